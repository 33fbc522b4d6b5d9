"""Random cases of every operator by its Triton kernels, small ones."""

import pytest
import torch

from envoi.runtime.devices import implementation
from tests.fuzz import run
from tests.fuzz.test_fuzz import assert_right

COUNTS = {
    "gemm": 16, "grouped_gemm": 16, "epilogue": 80, "route": 10, "moe": 6, "indexer_topk": 4, "quantise": 20,
    "expert_parallel": 5, "expert_parallel_ranks": 2,
}  # fmt: skip


@pytest.mark.parametrize("operator", run.OPERATORS)
def test_random_cases(operator):
    assert implementation(torch.device("cpu")) == "triton"
    assert_right(operator, 1000, COUNTS[operator], "small", "cpu")

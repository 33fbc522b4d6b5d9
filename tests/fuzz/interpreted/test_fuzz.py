"""Random cases of every operator by its Triton kernels, small ones."""

import pytest
import torch

from envoi.runtime.devices import implementation
from tests.fuzz import run
from tests.fuzz.test_fuzz import assert_right

COUNTS = {
    "gemm": 12, "grouped_gemm": 12, "epilogue": 40, "route": 8, "moe": 4, "indexer_topk": 3, "indexer_blocks": 2,
    "quantise": 12,
    "expert_parallel": 3, "expert_parallel_ranks": 1,
}  # fmt: skip


@pytest.mark.parametrize("operator", run.OPERATORS)
def test_random_cases(operator):
    assert implementation(torch.device("cpu")) == "triton"
    assert_right(operator, 1000, COUNTS[operator], "small", "cpu")

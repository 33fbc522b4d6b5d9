"""Same bits by the Triton kernels, in the interpreter."""

import pytest
import torch

from tools.promises.same_bits import Result, other_rows, run_to_run
from tools.promises.subjects import MAKERS, subject

CPU = torch.device("cpu")
# A tile of 70 rows takes the interpreter a second for each expert: one format of each kind.
SOME = [
    name for name in MAKERS
    if not name.startswith(("gemm", "grouped")) or name.split()[1] in ("bf16", "fp8_block128", "mxfp4", "nvfp4")
]  # fmt: skip


@pytest.mark.parametrize("name", SOME)
def test_kernels(name):
    found = subject(name, CPU)
    assert other_rows(found, 0, 3, CPU) == Result(3, 0)
    assert run_to_run(found, 0, 3, CPU) == Result(3, 0)

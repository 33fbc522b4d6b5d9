"""Same bits on a GPU, each promise over random rows; and that what isn't promised can be told from it.

`python -m tests.promises same-bits` makes more draws of the same checks, and records them.
"""

import pytest
import torch

from envoi.quant import FORMATS
from tests.promises.ranks import compare_ranks
from tests.promises.same_bits import CHECKS, Result, other_rows
from tests.promises.subjects import MAKERS, subject

DRAWS = 8
# Compiling takes the time: the program has the other epilogues.
SOME = [name for name in MAKERS if not name.endswith(("swiglu", "unit rows"))]
# Calls whose bits do follow M without batch_invariant, on Hopper: K is split; few tokens have kernels of their own.
FOLLOW_M = ("gemm bf16 store", "gemm fp8_row store", "gemm fp8_block128 store", "moe mxfp4")


@pytest.mark.gpu
@pytest.mark.parametrize("name", SOME)
def test_promises(name):
    device = torch.device("cuda")
    made = subject(name, device)
    found = {check: CHECKS[check](made, 0, DRAWS, device) for check in CHECKS}
    assert all(result.count for result in found.values())
    assert not {check: result.text for check, result in found.items() if result.wrong}


@pytest.mark.gpu(arch="sm_90")
@pytest.mark.parametrize("name", FOLLOW_M)
def test_without_batch_invariant_bits_follow_the_rows(name):
    device = torch.device("cuda")
    assert other_rows(subject(name, device, batch_invariant=False), 0, 60, device).wrong > 0


@pytest.mark.gpu(2)
@pytest.mark.parametrize("format", FORMATS)
def test_the_number_of_ranks(format):
    assert compare_ranks(format, 0, 10, torch.device("cuda")) == Result(10, 0)

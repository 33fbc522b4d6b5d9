"""Registered kernels of the Hopper GEMM on a GPU: correct, and equal to the code counted without one."""

from dataclasses import replace

import pytest
import torch

from envoi.ops.gemm import gemm, grouped_gemm
from envoi.ops.gemm.backend import run_kernels
from envoi.ops.gemm.reference import spread_columns
from envoi.quant import dequantize
from envoi.types import QuantTensor
from tests.gemm.test_gpu import judge, normal, products_by_expert, torchs_product
from tests.helpers.launches import assert_same_code, watched
from tools.kernel_cases import gemm_hopper as cases
from tools.kernel_cases import gemm_hopper_mx as mx_cases
from tools.oracles.gemm import oracle

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("tidy_gpu")]
HOPPER = (9, 0)
ROWS_OF_NONE = 3


def uneven_offsets(case):
    """Return offsets of experts of very different sizes, some empty, and a few rows of none."""
    generator = torch.Generator().manual_seed(0)
    bounds = torch.randint(0, case.M - ROWS_OF_NONE, (case.num_experts + 1,), generator=generator).sort().values
    bounds[1] = bounds[0] = 0
    bounds[-1] = case.M - ROWS_OF_NONE
    return bounds.to(device="cuda", dtype=torch.int32)


def maker():
    """Return a function that makes normal numbers, different for each tensor."""
    seeds = iter(range(100))
    return lambda shape, dtype: normal(*shape, seed=next(seeds), dtype=dtype)


def products(given):
    """Return the accumulators of torch's tensor cores, and those in float64."""
    if given.offsets is None:
        return torchs_product(given.a, given.b), oracle(given.a, given.b)
    return products_by_expert(given.a, given.b, given.offsets)


def addresses_of(rows):
    """Return the address of each row, int64."""
    step = rows.stride(0) * rows.itemsize
    return rows.data_ptr() + step * torch.arange(len(rows), device="cuda")


def call(given):
    if given.offsets is None:
        return gemm(given.a, given.b, given.epilogue, **given.operands)
    if not given.grouping.write_tail:
        ir, operands, grouping = given.epilogue.ir, given.operands, given.grouping
        sent = torch.full((given.a.shape[0], given.b.shape[1]), torch.nan, dtype=torch.bfloat16, device="cuda")
        if grouping.to is not None:
            grouping = replace(grouping, to=addresses_of(sent))
        out, *sf = run_kernels(given.a, given.b, given.offsets, ir, torch.bfloat16, operands, grouping)
        if sf:
            out = dequantize(QuantTensor(out, sf[0], (1, out.shape[1] // sf[0].shape[1])))
        if grouping.to is not None:
            out = sent
        assert out[-ROWS_OF_NONE:].isnan().all(), "somebody wrote rows of no expert"
        return out[:-ROWS_OF_NONE]
    return grouped_gemm(given.a, given.b, given.offsets, given.epilogue, **given.operands)


@pytest.mark.parametrize("case", (*cases.CASES, *cases.measured_cases(), *mx_cases.CASES), ids=lambda case: case.name)
def test_registered(case):
    offsets = uneven_offsets(case) if case.num_experts else None
    given = cases.inputs(case, maker(), offsets)
    launched = {}
    with watched(lambda sha256, kernel: launched.setdefault(sha256, kernel.asm["ptx"])):
        got = call(given)
    operands = dict(given.operands)
    if offsets is not None:
        spread_columns(given.epilogue.ir, operands, offsets, case.M)
    acc, exact = products(given)
    if not case.write_tail:
        acc, exact = acc[:-ROWS_OF_NONE], exact[:-ROWS_OF_NONE]
        operands = {name: value[:-ROWS_OF_NONE] for name, value in operands.items()}
    judge(given.epilogue, got, acc, exact, operands, offsets)
    if torch.cuda.get_device_capability() == HOPPER:
        launch_of = mx_cases.launch_of if case in mx_cases.CASES else cases.launch_of
        assert_same_code(case.title, launch_of(case), launched)

"""Two kernels for an epilogue that needs wide tiles, without a GPU: when they are chosen, and what they launch."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from envoi import gemm
from envoi.epilogues import Row, epilogue, exp, log, row_sum
from envoi.epilogues.cut import cut
from envoi.epilogues.library import swiglu_fp8
from envoi.ops.gemm import backend
from envoi.ops.gemm.grouping import ALL_ROWS, EXPERTS_ROWS, INVARIANT_ROWS, Grouping
from envoi.ops.gemm.hopper import host, tune, two_kernels
from envoi.ops.gemm.hopper.config import Problem
from envoi.ops.gemm.hopper.kernel import gemm_kernel
from envoi.ops.gemm.triton.kernel import rows_kernel
from envoi.quant.formats import SCHEMES
from envoi.runtime.devices import Target
from envoi.runtime.program import Launch, building, without_memory
from envoi.tune.problems import logsumexp, logsumexp_of_max
from envoi.types import QuantTensor
from tests.helpers.slow import mostly_slow
from tools.machine_code.compile import compile_launch

BF16, SMS = torch.bfloat16, 132


def matrix(kind: str, *shape: int) -> torch.Tensor | QuantTensor:
    if kind == "bf16":
        return without_memory(shape, BF16)
    scheme = SCHEMES[kind]
    group = scheme.group_for(shape)
    *lead, rows, columns = shape
    sf = without_memory((*lead, -(-rows // group[0]), columns // group[1]), scheme.sf)
    return QuantTensor(without_memory(shape, scheme.values), sf, group)


OPERANDS = {"bf16": ("bf16", "bf16"), "fp8_row": ("fp8_row", "fp8_row"), "fp8_block128": ("fp8_1x128", "fp8_128x128")}


def work(M: int, N: int, K: int, ep=swiglu_fp8, format: str = "bf16", experts: int = 0) -> host.Work:
    of_a, of_b = OPERANDS[format]
    offsets = without_memory((experts + 1,), torch.int32) if experts else None
    b = matrix(of_b, experts, N, K) if experts else matrix(of_b, N, K)
    return host.work_of(matrix(of_a, M, K), b, ep.ir, {}, offsets)


def in_two(*sizes: int, grouping: Grouping = ALL_ROWS, **named) -> bool:
    return work(*sizes, **named).parts(grouping, SMS) is not None


# When


@pytest.mark.parametrize(
    ("M", "N", "K", "format"),
    [(1, 4096, 4096, "bf16"), (300, 8192, 4096, "bf16"), (418, 1024, 2048, "bf16"), (37, 4096, 4096, "fp8_row")],
)
def test_a_small_product_has_two(M, N, K, format):
    assert in_two(M, N, K, format=format)


@pytest.mark.parametrize(
    ("M", "N", "K", "format"), [(2500, 3072, 2048, "bf16"), (16384, 14336, 4096, "bf16"), (3000, 4096, 7168, "fp8_row")]
)
def test_a_large_product_has_one(M, N, K, format):
    assert not in_two(M, N, K, format=format)


@pytest.mark.parametrize("M", [1, 64, 500, 16384])
@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize("grouping", [ALL_ROWS, INVARIANT_ROWS, EXPERTS_ROWS])
def test_where_no_tile_holds_a_group_there_are_two(M, experts, grouping):
    assert in_two(M, 4096, 4096, format="fp8_block128", experts=experts, grouping=grouping)


def test_the_choice_follows_the_model_of_time():
    problem = tune.rounded(Problem(300, 8192, 4096, 2))
    parts = cut(swiglu_fp8.ir)
    whole = two_kernels._best_cycles(problem, swiglu_fp8.ir, BF16, SMS)
    first = two_kernels._best_cycles(problem, parts.first, parts.dtype, SMS)
    assert first + two_kernels.second_cycles(problem, parts) < whole
    assert two_kernels.pay(problem, swiglu_fp8.ir, SMS)
    narrow = replace(problem, N=256 * 132 * 5)
    assert not two_kernels.pay(narrow, swiglu_fp8.ir, SMS)


# What


def launches(format: str, M: int, N: int, K: int, grouping: Grouping = ALL_ROWS, experts: int = 0) -> list[Launch]:
    of_a, of_b = OPERANDS[format]
    lead = (experts,) if experts else ()
    a, b = matrix(of_a, M, K), matrix(of_b, *lead, N, K)
    offsets = without_memory((experts + 1,), torch.int32) if experts else None
    with building(Target("sm_90")) as builder:
        backend.run_kernels(a, b, offsets, swiglu_fp8.ir, BF16, {}, grouping)
    return builder.launches


@pytest.mark.parametrize(("format", "M"), [("bf16", 300), ("fp8_row", 37), ("fp8_block128", 1000)])
def test_the_second_reads_half_of_the_columns(format, M):
    first, second = launches(format, M, 4096, 4096)
    assert (first.kernel, second.kernel) == (gemm_kernel, rows_kernel)
    rows, offsets, _, (values, sf), num_rows, num_columns, *_, overlap = second.arguments
    assert (rows.shape, rows.dtype, offsets) == ((M, 2048), torch.float32, None)
    assert (num_rows, num_columns) == (M, 2048)
    assert values.shape == (M, 2048) and sf.shape == (M, 16)
    assert overlap and second.options["launch_pdl"]  # it waits for the first, and for nothing else


@pytest.mark.parametrize(("grouping", "knows_experts"), [(ALL_ROWS, False), (EXPERTS_ROWS, True)])
def test_the_second_knows_experts_only_where_rows_are_left_unwritten(grouping, knows_experts):
    _, second = launches("fp8_block128", 200, 4096, 4096, grouping, experts=4)
    assert (second.arguments[1] is not None) == knows_experts


BLOCKS = "fp8_block128", 1000


@pytest.mark.parametrize(("format", "M"), mostly_slow([("bf16", 300), BLOCKS], quick=[BLOCKS]))
def test_both_compile_without_spills(format, M):
    for launch in launches(format, M, 4096, 4096):
        binary = compile_launch(launch, "sm_90")
        assert binary.stack_bytes == 0, launch.kernel.fn.__name__


@epilogue
def logsumexp_below(acc, bound: Row):
    return acc, log(row_sum(exp(acc - bound))) + bound


# As the tutorial of epilogues says.
@pytest.mark.parametrize("columns", [256, 264, 4096])
@pytest.mark.parametrize("ep", [logsumexp, logsumexp_below, logsumexp_of_max], ids=lambda ep: ep.ir.name)
def test_a_tile_that_needs_its_rows_complete_takes_a_second_kernel_beyond_256_columns(ep, columns):
    a, b = matrix("bf16", 2000, 512), matrix("bf16", columns, 512)
    operands: dict[str, Any] = {"bound": without_memory((2000,), torch.float32)} if ep is logsumexp_below else {}
    with building(Target("sm_90", SMS)) as builder:
        gemm(a, b, ep, **operands)
    second = ep is logsumexp_of_max and columns > 256
    assert [launch.kernel for launch in builder.launches] == [gemm_kernel, rows_kernel][: 1 + second]

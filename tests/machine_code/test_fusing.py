"""Sums of products: their order, and which are fused, don't depend on the tiles or the kernel, since bits would."""

import re
from functools import partial

import pytest
import torch

import envoi
from envoi.epilogues import Col, Epilogue, Row, Scalar, epilogue
from envoi.runtime import triton_compat
from envoi.runtime.program import without_memory
from tools.kernel_cases.indexer import SET
from tools.kernel_cases.planning import launch_of_call, matrix
from tools.machine_code.compile import compile_launch

LINE = re.compile(r"\s(mul|fma)\.(?:rn\.)?f32 \s*(%\w+), (.*);|(mov)\.b32 (%\w+), (%\w+);")


@epilogue
def of_column(acc, alpha: Scalar, beta: Scalar, bias: Col):
    """Return beta * bias + alpha * acc."""
    return beta * bias + alpha * acc


@epilogue
def less_column(acc, alpha: Scalar, beta: Scalar, bias: Col):
    """Return beta * bias - alpha * acc."""
    return beta * bias - alpha * acc


@epilogue
def of_row(acc, alpha: Scalar, beta: Scalar, bias: Row):
    """Return beta * bias + alpha * acc."""
    return beta * bias + alpha * acc


def fused(ptx: str) -> set[str]:
    """Return how deep in products the fused factors and the addends of all fma are."""
    depth: dict[str, int] = {}
    found = set()
    for op, to, args, *copy in LINE.findall(ptx):
        if copy[0]:
            depth[copy[1]] = depth.get(copy[2], 0)
            continue
        each = [depth.get(x, 0) for x in args.split(", ")]
        depth[to] = 1 + max(each[:2])
        if op == "fma":
            found.add(f"{max(each[:2])} + {each[2]}")
    return found


@pytest.mark.parametrize("ep", [of_column, less_column, of_row], ids=lambda ep: ep.ir.name)
def test_the_product_with_the_accumulator_is_fused(ep: Epilogue):
    ways = {}
    for M in (8, 48, 128, 512):
        kind = without_memory((M if ep is of_row else 1024,), torch.float32)

        def call(M=M, kind=kind):
            operands = {"alpha": 0.7, "beta": 0.3, "bias": kind}
            envoi.gemm(matrix("fp8_row", M, 1024), matrix("fp8_row", 1024, 1024), ep, batch_invariant=True, **operands)

        ways[M] = fused(compile_launch(launch_of_call(call, "gemm_kernel"), "sm_90").ptx)
    assert set(map(tuple, ways.values())) == {("2 + 1",)}, ways  # (acc * row factor * column factor) * alpha + product


def chains(ptx: str) -> set[int]:
    """Return how many products the chains have that end in an fma: the addend of each fma is the one before."""
    length: dict[str, int] = {}
    ends = set()
    for op, to, args, *_ in LINE.findall(ptx):
        if op == "fma":
            addend = args.split(", ")[2]
            length[to] = 1 + length.get(addend, 0)
            ends = ends - {addend} | {to}
        elif op == "mul":
            length[to] = 1
    return {length[end] for end in ends}


@pytest.mark.parametrize(("heads", "key", "of_lane", "in_blocks"), [(4, 132, 2, 4), (32, 68, 8, 8)], ids=["fp8", "fp4"])
def test_heads_are_added_alike_in_rows_alone_and_in_blocks(heads, key, of_lane, in_blocks):
    """Check that a lane's products are one chain, and that the compiler has fused none by itself."""
    for kernel, given, width in (
        ("scores_kernel", {}, of_lane),
        ("prefill_scores_kernel", {"next_n": 2, "requests": 300}, in_blocks),
    ):
        launch = launch_of_call(partial(SET, heads=heads, key=key, **given), kernel)
        made = triton_compat.compile_without_driver(launch.kernel, launch.arguments, "sm_90", launch.options)
        assert chains(made.asm["ptx"]) == {width}, kernel
        written = len(re.findall(r"call .*@llvm\.fma\.f32\(", made.asm["llir"]))
        assert made.asm["ptx"].count("fma.rn.f32") == written, kernel


def test_no_head_is_fused_in_portable_scores():
    """Check that FMAs are as many with 16 heads as with 64: a fused product would come with each head of a lane."""
    fused = set()
    for heads in (16, 64):
        launch = launch_of_call(partial(SET, heads=heads), "scores_kernel", 0, "sm_100")
        made = triton_compat.compile_without_driver(launch.kernel, launch.arguments, "sm_90", launch.options)
        fused.add(made.asm["ptx"].count("fma.rn.f32"))
    assert len(fused) == 1

"""Sums of two products: which one is fused doesn't depend on the tiles, since bits would."""

import re

import pytest
import torch

import envoi
from envoi.epilogues import Col, Epilogue, Row, Scalar, epilogue
from envoi.runtime.program import without_memory
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

"""Kernels of Envoi at practical sizes, by name: what tests count, and what can be compiled before it is needed."""

from importlib import import_module

from envoi.runtime.kernel_case import KernelCase

OPERATORS = (
    "gemm.hopper", "gemm.hopper_few", "gemm.hopper_mx", "gemm.hopper_w4a16", "gemm.hopper_w4a8", "gemm.blackwell",
    "gemm.triton", "moe", "moe.parallel", "moe.router", "indexer",
)  # fmt: skip


def kernel_cases() -> dict[str, KernelCase]:
    """Return the cases of all operators. Raises ValueError if a name is used twice."""
    found: dict[str, KernelCase] = {}
    for operator in OPERATORS:
        for case in import_module(f"envoi.ops.{operator}.cases").KERNELS:
            if found.setdefault(case.name, case) is not case:
                raise ValueError(f"cases: {case.name!r} is used twice")
    return found

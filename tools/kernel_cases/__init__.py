"""Kernels of Envoi at practical sizes, by name: what tests count and `tools.machine_code` compiles."""

from importlib import import_module

from envoi.runtime.kernel_case import KernelCase

OPERATORS = (
    "gemm_hopper", "moe_decode", "gemm_hopper_mx", "gemm_hopper_w4a16", "gemm_hopper_w4a8", "gemm_blackwell",
    "gemm_triton", "moe", "moe_parallel", "router", "indexer",
)  # fmt: skip


def kernel_cases() -> dict[str, KernelCase]:
    """Return the cases of all operators. Raises ValueError if a name is used twice."""
    found: dict[str, KernelCase] = {}
    for operator in OPERATORS:
        for case in import_module(f"tools.kernel_cases.{operator}").KERNELS:
            if found.setdefault(case.name, case) is not case:
                raise ValueError(f"cases: {case.name!r} is used twice")
    return found

"""Kernels of Envoi at practical sizes, by name: what tests count and `tools.machine_code` compiles.

The arguments come from the operator's host path, with tensors that have no memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from envoi.runtime import triton_compat
from envoi.runtime.devices import EVERY_ARCH
from envoi.runtime.program import Launch

HOPPER, BLACKWELL = EVERY_ARCH[:1], EVERY_ARCH[1:]
NUM_SMS = 132  # of an H100 or H200

Make = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
OPERATORS = (
    "gemm_hopper", "moe_decode", "gemm_hopper_mx", "gemm_hopper_w4a16", "gemm_hopper_w4a8", "gemm_blackwell",
    "gemm_triton", "moe", "moe_parallel", "router", "indexer",
)  # fmt: skip


@dataclass(frozen=True)
class KernelCase:
    """Launch under a name. about: a line for lists. arches: what the kernel is written for, such as "sm_90"."""

    name: str
    about: str
    arches: tuple[str, ...]
    launch: Callable[[], Launch]


def kernel_key(kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], options: Mapping[str, Any]) -> str:
    """Return a key that launches on Hopper share if they run one compiled kernel."""
    return repr((triton_compat.specialize(kernel, arguments, *HOPPER), options))


@contextmanager
def driver_for(arch: str) -> Iterator[None]:
    """Make the driver report `arch` as its GPU inside the context: 3.7's descriptors of FP4 in padded bytes need it."""
    found, driver._active = driver._active, _CompileOnlyDriver(triton_compat.target_of(arch))  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        driver._active = found


class _CompileOnlyDriver:
    """Stand-in for Triton's driver that reports its target and can't run anything; enough to compile."""

    def __init__(self, target: GPUTarget) -> None:
        self.get_current_target = lambda: target
        self.get_current_device = lambda: f"sm_{target.arch}"  # a device of its own among those of a JITFunction
        self.get_current_stream = lambda device: 0


def kernel_cases() -> dict[str, KernelCase]:
    """Return the cases of all operators. Raises ValueError if a name is used twice."""
    found: dict[str, KernelCase] = {}
    for operator in OPERATORS:
        for case in import_module(f"tools.kernel_cases.{operator}").KERNELS:
            if found.setdefault(case.name, case) is not case:
                raise ValueError(f"cases: {case.name!r} is used twice")
    return found

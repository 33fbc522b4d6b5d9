"""Launches of the MoE path's Triton kernels: grid, arguments and options."""

from importlib import import_module
from typing import Any, NamedTuple

COLUMNS_PER_WARP = 512


class Launch(NamedTuple):
    """Grid of a launch, one argument for each parameter of the kernel, Triton's options (num_warps ..)."""

    grid: tuple[int, ...]
    arguments: tuple
    options: dict[str, Any]


def launch_kernel(module: str, kernel: str, call: Launch) -> None:
    """Launch the kernel of this name from a module of kernels, which is imported on first use: it needs Triton."""
    from envoi.runtime.launch import launch

    launch(getattr(import_module(module), kernel), *call)


def warps_for(num_columns: int) -> dict[str, int]:
    """Return the options for programs that each work on `num_columns` columns of a row."""
    return {"num_warps": min(16, max(4, num_columns // COLUMNS_PER_WARP))}

"""Launching the path's Triton kernels: a grid, the arguments and the options of one launch."""

from importlib import import_module
from typing import Any, NamedTuple

COLUMNS_PER_WARP = 512


class Launch(NamedTuple):
    """One launch: grid, one argument for each parameter of the kernel, Triton's options (num_warps ..)."""

    grid: tuple[int, ...]
    arguments: tuple
    options: dict[str, Any]


def launch_kernel(module: str, kernel: str, call: Launch) -> None:
    """Launch the kernel of this name from a module of kernels, which is imported on first use: it needs Triton."""
    from envoi.runtime.launch import launch

    launch(getattr(import_module(module), kernel), *call)


def warps_for(num_columns: int) -> dict[str, int]:
    """Options of a program that works on so many columns of a row."""
    return {"num_warps": min(16, max(4, num_columns // COLUMNS_PER_WARP))}

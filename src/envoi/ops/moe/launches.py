"""Launches of the MoE path's Triton kernels, by name."""

from importlib import import_module
from typing import Any

COLUMNS_PER_WARP = 512


def launch_kernel(
    module: str, kernel: str, grid: tuple[int, ...], arguments: tuple, options: dict[str, Any]
) -> None:  # fmt: skip
    """Launch the kernel of this name from a module of kernels, which is imported on first use: it needs Triton."""
    from envoi.runtime.launch import launch

    launch(getattr(import_module(module), kernel), grid, arguments, options)


def warps_for(num_columns: int) -> dict[str, int]:
    """Return the options for programs that each work on `num_columns` columns of a row."""
    return {"num_warps": min(16, max(4, num_columns // COLUMNS_PER_WARP))}

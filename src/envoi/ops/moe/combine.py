"""Combine on one rank: sum the rows of each token's slots."""

import torch

from envoi.ops.moe.launches import Launch, launch_kernel, warps_for
from envoi.ops.moe.permute import KERNELS
from envoi.runtime.math import next_power_of_2

MAX_COLUMNS = 1024  # columns of a token that one program sums


def combine_rows(rows: torch.Tensor, slot_to_pos: torch.Tensor) -> torch.Tensor:
    """Sum rows [P, H] bf16 into tokens [M, H] bf16, in slot order, in float32, rounded once."""
    out = torch.empty(slot_to_pos.shape[0], rows.shape[1], dtype=rows.dtype, device=rows.device)
    launch_kernel(KERNELS, "combine_kernel", combine_arguments(rows, slot_to_pos, out))
    return out


def combine_arguments(rows: torch.Tensor, slot_to_pos: torch.Tensor, out: torch.Tensor) -> Launch:
    """Build the launch of `combine_kernel`."""
    (M, k), width = slot_to_pos.shape, rows.shape[1]
    block = min(MAX_COLUMNS, next_power_of_2(width))
    return Launch((M, -(-width // block)), (rows, slot_to_pos, out, width, k, block), warps_for(block))

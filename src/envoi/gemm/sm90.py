"""Launching the Hopper kernel: descriptors, arguments, grid."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from envoi.epilogue.lower import Lowered
from envoi.epilogue.slots import MAX_DESCS
from envoi.gemm.config import Config, Problem
from envoi.gemm.grouping import ALL_ROWS, Grouping
from envoi.runtime import workspace
from envoi.runtime.tma import as_one_matrix, descriptor


@dataclass(frozen=True)
class Call:
    """One launch. a [M, K], b [N, K] or [E, N, K], both as TMA takes them (`tma_ready`).

    scales: factors of a [M, K / 128] and of b [.., N / 128, K / 128], or None. operands: in the order of the IR's,
    their names beside them. outputs: one for each of code.slots. offsets [E + 1] of a grouped GEMM, or None;
    grouping: of its rows.
    """

    a: torch.Tensor
    b: torch.Tensor
    code: Lowered
    operands: tuple
    names: tuple[str, ...]
    outputs: list[torch.Tensor]
    offsets: torch.Tensor | None = None
    scales: tuple[torch.Tensor, torch.Tensor] | None = None
    grouping: Grouping = ALL_ROWS

    @property
    def num_groups(self) -> int:
        """Experts, or 0."""
        return 0 if self.offsets is None else self.b.shape[0]

    @property
    def num_tokens(self) -> int:
        """Rows, as far as that is known."""
        return self.grouping.likely_rows(self.a.shape[0])

    @property
    def side_bytes(self) -> float:
        """Of the operands that come by TMA, for each column of the accumulator."""
        sides = (self.operands[self.names.index(name)] for name in self.code.side)
        return sum(side.shape[1] * side.itemsize / self.b.shape[-2] for side in sides)


def as_stored(outputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The outputs in dtypes that Triton knows."""
    return tuple(x.view(torch.uint8) if x.dtype == torch.float8_e8m0fnu else x for x in outputs)


def max_groups(num_groups: int, behind: bool = True) -> int:
    """The power of two that a role's vectors over the experts, and rows of none, have; 1 without experts."""
    return max(32, 1 << (num_groups + behind - 1).bit_length()) if num_groups else 1


def problem_of(call: Call) -> Problem:
    """What the choice of a config depends on."""
    K, N = call.a.shape[1], call.b.shape[-2]
    return Problem(call.num_tokens, N, K, call.a.itemsize, call.num_groups, call.scales is not None, call.side_bytes)


def arguments(call: Call, config: Config, num_sms: int) -> tuple[tuple[int], tuple]:
    """The grid, and the kernel's arguments."""
    (M, K), N = call.a.shape, call.b.shape[-2]
    weights = as_one_matrix(call.b)
    x, y = (weights, call.a) if config.swap_ab else (call.a, weights)
    tiles = -(-M // config.block_m) * -(-N // config.block_n)
    num_cut = tiles % num_sms if config.split_k > 1 else 0
    units = tiles + num_cut * (config.split_k - 1)  # the tiles of the last, unfilled wave are cut
    groups = call.num_groups
    grouped = 0 if call.offsets is None else 2 if call.grouping.behind else 1
    return (num_sms if groups else min(units, num_sms),), (
        descriptor(x, config.role_m, config.block_k), descriptor(y, config.block_y, config.block_k),
        *epilogue_descriptors(call, config, N), call.operands or (0,), as_stored(call.outputs),
        call.offsets,
        *scratch(call, config, M, N, num_cut), *(call.scales or (None, None)),
        M, N, K, groups, tiles - num_cut, config, call.code, call.scales is not None, grouped,
        max_groups(groups, call.grouping.behind),
    )  # fmt: skip


def epilogue_descriptors(call: Call, config: Config, N: int) -> list[Any]:
    """Of the outputs that leave by TMA, then of the operands that come by it, in boxes of a piece."""
    piece = min(config.piece, config.block_y)
    descs: list[Any] = [None] * (2 * MAX_DESCS)
    for i, index in enumerate(call.code.leaving):
        slot = call.code.slots[index]
        descs[i] = descriptor(call.outputs[index], config.role_m, piece // (slot.columns * (2 if slot.packed else 1)))
    for i, name in enumerate(call.code.side):
        operand = call.operands[call.names.index(name)]
        descs[MAX_DESCS + i] = descriptor(operand, config.role_m, operand.shape[1] * piece // N)
    return descs


def scratch(call: Call, config: Config, M: int, N: int, num_cut: int) -> tuple[torch.Tensor, ...]:
    """Partial sums of cut tiles and their counters; partial reductions of rows and their counters."""
    device = call.a.device
    roles = num_cut * config.num_parts
    num_sums = roles * config.split_k * config.role_m * config.block_y if config.split_k > 1 else 0
    slots = -(-N // (config.role_m if config.swap_ab else config.block_y))
    if not num_sums and not call.code.partials:
        return _nothing(device)
    sums = torch.empty(num_sums + call.code.partials * slots * M, dtype=torch.float32, device=device)
    count = workspace.counters(roles + M + config.block_m, device)
    return sums, count, sums[num_sums:], count[roles:]


@cache
def _nothing(device: torch.device) -> tuple[torch.Tensor, ...]:
    sums, count = (torch.empty(0, dtype=dtype, device=device) for dtype in (torch.float32, torch.int32))
    return sums, count, sums, count


def launch(call: Call, config: Config, num_sms: int) -> None:
    """Run it."""
    from envoi.gemm.kernel_sm90 import gemm_kernel
    from envoi.runtime.launch import launch as launch_kernel

    grid, args = arguments(call, config, num_sms)
    launch_kernel(gemm_kernel, grid, args, {"num_warps": config.num_warps})

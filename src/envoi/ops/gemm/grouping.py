"""Rows that a GEMM computes and the addresses they are scattered to, for the kernels of every architecture."""

from dataclasses import dataclass, replace
from enum import IntEnum

import torch

NOMINAL_ROWS = 256  # of an expert, or in all: tiles for so many are neither slow for few tokens nor for many


@dataclass(frozen=True)
class Grouping:
    """Options of a GEMM's rows; all but batch_invariant are those of a grouped one.

    write_tail: also write the rows after offsets[E], which belong to no expert, with 0 as their product.
    expected: approximate number of rows of all experts; None = as many as there is room for. Only the choice of a
        config depends on it.
    to: int64 [M], the address that each row of the epilogue's only output is scattered to: a multiple of 16, also on
        another GPU, with room for N elements of the output's dtype, and its scale factors. None = the rows of a new
        tensor.
    results: the scheme in which the experts' second GEMM stores its rows, None for bf16.
    batch_invariant: make no choice by the number of rows on which a row's bits depend: see `settled`.
    are_offsets_early: `offsets` was written before the launch right in front of the GEMM lets others start. On Hopper
        the GEMM then starts before that launch ends, and asks for weights meanwhile.
    """

    write_tail: bool = True
    expected: int | None = None
    to: torch.Tensor | None = None
    batch_invariant: bool = False
    are_offsets_early: bool = False
    results: str | None = None

    def likely_rows(self, room: int) -> int:
        """Return the number of rows to expect where there is room for `room`."""
        return room if self.expected is None else max(1, self.expected)

    def settled(self, adds_up_rows: bool, num_groups: int) -> "Grouping":
        """Return the options with which a config is chosen.

        adds_up_rows: the epilogue reduces rows across columns, in an order that follows the tile's width. Where bits
        mustn't depend on the batch, the config is then that of one number of rows.
        """
        if not (self.batch_invariant and adds_up_rows):
            return self
        return replace(self, expected=NOMINAL_ROWS * max(1, num_groups))


ALL_ROWS = Grouping()
EXPERTS_ROWS = Grouping(write_tail=False)
INVARIANT_ROWS = Grouping(batch_invariant=True)


class RowMode(IntEnum):
    """Rows of the token matrix that a kernel computes."""

    DENSE = 0  # all M rows, one weight matrix
    EXPERT_ROWS = 1  # rows [offsets[0], offsets[num_experts]), each with its expert's weights
    EXPERT_ROWS_AND_TAIL = 2  # EXPERT_ROWS, and rows [offsets[num_experts], M), whose product is 0

    @property
    def is_grouped(self) -> bool:
        """Return True if rows are grouped by expert."""
        return self != RowMode.DENSE

    @property
    def has_tail(self) -> bool:
        """Return True if rows after the last expert's are written too."""
        return self == RowMode.EXPERT_ROWS_AND_TAIL

    @staticmethod
    def of(is_grouped: bool, has_tail: bool) -> "RowMode":
        """Return the mode of a launch."""
        if not is_grouped:
            return RowMode.DENSE
        return RowMode.EXPERT_ROWS_AND_TAIL if has_tail else RowMode.EXPERT_ROWS

"""Rows that a GEMM computes and the addresses they are scattered to, for the kernels of every architecture."""

from dataclasses import dataclass
from enum import IntEnum

import torch


@dataclass(frozen=True)
class Grouping:
    """Options of a grouped GEMM's rows.

    write_tail: also write the rows after offsets[E], which belong to no expert, with 0 as their product.

    expected: approximate number of rows of all experts; None = as many as there is room for. Only the choice of a
        config depends on it.
    to: int64 [M], the address that each row of the epilogue's only output is scattered to: a multiple of 16, also on
        another GPU, with room for N elements of the output's dtype. None = the rows of a new tensor.
    """

    write_tail: bool = True
    expected: int | None = None
    to: torch.Tensor | None = None

    def likely_rows(self, room: int) -> int:
        """Return the number of rows to expect where there is room for `room`."""
        return room if self.expected is None else max(1, self.expected)


ALL_ROWS = Grouping()
EXPERTS_ROWS = Grouping(write_tail=False)


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

"""Which rows a grouped GEMM computes and where they go, beyond where each expert's begin."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Grouping:
    """write_tail: also write the rows after offsets[E], which belong to no expert, with 0 as their product.

    expected: about how many rows the experts have in all; None = as many as there is room for. Only the choice of a
        config depends on it.
    to: int64 [M], the address to which each row of the epilogue's only output goes: a multiple of 16 bytes, also on
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

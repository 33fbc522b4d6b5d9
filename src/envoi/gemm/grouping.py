"""What the rows of a grouped GEMM are like, beyond where each expert's begin."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Grouping:
    """behind: the rows behind offsets[E], which no expert has, are written too: with 0 as their product.

    expected: about how many rows the experts have in all; None = as many as there is room for. Only the choice of a
        config depends on it.
    to: where each row of the epilogue's one output goes, int64 [M]: an address on 16 bytes, maybe of another GPU;
        None = the rows of a new tensor. What a row's address points to has the output's dtype and N elements.
    """

    behind: bool = True
    expected: int | None = None
    to: torch.Tensor | None = None

    def likely_rows(self, room: int) -> int:
        """How many rows there will be, as far as that is known, where there is room for so many."""
        return room if self.expected is None else max(1, self.expected)


ALL_ROWS = Grouping()
EXPERTS_ROWS = Grouping(behind=False)

"""The memory that ranks of one NVLink domain read and write in each other: what is where in it."""

from dataclasses import dataclass
from functools import cached_property

import torch

from envoi.quant.formats import Scheme, format_named
from envoi.types import Matrix, QuantTensor

ALIGN = 256  # bytes
TOKENS, FACTORS, RETURNS = 7, 8, 9  # of `Plan.at`


@dataclass(frozen=True)
class Plan:
    """Sizes that all ranks of a group agree on.

    max_tokens: of a rank; num_topk: slots of a token, at most. format: of the experts.
    """

    num_ranks: int
    num_experts: int
    max_tokens: int
    num_topk: int
    hidden: int
    format: str

    @property
    def room(self) -> int:
        """Slots that a rank may have."""
        return self.max_tokens * self.num_topk

    @property
    def scheme(self) -> Scheme | None:
        """Of the tokens on their way; None: bf16."""
        return format_named(self.format).activations

    @property
    def row_bytes(self) -> int:
        """Of a token on its way, without its scale factors."""
        return self.hidden * (2 if self.scheme is None else self.scheme.values.itemsize)

    @property
    def num_sf(self) -> int:
        """Scale factors of a token."""
        return 0 if self.scheme is None else self.hidden // self.scheme.group_for((1, self.hidden))[1]

    @property
    def slot_bytes(self) -> int:
        """Of a row on its way back, bf16."""
        return self.hidden * 2

    @cached_property
    def at(self) -> tuple[int, ...]:
        """Where each part begins, in bytes; at the end how much there is.

        flags [2, num_ranks]: dispatch, combine. trouble [num_ranks]. sizes [num_ranks, 2]: tokens and top-k of each.
        counts [num_ranks, num_experts + 1]: where each expert's slots begin. ids, places and weights of slots
        [num_ranks, room]. tokens [max_tokens, row_bytes], their factors. returns [room, slot_bytes]: the rows that
        come back. The kernels know them by constants, in this order.
        """
        ranks, slots = self.num_ranks, self.num_ranks * self.room * 4
        sf_bytes = self.num_sf * (1 if self.scheme is None else self.scheme.sf.itemsize)
        sizes = (
            2 * ranks * 4, ranks * 4, 2 * ranks * 4, ranks * (self.num_experts + 1) * 4, slots, slots, slots,
            self.max_tokens * self.row_bytes, self.max_tokens * sf_bytes, self.room * self.slot_bytes,
        )  # fmt: skip
        found = [0]
        for size in sizes:
            found.append(found[-1] + -(-size // ALIGN) * ALIGN)
        return tuple(found)

    def tokens_in(self, memory: torch.Tensor) -> Matrix:
        """A rank's tokens, as a view of its memory."""
        scheme, shape = self.scheme, (self.max_tokens, self.hidden)
        if scheme is None:
            return self._view(memory, TOKENS, torch.bfloat16, shape)
        values = self._view(memory, TOKENS, scheme.values, shape)
        return QuantTensor(
            values, self._view(memory, FACTORS, scheme.sf, (self.max_tokens, self.num_sf)), scheme.group_for(shape)
        )

    def slots_in(self, memory: torch.Tensor) -> torch.Tensor:
        """The rows that come back to a rank [room, hidden], as a view of its memory."""
        return self._view(memory, RETURNS, torch.bfloat16, (self.room, self.hidden))

    def _view(self, memory: torch.Tensor, part: int, dtype: torch.dtype, shape: tuple[int, int]) -> torch.Tensor:
        begin = self.at[part]
        return memory[begin : begin + shape[0] * shape[1] * dtype.itemsize].view(dtype).view(shape)

"""Memory of the fused L1 on one rank: where its rows come from, and the counters of their arrival. No peer reads it."""

from dataclasses import dataclass

import torch

from envoi.runtime.math import cdiv, next_power_of_2

BLOCK_ROWS = 64  # rows that share a counter of arrivals
FIRST_ARRIVALS = 32  # tickets have a cache line of their own


@dataclass(frozen=True)
class FusedMemory:
    """Buffers of one rank, which `order_rows_kernel` writes anew in each call.

    counters int32: tickets, then from FIRST_ARRIVALS on the arrivals of each block of rows.
    row_tokens [capacity] int32: at the first row of a token its number, (source << token_bits) + token, else -1.
    token_rows [num_ranks << token_bits, num_slots] int32: rows of each token on this rank, then -1.
    """

    counters: torch.Tensor
    row_tokens: torch.Tensor
    token_rows: torch.Tensor

    @property
    def tickets(self) -> torch.Tensor:
        """Counter of the tickets that movers have drawn: added to by them; reset to 0 before L1; nobody waits."""
        return self.counters[:1]

    @property
    def arrivals(self) -> torch.Tensor:
        """Rows of each block that have arrived: added to by movers, waited for by producers; reset to 0 before L1."""
        return self.counters[FIRST_ARRIVALS:]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors, whose addresses launches take."""
        return self.counters, self.row_tokens, self.token_rows


def token_bits(max_tokens: int) -> int:
    """Return the bits that a token's place on its rank takes in its number."""
    return (max_tokens - 1).bit_length()


def allocate(num_ranks: int, max_tokens: int, num_topk: int, device: torch.device) -> FusedMemory:
    """Allocate the buffers for the most rows there can be. max_tokens: of a rank; num_topk: slots of a token."""

    def ints(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    capacity = num_ranks * max_tokens * num_topk
    tokens = num_ranks << token_bits(max_tokens)
    return FusedMemory(
        ints(FIRST_ARRIVALS + cdiv(capacity, BLOCK_ROWS)), ints(capacity), ints(tokens, next_power_of_2(num_topk))
    )

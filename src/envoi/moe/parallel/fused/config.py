"""Movers of the fused L1: how many, how much each has in flight; and the pointers that a launch gives them."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from envoi.constant import Constant
from envoi.runtime.math import next_power_of_2

LANES = 32
VECTOR = 4  # words of 4 bytes that a lane loads at once
FORMAT = "fp8_block128"  # of the experts
MOVERS = {"num_movers": 3, "loads": 4}  # fields of MoverConfig


@dataclass(frozen=True)
class MoverConfig(Constant):
    """Movers of a CTA, and the shape of what they move.

    num_words, num_sf: words of 4 bytes, and scale factors, of a token. num_slots: slots of a token, a power of two.
    num_movers: 2 or 3, a warp each; 3 beside one consumer. loads: 16-byte loads in flight of a lane, a power of two.
    registers: of a thread of the movers and the producer. alone, batch: rows of a ticket, see `scheduler`.
    """

    num_words: int
    num_sf: int
    num_slots: int
    num_movers: int = 3
    loads: int = 4
    registers: int = 40
    alone: int = 4096
    batch: int = 4

    @property
    def piece(self) -> int:
        """Words of a token that a mover has in flight."""
        return min(self.loads * VECTOR * LANES, max(VECTOR * LANES, next_power_of_2(self.num_words)))

    @property
    def sf_lanes(self) -> int:
        """Length of a vector over a token's scale factors."""
        return max(LANES, next_power_of_2(self.num_sf))


class RowMap(NamedTuple):
    """Pointers to what `order_rows_kernel` wrote, to the peers' tokens, and to the rows that they become.

    peers [num_ranks] int64: addresses of the ranks' memory. row_tokens, token_rows, tickets, arrivals: of
    `memory.FusedMemory`. rows, rows_sf: this rank's rows and their scale factors, as int32.
    """

    peers: Any
    row_tokens: Any
    token_rows: Any
    tickets: Any
    arrivals: Any
    rows: Any
    rows_sf: Any

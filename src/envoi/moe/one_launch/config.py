"""Shape of the tokens that the launch of the experts pulls, and tilings of its two GEMMs."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from envoi.constant import Constant
from envoi.gemm.hopper.config import Config
from envoi.runtime.math import next_power_of_2

FORMAT = "fp8_block128"  # of the experts
OTHER_COUNTERS = 4  # of `progress`, before those of units
UNIT_COUNTERS = 1024  # at most; each counts as many units of L1, a power of two
LEAST_SHIFT = 5  # log2 of how many, at least
LANES = 32  # of a warp
NUM_COUNTERS = OTHER_COUNTERS + UNIT_COUNTERS + LANES  # a look may go on after the last one
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24  # of a thread
MAX_SLOTS = LANES  # of a token: a lane each
PULLED_WORDS = 8192  # by four warps at once, in registers: these, and the next ones that they ask for meanwhile
MAX_HIDDEN = PULLED_WORDS  # bytes: a token a warp
FEW_ROWS = 64  # of an expert, up to which one consumer has a tile of L1: fewer beyond `LONG_K`, see `host._tiling`
_TILE = Config(64, 2, 128, 128, 6, mixed_experts=True)
_WIDE = replace(_TILE, num_stages=5, wide_tail_tiles=True)
# Tilings of L1 and L2 that have the same stages, so that one ring serves both, and tiles of as many rows.
FEW = (
    replace(_TILE, num_consumers=1, block_k=256, num_stages=4, paired_tiles=True),
    replace(_TILE, pingpong=True, block_k=256, num_stages=4),
)
WIDE = replace(_WIDE, paired_tiles=True), _WIDE
SQUARE = replace(_TILE, paired_tiles=True), replace(_TILE, num_store_buffers=2)


@dataclass(frozen=True)
class PullConfig(Constant):
    """Shape of what is pulled.

    num_words, num_sf: words of 4 bytes, and scale factors, of a token. num_topk: slots of a token, at most.
    num_experts: of all ranks. slot_bytes: from one slot's row to the next, where rows are sent back.
    max_tokens_at, outcome_at: places in `Pulled.state` of the most tokens that a rank has, and of the call's outcome so
    far. fine: the outcome of a call that nobody refused. num_calls: that the history of loads has room for.
    """

    num_words: int
    num_sf: int
    num_topk: int
    num_experts: int
    slot_bytes: int
    max_tokens_at: int
    outcome_at: int
    fine: int
    num_calls: int

    @property
    def tokens(self) -> int:
        """Tokens that four warps pull at once, one or two a warp, in at most 64 registers of a thread."""
        return min(8, PULLED_WORDS // self.words)

    @property
    def words(self) -> int:
        """Length of a vector over a token's words."""
        return max(4 * LANES, next_power_of_2(self.num_words))

    @property
    def factors(self) -> int:
        """Length of a vector over a token's scale factors."""
        return max(LANES, next_power_of_2(self.num_sf))

    @property
    def slots(self) -> int:
        """Length of a vector over a token's slots."""
        return next_power_of_2(self.num_topk)

    @property
    def experts(self) -> int:
        """Length of a vector over all experts."""
        return max(4 * LANES, next_power_of_2(self.num_experts))


class Pulled(NamedTuple):
    """Pointers and sizes of a pull, as `dispatch_kernels.pull_kernel` has them.

    peers [num_ranks] int64: addresses of the ranks' memory. rows, rows_sf: this rank's rows as int32, and their scale
    factors. row_weights, row_destinations: of each row. room: slots that a rank may have. num_local: experts here.
    """

    peers: Any
    row_shift: Any
    state: Any
    history: Any
    rows: Any
    rows_sf: Any
    row_weights: Any
    row_destinations: Any
    num_ranks: Any
    room: Any
    num_local: Any

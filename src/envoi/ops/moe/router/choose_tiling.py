"""Choice of the Hopper router's launches among the tilings worth comparing, by a model of time.

A call is one launch, or several one after the other, each with some of the rows and a tiling of its own:
10817 tokens of 256 experts are 170 tiles for 132 multiprocessors; two launches of 132 and of 38 tiles, the latter cut
finer, take less time than two rounds of one launch do.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from envoi.ops.moe.router.spec import Spec, block_sum
from envoi.ops.moe.router.tiling import FEW_SIGNALS, MAX_SIGNALS, MAX_WIDTH, TILE, Cut, RouterTiling, make, two_widths
from envoi.ops.moe.router.time_model import CACHED_SUMS_BYTES, LAUNCH_CYCLES, predicted_cycles
from envoi.runtime.math import next_power_of_2

SAME_BELOW = 64  # up to so many tokens use the tiling of the next power of two
MAX_LAUNCHES = 8
WORTH_LAUNCHES = 0.96  # of the cycles of one launch, which several have to stay below
ROUND_WIDTHS = (64, 128, 256, 1024)  # columns of a part, for rounds of which a call may have launches of their own
WIDTHS = {4: (16, 32, 64, 128), 8: (128, 256)}  # warps -> block_n for which a block's sums and the total fit registers
TURN_COLUMNS = 256  # columns of a turn, whose logits of 64 rows shared memory holds beside four stages
MOST_POLLED_ROWS = 256  # with more than FEW_SIGNALS sums: polling was up to 10 % slower for more rows


@dataclass(frozen=True)
class Share:
    """Rows of one launch, and their tiling."""

    num_rows: int
    tiling: RouterTiling


@cache
def choose_shares(M: int, hidden: int, spec: Spec, num_sms: int) -> tuple[Share, ...]:
    """Choose the launches of a call, in the order of their rows, with the fewest predicted cycles in all."""
    return _cheapest(M, hidden, spec, num_sms, MAX_LAUNCHES)[1]


@cache
def _cheapest(M: int, hidden: int, spec: Spec, num_sms: int, most: int) -> tuple[float, tuple[Share, ...]]:
    """Return the fewest predicted cycles of at most `most` launches, and the launches."""
    tiling, of_one = choose_tiling(M, hidden, spec, num_sms)
    found = of_one, (Share(M, tiling),)
    for parts in {-(-spec.num_experts // width) for width in ROUND_WIDTHS}:
        in_round = TILE * (num_sms // parts)  # rows
        num_rounds = M // in_round if in_round else 0
        for rows, count in {(num_rounds * in_round, 1), (in_round, num_rounds)}:
            rest = M - rows * count
            if 0 < rows < M and count + (rest > 0) <= most:
                tiling, cycles = choose_tiling(rows, hidden, spec, num_sms)
                more, others = _cheapest(rest, hidden, spec, num_sms, min(most - count, 2)) if rest else (0.0, ())
                total = count * cycles + more + (count - (rest == 0)) * LAUNCH_CYCLES
                if total < min(found[0], WORTH_LAUNCHES * of_one):
                    found = total, (Share(rows, tiling),) * count + others
    return found


@cache
def choose_tiling(M: int, hidden: int, spec: Spec, num_sms: int) -> tuple[RouterTiling, float]:
    """Return the tiling of one launch with the fewest `predicted_cycles`, and these.

    Parts along K only if the L2 holds their sums beside the tokens: by way of memory the sums took 6 to 15 us longer.
    """
    M = tiled_rows(M)
    found = candidates(M, hidden, spec, num_sms)
    cached = (x for x in found if x.parts_k == 1 or 2 * M * hidden + x.sum_bytes(M) < CACHED_SUMS_BYTES)
    tilings = ((x, predicted_cycles(M, hidden, spec, x, num_sms)) for x in cached)
    return min(tilings, key=lambda found: found[1])


def tiled_rows(M: int) -> int:
    """Return the number of rows that a launch of M rows is tiled for."""
    return next_power_of_2(M) if M <= SAME_BELOW else M


def candidates(M: int, hidden: int, spec: Spec, num_sms: int) -> Iterator[RouterTiling]:
    """Yield all tilings worth comparing."""
    polled = MAX_SIGNALS if M <= MOST_POLLED_ROWS else FEW_SIGNALS
    num_blocks = -(-hidden // block_sum(hidden))
    if M > TILE:  # first: as fast as one width by the model, but for its empty columns
        yield from fitted_candidates(M, hidden, spec, num_sms)
    for num_warps, widths in WIDTHS.items():
        for block_n in widths:
            if block_n > spec.columns:
                continue
            for blocks_each in {-(-num_blocks // parts) for parts in range(1, num_blocks + 1)}:
                tiling = make(M, hidden, spec, Cut(num_warps, block_n, blocks_each, most_signals=polled), num_sms)
                if tiling.all_parts_wait or blocks_each == num_blocks:
                    yield tiling
                if tiling.polls_sums and tiling.sum_bytes(M) > 4 * FEW_SIGNALS:
                    yield make(M, hidden, spec, Cut(num_warps, block_n, blocks_each, most_signals=0), num_sms)
            if block_n == spec.columns:
                for rows in (8, 16, 32):
                    if rows < M:
                        yield make(M, hidden, spec, Cut(num_warps, block_n, num_blocks, rows), num_sms)
    if M > TILE:
        yield from large_candidates(M, hidden, spec, num_sms)


def large_candidates(M: int, hidden: int, spec: Spec, num_sms: int) -> Iterator[RouterTiling]:
    """Yield tilings for many rows: 128 of them a CTA, which halves the loads of the gate; or all columns in two turns.

    No turns for columns of which two widths have room.
    """
    num_blocks = -(-hidden // block_sum(hidden))
    if 64 <= spec.columns <= 128:
        yield make(M, hidden, spec, Cut(8, spec.columns, num_blocks, 2 * TILE, tile=2 * TILE), num_sms)
    if MAX_WIDTH < spec.num_experts <= 2 * TURN_COLUMNS:
        yield make(M, hidden, spec, Cut(8, TURN_COLUMNS, num_blocks, turns=2), num_sms)


def fitted_candidates(M: int, hidden: int, spec: Spec, num_sms: int) -> Iterator[RouterTiling]:
    """Yield tilings whose parts have two widths, for numbers of experts such as 160 = 128 + 32 or 2 * (64 + 16)."""
    num_blocks = -(-hidden // block_sum(hidden))
    for parts in (1, 2):
        block_n, rest_n = two_widths(spec.num_experts, parts)
        if not rest_n:
            continue
        if parts == 1 and block_n == 128:
            yield make(M, hidden, spec, Cut(8, block_n, num_blocks, 2 * TILE, tile=2 * TILE, rest_n=rest_n), num_sms)
        for num_warps in (4, 8):
            # Four warps have registers for 160 columns; eight warps' instructions are wasted on 64.
            suits = block_n == 64 or (parts == 1 and block_n + rest_n <= 160) if num_warps == 4 else block_n > 64
            if not suits:
                continue
            most_k = num_blocks if num_warps == 8 and block_n == 128 else 1  # no room for others, or not measured
            for blocks_each in {-(-num_blocks // k) for k in range(1, most_k + 1)}:
                cut = Cut(num_warps, block_n, blocks_each, rest_n=rest_n, most_signals=FEW_SIGNALS)
                tiling = make(M, hidden, spec, cut, num_sms)
                if tiling.all_parts_wait or tiling.parts == 1:
                    yield tiling
            if parts == 1:
                for rows in (16, 32):
                    yield make(M, hidden, spec, Cut(num_warps, block_n, num_blocks, rows, rest_n=rest_n), num_sms)

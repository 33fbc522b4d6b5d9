"""Choice of the Hopper router's launches, by a model of time.

A call is one launch, or several one after the other, each with some of the rows and a tiling of its own:
10817 tokens of 256 experts are 170 tiles for 132 multiprocessors; two launches of 132 and of 38 tiles, the latter cut
finer, take less time than two rounds of one launch do.
"""

from dataclasses import dataclass
from functools import cache

from envoi.ops.moe.router.candidates import candidates
from envoi.ops.moe.router.spec import Spec
from envoi.ops.moe.router.tiling import TILE, RouterTiling
from envoi.ops.moe.router.time_model import CACHED_SUMS_BYTES, LAUNCH_CYCLES, predicted_cycles
from envoi.runtime.math import next_power_of_2

SAME_BELOW = 64  # up to so many tokens use the tiling of the next power of two
MAX_LAUNCHES = 8
WORTH_LAUNCHES = 0.96  # of the cycles of one launch, which several have to stay below
ROUND_WIDTHS = (64, 128, 256, 1024)  # columns of a part, for rounds of which a call may have launches of their own


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

"""Choice of the Hopper router's launches among the tilings worth comparing, by a model of time.

A call is one launch, or several one after the other, each with some of the rows and a tiling of its own: 8600 tokens
of 256 experts are 135 tiles for 132 multiprocessors; two launches of 132 and of 3 tiles, the latter cut finer, take
less time than two rounds of one launch do. Or it is two launches that overlap: one that only multiplies, and one that
chooses the experts of rows as they are stored.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from envoi.ops.moe.router.spec import Spec, block_sum
from envoi.ops.moe.router.tiling import (
    FEW_SIGNALS,
    MAX_SIGNALS,
    MAX_WIDTH,
    TILE,
    Cut,
    RouterTiling,
    choice_of,
    make,
    rest_of,
    two_widths,
)
from envoi.runtime.devices import H200
from envoi.runtime.math import next_power_of_2

SAME_BELOW = 64  # up to so many tokens use the tiling of the next power of two
MAX_LAUNCHES = 8
WORTH_LAUNCHES = 0.96  # of the cycles of one launch, which several have to stay below
ROUND_WIDTHS = (64, 128, 256, 1024)  # columns of a part, for rounds of which a call may have launches of their own
WIDTHS = {4: (16, 32, 64, 128), 8: (128, 256)}  # warps -> block_n for which a block's sums and the total fit registers
TURN_COLUMNS = 256  # columns of a turn, whose logits of 64 rows shared memory holds beside four stages
CACHED_BYTES = 30e6  # of tokens that are still in the L2 when they are needed again
CACHED_SUMS_BYTES = 20e6  # the same of tokens and sums of parts along K together: sums are written first
APART_WIDTHS = (96, 128, 144, 160, 192)  # columns of tiles that only multiply: a power of two, or the sum of two
ONE_SUM_WIDTH = 256  # one more, for which registers have room without the total of blocks
APART_ROWS, APART_EXPERTS = 1024, 129  # least rows and experts for them; fewer weren't measured
WORTH_APART = 0.97  # of the cycles of other launches, which they have to stay below
LAUNCH_CYCLES = 1500.0  # one more launch, besides what `predicted_cycles` has for each
MOST_POLLED_ROWS = 256  # with more than FEW_SIGNALS sums: polling was up to 10 % slower for more rows


@dataclass(frozen=True)
class Share:
    """Rows of one launch, and their tiling."""

    num_rows: int
    tiling: RouterTiling


@cache
def choose_shares(
    M: int, hidden: int, spec: Spec, num_sms: int, batch_invariant: bool = True
) -> tuple[Share, ...]:  # fmt: skip
    """Choose the launches of a call, in the order of their rows, with the fewest predicted cycles in all.

    batch_invariant: none that sums all of K at once.
    """
    cycles, shares = _cheapest(M, hidden, spec, num_sms, MAX_LAUNCHES)
    found = list(apart_candidates(M, hidden, spec, num_sms))
    if not batch_invariant:
        found += apart_candidates(M, hidden, spec, num_sms, one_sum=True)
    for tiling in found:
        of_two = predicted_cycles(M, hidden, spec, tiling, num_sms) / WORTH_APART
        if of_two < cycles:
            cycles, shares = of_two, (Share(M, tiling),)
    return shares


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


def is_many(M: int, num_experts: int) -> bool:
    """Tell whether a launch that only multiplies may pay; only there does `batch_invariant` make a difference."""
    return M >= APART_ROWS and num_experts >= APART_EXPERTS


def apart_candidates(
    M: int, hidden: int, spec: Spec, num_sms: int, one_sum: bool = False
) -> Iterator[RouterTiling]:  # fmt: skip
    """Yield tilings that only multiply, for rows whose experts are chosen by a launch of its own: 64 rows or 128.

    Of the widths that cut the experts in the same number of parts, the least. None for few rows or experts. With the
    last tiles cut along K where they can be, and without. one_sum: such as sum all of K at once, of up to 256 columns.
    """
    if not is_many(M, spec.num_experts):
        return
    num_blocks = -(-hidden // block_sum(hidden))
    widths = (*APART_WIDTHS, ONE_SUM_WIDTH) if one_sum else APART_WIDTHS
    for tile in (TILE, 2 * TILE):
        for width in {-(-spec.num_experts // width): width for width in reversed(widths)}.values():
            block_n = 1 << (width.bit_length() - 1)
            more = {"tile": tile, "rest_n": width - block_n, "apart": True, "one_sum": one_sum}
            cut = Cut(tile // 16, block_n, num_blocks, tile, **more)
            yield make(M, hidden, spec, cut, num_sms)
            cuts = make(M, hidden, spec, replace(cut, cuts=True), num_sms)
            if rest_of(M, hidden, cuts, num_sms).parts > 1:
                yield cuts


# Model of the GPU time that a tiling takes


@dataclass(frozen=True)
class Costs:
    """Constants of the model of time, in cycles at `H200.clock_mhz`, from measurements on an H200.

    A test holds them to bench/router_times.jsonl; `tools/time_models` can fit them to it.

    start: a launch, and the first loads of a round. cta: until the next CTA of a round starts. roles: until the warps
    of several roles have started. meet, signal: all parts of some rows wait for each other, by a counter or by polling
    the sums. choose: choosing the experts of a pass of rows, however few. element: for each logit of a warp, in each
    round of the choice. idle: for each warp beyond the rows of a pass. group: for each group but one, in each pass, if
    the best of each is found after that of the one before. l2_bytes: loaded by a multiprocessor per cycle; less than a
    GEMM's tiles, since there is no second consumer. sum_bytes: of partial sums that a multiprocessor stores or loads
    per cycle. wide: factor of products by tiles of more than TILE rows, or of more than 128 columns by eight warps.

    l2_alone: `l2_bytes` at most, where few multiprocessors load. settled: factor of the choice, but for groups, where
    near ties are settled with the whole pass. Neither for few rows or experts: l2_alone chose worse there.

    Of products and choice in two launches. apart_start: of the first. between: from a tile of a CTA to its next, whose
    loads have begun before. choice_start: from the last sum to the first choice, and the last one. logit, row_group: of
    all rows of a multiprocessor, for each logit in each round, and each group but one. hidden: part of the choice that
    the last of many rounds hides.
    """

    start: float = 1500.0
    cta: float = 12.0
    roles: float = 1800.0
    meet: float = 3300.0
    signal: float = 1300.0
    choose: float = 1500.0
    element: float = 0.12
    idle: float = 200.0
    group: float = 400.0
    settled: float = 0.76
    l2_bytes: float = 65.0
    sum_bytes: float = 20.0
    wide: float = 1.2
    apart_start: float = 1240.0
    between: float = 1000.0
    l2_alone: float = 90.0
    choice_start: float = 4750.0
    logit: float = 0.0245
    row_group: float = 30.0
    hidden: float = 0.35


COSTS = Costs()
SCORE_ROUNDS = {"sigmoid": 5, "sqrt_softplus": 15}  # as many rounds of the choice take as long as a score


def predicted_cycles(
    M: int, hidden: int, spec: Spec, tiling: RouterTiling, num_sms: int, costs: Costs = COSTS
) -> float:  # fmt: skip
    """Estimate the cycles of a launch, or of the two of a tiling that only multiplies.

    Loading and multiplying, then exchanging sums and choosing.

    Loads and products hide each other, unless they are about equally long; not at all if one role does first all of the
    former and then the latter.
    """
    if tiling.apart:
        return _apart_cycles(M, hidden, spec, tiling, num_sms, costs)
    ctas = -(-M // tiling.rows_per_cta) * tiling.parts
    waves = -(-ctas // num_sms)
    many = is_many(M, spec.num_experts)
    loads = _load_cycles(hidden, spec, tiling, _loading(costs, ctas, waves, num_sms) if many else costs)
    loads = max(loads, _memory_cycles(M, hidden, spec, tiling, num_sms) / waves)
    products = _product_cycles(hidden, tiling, costs)
    both = loads + products if tiling.single_fill else (loads**3 + products**3) ** (1 / 3)
    rest = 0.0 if tiling.single_fill else costs.roles
    if tiling.parts > 1:
        sets = max(1, tiling.num_sets // max(tiling.parts_k - 1, 1))
        floats = tiling.rows_per_part * tiling.num_sets * spec.columns + tiling.rows_per_cta * tiling.width * sets
        rest += (costs.signal if tiling.polls_sums else costs.meet) + 4 * floats / costs.sum_bytes
    choice = _choice_cycles(spec, tiling, costs, costs.settled if many and tiling.settles else 1.0)
    return costs.cta * min(ctas, num_sms) + waves * (costs.start + both + rest + choice)


def _loading(costs: Costs, ctas: int, waves: int, num_sms: int) -> Costs:
    """Return the costs with `l2_bytes` as a multiprocessor gets them where not all of them load in every round."""
    return replace(costs, l2_bytes=min(costs.l2_alone, costs.l2_bytes * num_sms * waves / ctas))


def _span(hidden: int, tiling: RouterTiling) -> int:
    """Return the elements along K of a CTA."""
    return min(hidden, tiling.steps_each * tiling.block_k)


def _load_cycles(hidden: int, spec: Spec, tiling: RouterTiling, costs: Costs) -> float:
    """Return the cycles of a CTA's loads from the L2."""
    columns = min(tiling.turns * tiling.width, -(-spec.num_experts // tiling.box_n) * tiling.box_n)
    return 2 * _span(hidden, tiling) * (tiling.turns * tiling.rows_per_cta + columns) / costs.l2_bytes


def _memory_cycles(M: int, hidden: int, spec: Spec, tiling: RouterTiling, num_sms: int) -> float:
    """Return the cycles of a launch's loads from memory: each turn's tokens, unless the L2 still has them."""
    at_once = 2 * hidden * min(M, num_sms * tiling.rows_per_cta // tiling.parts)  # bytes of the tokens of a round
    reads = tiling.turns if at_once > CACHED_BYTES else 1
    return 2 * hidden * (M * reads + spec.num_experts) / H200.hbm_bytes


def _product_cycles(hidden: int, tiling: RouterTiling, costs: Costs) -> float:
    """Return the cycles of a CTA's products.

    An instruction takes at least the time in which its operands, 64 rows of tokens and the columns, 32 bytes each, come
    from shared memory, 128 bytes a cycle; the tokens for each four warps.
    """
    groups = tiling.num_warps * 16 // tiling.tile
    widths = (n for n in (tiling.block_n, tiling.rest_n) if n)
    cycles = _span(hidden, tiling) / 16 * tiling.turns * sum(max(n / 2, 16 * groups + n / 4) for n in widths)
    if tiling.tile > TILE or (tiling.num_warps == 8 and tiling.width > 128):
        cycles *= costs.wide * tiling.tile / TILE
    return cycles


def _choice_cycles(spec: Spec, tiling: RouterTiling, costs: Costs, factor: float) -> float:
    """Return the cycles in which a CTA chooses the experts of its rows; of all but groups, times a factor."""
    passes = -(-tiling.rows_per_part // tiling.rows_per_pass)
    chosen_from = tiling.width if tiling.in_runs else spec.columns
    elements = tiling.rows_per_pass * chosen_from / tiling.num_warps
    groups = 0 if spec.groups_fill else spec.rule.num_groups - 1
    idle = max(0, tiling.num_warps - tiling.rows_per_pass)
    rounds = spec.k + 12 + 3 * max(0, spec.k - 10)  # of more experts, more rows are uncertain: up to 1.35 times as long
    each = groups * costs.group + factor * (costs.choose + elements * rounds * costs.element)
    return passes * each + idle * costs.idle


def _apart_cycles(M: int, hidden: int, spec: Spec, tiling: RouterTiling, num_sms: int, costs: Costs) -> float:
    """Return the cycles of a launch that only multiplies and one that chooses experts, in part at the same time."""
    rest = rest_of(M, hidden, tiling, num_sms)
    tiles = -(-M // tiling.rows_per_cta) * tiling.parts
    ctas = rest.first + (tiles - rest.first) * rest.parts
    waves = -(-ctas // num_sms)
    rounds = waves - 1 + rest.steps / tiling.steps_each
    loads = _load_cycles(hidden, spec, tiling, _loading(costs, ctas, waves, num_sms))
    loads = max(loads, _memory_cycles(M, hidden, spec, tiling, num_sms) / rounds)
    both = (loads**3 + _product_cycles(hidden, tiling, costs) ** 3) ** (1 / 3)
    stored_bytes = 4 * tiling.rows_per_cta * tiling.width
    if rest.parts > 1:  # all sets but one are stored and loaded besides
        rows = (tiles - rest.first) / tiling.parts * tiling.rows_per_cta
        stored_bytes += 8 * (rest.sets - 1) * rows * spec.num_experts / num_sms
    stores = stored_bytes / costs.sum_bytes
    between = (waves - 1) * costs.between if not tiling.single_fill else (waves - 1) * (costs.apart_start + stores)
    products = costs.cta * min(ctas, num_sms) + costs.apart_start + rounds * both + between + stores
    groups = 0 if spec.groups_fill else spec.rule.num_groups - 1
    rounds = spec.k + 12 + SCORE_ROUNDS.get(spec.rule.score, 0) * spec.by_score
    choice = M / num_sms * (choice_of(spec, rest.sets > 1).width * rounds * costs.logit + groups * costs.row_group)
    hidden_part = costs.hidden * (1 - 1 / waves) if "maxnreg" in tiling.options else 0.0
    return products + costs.choice_start + choice * (1 - hidden_part)

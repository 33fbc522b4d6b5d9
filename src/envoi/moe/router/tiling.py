"""Tiling of the Hopper router: division of rows, columns and blocks along K among CTAs, chosen by a model of time.

A call is one launch, or several one after the other, each with some of the rows and a tiling of its own:
10817 tokens of 256 experts are 170 tiles for 132 multiprocessors; two launches of 132 and of 38 tiles, the latter cut
finer, take less time than two rounds of one launch do.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from envoi.constant import Constant
from envoi.moe.router.spec import Spec, block_sum
from envoi.runtime.devices import SHARED_BYTES
from envoi.runtime.gpu_rates import H200
from envoi.runtime.math import next_power_of_2
from envoi.runtime.triton_compat import WHOLE_VIEWS

WIDTHS = {4: (16, 32, 64, 128), 8: (128, 256)}  # warps -> block_n for which a block's sums and the total fit registers
TILE = 64  # rows of an instruction, and of a tile; eight warps can have two of them for up to 128 columns
SAME_BELOW = 64  # up to so many tokens use the tiling of the next power of two
TILE_ROWS = 8  # least rows of a tile in shared memory: its swizzle repeats after eight
MAX_ELEMENTS = 512  # logits in which a warp chooses experts at a time, if all its lanes share a row
MAX_SIGNALS = 1 << 20  # partial sums that are polled, if few rows are routed at a time
FEW_SIGNALS = 1 << 18  # and if many are: an uncertain row then sends all of them the exact way
FEW_ROWS, FEW_SCORED_ROWS = 16, 8  # few rows; by scores more of them are uncertain
TURN_COLUMNS = 256  # columns of a turn, whose logits of 64 rows shared memory holds beside four stages
TOKEN_BOX = 32  # rows of tokens that are loaded at a time if there are two widths
FIRST_STAGES = 3  # in flight while the roles start, if a stage takes many loads: more than memory returns until then
MIN_REST = 32  # columns of the second width where a CTA has them all: a row's 32 lanes share it
MAX_WIDTH = 384  # columns of which eight warps have room for a block's sums and the total
RESERVED_BYTES = 3072  # barriers, and the compiler's scratch for reductions

# Cycles of an H200; only ratios matter.
L2_BYTES = 0.8125 * H200.l2_bytes  # loaded by an SM per cycle: boxes of 64 rows at most, and no second consumer
SUM_BYTES = 20.0  # of sums stored to, or loaded from, the workspace by an SM per cycle
START_CYCLES = 1500.0
CTA_CYCLES = 12.0  # until the next CTA of a round starts
ROLES_CYCLES = 2200.0  # until the warps of several roles have started
MEET_CYCLES = 3900.0  # all parts of some rows wait for each other by a counter
SIGNAL_CYCLES = 2000.0  # all parts of some rows wait for each other by polling the sums
CHOOSE_CYCLES = 1500.0  # choosing the experts of a pass of rows, however few
ELEMENT_CYCLES = 0.12  # for each logit of a warp, in each round of the choice
GROUP_CYCLES = 400.0  # for each group but one, in each pass, if the best of each is found after that of the one before
MMA_SLOWDOWN = 1.2  # of products where they, not the loads, take the time
CACHED_BYTES = 30e6  # of tokens, and sums of parts along K, that are still in the L2 when they are needed again
LAUNCH_CYCLES = 1500.0  # one more launch, besides what `predicted_cycles` has for each

MOST_POLLED_ROWS = 256  # with more than FEW_SIGNALS sums: polling was up to 10 % slower for more rows
MAX_LAUNCHES = 8
WORTH_LAUNCHES = 0.96  # of the cycles of one launch, which several have to stay below
ROUND_WIDTHS = (64, 128, 256, 1024)  # columns of a part, for rounds of which a call may have launches of their own


@dataclass(frozen=True)
class RouterTiling(Constant):
    """Division of a launch's work: a CTA takes rows_per_cta rows, block_n columns, steps_each * block_k of K.

    num_warps: the consumer's warps. num_stages: stages of the pipeline; with single_fill all of a CTA's operands fit.
    parts: CTAs of the same rows, parts_n along the columns and parts_k along K. all_parts_wait: they wait for each
    other, and each routes rows_per_part rows; else the last to arrive routes all of them. polls_sums: they poll the
    partial sums themselves instead of a counter. rows_per_pass: rows that are routed at a time. num_sets: partial sums
    of each row. steps_in_block: steps along K in a block of sums. columns: columns of the workspace. rows_per_cta:
    `tile`, the rows that are multiplied, unless there are fewer tokens, or a CTA has all columns and all of K. lanes:
    lanes that share a row when experts are chosen. turns: times that a CTA goes along K, each with the next block_n
    columns; if more than one, it has all columns and all of K. rest_n: columns after block_n, which have an accumulator
    of their own; only one turn then. box_n: rows of the gate that are loaded at a time.
    """

    num_warps: int
    block_n: int
    block_k: int
    num_stages: int
    parts_n: int
    parts_k: int
    steps_each: int
    steps_in_block: int
    num_sets: int
    rows_per_part: int
    rows_per_pass: int
    all_parts_wait: bool
    polls_sums: bool
    columns: int
    rows_per_cta: int
    single_fill: bool
    lanes: int
    turns: int = 1
    tile: int = TILE
    rest_n: int = 0
    box_n: int = 0

    @property
    def box_m(self) -> int:
        """Number of rows of the tokens that are loaded at a time."""
        return min(self.rows_per_cta, TOKEN_BOX) if self.rest_n else self.rows_per_cta

    @property
    def in_runs(self) -> bool:
        """Return True if lanes share each rest_n columns evenly, not all at once: whole registers have no column."""
        return self.rest_n > 0 and self.parts == 1

    @property
    def width(self) -> int:
        """Number of columns that a CTA takes in a turn."""
        return self.block_n + self.rest_n

    @property
    def num_first(self) -> int:
        """Number of stages that are filled before the roles start: all of them, unless each takes many loads.

        There all warps meet before each load; the producer needn't.
        """
        few = self.box_n == self.width and self.box_m == self.rows_per_cta
        return self.num_stages if few or self.single_fill else min(self.num_stages, FIRST_STAGES)

    @property
    def gate_slots(self) -> int:
        """Number of the gate's stages, and as much memory beside them as the logits of all turns but the last need."""
        return self.num_stages + 2 * self.tile // self.block_k * (self.turns - 1)

    @property
    def boards(self) -> int:
        """Number of boards, logits [tile, run] in float32, that the memory of the gate has room for."""
        return max(1, self.gate_slots * self.block_k // (2 * self.tile))

    @property
    def run(self) -> int:
        """Number of neighbouring columns that the lanes of a row share evenly: those of a turn."""
        if self.in_runs:
            return self.rest_n
        return self.block_n if self.turns > 1 else self.columns

    @property
    def parts(self) -> int:
        """Number of CTAs that share their rows."""
        return self.parts_n * self.parts_k

    def sum_bytes(self, num_tokens: int) -> int:
        """Return the bytes of all partial sums of so many tokens in the workspace."""
        return 4 * num_tokens * self.num_sets * self.columns

    @property
    def reroutes_eights(self) -> bool:
        """Return True if uncertain rows are routed again eight at a time instead of with the whole pass.

        Possible if their sums can be read twice and 32 lanes for each row give the same bits.
        """
        return not self.polls_sums and self.columns >= 128 and self.rows_per_pass > 8


def lanes_of(rows_a_warp: int, spec: Spec) -> int:
    """Return the number of lanes that share a row.

    For many rows few lanes do less work in all; for few rows a whole warp is faster, and reduces integers in one
    instruction.
    """
    if spec.columns < 128:
        return max(4, spec.columns // 8)
    few = max(8, spec.slots, spec.columns // 32)
    return 32 if rows_a_warp < 4 else few


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
    M = next_power_of_2(M) if M <= SAME_BELOW else M
    found = candidates(M, hidden, spec, num_sms)
    cached = (x for x in found if x.parts_k == 1 or 2 * M * hidden + x.sum_bytes(M) < CACHED_BYTES)
    tilings = ((x, predicted_cycles(M, hidden, spec, x, num_sms)) for x in cached)
    return min(tilings, key=lambda found: found[1])


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


def two_widths(num_experts: int, parts: int) -> tuple[int, int]:
    """Return two powers of two, each part's columns at least, the larger one first; (.., 0) where one is as good."""
    columns = -(-num_experts // parts)
    block_n = next_power_of_2(columns) // 2
    rest_n = max(MIN_REST if parts == 1 else 16, next_power_of_2(max(columns - block_n, 1)))
    fits = 64 <= block_n <= 256 and block_n < columns and rest_n < block_n and block_n + rest_n <= MAX_WIDTH
    return block_n, rest_n if fits else 0


@dataclass(frozen=True)
class Cut:
    """Free choices of a RouterTiling. blocks_each: blocks along K of a CTA. rows: most rows of a CTA.

    most_signals: most partial sums that are polled, where few rows are routed at a time; where many are, FEW_SIGNALS.
    """

    num_warps: int
    block_n: int
    blocks_each: int
    rows: int = TILE
    turns: int = 1
    tile: int = TILE
    rest_n: int = 0
    most_signals: int = MAX_SIGNALS


def box_of(num_experts: int, block_n: int, rest_n: int) -> int:
    """Return the rows of the gate that are loaded at a time: a power of two, so that hardly a row isn't an expert."""
    if not rest_n and num_experts % block_n == 0:
        return block_n
    padded = -(-num_experts // 16) * 16
    return min(padded & -padded, block_n, rest_n or block_n)


def make(M: int, hidden: int, spec: Spec, cut: Cut, num_sms: int) -> RouterTiling:
    """Make a tiling from its free choices."""
    num_warps, block_n, tile = cut.num_warps, cut.block_n, cut.tile
    width = block_n + cut.rest_n
    block = block_sum(hidden)
    num_blocks = -(-hidden // block)
    parts_n = 1 if cut.turns > 1 else -(-spec.num_experts // width)
    parts_k = -(-num_blocks // cut.blocks_each)
    parts = parts_n * parts_k
    num_sets = num_blocks - cut.blocks_each + 1
    waits = parts > 1 and -(-M // tile) * parts <= num_sms
    rows = max(TILE_ROWS, next_power_of_2(min(M, cut.rows)))
    share = min(next_power_of_2(-(-min(M, tile) // parts)), tile) if waits else rows
    lanes = lanes_of(share // num_warps, spec)
    rows_each = min(MAX_ELEMENTS * (1 if lanes == 32 or spec.columns < 128 else 2) * num_warps // spec.columns, share)
    are_few = rows_each <= (FEW_SCORED_ROWS if spec.by_score else FEW_ROWS)
    most_signals = min(cut.most_signals, MAX_SIGNALS if are_few else FEW_SIGNALS)
    signals = waits and spec.columns <= 512 and num_sets * M * spec.columns <= most_signals
    if signals:  # each sum is read, and reset, by one thread
        rows_each = max(rows_each, 32 * num_warps // spec.columns)
    block_k = 256 if block_n < 64 else 128 if block_n < 128 else 64
    block_k = max(32, min(block_k, next_power_of_2(hidden), block & -block))
    stage_bytes = 2 * block_k * (tile + width)
    steps_each = cut.blocks_each * block // block_k
    others = RESERVED_BYTES + signals * 4 * rows_each * spec.columns + (cut.turns - 1) * 4 * tile * block_n
    # The stages of the gate hold the logits of a tile in the end.
    board = -(-2 * tile // block_k)
    unit = board if cut.turns > 1 or (WHOLE_VIEWS and parts == 1) else 1
    fits = (SHARED_BYTES - others) // stage_bytes // unit * unit
    steps = min(steps_each, -(-hidden // block_k))
    loads_all = steps <= fits and cut.turns == 1
    stages = max(-(-steps // unit) * unit, board) if loads_all else min(fits, 16)
    return RouterTiling(
        num_warps, block_n, block_k, stages, parts_n, parts_k, steps_each, block // block_k, max(1, num_sets),
        share, rows_each, waits, signals, spec.columns, rows, loads_all, lanes, cut.turns, tile, cut.rest_n,
        box_of(spec.num_experts, block_n, cut.rest_n),
    )  # fmt: skip


def predicted_cycles(M: int, hidden: int, spec: Spec, tiling: RouterTiling, num_sms: int) -> float:
    """Estimate the cycles of a launch: the slowest of loading and multiplying, then exchanging sums and choosing."""
    ctas = -(-M // tiling.rows_per_cta) * tiling.parts
    waves = -(-ctas // num_sms)
    span = min(hidden, tiling.steps_each * tiling.block_k)
    columns = min(tiling.turns * tiling.width, -(-spec.num_experts // tiling.box_n) * tiling.box_n)
    loads = 2 * span * (tiling.turns * tiling.rows_per_cta + columns) / L2_BYTES
    at_once = 2 * hidden * min(M, num_sms * tiling.rows_per_cta // tiling.parts)  # bytes of the tokens of a round
    reads = tiling.turns if at_once > CACHED_BYTES else 1
    dram = 2 * hidden * (M * reads + spec.num_experts) / H200.hbm_bytes / waves
    # An instruction takes at least 32 cycles, whatever its columns.
    least = 32 * tiling.num_warps * 16 // tiling.tile
    products = span / 16 * tiling.turns * sum(max(n / 2, least) for n in (tiling.block_n, tiling.rest_n) if n)
    if tiling.tile > TILE or (tiling.num_warps == 8 and tiling.width > 128):
        products *= MMA_SLOWDOWN * tiling.tile / TILE
    rest = 0.0 if tiling.single_fill else ROLES_CYCLES
    if tiling.parts > 1:
        sets = max(1, tiling.num_sets // max(tiling.parts_k - 1, 1))
        floats = tiling.rows_per_part * tiling.num_sets * spec.columns + tiling.rows_per_cta * tiling.width * sets
        rest += (SIGNAL_CYCLES if tiling.polls_sums else MEET_CYCLES) + 4 * floats / SUM_BYTES
    passes = -(-tiling.rows_per_part // tiling.rows_per_pass)
    chosen_from = tiling.width if tiling.in_runs else spec.columns
    elements = tiling.rows_per_pass * chosen_from / tiling.num_warps
    groups = 0 if spec.groups_fill else spec.rule.num_groups - 1
    rest += passes * (CHOOSE_CYCLES + groups * GROUP_CYCLES + elements * (spec.k + 12) * ELEMENT_CYCLES)
    return CTA_CYCLES * min(ctas, num_sms) + waves * (START_CYCLES + max(loads, dram, products) + rest)

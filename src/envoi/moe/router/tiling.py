"""Tiling of the Hopper router: division of rows, columns and blocks along K among CTAs, chosen by a model of time."""

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
TILE = 64  # rows of an instruction
SAME_BELOW = 64  # up to so many tokens use the tiling of the next power of two
TILE_ROWS = 8  # least rows of a tile in shared memory: its swizzle repeats after eight
MAX_ELEMENTS = 512  # logits in which a warp chooses experts at a time, if all its lanes share a row
MAX_SIGNALS = 1 << 18  # partial sums that are polled
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


@dataclass(frozen=True)
class RouterTiling(Constant):
    """Division of a launch's work: a CTA takes rows_per_cta rows, block_n columns, steps_each * block_k of K.

    num_warps: the consumer's warps. num_stages: stages of the pipeline; with single_fill all of a CTA's operands fit.
    parts: CTAs of the same rows, parts_n along the columns and parts_k along K. all_parts_wait: they wait for each
    other, and each routes rows_per_part rows; else the last to arrive routes all of them. polls_sums: they poll the
    partial sums themselves instead of a counter. rows_per_pass: rows that are routed at a time. num_sets: partial sums
    of each row. steps_in_block: steps along K in a block of sums. columns: columns of the workspace. rows_per_cta:
    `tile`, the rows of an instruction, unless there are fewer tokens, or a CTA has all columns and all of K. lanes:
    lanes that share a row when experts are chosen.
    """

    tile = TILE

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

    @property
    def parts(self) -> int:
        """Number of CTAs that share their rows."""
        return self.parts_n * self.parts_k

    @property
    def reroutes_eights(self) -> bool:
        """Return True if uncertain rows are routed again eight at a time instead of with the whole pass.

        Possible if their sums can be read twice and 32 lanes for each row give the same bits.
        """
        return not self.polls_sums and self.columns >= 128 and self.rows_per_pass > 8


def lanes_of(rows_a_warp: int, spec: Spec) -> int:
    """Return the number of lanes that share a row.

    For many rows few lanes do less work in all; for few rows a whole warp is faster, and reduces integers in one
    instruction. If a sum over all columns is needed, its order has to be the same for any number of rows.
    """
    if spec.columns < 128:
        return max(4, spec.columns // 8)
    few = max(8, spec.slots, spec.columns // 32)
    return 32 if spec.whole_softmax or rows_a_warp < 4 else few


@cache
def choose_tiling(M: int, hidden: int, spec: Spec, num_sms: int) -> RouterTiling:
    """Choose the tiling with the fewest `predicted_cycles`."""
    tilings = candidates(M, hidden, spec, num_sms)
    return min(tilings, key=lambda tiling: predicted_cycles(M, hidden, spec, tiling, num_sms))


def candidates(M: int, hidden: int, spec: Spec, num_sms: int) -> Iterator[RouterTiling]:
    """Yield all tilings worth comparing."""
    num_blocks = -(-hidden // block_sum(hidden))
    for num_warps, widths in WIDTHS.items():
        for block_n in widths:
            if block_n > spec.columns:
                continue
            for blocks_each in {-(-num_blocks // parts) for parts in range(1, num_blocks + 1)}:
                tiling = make(M, hidden, spec, num_warps, block_n, blocks_each, TILE, num_sms)
                if tiling.all_parts_wait or blocks_each == num_blocks:
                    yield tiling
            if block_n == spec.columns:
                for rows in (8, 16, 32):
                    if rows < M:
                        yield make(M, hidden, spec, num_warps, block_n, num_blocks, rows, num_sms)


def make(
    M: int, hidden: int, spec: Spec, num_warps: int, block_n: int, blocks_each: int, rows: int, num_sms: int
) -> RouterTiling:
    """Make a tiling from its free choices; blocks_each: blocks along K of a CTA, rows: most rows of a CTA."""
    block = block_sum(hidden)
    num_blocks = -(-hidden // block)
    parts_n = -(-spec.num_experts // block_n)
    parts_k = -(-num_blocks // blocks_each)
    parts = parts_n * parts_k
    num_sets = num_blocks - blocks_each + 1
    waits = parts > 1 and -(-M // TILE) * parts <= num_sms
    signals = waits and spec.columns <= 512 and num_sets * M * spec.columns <= MAX_SIGNALS
    rows = max(TILE_ROWS, next_power_of_2(min(M, rows)))
    share = min(next_power_of_2(-(-min(M, TILE) // parts)), TILE) if waits else rows
    lanes = lanes_of(share // num_warps, spec)
    rows_each = min(MAX_ELEMENTS * (1 if lanes == 32 or spec.columns < 128 else 2) * num_warps // spec.columns, share)
    if signals:  # each sum is read, and reset, by one thread
        rows_each = max(rows_each, 32 * num_warps // spec.columns)
    block_k = 256 if block_n < 64 else 128 if block_n < 128 else 64
    block_k = max(32, min(block_k, next_power_of_2(hidden), block & -block))
    stage_bytes = 2 * block_k * (TILE + block_n)
    steps_each = blocks_each * block // block_k
    others = RESERVED_BYTES + signals * 4 * rows_each * spec.columns
    # The stages of the gate hold the logits of a tile in the end.
    board = -(-2 * TILE // block_k)
    unit = board if WHOLE_VIEWS and parts == 1 else 1
    fits = (SHARED_BYTES - others) // stage_bytes // unit * unit
    steps = min(steps_each, -(-hidden // block_k))
    loads_all = steps <= fits
    stages = max(-(-steps // unit) * unit, board) if loads_all else min(fits, 16)
    return RouterTiling(
        num_warps, block_n, block_k, stages, parts_n, parts_k, steps_each, block // block_k, max(1, num_sets),
        share, rows_each, waits, signals, spec.columns, rows, loads_all, lanes,
    )  # fmt: skip


def predicted_cycles(M: int, hidden: int, spec: Spec, tiling: RouterTiling, num_sms: int) -> float:
    """Estimate the cycles of a launch: the slowest of loading and multiplying, then exchanging sums and choosing."""
    ctas = -(-M // tiling.rows_per_cta) * tiling.parts
    waves = -(-ctas // num_sms)
    span = min(hidden, tiling.steps_each * tiling.block_k)
    loads = 2 * span * (tiling.rows_per_cta + tiling.block_n) / L2_BYTES
    dram = 2 * hidden * (M + spec.num_experts) / H200.hbm_bytes / waves
    # An instruction takes at least 32 cycles, whatever its columns.
    products = span / 16 * max(tiling.block_n / 2, 32)
    rest = 0.0 if tiling.single_fill else ROLES_CYCLES
    if tiling.parts > 1:
        sets = max(1, tiling.num_sets // max(tiling.parts_k - 1, 1))
        floats = tiling.rows_per_part * tiling.num_sets * spec.columns + tiling.rows_per_cta * tiling.block_n * sets
        rest += (SIGNAL_CYCLES if tiling.polls_sums else MEET_CYCLES) + 4 * floats / SUM_BYTES
    passes = -(-tiling.rows_per_part // tiling.rows_per_pass)
    elements = tiling.rows_per_pass * spec.columns / tiling.num_warps
    rest += passes * (CHOOSE_CYCLES + elements * (spec.k + 12) * ELEMENT_CYCLES)
    return CTA_CYCLES * min(ctas, num_sms) + waves * (START_CYCLES + max(loads, dram, products) + rest)

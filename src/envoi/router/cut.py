"""How the Hopper router cuts its work into CTAs: rows, columns, blocks along K. Plain Python."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from envoi.gemm.config import SHARED_BYTES, power_of_two
from envoi.router.spec import Spec, block_sum
from envoi.triton_compat import WHOLE_VIEWS

WIDTHS = {4: (16, 32, 64, 128), 8: (128, 256)}  # of warps: what leaves room in registers for a block and the total
TILE = 64  # rows of an instruction
SAME_BELOW = 64  # tokens up to here have the cut of the next power of two
TILE_ROWS = 8  # of a tile in shared memory at least: its swizzle repeats after eight
MAX_ELEMENTS = 512  # that a warp chooses experts in at a time, if all of it shares a row
MAX_SIGNALS = 1 << 18  # sums that are waited for themselves
RESERVED_BYTES = 3072  # barriers, and what the compiler takes for reductions

# Cycles of an H200; only ratios matter.
L2_BYTES = 65.0  # that a multiprocessor takes in one
DRAM_BYTES = 2400.0  # that all of them take together
SUM_BYTES = 20.0  # of sums that one leaves, or takes back, in the workspace
START_CYCLES = 1500.0
CTA_CYCLES = 12.0  # until the next CTA of a wave starts
ROLES_CYCLES = 2200.0  # until the warps of several roles have gone their ways
MEET_CYCLES = 3900.0  # all parts of some rows wait for each other
SIGNAL_CYCLES = 2000.0  # the same by the sums themselves
CHOOSE_CYCLES = 1500.0  # a tile of rows, however small
ELEMENT_CYCLES = 0.12  # a round of one element of it, one warp


@dataclass(frozen=True)
class Cut:
    """A CTA has `tile` rows, those of an instruction, block_n columns, steps_each steps of block_k along K; num_warps
    multiply and choose.

    parts: CTAs that share their rows, parts_n of them side by side. waits: they wait for each other, and each routes
    `share` rows; else the last to come routes all of them. signals: they wait for the sums themselves, not for a
    counter. rows_each: at a time. num_sets: sums that each row has. steps_in_block: steps along K in a block of sums.
    columns: of the workspace. rows: `tile` unless there are fewer tokens, or a CTA has all columns and all of K.
    loads_all: a CTA's part of the operands fits its stages. lanes: that share a row when experts are chosen.
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
    share: int
    rows_each: int
    waits: bool
    signals: bool
    columns: int
    rows: int
    loads_all: bool
    lanes: int

    @property
    def parts(self) -> int:
        """CTAs that share their rows."""
        return self.parts_n * self.parts_k

    @property
    def in_eights(self) -> bool:
        """Rows whose experts aren't certain are done again eight at a time, not the whole pass: their logits can be
        read twice, and 32 lanes a row give the same sums."""
        return not self.signals and self.columns >= 128 and self.rows_each > 8


def lanes_of(rows_a_warp: int, spec: Spec) -> int:
    """Lanes that share a row.

    With many rows few lanes do less in all; with few rows a whole warp is sooner ready, and reduces integers in one
    instruction. Where a sum over all columns counts, its order has to be the same for any number of rows.
    """
    if spec.columns < 128:
        return max(4, spec.columns // 8)
    few = max(8, spec.slots, spec.columns // 32)
    return 32 if spec.whole_softmax or rows_a_warp < 4 else few


@cache
def choose_cut(M: int, hidden: int, spec: Spec, num_sms: int) -> Cut:
    """The cut that the model below finds fastest."""
    return min(candidates(M, hidden, spec, num_sms), key=lambda cut: predicted_cycles(M, hidden, spec, cut, num_sms))


def candidates(M: int, hidden: int, spec: Spec, num_sms: int) -> Iterator[Cut]:
    """All cuts that make sense."""
    num_blocks = -(-hidden // block_sum(hidden))
    for num_warps, widths in WIDTHS.items():
        for block_n in widths:
            if block_n > spec.columns:
                continue
            for blocks_each in {-(-num_blocks // parts) for parts in range(1, num_blocks + 1)}:
                cut = make(M, hidden, spec, num_warps, block_n, blocks_each, TILE, num_sms)
                if cut.waits or blocks_each == num_blocks:
                    yield cut
            if block_n == spec.columns:
                for rows in (8, 16, 32):
                    if rows < M:
                        yield make(M, hidden, spec, num_warps, block_n, num_blocks, rows, num_sms)


def make(
    M: int, hidden: int, spec: Spec, num_warps: int, block_n: int, blocks_each: int, rows: int, num_sms: int
) -> Cut:
    """A cut with what follows from it."""
    block = block_sum(hidden)
    num_blocks = -(-hidden // block)
    parts_n = -(-spec.num_experts // block_n)
    parts_k = -(-num_blocks // blocks_each)
    parts = parts_n * parts_k
    num_sets = num_blocks - blocks_each + 1
    waits = parts > 1 and -(-M // TILE) * parts <= num_sms
    signals = waits and spec.columns <= 512 and num_sets * M * spec.columns <= MAX_SIGNALS
    rows = max(TILE_ROWS, power_of_two(min(M, rows)))
    share = min(power_of_two(-(-min(M, TILE) // parts)), TILE) if waits else rows
    lanes = lanes_of(share // num_warps, spec)
    rows_each = min(MAX_ELEMENTS * (1 if lanes == 32 or spec.columns < 128 else 2) * num_warps // spec.columns, share)
    if signals:  # each sum is read, and taken, by one thread
        rows_each = max(rows_each, 32 * num_warps // spec.columns)
    block_k = 256 if block_n < 64 else 128 if block_n < 128 else 64
    block_k = max(32, min(block_k, power_of_two(hidden), block & -block))
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
    return Cut(
        num_warps, block_n, block_k, stages, parts_n, parts_k, steps_each, block // block_k, max(1, num_sets),
        share, rows_each, waits, signals, spec.columns, rows, loads_all, lanes,
    )  # fmt: skip


def predicted_cycles(M: int, hidden: int, spec: Spec, cut: Cut, num_sms: int) -> float:
    """What a launch takes, roughly: the slowest of loading and multiplying, then meeting and choosing."""
    ctas = -(-M // cut.rows) * cut.parts
    waves = -(-ctas // num_sms)
    span = min(hidden, cut.steps_each * cut.block_k)
    loads = 2 * span * (cut.rows + cut.block_n) / L2_BYTES
    dram = 2 * hidden * (M + spec.num_experts) / DRAM_BYTES / waves
    # An instruction takes at least 32 cycles, whatever its columns.
    products = span / 16 * max(cut.block_n / 2, 32)
    rest = 0.0 if cut.loads_all else ROLES_CYCLES
    if cut.parts > 1:
        sets = max(1, cut.num_sets // max(cut.parts_k - 1, 1))
        floats = cut.share * cut.num_sets * spec.columns + cut.rows * cut.block_n * sets
        rest += (SIGNAL_CYCLES if cut.signals else MEET_CYCLES) + 4 * floats / SUM_BYTES
    passes = -(-cut.share // cut.rows_each)
    elements = cut.rows_each * spec.columns / cut.num_warps
    rest += passes * (CHOOSE_CYCLES + elements * (spec.k + 12) * ELEMENT_CYCLES)
    return CTA_CYCLES * min(ctas, num_sms) + waves * (START_CYCLES + max(loads, dram, products) + rest)

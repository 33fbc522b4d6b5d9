"""How the Hopper router cuts its work into CTAs: rows, columns, blocks along K. Plain Python."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from envoi.gemm.config import SHARED_BYTES, power_of_two
from envoi.router.spec import BLOCK_SUM, Spec

ROWS = 64  # of a CTA
TILE_ROWS = 8  # of a tile in shared memory at least: its swizzle repeats after eight
MAX_ELEMENTS = 2048  # of the tiles that experts are chosen in
RESERVED_BYTES = 3072  # barriers, and what the compiler takes for reductions

# Cycles of an H200; only ratios matter.
L2_BYTES = 64.0  # that a multiprocessor takes in one
DRAM_BYTES = 2400.0  # that all of them take together
START_CYCLES = 2500.0
ROLES_CYCLES = 700.0  # until the warps of several roles have gone their ways
MEET_CYCLES = 3900.0  # all parts of some rows wait for each other
CHOOSE_CYCLES = 1500.0  # a tile of rows, however small
ELEMENT_CYCLES = 0.03  # a round of one element of it, four warps


@dataclass(frozen=True)
class Cut:
    """A CTA has `rows` rows, num_roles * block_n columns, steps_each steps of block_k along K.

    parts: CTAs that share their rows, parts_n of them side by side. waits: they wait for each other, and each role
    routes `share` rows; else the last to come routes all of them. rows_each: at a time. num_sets: sums that each row
    has. columns: of the workspace. rows: 64 unless there are fewer tokens, or a CTA has all columns and all of K.
    loads_all: a CTA's part of the operands fits its stages.
    """

    num_roles: int
    block_n: int
    block_k: int
    num_stages: int
    parts_n: int
    parts_k: int
    steps_each: int
    num_sets: int
    share: int
    rows_each: int
    waits: bool
    columns: int
    rows: int
    loads_all: bool

    @property
    def steps_in_block(self) -> int:
        """Steps along K in a block of sums."""
        return BLOCK_SUM // self.block_k

    @property
    def width(self) -> int:
        """Columns of a CTA."""
        return self.block_n * self.num_roles

    @property
    def parts(self) -> int:
        """CTAs that share their rows."""
        return self.parts_n * self.parts_k


@cache
def choose_cut(M: int, hidden: int, spec: Spec, num_sms: int) -> Cut:
    """The cut that the model below finds fastest."""
    return min(candidates(M, hidden, spec, num_sms), key=lambda cut: predicted_cycles(M, hidden, spec, cut, num_sms))


def candidates(M: int, hidden: int, spec: Spec, num_sms: int) -> Iterator[Cut]:
    """All cuts that make sense."""
    num_blocks = -(-hidden // BLOCK_SUM)
    for num_roles in (1, 2):
        for block_n in (16, 32, 64, 128):
            if block_n * num_roles > spec.columns:
                continue
            for blocks_each in {-(-num_blocks // parts) for parts in range(1, num_blocks + 1)}:
                cut = make(M, hidden, spec, num_roles, block_n, blocks_each, ROWS, num_sms)
                if cut.waits or blocks_each == num_blocks:
                    yield cut
            if block_n * num_roles == spec.columns:
                for rows in (8, 16, 32):
                    if TILE_ROWS * num_roles <= rows < M:
                        yield make(M, hidden, spec, num_roles, block_n, num_blocks, rows, num_sms)


def make(
    M: int, hidden: int, spec: Spec, num_roles: int, block_n: int, blocks_each: int, rows: int, num_sms: int
) -> Cut:
    """A cut with what follows from it."""
    num_blocks = -(-hidden // BLOCK_SUM)
    parts_n = -(-spec.num_experts // (block_n * num_roles))
    parts_k = -(-num_blocks // blocks_each)
    parts = parts_n * parts_k
    waits = parts > 1 and -(-M // ROWS) * parts <= num_sms
    rows = max(TILE_ROWS, power_of_two(min(M, rows)))
    if parts == 1:
        rows = max(rows, TILE_ROWS * num_roles)
    share = rows // (1 if parts > 1 else num_roles)
    if waits:
        share = min(power_of_two(-(-min(M, ROWS) // (parts * num_roles))), ROWS)
    rows_each = min(MAX_ELEMENTS // spec.columns, share)
    block_k = 256 if block_n * num_roles < 64 else 128 if block_n * num_roles < 128 else 64
    block_k = max(64, min(block_k, power_of_two(hidden)))
    stage_bytes = 2 * block_k * (ROWS + block_n * num_roles)
    steps_each = blocks_each * BLOCK_SUM // block_k
    fits = (SHARED_BYTES - RESERVED_BYTES) // stage_bytes
    steps = min(steps_each, -(-hidden // block_k))
    loads_all = num_roles == 1 and steps <= fits
    # The stages of the gate hold 64 rows of logits in the end.
    stages = max(steps, -(-128 // block_k)) if loads_all else min(fits, 16)
    return Cut(
        num_roles, block_n, block_k, stages, parts_n, parts_k, steps_each, max(1, num_blocks - blocks_each + 1),
        share, rows_each, waits, spec.columns, rows, loads_all,
    )  # fmt: skip


def predicted_cycles(M: int, hidden: int, spec: Spec, cut: Cut, num_sms: int) -> float:
    """What a launch takes, roughly: the slowest of loading and multiplying, then meeting and choosing."""
    ctas = -(-M // cut.rows) * cut.parts
    waves = -(-ctas // num_sms)
    span = min(hidden, cut.steps_each * cut.block_k)
    loads = 2 * span * (cut.rows + cut.width) / L2_BYTES
    dram = 2 * hidden * (M + spec.num_experts) / DRAM_BYTES / waves
    # An instruction takes at least 32 cycles, whatever its columns.
    products = span / 16 * cut.num_roles * max(cut.block_n / 2, 32)
    rest = 0.0 if cut.loads_all else ROLES_CYCLES
    if cut.parts > 1:
        sets = max(1, cut.num_sets // max(cut.parts_k - 1, 1))
        floats = cut.share * cut.num_roles * cut.num_sets * spec.columns + ROWS * cut.width * sets
        rest += MEET_CYCLES + 8 * floats / L2_BYTES
    passes = max(1, cut.share // cut.rows_each)
    rest += passes * (CHOOSE_CYCLES + cut.rows_each * spec.columns * (spec.k + 12) * ELEMENT_CYCLES)
    return waves * (START_CYCLES + max(loads, dram, products) + rest)

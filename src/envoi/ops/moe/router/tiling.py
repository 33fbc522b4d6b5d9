"""Tiling of the Hopper router: division of rows, columns and blocks along K among CTAs."""

from dataclasses import dataclass, replace
from typing import Any

from envoi.constant import Constant
from envoi.ops.moe.router.spec import Spec, block_sum
from envoi.runtime.devices import SHARED_BYTES
from envoi.runtime.math import next_power_of_2
from envoi.runtime.triton_compat import WHOLE_VIEWS

TILE = 64  # rows of an instruction, and of a tile; eight warps can have two of them for up to 128 columns
TILE_ROWS = 8  # least rows of a tile in shared memory: its swizzle repeats after eight
MAX_ELEMENTS = 512  # logits in which a warp chooses experts at a time, if all its lanes share a row
MAX_SIGNALS = 1 << 20  # partial sums that are polled, if few rows are routed at a time
FEW_SIGNALS = 1 << 18  # and if many are: an uncertain row then sends all of them the exact way
FEW_ROWS, FEW_SCORED_ROWS = 16, 8  # few rows; by scores more of them are uncertain
TOKEN_BOX = 32  # rows of tokens that are loaded at a time if there are two widths
FIRST_STAGES = 3  # in flight while the roles start, if a stage takes many loads: more than memory returns until then
OTHER_REGISTERS, PRODUCER_REGISTERS = 40, 40  # of a thread besides sums; of the producer
MOST_REGISTERS = 136  # of a thread that multiplies, if a CTA that chooses has to have room beside it
CHOICE_REGISTERS, MANY_CHOICE_REGISTERS = 104, 128  # of a thread that chooses; for up to 512 columns, for more
# For many rows as few as don't spill, so that more warps choose at a time; a row alone takes longer. Of plain logits,
# or of sigmoids of up to 12 a lane; of sigmoids of 16 a lane, or of more slots.
FEW_REGISTERS, SIGMOID_REGISTERS = 64, 80
MANY_ROWS = 64  # of each multiprocessor
CHOICE_BYTES = 4096  # of shared memory for two such CTAs
CHOICE_WARPS = 4  # of a CTA that only chooses
MIN_REST = 32  # columns of the second width where a CTA has them all: a row's 32 lanes share it
MOST_PARTS = 8  # along K of a tile of a launch that only multiplies
MAX_WIDTH = 384  # columns of which eight warps have room for a block's sums and the total
RESERVED_BYTES = 3072  # barriers, and the compiler's scratch for reductions


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
    of their own; only one turn then. box_n: rows of the gate that are loaded at a time. apart: only multiplies, and
    stores all sums in the workspace; experts are chosen by a second launch (`ChoiceTiling`). cuts: such tiles of a last
    round that isn't full are cut along K (`Rest`). one_sum: such a launch sums all of K at once, not in blocks.
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
    apart: bool = False
    cuts: bool = False
    one_sum: bool = False

    @property
    def box_m(self) -> int:
        """Number of rows of the tokens that are loaded at a time."""
        return min(self.rows_per_cta, TOKEN_BOX) if self.rest_n else self.rows_per_cta

    @property
    def in_runs(self) -> bool:
        """Return True if lanes share each rest_n columns evenly, not all at once: whole registers have no column."""
        return self.rest_n > 0 and self.parts == 1 and not self.apart

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

    @property
    def options(self) -> dict[str, Any]:
        """Options of the launch."""
        most = spared_registers(self.num_warps, self.tile, self.width, self.one_sum)
        leaves_room = self.apart and not self.single_fill and most <= MOST_REGISTERS
        return {"num_warps": self.num_warps, "launch_pdl": True} | ({"maxnreg": most} if leaves_room else {})

    def sum_bytes(self, num_tokens: int) -> int:
        """Return the bytes of all partial sums of so many tokens in the workspace."""
        return 4 * num_tokens * self.num_sets * self.columns

    @property
    def reroutes_eights(self) -> bool:
        """Return True if uncertain rows are routed again eight at a time instead of with the whole pass.

        Possible if their sums can be read twice and 32 lanes for each row give the same bits.
        """
        return not self.polls_sums and self.columns >= 128 and self.rows_per_pass > 8

    @property
    def settles(self) -> bool:
        """Return True if near ties are settled with the whole pass; not where eight warps have many rows.

        There it was up to 4 % slower than eight rows again at a time.
        """
        return not (self.reroutes_eights and self.num_warps == 8)


def spared_registers(num_warps: int, tile: int, width: int, one_sum: bool = False) -> int:
    """Return the registers of a thread, on average over all roles, that a CTA needs which only multiplies.

    The assembler takes no less than the accumulator of an instruction and 26 more, whatever the average.
    """
    sums = (1 if one_sum else 2) * tile * width // (32 * num_warps)
    average = -(-((sums + OTHER_REGISTERS) * num_warps + PRODUCER_REGISTERS * 4) // (num_warps + 4) // 8) * 8
    return max(average, (1 << (width.bit_length() - 1)) // 2 + 32)


def lanes_of(rows_a_warp: int, spec: Spec) -> int:
    """Return the number of lanes that share a row.

    For many rows few lanes do less work in all; for few rows a whole warp is faster, and reduces integers in one
    instruction.
    """
    if spec.columns < 128:
        return max(4, spec.columns // 8)
    few = max(8, spec.slots, spec.columns // 32)
    return 32 if rows_a_warp < 4 else few


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
    apart: experts are chosen by a launch of its own. cuts: last tiles of such a launch may be cut along K.
    one_sum: it sums all of K at once.
    """

    num_warps: int
    block_n: int
    blocks_each: int
    rows: int = TILE
    turns: int = 1
    tile: int = TILE
    rest_n: int = 0
    most_signals: int = MAX_SIGNALS
    apart: bool = False
    cuts: bool = False
    one_sum: bool = False


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
    waits = parts > 1 and -(-M // tile) * parts <= num_sms and not cut.apart
    rows = max(TILE_ROWS, next_power_of_2(min(M, cut.rows)))
    share = min(next_power_of_2(-(-min(M, tile) // parts)), tile) if waits else rows
    lanes = lanes_of(share // num_warps, spec)
    rows_each = min(MAX_ELEMENTS * (1 if lanes == 32 or spec.columns < 128 else 2) * num_warps // spec.columns, share)
    are_few = rows_each <= (FEW_SCORED_ROWS if spec.by_score else FEW_ROWS)
    most_signals = min(cut.most_signals, MAX_SIGNALS if are_few else FEW_SIGNALS)
    signals = waits and spec.columns <= 512 and num_sets * M * spec.columns <= most_signals
    if signals:  # each sum is read, and reset, by one thread
        rows_each = max(rows_each, 32 * num_warps // spec.columns)
    block_k = 256 if block_n < 64 else 128 if block_n < 128 and not (cut.apart and tile > TILE) else 64
    block_k = max(32, min(block_k, next_power_of_2(hidden), block & -block))
    stage_bytes = 2 * block_k * (tile + width)
    steps_each = cut.blocks_each * block // block_k
    beside = (
        CHOICE_BYTES if cut.apart and spared_registers(num_warps, tile, width, cut.one_sum) <= MOST_REGISTERS else 0
    )
    others = RESERVED_BYTES + beside + signals * 4 * rows_each * spec.columns + (cut.turns - 1) * 4 * tile * block_n
    # The stages of the gate hold the logits of a tile in the end.
    board = 1 if cut.apart else -(-2 * tile // block_k)
    unit = board if cut.turns > 1 or (WHOLE_VIEWS and parts == 1 and not cut.apart) else 1
    fits = (SHARED_BYTES - others) // stage_bytes // unit * unit
    steps = min(steps_each, -(-hidden // block_k))
    loads_all = steps <= fits and cut.turns == 1
    stages = max(-(-steps // unit) * unit, board) if loads_all else min(fits, 16)
    return RouterTiling(
        num_warps, block_n, block_k, stages, parts_n, parts_k, steps_each, block // block_k, max(1, num_sets),
        share, rows_each, waits, signals, spec.columns, rows, loads_all, lanes, cut.turns, tile, cut.rest_n,
        box_of(spec.num_experts, block_n, cut.rest_n), cut.apart, cut.cuts, cut.one_sum,
    )  # fmt: skip


@dataclass(frozen=True)
class Rest:
    """Last tiles of a launch that only multiplies, each cut along K among `parts` CTAs where a round isn't full.

    first: their first tile, which is the first of its rows. steps: along K of a CTA, whole blocks. sets: partial sums
    of each row, as in a launch with parts along K.
    """

    first: int
    parts: int
    steps: int
    sets: int


def rest_of(M: int, hidden: int, tiling: RouterTiling, num_sms: int) -> Rest:
    """Return how the last tiles of M rows are cut.

    A CTA has more steps than stages, since a tile is counted as stored when the next one has filled them all.
    """
    block = 1 if tiling.one_sum else tiling.steps_in_block
    num_steps = -(-hidden // tiling.block_k)
    blocks = -(-num_steps // block)
    num_tiles = -(-M // tiling.rows_per_cta) * tiling.parts
    first = num_tiles // num_sms * num_sms // tiling.parts * tiling.parts
    if tiling.cuts and not tiling.single_fill and first < num_tiles:
        most = (num_tiles // num_sms * num_sms - first + num_sms) // (num_tiles - first)  # CTAs that a tile has
        for each in range(-(-blocks // min(max(most, 1), MOST_PARTS)), blocks):
            parts = -(-blocks // each)
            of_last = num_steps - (parts - 1) * each * block
            if min(each * block, of_last) > tiling.num_stages:
                return Rest(first, parts, each * block, parts if tiling.one_sum else blocks - each + 1)
    return Rest(num_tiles, 1, tiling.steps_each, 1)


@dataclass(frozen=True)
class ChoiceTiling(Constant):
    """Division of the rows of a choice that is a launch of its own.

    A CTA chooses for rows_per_pass rows, whose sums are in the workspace. num_warps, lanes: of the CTA, and of each
    row. num_experts: columns that exist. adds_sets: some rows have several sets of sums. registers: most of a thread.
    """

    num_warps: int
    rows_per_pass: int
    lanes: int
    columns: int
    num_experts: int
    adds_sets: bool
    registers: int

    @property
    def options(self) -> dict[str, Any]:
        """Options of the launch."""
        return {"num_warps": self.num_warps, "launch_pdl": True, "maxnreg": self.registers}

    @property
    def run(self) -> int:
        """Number of neighbouring columns that the lanes of a row share evenly: 16 bytes for each lane."""
        return min(4 * self.lanes, self.columns)

    @property
    def width(self) -> int:
        """Number of columns in runs that have an expert."""
        return -(-self.num_experts // self.run) * self.run

    @property
    def in_runs(self) -> bool:
        """Return True if whole registers have no column."""
        return self.width < self.columns


def choice_of(spec: Spec, adds_sets: bool, rows_each: float = 0.0) -> ChoiceTiling:
    """Return the ChoiceTiling of a launch that only multiplies: a row for each warp, or several of few columns.

    rows_each: rows of the launch for each multiprocessor.
    """
    columns = spec.columns
    lanes = 32 if columns >= 512 else max(4, spec.slots, columns // 16)
    rows = max(MAX_ELEMENTS // columns, 32 // lanes) * CHOICE_WARPS
    tiling = ChoiceTiling(CHOICE_WARPS, rows, lanes, columns, spec.num_experts, adds_sets, 0)
    return replace(tiling, registers=choice_registers(spec, tiling.width // lanes, rows_each))


def choice_registers(spec: Spec, logits: int, rows_each: float) -> int:
    """Return the registers of a thread that only chooses, each lane among so many logits of a row."""
    if spec.columns > 512:
        return MANY_CHOICE_REGISTERS
    other_score = spec.by_score and spec.rule.score != "sigmoid"
    more_values = spec.whole_softmax or spec.want_logits or spec.want_dense or spec.rule.num_groups > 1
    if rows_each < MANY_ROWS or other_score or more_values:
        return CHOICE_REGISTERS
    is_plain = spec.slots <= 16 and (logits <= 12 or not spec.by_score)
    return FEW_REGISTERS if is_plain else SIGMOID_REGISTERS

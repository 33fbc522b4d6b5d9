"""Configs of the Hopper GEMM: one frozen Config, and one predicate that refuses."""

from dataclasses import dataclass, replace

from envoi.constant import Constant
from envoi.epilogues.lower import Lowered
from envoi.runtime.devices import SHARED_BYTES
from envoi.runtime.math import cdiv, next_power_of_2
from envoi.runtime.tma import TMA_BYTES

RESERVED_BYTES = 2048  # of shared memory, for barriers and for what reductions exchange
PARTIAL_BYTES = 512  # more of it where tiles pass on partial reductions of their rows
MIN_STAGES = 2
_FLAGS = ("pingpong", "swap_ab", "wide_tail_tiles", "paired_tiles", "mixed_experts", "short_boxes")
SHORT_ROWS, SHORT_BYTES = 16, 128  # of a box of x where a tile has no more rows; of a row of it, one swizzle
FEW_TOKENS = 64  # tokens (of an expert) up to which the weights are the instruction's M side
MAX_FEW_COLUMNS = 64  # columns that an epilogue may need at once where tokens are few
PINGPONG_ROWS = 17, 64  # tokens of an expert for which consumers take tiles with scale factors along K in turns
LONG_K = 2048  # elements of K, beyond which turns cost more: one consumer multiplies at a time
PINGPONG_MAX_ROWS_LONG_K = 54  # at most, beyond LONG_K: with 55 tokens a tenth of the experts has two tiles
MOST_OF_THREE = 100  # accumulators of a thread of three consumers, if `narrowed`
MOST_OF_THREE_FP8 = 96  # of them in FP8, whose factors take registers too
TWO_WIDTHS = 96, 160, 192  # features of a tile that two accumulators hold: 64 + 32, 128 + 32, 128 + 64
NARROWED = tuple(y for y in range(24, 256, 8) if y & (y - 1))  # tokens of a tile whose instructions are `narrowed`
NARROWED_FEATURES = tuple(y for y in range(80, 256, 16) if y & (y - 1) and y not in TWO_WIDTHS)  # the same of features
NEIGHBOURS = 8  # multiprocessors that CTAs after each other lie on, and to which the L2 sends once what all ask for
HIGH_BANDS, LOW_BANDS = (8, 16), (1, 2, 4)  # rows of tiles that are walked together
L2_KEEPS = 25 << 20  # bytes of one side of a GEMM that the L2 of an H200 keeps from one band to the next: half of it
MAX_ACCUMULATORS = 128  # of a thread; with more the epilogue has too few registers


@dataclass(frozen=True)
class Config(Constant):
    """Tiling of one problem by the Hopper GEMM; `TileConfig` documents the tile's fields.

    rows_per_consumer: 64 or 128. num_consumers: 1 to 3; they share each tile, each with its own rows of x, or two with
        `pingpong` take whole tiles alternately, so that the epilogue of one overlaps the mainloop of the other.
        Three, in a plain GEMM only, have at most 64 accumulators a thread, if `narrowed` `MOST_OF_THREE`.
    block_y: a power of two from 8 to 256, or in a plain GEMM one of `TWO_WIDTHS`, by two accumulators, one of
        `NARROWED_FEATURES` or with swap_ab one of `NARROWED`, by instructions that Triton has no tensor for.
    block_k: elements of K in a stage. num_stages: stages in the ring. num_warps: of a consumer, 4 or 8.
    epilogue_columns, num_store_buffers: the epilogue's column chunks (of tokens if `stored_in_boxes`), and the ring
        through which TMA stores them.
    wide_tail_tiles: only in a grouped GEMM. paired_tiles: for an epilogue that is lowered for pairs, and no other.
    mixed_experts: only in a grouped GEMM; worth it where the producer publishes tiles, since a search takes longer.
    short_boxes: only in a grouped GEMM with the tokens on the M side and one consumer a tile. Where a tile has at most
        SHORT_ROWS tokens, it loads so many rows of x instead of rows_per_consumer. The others are other experts', and
        beside 128 features half as many bytes as the weights: what comes out of the L2 cache would bound the time.
    tiles_overlap: only in a plain GEMM. columns_ahead: with the tokens on the M side. `fitted` decides both, and labels
        leave them out.
    """

    rows_per_consumer: int
    num_consumers: int
    block_y: int
    block_k: int
    num_stages: int
    num_warps: int = 4
    pingpong: bool = False
    split_k: int = 1
    swap_ab: bool = False
    swizzle_rows: int = 8
    epilogue_columns: int = 64
    num_store_buffers: int = 1
    wide_tail_tiles: bool = False
    paired_tiles: bool = False
    mixed_experts: bool = False
    short_boxes: bool = False
    tiles_overlap: bool = False
    columns_ahead: bool = False

    @property
    def consumers_per_tile(self) -> int:
        """Consumers that share a tile."""
        return 1 if self.pingpong else self.num_consumers

    @property
    def block_x(self) -> int:
        """Rows of x in a tile."""
        return self.rows_per_consumer * self.consumers_per_tile

    @property
    def block_m(self) -> int:
        """Tokens of a tile; of the lower kind with `wide_tail_tiles`."""
        return self.rows_per_consumer if self.wide_tail_tiles else self.block_y if self.swap_ab else self.block_x

    @property
    def block_n(self) -> int:
        """Features of a tile, or of a pair of tiles; of the wider kind with `wide_tail_tiles`."""
        return self.block_x if self.swap_ab else self.y_pitch * self.y_boxes_per_stage

    @property
    def tiles_per_unit(self) -> int:
        """Tiles that a CTA takes at a time."""
        return 2 if self.paired_tiles else 1

    @property
    def y_pitch(self) -> int:
        """Features from one y box of a tile to the next: the other tile of a pair has those between them."""
        return self.block_y * self.tiles_per_unit

    @property
    def epilogue_in_place(self) -> bool:
        """Return False: with swap_ab `to_token_major` moves products between threads."""
        return False

    @property
    def narrowed(self) -> bool:
        """Return True if block_y is no power of two, and one instruction computes it: see `runtime.narrow_wgmma`."""
        return self.block_y & self.block_y - 1 > 0 and (self.swap_ab or self.block_y not in TWO_WIDTHS)

    @property
    def few_columns(self) -> bool:
        """Return True if chunks are cut from an accumulator of which only the first block_y columns are the tile's."""
        return self.narrowed and (not self.swap_ab or self.stored_in_boxes)

    @property
    def stored_in_boxes(self) -> bool:
        """Return True if narrowed, with so many tokens that TMA stores them, and loads operands of the epilogue."""
        return self.narrowed and self.swap_ab and self.block_y > FEW_TOKENS

    @property
    def main_y(self) -> int:
        """Rows of y in a TMA box: the largest power of two in block_y; if `narrowed`, that which needs fewest boxes."""
        most = 1 << self.block_y.bit_length() - 1
        if not self.narrowed:
            return most
        return min((most, most // 2, most // 4), key=lambda box: num_boxes(self.block_y, box, self.small_box))

    @property
    def rest_y(self) -> int:
        """Rows of y after those of main_y, which have an accumulator of their own; 0 in a tile of one width."""
        return 0 if self.narrowed else self.block_y - self.main_y

    @property
    def small_box(self) -> int:
        """Rows of y in a box after those of main_y, if `narrowed`; outputs `stored_in_boxes` are in as many tokens."""
        return min(64, self.block_y & -self.block_y)

    @property
    def boxes_per_stage(self) -> int:
        """TMA boxes that fill a stage, both operands', if `narrowed`."""
        return self.consumers_per_tile + num_boxes(self.block_y, self.main_y, self.small_box)

    @property
    def stage_y(self) -> int:
        """Rows of y that a stage has room for: block_y, or the accumulator's if Triton can't view them as so many."""
        if not self.narrowed:
            return self.block_y
        from envoi.runtime.triton_compat import LARGER_VIEWS  # here, since plans import this file without Triton

        return self.block_y if LARGER_VIEWS else self.tensor_y

    @property
    def tensor_y(self) -> int:
        """Columns of the first accumulator's tensor."""
        return next_power_of_2(self.block_y) if self.narrowed else self.main_y

    @property
    def num_x_boxes(self) -> int:
        """TMA boxes of x that all stages have room for; with `wide_tail_tiles` each two share memory with a y box."""
        return x_boxes(self, self.num_stages)

    @property
    def y_boxes_per_stage(self) -> int:
        """TMA boxes of y that a stage has room for."""
        return 2 if self.wide_tail_tiles else 1

    @property
    def num_chunks(self) -> int:
        """Column chunks of a consumer's accumulator; if `stored_in_boxes`, chunks of tokens."""
        if self.stored_in_boxes:
            return cdiv(self.block_y, self.epilogue_columns)
        return max(1, (self.rows_per_consumer if self.swap_ab else self.block_y) // self.epilogue_columns)

    @property
    def spread_experts(self) -> bool:
        """False: each warp holds whole vectors over the experts, so that sums over them need no barrier."""
        return False

    def label(self) -> str:
        """Return a short name for tables, "2x64x128 k64x8 p64x1 pingpong"; fields with their default are omitted."""
        parts = [
            f"{self.num_consumers}x{self.rows_per_consumer}x{self.block_y}",
            f"k{self.block_k}x{self.num_stages}",
            f"p{self.epilogue_columns}x{self.num_store_buffers}",
        ]
        parts += [f"w{self.num_warps}"] * (self.num_warps != 4) + [f"split{self.split_k}"] * (self.split_k > 1)
        parts += [f"swizzle{self.swizzle_rows}"] * (self.swizzle_rows != 8)
        return " ".join(parts + [name for name in _FLAGS if getattr(self, name)])


def x_boxes(config: Config, num_stages: int) -> int:
    """Return the TMA boxes of x that so many stages have room for; see `Config.num_x_boxes`."""
    return cdiv(5 * num_stages, 2) * 2 if config.wide_tail_tiles else num_stages * config.consumers_per_tile


def num_boxes(rows: int, main: int, small: int) -> int:
    """Return how many boxes hold so many rows: of `main` rows as long as they fit, then of `small`."""
    return rows // main + rows % main // small


@dataclass(frozen=True)
class Problem:
    """Sizes of one launch: tokens M, features N, K, bytes of an element.

    num_groups: experts of a grouped GEMM, 0 for a plain one. scaled: scale factors change along K (fp8_block128).
    tma_operand_bytes: bytes for each column of the accumulator of the tile operands that TMA loads.
    whole_k: the sum over K mustn't be split. in_halves: the experts' features are two halves, gate's and up's, and a
        box of weights has rows of both.
    """

    M: int
    N: int
    K: int
    element_bytes: int
    num_groups: int = 0
    scaled: bool = False
    tma_operand_bytes: float = 0.0
    whole_k: bool = False
    in_halves: bool = False


def are_few(tokens: int, columns: int) -> bool:
    """Return True if so few tokens (of an expert) are stored without TMA. columns: that the epilogue needs at once."""
    return tokens <= FEW_TOKENS and columns <= MAX_FEW_COLUMNS


def why_not(problem: Problem, config: Config, code: Lowered) -> str:
    """Return why a config can't run this problem with this epilogue, in words; "" if it can."""
    return (
        _why_not_consumers(config)
        or _why_not_chunks(problem, config, code)
        or _why_not_narrowed(problem, config)
        or _why_not_two_widths(problem, config)
        or _why_not_problem(problem, config)
        or _why_not_memory(problem, config, code)
    )


def _why_not_consumers(c: Config) -> str:
    if c.num_stages < MIN_STAGES:
        return f"num_stages: expected at least {MIN_STAGES}, got {c.num_stages}: the producer would wait forever"
    if c.rows_per_consumer not in (64, 128) or c.num_consumers not in (1, 2, 3) or c.num_warps not in (4, 8):
        return f"consumers: expected 1 to 3 of 64 or 128 rows by 4 or 8 warps, got {c.label()}"
    many = accumulator_registers(c) > MAX_ACCUMULATORS // 2 and not c.narrowed
    if c.num_consumers == 3 and (c.num_warps == 8 or many):
        return f"consumers: expected at most 64 accumulators a thread of four warps for three, got {c.label()}"
    if c.rows_per_consumer < 16 * c.num_warps:
        return f"rows_per_consumer: expected at least 16 a warp, got {c.rows_per_consumer} for {c.num_warps} warps"
    others = NARROWED if c.swap_ab else (*TWO_WIDTHS, *NARROWED_FEATURES)
    if (c.block_y & (c.block_y - 1) or not 8 <= c.block_y <= 256) and c.block_y not in others:
        return f"block_y: expected a power of two from 8 to 256, or one of {others}, got {c.block_y}"
    if accumulator_registers(c) > MAX_ACCUMULATORS:
        return f"block_y: expected at most {MAX_ACCUMULATORS} accumulators a thread, got {accumulator_registers(c)}"
    if c.pingpong and c.num_consumers != 2:
        return f"pingpong: expected 2 consumers, got {c.num_consumers}"
    return ""


def _why_not_chunks(problem: Problem, c: Config, code: Lowered) -> str:
    width, columns = _output_columns(c), c.epilogue_columns
    if width % min(columns, width) or min(columns, width) % code.chunk_columns:
        return f"epilogue_columns: expected a multiple of {code.chunk_columns} that divides {width}, got {columns}"
    if code.whole_rows and (c.swap_ab or c.block_y < problem.N or columns < c.block_y):
        return f"block_y: expected chunks of whole rows of {problem.N} columns, got {columns}"
    if c.paired_tiles != code.paired:
        return f"paired_tiles: expected {code.paired} for this epilogue, got {c.paired_tiles}"
    if code.tma_outputs and c.num_chunks % c.num_store_buffers:  # a tile's first chunk would take the last one's buffer
        return f"num_store_buffers: expected one that divides {c.num_chunks} chunks, got {c.num_store_buffers}"
    if c.few_columns:
        # Stores from registers would be right too, since rows after a tile's last are masked; none were measured.
        if not code.elementwise or len(code.tma_outputs) != len(code.output_specs):
            widths = f"at most {FEW_TOKENS} tokens or a power of two"
            return f"block_y: expected {widths} unless outputs are elementwise and stored by TMA"
        if c.stored_in_boxes:
            return ""
    if c.swap_ab and (code.tma_outputs or code.tma_operands):
        return "swap_ab: expected an epilogue lowered to plain loads and stores"
    if code.takes_halves and not c.swap_ab and (c.block_y < 16 or c.split_k > 1):
        return f"block_y: expected at least 16, and split_k 1, for an epilogue of halves, got {c.label()}"
    if c.split_k > 1 and columns * c.rows_per_consumer > 128 * 64 and not c.swap_ab:
        return f"split_k: expected chunks of at most 128 columns, got {columns}: the parts' sums wouldn't fit"
    if not c.stored_in_boxes and min(_box_bytes(c, code), default=TMA_BYTES) < TMA_BYTES:
        return f"epilogue_columns: expected boxes at least {TMA_BYTES} bytes wide for TMA, got {columns} columns"
    return ""


def _why_not_narrowed(problem: Problem, c: Config) -> str:
    if not c.narrowed:
        return ""
    if problem.num_groups or problem.scaled or c.rows_per_consumer != 64:
        return f"block_y: expected a power of two unless in a plain GEMM of 64 rows a consumer, got {c.label()}"
    if c.few_columns and c.split_k > 1:
        return f"split_k: expected 1 beside {c.block_y} columns, no power of two, got {c.split_k}"
    if c.block_k * problem.element_bytes > 128:  # longer rows are kept in parts, far apart in views of many rows
        return f"block_k: expected rows of at most 128 bytes in a stage, got {c.block_k} elements"
    if c.stored_in_boxes and c.epilogue_columns % c.small_box:
        return f"epilogue_columns: expected a multiple of {c.small_box} tokens, got {c.epilogue_columns}"
    most = MOST_OF_THREE_FP8 if problem.element_bytes == 1 else MOST_OF_THREE
    if c.num_consumers == 3 and accumulator_registers(c) > most:
        return f"consumers: expected at most {most} accumulators a thread for three, got {c.label()}"
    return ""


def _why_not_two_widths(problem: Problem, c: Config) -> str:
    if not c.rest_y:
        return ""
    if problem.num_groups or problem.scaled or c.swap_ab or c.split_k > 1:
        return f"block_y: expected a power of two unless in a plain GEMM, whole, without swap_ab, got {c.label()}"
    if c.rest_y % c.epilogue_columns:
        return f"epilogue_columns: expected one that divides {c.rest_y}, got {c.epilogue_columns}"
    return ""


def _why_not_problem(problem: Problem, c: Config) -> str:
    if c.num_consumers == 3 and (problem.num_groups or problem.scaled):
        return f"num_consumers: expected at most 2 in a grouped GEMM and with scales along K, got {c.num_consumers}"
    if problem.num_groups and c.split_k > 1:
        return f"split_k: expected 1 in a grouped GEMM, got {c.split_k}"
    if problem.whole_k and c.split_k > 1:
        return f"split_k: expected 1 where bits don't depend on the batch, got {c.split_k}"
    if c.wide_tail_tiles and (c.consumers_per_tile != 2 or c.block_y != 2 * c.rows_per_consumer or c.swap_ab):
        return f"wide_tail_tiles: expected a tile of two consumers that is as wide as high, got {c.label()}"
    if c.mixed_experts and (not problem.num_groups or c.swap_ab):
        return f"mixed_experts: expected a grouped GEMM with the tokens on the M side, got {c.label()}"
    if c.short_boxes and (not problem.num_groups or c.swap_ab or c.consumers_per_tile > 1):
        return f"short_boxes: expected a grouped GEMM with one consumer a tile, without swap_ab, got {c.label()}"
    if c.short_boxes and c.block_k * problem.element_bytes % SHORT_BYTES:
        return f"short_boxes: expected rows of a multiple of {SHORT_BYTES} bytes in a stage, got {c.block_k} elements"
    if c.columns_ahead and c.swap_ab:
        return "columns_ahead: expected False with the features on the M side, got True"
    if c.tiles_overlap and problem.num_groups:
        return "tiles_overlap: expected False in a grouped GEMM, got True"
    if c.wide_tail_tiles and (problem.N % c.block_n or not problem.num_groups):
        return f"wide_tail_tiles: expected a grouped GEMM with N a multiple of {c.block_n}, got {problem.N}"
    if c.paired_tiles and (c.swap_ab or c.pingpong or c.num_chunks > 1):
        return f"paired_tiles: expected tokens on the M side, no pingpong and one chunk, got {c.label()}"
    if c.paired_tiles and (problem.N % c.block_n or not problem.num_groups):
        return f"paired_tiles: expected a grouped GEMM with N a multiple of {c.block_n}, got {problem.N}"
    if problem.scaled and c.block_k not in (128, 256):
        return f"block_k: expected 128 or 256 (one block or two) with scales along K, got {c.block_k}"
    rows = c.rows_per_consumer
    if problem.scaled and rows * c.block_y > 64 * 128 * c.num_warps // 4:
        return f"block_y: expected at most 64 x 128 a consumer with scales along K, got {rows} x {c.block_y}"
    return ""


def _why_not_memory(problem: Problem, c: Config, code: Lowered) -> str:
    used = shared_bytes(problem, c, code)
    if used > SHARED_BYTES:
        return f"num_stages: {c.label()} needs {used} bytes of shared memory, got {SHARED_BYTES}"
    return ""


def _output_columns(c: Config) -> int:
    """Return the columns of a consumer's accumulator that the epilogue sees: features, or tokens `stored_in_boxes`."""
    if c.stored_in_boxes:
        return c.tensor_y
    return c.rows_per_consumer if c.swap_ab else c.block_y


def _box_bytes(c: Config, code: Lowered) -> list[int]:
    """Return the bytes of a row of the boxes in which TMA stores the outputs; packed halves have the fewest."""
    columns = min(c.epilogue_columns, c.block_y)
    specs = [code.output_specs[index] for index in code.tma_outputs]
    return [spec.shape(1, columns)[1] * spec.dtype.itemsize for spec in specs]


def accumulator_registers(config: Config) -> int:
    """Return how many accumulators a thread of a consumer holds."""
    return config.rows_per_consumer * config.block_y // (32 * config.num_warps)


def shared_bytes(problem: Problem, config: Config, code: Lowered) -> int:
    """Return the bytes of shared memory: the stages, the buffers of TMA outputs and of TMA operands, a reserve."""
    return int(_bytes_of_stages(problem, config, config.num_stages) + _bytes_beside(problem, config, code))


def _bytes_of_stages(problem: Problem, config: Config, num_stages: int) -> int:
    x_rows = x_boxes(config, num_stages) * config.rows_per_consumer
    y_rows = 0 if config.wide_tail_tiles else num_stages * config.stage_y  # wide: within x's
    return (x_rows + y_rows) * config.block_k * problem.element_bytes


def _bytes_beside(problem: Problem, config: Config, code: Lowered) -> float:
    rows = config.rows_per_consumer * config.num_consumers
    columns = config.epilogue_columns if config.stored_in_boxes else min(config.epilogue_columns, config.block_y)
    buffers = rows * columns * (config.num_store_buffers * code.staged_output_bytes + problem.tma_operand_bytes)
    if config.swap_ab and not config.stored_in_boxes:
        buffers = rows * config.tensor_y * 4  # the transpose goes through shared memory
    if config.columns_ahead:
        buffers += config.num_consumers * next_power_of_2(config.block_y) * code.columns_ahead * 4
    if code.partials:
        buffers += PARTIAL_BYTES
    return buffers + RESERVED_BYTES


def fitted(problem: Problem, config: Config, code: Lowered) -> Config:
    """Return the config with as many stages as fit, and chunks that the epilogue can work on.

    Tiles overlap, except in grouped GEMMs and where the compiler would spill registers for it: with sums of rows, and
    where the largest accumulators are split. Column operands are loaded ahead where that costs no stage and no spills,
    with the tokens on the M side.
    """
    columns = min(max(config.epilogue_columns, code.chunk_columns), _output_columns(config))
    full = config.split_k > 1 and accumulator_registers(config) == MAX_ACCUMULATORS
    sums = code.partials and not code.maxima_together
    overlap = not (problem.num_groups or sums or full)
    config = replace(config, epilogue_columns=columns, tiles_overlap=overlap, columns_ahead=False)
    if config.num_store_buffers > config.num_chunks:
        config = replace(config, num_store_buffers=config.num_chunks)
    stages, left = config.num_stages, SHARED_BYTES - _bytes_beside(problem, config, code)
    while stages > MIN_STAGES and _bytes_of_stages(problem, config, stages) > left:
        stages -= 1
    if stages < config.num_stages:
        config = replace(config, num_stages=stages)
    would_spill = config.num_warps == 8 and code.tma_operands
    would_spill = would_spill and (config.split_k > 1 or (problem.num_groups and code.partials))
    if code.columns_ahead <= 0 or config.swap_ab or would_spill:
        return config
    ahead = replace(config, columns_ahead=True)
    return config if shared_bytes(problem, ahead, code) > SHARED_BYTES else ahead

"""Config of the kernel for FP8 tokens and MXFP4 weights, and its choice."""

from dataclasses import dataclass, replace
from functools import cache

from envoi.ops.gemm.hopper.config import RESERVED_BYTES
from envoi.ops.gemm.hopper.tile_config import SwappedTiles
from envoi.runtime.devices import SHARED_BYTES
from envoi.runtime.math import next_power_of_2

TILE = 64  # rows, and elements of K, of a tile of weights
ROW_BYTES = 128  # of a token in a stage
WEIGHT_BYTES = 2048  # of a tile
FACTOR_WORDS = {"e4m3": 32, "bf16": 32, "nvfp4": 64}  # int32, of a tile's factors, by what weights become
MAX_STAGES = 8
REGISTERS = 65536  # of an SM
PIECE, MOST_COLUMNS = 256, 7168  # columns that a warp loads at once, and of a row that it can hold
TURNED_BYTES = 6144  # in which a consumer transposes a part of a tile at a time
MOST_WIDE_EXPERTS = 512  # beyond, every tile has the same width
# How long 128 features of a tile of so many tokens take beside those of 64: notes/2026-11-fp8-fp4.md.
TOKEN_TILES = {8: 0.72, 16: 0.75, 32: 0.81, 64: 1.0, 128: 1.38}
BLOCKS = (16, 32, 64, 128)  # tokens of an expert's tiles but its last one
WITH_TAILS = 64  # from so many tokens on the last tile may be narrower
# Numbers of rows of experts that have as many in the mean, in deviations: eighths of a normal distribution.
MOST_PRODUCER = 72  # registers of a thread of the producer
THREE_CTAS = 0.91  # of the time of tiles with two CTAs on a multiprocessor, in tiles of 16
DRAWS = (-1.53, -0.89, -0.49, -0.16, 0.16, 0.49, 0.89, 1.53)


@dataclass(frozen=True)
class W4A8Config(SwappedTiles):
    """Constants of the kernel: tiles of its consumers' features, row_tiles * 64 each, and block_y tokens.

    num_steps: K / 64. stages_per_turn: stages that a turn of the loop multiplies. looks_up: tables of E4M3 come from
    memory, else they are computed, which only shifts from -5 on allow (`envoi.quant.fp8_fragments`). ctas: on an SM.
    widths: of an expert's last tile: 1, or 4, block_y and its half, quarter and eighth (`tile_scheduler`).
    widened: "e4m3" for MXFP4 and FP8 tokens, "bf16" for MXFP4 and bf16 tokens, "nvfp4" for NVFP4 and bf16 tokens.
    reduces_rows: an epilogue reduces rows, from shared memory; others work where the products are.
    quantized_columns: of a row that this kernel quantises (`row_scales`), 0: none.
    The rest is what epilogues and the order of tiles ask of every Hopper kernel's config (`TileConfig`).
    """

    block_y: int
    num_stages: int
    num_steps: int
    row_tiles: int
    stages_per_turn: int
    looks_up: bool
    num_consumers: int
    ctas: int
    widths: int = 1
    widened: str = "e4m3"
    reduces_rows: bool = False
    quantized_columns: int = 0
    producer_registers: int = 24
    epilogue_tokens: int = 64
    rows_per_consumer: int = TILE  # of one run of the epilogue
    num_warps: int = 4
    swizzle_rows: int = 8

    @property
    def epilogue_in_place(self) -> bool:
        """Return True if epilogues work on the products where the tensor cores leave them."""
        return not self.reduces_rows

    @property
    def steps_per_stage(self) -> int:
        """Tiles along K of a stage: its rows of tokens have 128 bytes."""
        return 2 if self.widened == "e4m3" else 1

    @property
    def block_k(self) -> int:
        """Elements of K of a stage."""
        return TILE * self.steps_per_stage

    @property
    def factor_words(self) -> int:
        """Words of a tile's factors, int32."""
        return FACTOR_WORDS[self.widened]

    @property
    def registers(self) -> int:
        """Registers of a thread with which the kernel starts, so that all CTAs fit."""
        return min(255, REGISTERS // (128 * (self.num_consumers + 1) * self.ctas) // 8 * 8)

    @property
    def consumer_registers(self) -> int:
        """Registers of a thread of the second consumer; the first has what others leave."""
        return (self.registers * 3 - self.producer_registers) // 2 // 8 * 8

    @property
    def options(self) -> dict[str, int]:
        """Options of the launch."""
        return {"num_warps": self.num_warps, **({"maxnreg": self.registers} if self.ctas > 1 else {})}

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of tiles, the widest first."""
        return tuple(self.block_y >> width for width in range(self.widths))

    @property
    def rows_of_warp(self) -> int:
        """Rows that a warp quantises at a time: as many as registers hold."""
        return 2 if self.quantized_columns <= 4096 else 1

    @property
    def block_x(self) -> int:
        """Features of a tile."""
        return self.num_consumers * self.row_tiles * TILE

    @property
    def block_n(self) -> int:
        """Features of a tile."""
        return self.block_x

    @property
    def num_row_tiles(self) -> int:
        """Tiles of weights that a stage has side by side."""
        return self.num_consumers * self.row_tiles

    @property
    def stages_of_k(self) -> int:
        """Stages of a tile of the output; in the last one half may be missing."""
        return -(-self.num_steps // self.steps_per_stage)

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage in shared memory."""
        tile = WEIGHT_BYTES + 4 * self.factor_words
        return self.block_y * ROW_BYTES + self.steps_per_stage * self.num_row_tiles * tile


@cache
def w4a8_config(
    N: int, K: int, num_rows: int, num_experts: int, num_sms: int, looks_up: bool = False, widened: str = "e4m3",
    reduces_rows: bool = False,
) -> W4A8Config:  # fmt: skip
    """Return the config that should take the least time for so many rows of all experts."""
    form = looks_up, widened, reduces_rows
    found = [fitted(config_of(block_y, K, num_experts, *form)) for block_y in BLOCKS]
    return min(found, key=lambda config: predicted_tiles(config, N, num_rows, num_experts, num_sms))


def predicted_tiles(config: W4A8Config, N: int, num_rows: int, num_experts: int, num_sms: int) -> float:
    """Return how many tiles of 64 tokens, about, a CTA computes while another one does on its multiprocessor.

    For ranking configs. Experts' rows differ as with routing at random; CTAs end within half of a last tile.
    """
    rows = num_rows / max(1, num_experts)
    drawn = [max(1, round(rows + z * rows**0.5)) for z in DRAWS]
    pace = THREE_CTAS if config.ctas == 3 else 1.0
    costs = [TOKEN_TILES[size] for size in config.sizes]
    work = sum(_cost_of(count, config) for count in drawn) / len(drawn)
    tiles = work * max(1, min(num_experts, num_rows)) * -(-N // config.block_x)
    return pace * max(costs[0], tiles / num_sms + costs[-1] / 2)


def _cost_of(rows: int, config: W4A8Config) -> float:
    whole, rest = divmod(rows, config.block_y)
    last = min((size for size in config.sizes if size >= rest), default=config.block_y) if rest else 0
    return whole * TOKEN_TILES[config.block_y] + (TOKEN_TILES[last] if last else 0.0)


def config_of(
    block_y: int, K: int, num_experts: int, looks_up: bool = False, widened: str = "e4m3", reduces_rows: bool = False
) -> W4A8Config:
    """Return the fastest config for tiles of so many tokens, with more stages than may fit."""
    widths = 4 if block_y >= WITH_TAILS and num_experts <= MOST_WIDE_EXPERTS else 1
    ctas = 3 if block_y == 16 else 2
    # Each warp holds the ends of all experts' tiles.
    registers = 24 + max(0, next_power_of_2(num_experts) // 32 - 4) * 4
    return W4A8Config(
        block_y, MAX_STAGES, K // TILE, 2, 4, looks_up, num_consumers=1, ctas=ctas, widths=widths,
        producer_registers=min(registers, MOST_PRODUCER), widened=widened, reduces_rows=reduces_rows,
    )  # fmt: skip


def fitted(config: W4A8Config) -> W4A8Config:
    """Return the config with as many stages as fit the shared memory, less what barriers and epilogues take."""
    room = (SHARED_BYTES + 1024) // config.ctas - 1024
    room -= RESERVED_BYTES + config.num_consumers * TURNED_BYTES
    return replace(config, num_stages=min(config.num_stages, room // config.stage_bytes))

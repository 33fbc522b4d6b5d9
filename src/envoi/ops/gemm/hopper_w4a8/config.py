"""Config of the kernel for 4-bit weights and FP8 or bf16 tokens, and its choice."""

from dataclasses import dataclass, replace
from functools import cache

from envoi.ops.gemm.hopper.config import RESERVED_BYTES
from envoi.ops.gemm.hopper.tile_config import SwappedTiles
from envoi.ops.gemm.hopper_w4a16.few_config import Int4Form
from envoi.runtime.devices import SHARED_BYTES
from envoi.runtime.math import next_power_of_2

TILE = 64  # rows, and elements of K, of a tile of weights
ROW_BYTES = 128  # of a token in a stage
WEIGHT_BYTES = 2048  # of a tile
FACTOR_WORDS = {"e4m3": 32, "bf16": 32, "nvfp4": 64, "int4": 32}  # int32, of a tile's factors, by what weights become
TMA_STEP = 128  # bytes of whose multiples TMA writes to shared memory
MAX_STAGES = 8
REGISTERS = 65536  # of an SM
TURNED_BYTES = 6144  # in which a consumer transposes a part of a tile at a time
# Tiles: tokens of an expert's whole ones, widths of its last one, and how long 128 features keep a multiprocessor by
# tokens, relative to 128 without narrower ones: notes/2026-11-fp8-fp4.md. FP8 products take half the time of bf16's, so
# that narrower tiles save less, and whole ones beside them are slower.
TILES = {
    "e4m3": (
        (16, 1, {16: 0.49}), (32, 1, {32: 0.59}), (64, 1, {64: 0.72}), (128, 1, {128: 1.0}),
        (128, 4, {128: 1.06, 64: 0.89, 32: 0.62, 16: 0.62}),
    ),
    "bf16": (
        (16, 1, {16: 0.56}), (32, 1, {32: 0.62}), (64, 1, {64: 0.78}),
        (128, 4, {128: 1.0, 64: 0.84, 32: 0.64, 16: 0.64}),
    ),
}  # fmt: skip
MOST_OF_THREE = 256  # experts, beyond which three CTAs have too few registers
# Registers of a thread of the producer: up to so many experts, and for more. With a few more for it, and fewer for the
# consumer, ptxas waits after each of the consumer's products.
PRODUCER_REGISTERS, FEWER_EXPERTS, PRODUCER_REGISTERS_OF_MORE = 24, 256, 32
# Numbers of rows of experts that have as many in the mean, in deviations: eighths of a normal distribution.
DRAWS = (-1.53, -0.89, -0.49, -0.16, 0.16, 0.49, 0.89, 1.53)


@dataclass(frozen=True)
class W4A8Config(SwappedTiles):
    """Constants of the kernel: tiles of row_tiles * 64 features and block_y tokens.

    num_steps: K / 64. stages_per_turn: stages that a turn of the loop multiplies. looks_up: tables of E4M3 come from
    memory, else they are computed, which only shifts from -5 on allow (`envoi.quant.fp8_fragments`). ctas: on an SM.
    widths: of an expert's last tile: 1, or 4, block_y and its half, quarter and eighth (`tile_scheduler`).
    widened: "e4m3" for MXFP4 and FP8 tokens, "bf16" for MXFP4 and bf16 tokens, "nvfp4" for NVFP4 and "int4" for INT4
        and bf16 tokens. int4: the form of INT4 weights.
    reduces_rows: an epilogue reduces rows, from shared memory; others work where the products are.
    max_experts: length of vectors over the experts, a power of two.
    The rest is what epilogues and the order of tiles ask of every Hopper kernel's config (`TileConfig`).
    """

    block_y: int
    num_stages: int
    num_steps: int
    stages_per_turn: int
    looks_up: bool
    ctas: int
    widths: int = 1
    widened: str = "e4m3"
    reduces_rows: bool = False
    max_experts: int = 32
    int4: Int4Form | None = None

    row_tiles = 2
    num_consumers = 1  # two in a CTA, with one CTA on an SM, took longer: notes/2026-11-fp8-fp4.md
    num_warps = 4
    rows_per_consumer = TILE  # of one run of the epilogue
    swizzle_rows = 8

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
        return FACTOR_WORDS[self.widened] * (1 if self.int4 is None else self.int4.per_step)

    @property
    def zero_bytes(self) -> int:
        """Bytes of a tile's zero points."""
        return TILE * self.int4.per_step if self.int4 is not None and self.int4.has_zeros else 0

    @property
    def registers(self) -> int:
        """Registers of a thread with which the kernel starts, so that all CTAs fit."""
        return min(255, REGISTERS // (256 * self.ctas) // 8 * 8)

    @property
    def producer_registers(self) -> int:
        """Registers of a thread of the producer, which in the beginning holds numbers of all experts."""
        return PRODUCER_REGISTERS if self.max_experts <= FEWER_EXPERTS else PRODUCER_REGISTERS_OF_MORE

    @property
    def options(self) -> dict[str, int]:
        """Options of the launch."""
        return {"num_warps": self.num_warps, "maxnreg": self.registers}

    @property
    def block_x(self) -> int:
        """Features of a tile."""
        return self.row_tiles * TILE

    @property
    def stages_of_k(self) -> int:
        """Stages of a tile of the output; in the last one half may be missing."""
        return -(-self.num_steps // self.steps_per_stage)

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage in shared memory."""
        tile = WEIGHT_BYTES + 4 * self.factor_words + (TMA_STEP if self.zero_bytes else 0)
        return self.block_y * ROW_BYTES + self.steps_per_stage * self.row_tiles * tile


@cache
def w4a8_config(
    N: int, K: int, num_rows: int, num_experts: int, num_sms: int, looks_up: bool = False, widened: str = "e4m3",
    reduces_rows: bool = False, int4: Int4Form | None = None,
) -> W4A8Config:  # fmt: skip
    """Return the config that should take the least time for so many rows of all experts."""
    form = looks_up, widened, reduces_rows, int4
    tiles = TILES[kind_of(widened)]
    found = [fitted(config_of(block_y, widths, K, num_experts, *form)) for block_y, widths, _ in tiles]
    return min(found, key=lambda config: predicted_tiles(config, N, num_rows, num_experts, num_sms))


def predicted_tiles(config: W4A8Config, N: int, num_rows: int, num_experts: int, num_sms: int) -> float:
    """Return how long a multiprocessor computes, in tiles of 128 features and 128 tokens.

    For ranking configs. Experts' rows differ as with routing at random; CTAs end within half of a last tile.
    """
    costs = costs_of(config)
    work = mean_cost(costs, config.block_y, num_rows / max(1, num_experts))
    tiles = work * max(1, min(num_experts, num_rows)) * -(-N // config.block_x)
    return max(max(costs.values()), tiles / num_sms + min(costs.values()) / 2)


def kind_of(widened: str) -> str:
    """Return which of `TILES` are for weights that are widened to this."""
    return "e4m3" if widened == "e4m3" else "bf16"


def costs_of(config: W4A8Config) -> dict[int, float]:
    """Return the time of a tile of 128 features by its tokens: of whole ones, and of an expert's narrower last one."""
    tiles = {(block_y, widths): costs for block_y, widths, costs in TILES[kind_of(config.widened)]}
    return tiles[config.block_y, config.widths]


def mean_cost(costs: dict[int, float], block_y: int, rows: float) -> float:
    """Return what an expert's tiles cost, of 128 features each, where experts have so many rows in the mean."""
    drawn = [max(1, round(rows + z * rows**0.5)) for z in DRAWS]
    return sum(_cost_of(count, block_y, costs) for count in drawn) / len(drawn)


def _cost_of(rows: int, block_y: int, costs: dict[int, float]) -> float:
    whole, rest = divmod(rows, block_y)
    last = costs[min(size for size in costs if size >= rest)] if rest else 0.0
    return whole * costs[block_y] + last


def config_of(
    block_y: int, widths: int, K: int, num_experts: int, looks_up: bool = False, widened: str = "e4m3",
    reduces_rows: bool = False, int4: Int4Form | None = None,
) -> W4A8Config:  # fmt: skip
    """Return the fastest config for tiles of so many tokens and widths, with more stages than may fit."""
    ctas = 3 if block_y == 16 and num_experts <= MOST_OF_THREE else 2
    turn = 2 if widths > 1 and widened == "e4m3" else 4  # loops for four widths share the instruction cache
    return W4A8Config(
        block_y, MAX_STAGES, K // TILE, turn, looks_up, ctas, widths, widened, reduces_rows,
        max(32, next_power_of_2(num_experts)), int4,
    )  # fmt: skip


def fitted(config: W4A8Config) -> W4A8Config:
    """Return the config with as many stages as fit the shared memory, less what barriers and epilogues take."""
    room = (SHARED_BYTES + 1024) // config.ctas - 1024
    room -= RESERVED_BYTES + TURNED_BYTES + 2 * 4 * config.max_experts
    return replace(config, num_stages=min(config.num_stages, room // config.stage_bytes))

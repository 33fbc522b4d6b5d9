"""Config of the kernel for FP8 tokens and MXFP4 weights, and its choice."""

from dataclasses import dataclass, replace

from envoi.ops.gemm.hopper.config import RESERVED_BYTES
from envoi.ops.gemm.hopper.tile_config import SwappedTiles
from envoi.runtime.devices import SHARED_BYTES

TILE = 64  # rows, and elements of K, of a tile of weights
BLOCK_K = 128  # of a stage: two tiles
TILE_BYTES = 2048 + 128  # of a tile of weights and its factors
MAX_STAGES = 8
REGISTERS, PRODUCER_REGISTERS = 65536, 24  # of an SM, of a thread of the producer
TURNED_BYTES = 6144  # in which a consumer transposes a part of a tile at a time
# Tokens of a tile, and how long 128 features of one take beside those of 64 tokens: notes/2026-11-fp8-fp4.md.
TOKEN_TILES = {16: 0.75, 32: 0.81, 64: 1.0, 128: 1.38}


@dataclass(frozen=True)
class W4A8Config(SwappedTiles):
    """Constants of the kernel: tiles of its consumers' features, row_tiles * 64 each, and block_y tokens.

    num_steps: K / 64. stages_per_turn: stages that a turn of the loop multiplies. looks_up: tables of E4M3 come from
    memory, else they are computed, which only shifts from -5 on allow (`envoi.quant.fp8_fragments`). ctas: on an SM.
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
    epilogue_tokens: int = 64
    rows_per_consumer: int = TILE  # of one run of the epilogue
    block_k: int = BLOCK_K
    num_warps: int = 4
    swizzle_rows: int = 8
    epilogue_in_place = True

    @property
    def registers(self) -> int:
        """Registers of a thread with which the kernel starts, so that all CTAs fit."""
        return min(255, REGISTERS // (128 * (self.num_consumers + 1) * self.ctas) // 8 * 8)

    @property
    def consumer_registers(self) -> int:
        """Registers of a thread of the second consumer; the first has what others leave."""
        return (self.registers * 3 - PRODUCER_REGISTERS) // 2 // 8 * 8

    @property
    def options(self) -> dict[str, int]:
        """Options of the launch."""
        return {"num_warps": self.num_warps, **({"maxnreg": self.registers} if self.ctas > 1 else {})}

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
        return -(-self.num_steps // 2)

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage in shared memory."""
        return self.block_y * self.block_k + 2 * self.num_row_tiles * TILE_BYTES


def w4a8_config(K: int, num_rows: int, num_experts: int, looks_up: bool = False) -> W4A8Config:
    """Return the config for so many rows of all experts."""
    rows = num_rows / max(1, num_experts)
    # Experts differ: on average half of a last tile is empty.
    block_y = min(TOKEN_TILES, key=lambda size: max(1.0, rows / size + 0.5) * TOKEN_TILES[size])
    return fitted(config_of(block_y, K, looks_up))


def config_of(block_y: int, K: int, looks_up: bool = False) -> W4A8Config:
    """Return the fastest config for tiles of so many tokens, with more stages than may fit."""
    return W4A8Config(block_y, MAX_STAGES, K // TILE, 2, 4, looks_up, num_consumers=1, ctas=3 if block_y == 16 else 2)


def fitted(config: W4A8Config) -> W4A8Config:
    """Return the config with as many stages as fit the shared memory, less what barriers and epilogues take."""
    room = (SHARED_BYTES + 1024) // config.ctas - 1024
    room -= RESERVED_BYTES + config.num_consumers * TURNED_BYTES
    return replace(config, num_stages=min(config.num_stages, room // config.stage_bytes))

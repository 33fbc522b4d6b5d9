"""Config of the kernel for FP8 tokens and MXFP4 weights, and its choice."""

from dataclasses import dataclass, replace

from envoi.gemm.hopper.config import RESERVED_BYTES
from envoi.gemm.hopper.tile_config import SwappedTiles
from envoi.runtime.devices import SHARED_BYTES

TILE = 64  # rows, and elements of K, of a tile of weights
BLOCK_K = 128  # of a stage: two tiles
TILE_BYTES = 2048 + 128  # of a tile of weights and its factors
MAX_STAGES = 8
TURNED_BYTES = 16384  # in which both consumers transpose, a part of a tile at a time
# Tiles (64-row tiles of a consumer, tokens), and how long one takes for each 64 rows of weights beside 64 tokens.
TILES = {(1, 16): 0.7, (1, 32): 0.8, (1, 64): 1.0, (1, 128): 1.6, (1, 256): 2.9}


@dataclass(frozen=True)
class W4A8Config(SwappedTiles):
    """Constants of the kernel: tiles of two consumers' features, row_tiles * 64 each, and block_y tokens.

    num_steps: K / 64. stages_per_turn: stages that a turn of the loop multiplies. looks_up: tables of E4M3 come from
    memory, else they are computed, which only shifts from -5 on allow (`envoi.quant.fp8_fragments`).
    The rest is what epilogues and the order of tiles ask of every Hopper kernel's config (`TileConfig`).
    """

    block_y: int
    num_stages: int
    num_steps: int
    row_tiles: int = 1
    stages_per_turn: int = 2
    looks_up: bool = True
    num_consumers: int = 2
    rows_per_consumer: int = TILE  # of one run of the epilogue
    block_k: int = BLOCK_K
    num_warps: int = 4
    swizzle_rows: int = 8

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


def w4a8_config(K: int, num_rows: int, num_experts: int) -> W4A8Config:
    """Return the config for so many rows of all experts."""
    rows = num_rows / max(1, num_experts)
    # Experts differ: on average half of a last tile is empty.
    row_tiles, block_y = min(TILES, key=lambda tile: max(1.0, rows / tile[1] + 0.5) * TILES[tile])
    return fitted(W4A8Config(block_y, MAX_STAGES, K // TILE, row_tiles))


def fitted(config: W4A8Config) -> W4A8Config:
    """Return the config with as many stages as fit the shared memory, less what barriers and epilogues take."""
    room = SHARED_BYTES - RESERVED_BYTES - TURNED_BYTES
    return replace(config, num_stages=min(config.num_stages, room // config.stage_bytes))

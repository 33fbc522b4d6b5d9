"""Config of the kernel for many tokens, and its choice."""

from dataclasses import dataclass, replace

from envoi.ops.gemm.hopper.config import RESERVED_BYTES
from envoi.ops.gemm.hopper.tile_config import SwappedTiles
from envoi.ops.gemm.hopper_w4a16.few_config import unroll_of
from envoi.runtime.devices import SHARED_BYTES

ROLE_M = 64  # features of a consumer: a tile of weights
BLOCK_K = 64
MAX_STAGES = 12
LAST = 128  # tokens that the epilogue takes at once
# Tokens of a tile, and how long one takes beside one of 64: notes/2026-11-decode-w4a16.md.
TOKEN_TILES = {16: 0.84, 32: 0.89, 64: 1.0, 128: 1.38, 256: 2.25}


@dataclass(frozen=True)
class ManyConfig(SwappedTiles):
    """Constants of the kernel for many tokens: tiles of 128 features, 64 for each of two consumers, and block_y tokens.

    num_steps: K / 64. unroll: steps of K whose weights a consumer has requested ahead.
    The rest is what epilogues and the order of tiles ask of every Hopper kernel's config (`TileConfig`).
    """

    block_y: int
    num_stages: int
    num_steps: int
    unroll: int
    num_consumers: int = 2
    rows_per_consumer: int = ROLE_M
    block_k: int = BLOCK_K
    num_warps: int = 4
    swizzle_rows: int = 8

    @property
    def padded_steps(self) -> int:
        """Steps of K in whole groups of `unroll`; tokens are 0 in those that K doesn't have."""
        return -(-self.num_steps // self.unroll) * self.unroll


def many_config(K: int, num_rows: int, num_experts: int) -> ManyConfig:
    """Return the config for so many rows of all experts."""
    rows = num_rows / max(1, num_experts)
    # Experts differ: on average half of a last tile is empty.
    block_y = min(TOKEN_TILES, key=lambda size: max(1.0, rows / size + 0.5) * TOKEN_TILES[size])
    config = ManyConfig(block_y, MAX_STAGES, K // BLOCK_K, unroll_of(K // BLOCK_K))
    return replace(config, num_stages=min(MAX_STAGES, _room(config) // (block_y * BLOCK_K * 2)))


def _room(config: ManyConfig) -> int:
    """Return the bytes of shared memory that stages may take: all but barriers and the epilogue's transposed tiles."""
    return SHARED_BYTES - RESERVED_BYTES - config.block_x * min(config.block_y, LAST) * 4

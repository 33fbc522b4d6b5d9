"""Configs of the Hopper GEMM for MX weights: one frozen MxConfig, and the rules that choose one."""

from dataclasses import dataclass, replace

from envoi.epilogues.lower import Lowered
from envoi.ops.gemm.hopper.config import RESERVED_BYTES
from envoi.ops.gemm.hopper.tile_config import SwappedTiles
from envoi.runtime.devices import SHARED_BYTES
from envoi.runtime.math import cdiv

NARROW, WIDE = 64, 128  # features of a consumer, 16 for each of its warps
SPAN = 512  # elements along K whose scale factors are loaded at once
ROW_BYTES = 128  # of a weight row in a stage, at most
MAX_STAGES = 12
TOKEN_TILES = (8, 16, 32, 64, 128)
DEEP_TOKENS = 64  # tiles with more tokens have stages with less of K
MANY_TOKENS = {64: 1.0, 128: 1.64}  # relative time of a tile, measured


@dataclass(frozen=True)
class MxConfig(SwappedTiles):
    """Tiling of one problem: tiles of num_consumers * rows_per_consumer features and block_y tokens.

    Features are always the M side of wgmma, and K is never split; `TileConfig` documents the tile's fields.
    num_consumers: 1 or 2. bits: of a weight, 4 or 8. scales_at_most_2: as in QuantTensor.
    """

    num_consumers: int
    block_y: int
    num_stages: int
    rows_per_consumer: int = NARROW
    bits: int = 4
    scales_at_most_2: bool = False
    swizzle_rows: int = 8

    @property
    def num_warps(self) -> int:
        """Warps of a consumer: each has 16 features."""
        return self.rows_per_consumer // 16

    @property
    def block_k(self) -> int:
        """Elements of K in a stage."""
        return ROW_BYTES * 8 // self.bits if self.block_y <= DEEP_TOKENS else 128

    @property
    def words(self) -> int:
        """Words of 32 bits that a row's weights have in a stage."""
        return self.block_k * self.bits // 32

    @property
    def consumer_registers(self) -> int:
        """Registers of a thread of the second consumer."""
        return 232 if self.rows_per_consumer == NARROW else 112

    @property
    def num_sf_spans(self) -> int:
        """Number of spans whose scale factors fit: as many as the stages in flight can belong to."""
        return cdiv(self.num_stages - 1, SPAN // self.block_k) + 1

    def label(self) -> str:
        """Return a short name for tables, "mx4 2x64x16 x12"."""
        kind = f"mx{self.bits}{' bounded' * self.scales_at_most_2}"
        return f"{kind} {self.num_consumers}x{self.rows_per_consumer}x{self.block_y} x{self.num_stages}"


def shared_bytes(config: MxConfig) -> int:
    """Return the bytes of shared memory: weights, tokens, scale factors, and the buffer for transposing a tile."""
    weights, tokens = config.block_x * config.words * 4, config.block_y * config.block_k * 2
    transposed = config.block_x * min(config.block_y, 32) * 4
    scales = config.num_sf_spans * config.block_x * 16
    return config.num_stages * (weights + tokens) + scales + transposed + RESERVED_BYTES


def fitted(config: MxConfig) -> MxConfig:
    """Return the config with as many stages as fit."""
    while shared_bytes(config) > SHARED_BYTES:
        config = replace(config, num_stages=config.num_stages - 1)
    return config


def default_config(
    M: int,
    N: int,
    num_groups: int,
    num_sms: int,
    code: Lowered | None = None,
    bits: int = 4,
    scales_at_most_2: bool = False,
) -> MxConfig:
    """Return the config that suits M tokens, N features and num_groups experts (0 = dense).

    code: the epilogue, or None for a plain store.
    """
    tokens = cdiv(M, max(1, num_groups))
    block_y = tokens_of_a_tile(tokens)
    tiles = max(1, num_groups) * cdiv(tokens, block_y) * cdiv(N, NARROW)
    config = MxConfig(2, block_y, MAX_STAGES, bits=bits, scales_at_most_2=scales_at_most_2)
    if tiles <= num_sms:
        config = replace(config, num_consumers=1)
    elif tiles // 4 >= 2 * num_sms and block_y <= DEEP_TOKENS and is_short(code, block_y):
        config = replace(config, rows_per_consumer=WIDE)
    return fitted(config)


def tokens_of_a_tile(tokens: int) -> int:
    """Return the tokens of a tile for `tokens` tokens an expert."""
    if tokens <= DEEP_TOKENS:
        return next(size for size in TOKEN_TILES if size >= tokens)
    return min(MANY_TOKENS, key=lambda size: cdiv(tokens, size) * MANY_TOKENS[size])


def is_short(code: Lowered | None, block_y: int) -> bool:
    """Return True if an epilogue fits the 96 registers that a thread of a wide consumer has for it."""
    return code is None or (not code.partials and (block_y < DEEP_TOKENS or len(code.output_specs) == 1))

"""Counters of the launch of the experts, and tilings of its two GEMMs."""

from dataclasses import replace

from envoi.ops.gemm.hopper.config import Config

FORMAT = "fp8_block128"  # of the experts
OTHER_COUNTERS = 4  # of `progress`, before those of units
UNIT_COUNTERS = 1024  # at most; each counts as many units of L1, a power of two
LEAST_SHIFT = 5  # log2 of how many, at least
LANES = 32  # of a warp
NUM_COUNTERS = OTHER_COUNTERS + UNIT_COUNTERS + LANES  # a look may go on after the last one
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24  # of a thread
FEW_ROWS = 64  # of an expert, up to which one consumer has a tile of L1: fewer beyond `LONG_K`, see `host.tiling_of`
_TILE = Config(64, 2, 128, 128, 6, mixed_experts=True)
_WIDE = replace(_TILE, num_stages=5, wide_tail_tiles=True)
# Tilings of L1 and L2 that have the same stages, so that one ring serves both, and tiles of as many rows.
FEW = (
    replace(_TILE, num_consumers=1, block_k=256, num_stages=4, paired_tiles=True, short_boxes=True),
    replace(_TILE, pingpong=True, block_k=256, num_stages=4, short_boxes=True),
)
WIDE = replace(_WIDE, paired_tiles=True), _WIDE
SQUARE = replace(_TILE, paired_tiles=True), replace(_TILE, num_store_buffers=2)

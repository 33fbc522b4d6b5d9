"""Configs of the Blackwell GEMM: one frozen BlackwellConfig, and one predicate that refuses."""

from dataclasses import dataclass

from envoi.epilogues.lower import Lowered
from envoi.ops.gemm.hopper.tile_config import EqualTiles
from envoi.runtime.devices import SHARED_BYTES

TENSOR_COLUMNS = 512  # of tensor memory, each 128 lanes of 4 bytes
RESERVED_BYTES = 2560  # barriers, and the exchange buffers of reductions
MIN_STAGES = 2
ROWS = 128
MAX_CHUNK_REGISTERS = 128


@dataclass(frozen=True)
class BlackwellConfig(EqualTiles):
    """Tiling of one problem: x are the tokens, 128 a tile; `TileConfig` documents the tile's fields.

    block_y: features of a tile. block_k: elements of K in a stage. num_stages: stages in the ring.
    num_warps: warps of the epilogue role, 4 (a thread has a row) or 8 (half a row).
    num_accumulators: tiles in tensor memory; with 2, the epilogue of one overlaps the products of the next.
    sf_group: elements of K that share a scale factor, 32 (mxfp8, mxfp4) or 16 (nvfp4); 0 = the operands have none.
    epilogue_columns: of a chunk; with 4 warps also the width of a tensor memory load. 64, as 32 costs 4 to 6 % more
        instructions and twice the TMA stores, and 128 saves 2 % for 1.7 times the registers.
    """

    block_y: int
    block_k: int
    num_stages: int
    num_warps: int = 4
    num_accumulators: int = 2
    sf_group: int = 0
    split_k: int = 1
    swizzle_rows: int = 8
    epilogue_columns: int = 64
    num_store_buffers: int = 2

    swap_ab = False  # tokens are always the M side of the instruction
    rows_per_consumer = ROWS
    consumers_per_tile = 1  # the epilogue role
    block_x = ROWS
    block_m = ROWS
    spread_experts = True

    @property
    def block_n(self) -> int:
        """Features of a tile."""
        return self.block_y

    @property
    def num_chunks(self) -> int:
        """Chunks of a tile."""
        return self.block_y // self.epilogue_columns

    @property
    def role_registers(self) -> int:
        """Registers of a thread of the producer and of the multiplier, which search all experts for each tile.

        Beside 4 epilogue warps, whose threads have 256 at most, more cost nothing; 8 epilogue warps would get fewer.
        """
        return 168 if self.num_warps == 4 else 48

    @property
    def factor_columns(self) -> int:
        """Columns of tensor memory for the scale factors of one stage: 32 bits hold four factors along K."""
        if not self.sf_group:
            return 0
        return -(-self.block_k // (4 * self.sf_group)) * (ROWS + max(ROWS, self.block_y)) // 32

    @property
    def tensor_columns(self) -> int:
        """Columns of tensor memory in all."""
        return self.num_accumulators * self.block_y + self.factor_columns

    def label(self) -> str:
        """Return a short name for tables, "128x256 w4 k64 s4 a2 p64x2"."""
        split = f" split{self.split_k}" if self.split_k > 1 else ""
        scaled = f" sf{self.sf_group}" if self.sf_group else ""
        return (
            f"{ROWS}x{self.block_y} w{self.num_warps} k{self.block_k} s{self.num_stages} a{self.num_accumulators} "
            f"p{self.epilogue_columns}x{self.num_store_buffers}{scaled}{split}"
        )


@dataclass(frozen=True)
class BlackwellProblem:
    """Sizes of one launch: tokens M, features N, K.

    x_bits, y_bits: of an element of tokens and of features in shared memory, where FP4 beside FP8 takes a byte.
    num_groups: experts of a grouped GEMM, 0 for a plain one. sf_group: elements of K that share a scale factor, or 0.
    tma_operand_bytes: bytes for each column of the accumulator of the tile operands that TMA loads. padded: one operand
    is FP4, the other FP8.
    """

    M: int
    N: int
    K: int
    x_bits: int = 16
    y_bits: int = 16
    num_groups: int = 0
    sf_group: int = 0
    tma_operand_bytes: float = 0.0
    padded: bool = False


def shared_bytes(problem: BlackwellProblem, config: BlackwellConfig, code: Lowered) -> int:
    """Return the bytes of shared memory: the stages, the buffers of TMA outputs and operands, a reserve."""
    operands = (ROWS * problem.x_bits + config.block_y * problem.y_bits) * config.block_k // 8
    factors = (ROWS + config.block_y) * config.block_k // config.sf_group if config.sf_group else 0
    column_bytes = config.num_store_buffers * code.staged_output_bytes + problem.tma_operand_bytes
    buffers = ROWS * config.epilogue_columns * column_bytes
    return config.num_stages * (operands + factors) + int(buffers) + RESERVED_BYTES


def why_not(problem: BlackwellProblem, config: BlackwellConfig, code: Lowered) -> str:
    """Return why a config can't run this problem with this epilogue, in words; "" if it can."""
    return (
        _why_not_tile(problem, config)
        or _why_not_chunks(problem, config, code)
        or _why_not_factors(problem, config)
        or _why_not_memory(problem, config, code)
    )


def _why_not_tile(problem: BlackwellProblem, c: BlackwellConfig) -> str:
    if problem.K < 1:
        return f"K: expected at least 1, got {problem.K}: nothing would fill the accumulator"
    row_bytes = c.block_k * min(problem.x_bits, problem.y_bits) // 8
    if c.block_y not in (64, 128, 256):
        return f"block_y: expected 64, 128 or 256, got {c.block_y}"
    if row_bytes not in (64, 128, 256, 512):
        return f"block_k: expected rows of 64 to 512 bytes, a power of two, got {c.block_k} elements in {row_bytes}"
    if c.num_stages < MIN_STAGES:
        return f"num_stages: expected at least {MIN_STAGES}, got {c.num_stages}"
    if c.num_accumulators not in (1, 2):
        return f"num_accumulators: expected 1 or 2, got {c.num_accumulators}"
    if problem.num_groups and c.split_k > 1:
        return f"split_k: expected 1 in a grouped GEMM, got {c.split_k}"
    return ""


def _why_not_chunks(problem: BlackwellProblem, c: BlackwellConfig, code: Lowered) -> str:
    if c.num_warps not in (4, 8):
        return f"num_warps: expected 4 or 8 for the epilogue, got {c.num_warps}"
    columns = c.epilogue_columns
    if columns < 16 or columns & (columns - 1) or columns > c.block_y:
        return f"epilogue_columns: expected a power of two from 16 to block_y = {c.block_y}, got {columns}"
    if columns % code.chunk_columns:
        return f"epilogue_columns: expected a multiple of {code.chunk_columns} columns for this epilogue, got {columns}"
    if code.takes_halves:
        return "epilogue: expected one that takes pairs of columns, got one of halves"
    if code.whole_rows and (columns < c.block_y or c.block_y < problem.N):
        return f"epilogue_columns: expected whole rows of {problem.N} columns for this epilogue, got {columns}"
    registers = ROWS * columns // (32 * c.num_warps)
    if registers > MAX_CHUNK_REGISTERS:
        return (
            f"epilogue_columns: {columns} are {registers} registers a thread of {c.num_warps} warps, more than "
            f"{MAX_CHUNK_REGISTERS} leave none to compute with"
        )
    return ""


def _why_not_factors(problem: BlackwellProblem, c: BlackwellConfig) -> str:
    if c.sf_group != problem.sf_group:
        return f"sf_group: expected {problem.sf_group}, as the operands have it, got {c.sf_group}"
    if not c.sf_group:
        return ""
    if c.sf_group not in (16, 32):
        return f"sf_group: expected 16 or 32, got {c.sf_group}"
    if c.block_y < ROWS:
        return f"block_y: scale factors come by {ROWS} columns, got {c.block_y}"
    if c.block_k % (4 * c.sf_group):
        return f"block_k: four scale factors span {4 * c.sf_group} elements, got {c.block_k}"
    if problem.padded and (c.block_k < 128 or problem.K % 64):
        return f"block_k: FP4 beside FP8 comes in 128 or more, of a K in 64s, got {c.block_k} of {problem.K}"
    return ""


def _why_not_memory(problem: BlackwellProblem, c: BlackwellConfig, code: Lowered) -> str:
    if c.tensor_columns > TENSOR_COLUMNS:
        return (
            f"tensor memory: {c.num_accumulators} accumulators of {c.block_y} columns and {c.factor_columns} of scale "
            f"factors are {c.tensor_columns} columns, there are {TENSOR_COLUMNS}"
        )
    used = shared_bytes(problem, c, code)
    if used > SHARED_BYTES:
        return f"shared memory: {c.num_stages} stages and what leaves are {used} bytes, there are {SHARED_BYTES}"
    return ""

"""Configs of the Blackwell GEMM: one frozen BlackwellConfig, and which of them fit, for estimates."""

from dataclasses import dataclass

from envoi.epilogues.lower import Lowered
from envoi.ops.gemm.hopper.tile_config import EqualTiles
from envoi.runtime.devices import SHARED_BYTES

TENSOR_COLUMNS = 512  # of tensor memory, each 128 lanes of 4 bytes
RESERVED_BYTES = 2560  # barriers, and the exchange buffers of reductions
MIN_STAGES = 2
ROWS = 128


@dataclass(frozen=True)
class BlackwellConfig(EqualTiles):
    """Tiling of one problem: x are the tokens, 128 a tile; `TileConfig` documents the tile's fields.

    block_y: features of a tile, 64 (without scale factors), 128 or 256. num_stages: stages in the ring, 2 or more.
    block_k: elements of K in a stage, rows of 64 to 512 bytes, a power of two, and a multiple of 4 sf_group.
    num_warps: warps of the epilogue role, 4 (a thread has a row) or 8 (half a row).
    num_accumulators: tiles in tensor memory; with 2, the epilogue of one overlaps the products of the next.
    sf_group: elements of K that share a scale factor, 32 (mxfp8, mxfp4) or 16 (nvfp4); 0 = the operands have none.
    split_k: 1 in a grouped GEMM.
    epilogue_columns: of a chunk, a power of two; with 4 warps also the width of a tensor memory load. 64, as 32 costs 4
        to 6 % more instructions and twice the TMA stores, and 128 saves 2 % for 1.7 times the registers.
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
    """What a tiling has to fit: K, and the operands' numbers.

    x_bits, y_bits: of an element of tokens and of features in shared memory, where FP4 beside FP8 takes a byte.
    sf_group: elements of K that share a scale factor, or 0. padded: one operand is FP4, the other FP8.
    """

    K: int
    x_bits: int = 16
    y_bits: int = 16
    sf_group: int = 0
    padded: bool = False


def shared_bytes(problem: BlackwellProblem, config: BlackwellConfig, code: Lowered) -> int:
    """Return the bytes of shared memory: the stages, the buffers of TMA outputs, a reserve."""
    operands = (ROWS * problem.x_bits + config.block_y * problem.y_bits) * config.block_k // 8
    factors = (ROWS + config.block_y) * config.block_k // config.sf_group if config.sf_group else 0
    buffers = int(ROWS * config.epilogue_columns * config.num_store_buffers * code.staged_output_bytes)
    return config.num_stages * (operands + factors) + buffers + RESERVED_BYTES


def why_not(problem: BlackwellProblem, config: BlackwellConfig, code: Lowered) -> str:
    """Return why a config doesn't fit a GPU with this epilogue, or K the config, in words; "" if all fits."""
    if config.epilogue_columns > config.block_y:
        return f"epilogue_columns: expected at most block_y = {config.block_y}, got {config.epilogue_columns}"
    if problem.padded and problem.K % 64:
        return f"block_k: FP4 beside FP8 comes in 128 or more, of a K in 64s, got {config.block_k} of {problem.K}"
    if config.tensor_columns > TENSOR_COLUMNS:
        return (
            f"tensor memory: {config.num_accumulators} accumulators of {config.block_y} columns and "
            f"{config.factor_columns} of scale factors are {config.tensor_columns} columns, there are {TENSOR_COLUMNS}"
        )
    used = shared_bytes(problem, config, code)
    if used > SHARED_BYTES:
        return f"shared memory: {config.num_stages} stages and what leaves are {used} bytes, there are {SHARED_BYTES}"
    return ""

"""Tiling of the Blackwell router, and which calls it could take. Compiled and counted; never run, so not used yet."""

from dataclasses import dataclass

import torch

from envoi.constant import Constant
from envoi.ops.moe.router.spec import MAX_BLOCK, Spec
from envoi.runtime.devices import SHARED_BYTES
from envoi.runtime.math import next_power_of_2

IS_USED = False  # by calls: not before it has run on a GPU
ROWS = 128  # of a CTA: lanes of tensor memory, threads of four warps
MOST_REGISTERS = 255  # of a thread, as two CTAs have them; unasked the assembler spills at 128
TENSOR_COLUMNS = 512  # of tensor memory, each 128 lanes of 4 bytes
MAX_WIDTH = 128  # columns of an instruction, which is as fast as of 256: no more than 127 columns have no expert
MIN_STAGES = 3
CHUNK, MANY_SLOTS = 32, 16  # columns that a thread holds at once; half as many beside the places of more slots
MAX_GROUPS = 8  # whose scores a thread keeps beside a chunk
RESERVED_BYTES = 2048  # barriers, scratch of the scan of counts, and what each CTA costs a multiprocessor


@dataclass(frozen=True)
class BlackwellTiling(Constant):
    """Division of a CTA's work: 128 rows, all columns, all of K.

    width: columns of an instruction, num_tiles of which have all experts. block_k: of a stage. num_sets: accumulators
    of each column, one after the other along K with steps_in_set steps each: a tensor core truncates as it adds, so
    that shorter sums err less. chunk: columns whose experts are chosen at a time.
    """

    width: int
    num_tiles: int
    block_k: int
    num_stages: int
    num_sets: int
    steps_in_set: int
    chunk: int

    @property
    def columns(self) -> int:
        """Columns of a set of accumulators."""
        return self.width * self.num_tiles

    @property
    def num_chunks(self) -> int:
        """Chunks of a set of accumulators."""
        return self.columns // self.chunk


def why_not(dtypes: tuple[torch.dtype, torch.dtype], spec: Spec) -> str:
    """Return why the kernel doesn't take dtypes of tokens and gate, or a spec, in words; "" if it does."""
    if dtypes[0] != dtypes[1] or dtypes[0] == torch.float32:
        return f"tokens, gate: expected both bf16 or both fp16, got {dtypes[0]} and {dtypes[1]}"
    if spec.num_experts > TENSOR_COLUMNS:
        return f"gate.shape[0]: tensor memory has {TENSOR_COLUMNS} columns, got {spec.num_experts} experts"
    if spec.rule.num_groups > MAX_GROUPS:
        return f"rule.num_groups: a thread keeps the scores of at most {MAX_GROUPS} groups, got {spec.rule.num_groups}"
    if spec.hashed:
        return "hash_table: experts are looked up, not chosen"
    return ""


def tiling_of(hidden: int, spec: Spec) -> BlackwellTiling:
    """Return the tiling for a spec. It depends on no number of tokens, so that a token's bits don't."""
    width = max(CHUNK, min(MAX_WIDTH, next_power_of_2(spec.num_experts)))
    num_tiles = -(-spec.num_experts // width)
    columns = width * num_tiles
    most = min(TENSOR_COLUMNS // columns, -(-hidden // MAX_BLOCK))
    # Where tensor memory has room for two CTAs, one of them chooses experts while the other multiplies.
    bytes_left = SHARED_BYTES // (2 if 2 * most * columns <= TENSOR_COLUMNS else 1) - RESERVED_BYTES
    row_bytes = 2 * (ROWS + columns)
    block_k = 64 if bytes_left >= 64 * row_bytes * MIN_STAGES else 32
    steps = -(-hidden // block_k)
    steps_in_set = -(-steps // most)
    stages = min(bytes_left // (block_k * row_bytes), steps)
    chunk = CHUNK if spec.k <= MANY_SLOTS else CHUNK // 2
    return BlackwellTiling(width, num_tiles, block_k, stages, -(-steps // steps_in_set), steps_in_set, chunk)

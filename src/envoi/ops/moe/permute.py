"""Permute and combine on one rank by Triton kernels.

    map_ids         topk_ids of all experts -> topk_ids of those that are here
    add_shared      topk_ids, topk_weights -> those with the slots of shared experts
    sort_slots      topk_ids [M, k] -> RowMap: the row of each slot
    gather_rows     tokens [M, H] -> rows [M * k, H] by expert, in the experts' activation scheme, and their weights
    quantize_rows   rows in bf16 -> rows in a scheme
    combine_rows    rows -> tokens, the sum of each token's slots

Buffers have a row for each slot, M * k, the most there can be; offsets[E] of them are used.
"""

from dataclasses import dataclass, replace
from typing import cast

import torch

from envoi.ops.moe.launches import launch_kernel, warps_for
from envoi.quant.bits import as_bytes
from envoi.quant.formats import Scheme
from envoi.runtime.devices import casts_e4m3, implementation
from envoi.runtime.math import next_power_of_2
from envoi.runtime.timeline import UNTRACED
from envoi.types import ExpertWeights, Matrix, QuantTensor

KERNELS = "envoi.ops.moe.kernels"
# Slots that a program of the sort reads at once, for up to so many slots in all.
SORT_BLOCKS = ((512, 512), (1024, 4096), (4096, 1 << 31))
MAX_SORT_CHUNKS, MAX_SORT_PROGRAMS = 8, 512  # every program reads all ids
COUNT_SLOTS = 16384  # slots beyond which experts are counted first: then programs read only their chunk's ids
CHUNK_SLOTS = 4096  # slots of such a chunk, at most 32767; beyond MANY_SLOTS twice as many
MANY_SLOTS = 131072
PLACED = 4  # experts that a program of `place_kernel` places, at most 4: it ranks them in one 64-bit number
COUNTS_AT_ONCE = 4096  # of chunks and experts, that a program loads at once
MAPPED = 512  # slots whose ids a program maps
SHARED_SLOTS = 256  # slots that a program of `shared_kernel` writes, or those of one token if they have a gate
MAX_COLUMNS = 2048  # columns of a row that one program gathers or quantises
MAX_SUM_COLUMNS, MAX_SUM_COLUMNS_OF_FEW = 1024, 512  # columns of a token that one program sums
# Bytes of rows up to which those that have been summed make room in the L2 cache for those that L2 has left there:
# 134 and 268 MB are summed in 0.94 and 0.96 of the time, 403 and 1074 MB in 1.02 and 1.04 (H200).
KEPT_BYTES = 320 << 20
MAX_QUANTIZE_ROWS = 4096  # programs along the rows


@dataclass(frozen=True)
class RowMap:
    """Rows of the slots when sorted by expert.

    offsets [E + 1] int32: expert e owns rows offsets[e] : offsets[e + 1].
    slot_to_pos [M, k] int32: the row of each slot, -1 = masked. Within an expert, rows keep the order of their slots.

    Example: topk_ids [[1, 0], [1, -1]] gives offsets [0, 1, 3], slot_to_pos [[1, 0], [2, -1]].
    """

    offsets: torch.Tensor
    slot_to_pos: torch.Tensor


def overlaps(device: torch.device) -> bool:
    """Return True if these kernels start before the launch in front of them ends."""
    return implementation(device) == "hopper"


def map_ids(topk_ids: torch.Tensor, expert_map: torch.Tensor) -> torch.Tensor:
    """Return expert_map[topk_ids], contiguous and of the ids' dtype; -1 for what is no index.

    topk_ids: int32 or int64 [M, k]. expert_map: int32, one for each id.
    """
    out = torch.empty(topk_ids.shape, dtype=topk_ids.dtype, device=topk_ids.device)
    num_slots = topk_ids.numel()
    arguments = topk_ids.contiguous(), expert_map.contiguous(), out, num_slots, len(expert_map), MAPPED
    launch_kernel(KERNELS, "map_kernel", (-(-num_slots // MAPPED),), arguments, {"num_warps": 4})
    return out


def add_shared(
    tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, experts: ExpertWeights
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights float32 and ids int32 [M, k + num_shared]: those of [M, k], then those of the shared experts.

    An id that is no routed expert becomes -1. A token's bits don't depend on the others.
    """
    added = AddedSlots.of(tokens, topk_ids, experts.num_shared, experts.shared_gate, SHARED_SLOTS)
    weights, ids = added.empty_slots(topk_ids.device)
    arguments = (
        topk_ids.contiguous(), topk_weights.contiguous(), *added.given, ids, weights, *added.sizes,
        experts.num_routed, *added.form, overlaps(tokens.device),
    )  # fmt: skip
    options = {"num_warps": 4, "launch_pdl": overlaps(tokens.device)}
    launch_kernel(KERNELS, "shared_kernel", added.grid, arguments, options)
    return weights, ids


@dataclass(frozen=True)
class AddedSlots:
    """Slots of shared experts after those of a routing, as `kernels.with_shared_slots` takes them.

    given: tokens, their stride, and the gate or something in its place. sizes: num_tokens, k, width. form: constants
    NUM_SHARED, SLOTS, BLOCK and GATED of the kernels. Without a gate width is 0 and BLOCK 1, so that no other number of
    columns or slots is compiled again.
    """

    given: tuple
    sizes: tuple[int, int, int]
    form: tuple[int, int, int, bool]
    grid: tuple[int]

    @staticmethod
    def of(
        tokens: torch.Tensor, topk_ids: torch.Tensor, num_shared: int, gate: torch.Tensor | None, per_program: int
    ) -> "AddedSlots":
        """Describe a call's slots. per_program: how many a program has, unless they have a gate, then one token's."""
        M, k = topk_ids.shape
        total = k + num_shared
        if gate is None:  # nothing is read in its place, nor of the tokens
            form, grid = (num_shared, per_program, 1, False), -(-M * total // per_program)
            return AddedSlots((topk_ids, 0, topk_ids), (M, k, 0), form, (grid,))
        tokens, width = tokens if tokens.stride(1) == 1 else tokens.contiguous(), tokens.shape[1]
        form = num_shared, next_power_of_2(total), min(MAX_COLUMNS, next_power_of_2(width)), True
        return AddedSlots((tokens, tokens.stride(0), gate.contiguous()), (M, k, width), form, (M,))

    def empty_slots(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocate weights float32 and ids int32 [M, k + num_shared]."""
        shape = self.sizes[0], self.sizes[1] + self.form[0]
        weights = torch.empty(shape, dtype=torch.float32, device=device)
        return weights, torch.empty(shape, dtype=torch.int32, device=device)


def sort_slots(topk_ids: torch.Tensor, num_experts: int) -> RowMap:
    """Find the row of each slot: topk_ids [M, k] int32. Slots whose id is no expert get none."""
    offsets = torch.empty(num_experts + 1, dtype=torch.int32, device=topk_ids.device)
    row_map = RowMap(offsets, torch.empty(topk_ids.shape, dtype=torch.int32, device=topk_ids.device))
    (_sort if topk_ids.numel() <= COUNT_SLOTS else _count_and_place)(topk_ids, row_map)
    return row_map


def _sort(topk_ids: torch.Tensor, row_map: RowMap) -> None:
    num_experts, num_slots = len(row_map.offsets) - 1, topk_ids.numel()
    block = next(block for block, most in SORT_BLOCKS if num_slots <= most)
    chunks = max(1, min(MAX_SORT_CHUNKS, -(-num_slots // block), MAX_SORT_PROGRAMS // (num_experts + 1)))
    overlap = overlaps(topk_ids.device)
    arguments = topk_ids.contiguous(), row_map.offsets, row_map.slot_to_pos, num_slots, num_experts, block, overlap
    options = {"num_warps": 4, "launch_pdl": overlap}
    launch_kernel(KERNELS, "sort_kernel", (num_experts + 1, chunks), arguments, options)


def _count_and_place(topk_ids: torch.Tensor, row_map: RowMap) -> None:
    num_experts, num_slots = len(row_map.offsets) - 1, topk_ids.numel()
    block = CHUNK_SLOTS if num_slots <= MANY_SLOTS else 2 * CHUNK_SLOTS
    experts, chunks = max(2, next_power_of_2(num_experts)), -(-num_slots // block)
    counts = torch.empty(chunks, experts, dtype=torch.int32, device=topk_ids.device)
    ids, sizes = topk_ids.contiguous(), (num_slots, num_experts)
    count = ids, counts, *sizes, block, experts
    at_once = min(next_power_of_2(chunks), max(1, COUNTS_AT_ONCE // experts))
    place = ids, counts, row_map.offsets, row_map.slot_to_pos, *sizes, chunks, block, experts, at_once, PLACED
    options = {"num_warps": 8}
    launch_kernel(KERNELS, "count_kernel", (chunks,), count, options)
    launch_kernel(KERNELS, "place_kernel", (-(-(num_experts + 1) // PLACED), chunks), place, options)


def gather_rows(
    tokens: torch.Tensor, topk_weights: torch.Tensor, row_map: RowMap, scheme: Scheme | None, in_bf16: bool = False
) -> tuple[Matrix, torch.Tensor]:
    """Copy each token to the rows of its slots, quantised: rows [M * k, H] and row weights [M * k] float32.

    scheme: one with scale factors of single rows, or None for bf16. in_bf16: numbers of "mxfp8" are stored in bf16.
    """
    rows = empty_rows(topk_weights.numel(), tokens.shape[1], None if in_bf16 else scheme, tokens.device)
    weights = torch.empty(topk_weights.numel(), dtype=torch.float32, device=tokens.device)
    tokens = tokens if tokens.stride(1) == 1 else tokens.contiguous()
    (M, width), k = tokens.shape, topk_weights.shape[1]
    out, overlap = RowBuffers.of(rows, width), overlaps(tokens.device)
    if in_bf16 and scheme is not None:
        out = replace(out, group=scheme.group[1], has_e8m0_sf=True)
    arguments = (
        tokens, tokens.stride(0), topk_weights.contiguous(), row_map.slot_to_pos, out.values, out.sf, weights, width,
        k, out.block, next_power_of_2(k), *out.form, overlap,
    )  # fmt: skip
    options = warps_for(out.block) | {"launch_pdl": overlap}
    launch_kernel(KERNELS, "gather_kernel", (M, -(-width // out.block)), arguments, options)
    return rows, weights


def quantize_rows(rows: torch.Tensor, offsets: torch.Tensor, scheme: Scheme) -> QuantTensor:
    """Quantise bf16 rows [P, C] in a scheme of single rows; rows from offsets[E] on stay unwritten."""
    (num_rows, width), overlap = rows.shape, overlaps(rows.device)
    out = cast(QuantTensor, empty_rows(num_rows, width, scheme, rows.device))
    if not num_rows:
        return out
    buffers = RowBuffers.of(out, width)
    arguments = (
        rows, buffers.values, buffers.sf, offsets, len(offsets) - 1, width, buffers.block, *buffers.form, overlap,
        UNTRACED,
    )  # fmt: skip
    # Most rows may be unused: with a program for each, most would only start and end.
    grid = (min(num_rows, MAX_QUANTIZE_ROWS), -(-width // buffers.block))
    launch_kernel(KERNELS, "quantize_kernel", grid, arguments, warps_for(buffers.block) | {"launch_pdl": overlap})
    return out


def empty_rows(num_rows: int, width: int, scheme: Scheme | None, device: torch.device) -> Matrix:
    """Allocate rows [num_rows, width] in a scheme of single rows, or (None) in bf16."""
    if scheme is None:
        return torch.empty(num_rows, width, dtype=torch.bfloat16, device=device)
    group = scheme.group_for((num_rows, width))
    values = torch.empty(num_rows, width, dtype=scheme.values, device=device)
    return QuantTensor(values, torch.empty(num_rows, width // group[1], dtype=scheme.sf, device=device), group)


@dataclass(frozen=True)
class RowBuffers:
    """Rows as the kernels that quantise write them.

    values: bf16, or the bytes of E4M3. sf: scale factors, UE8M0 as bytes, or None. block: columns of one program, all
    of a row where the row has one factor. group: columns that share a factor, 0 = bf16; without sf they are rounded to
    MXFP8 and stored in bf16. has_e8m0_sf: factors are powers of two. has_cast: the GPU casts to E4M3 itself."""

    values: torch.Tensor
    sf: torch.Tensor | None
    block: int
    group: int
    has_e8m0_sf: bool
    has_cast: bool

    @staticmethod
    def of(rows: Matrix, width: int) -> "RowBuffers":
        """Describe rows [P, width], a tensor or a QuantTensor with scale factors of single rows."""
        if isinstance(rows, torch.Tensor):
            return RowBuffers(rows, None, min(MAX_COLUMNS, next_power_of_2(width)), 0, False, False)
        one_factor = rows.group[1] == width and rows.sf.dtype == torch.float32
        block = next_power_of_2(width) if one_factor else min(MAX_COLUMNS, next_power_of_2(width))
        group = block if one_factor else rows.group[1]
        has_e8m0_sf = rows.sf.dtype == torch.float8_e8m0fnu
        has_cast = casts_e4m3(rows.device)
        return RowBuffers(as_bytes(rows.values), as_bytes(rows.sf), block, group, has_e8m0_sf, has_cast)

    @property
    def form(self) -> tuple[int, bool, bool]:
        """Constants GROUP, POWERS and HARDWARE of the kernels."""
        return self.group, self.has_e8m0_sf, self.has_cast


def combine_rows(rows: torch.Tensor, slot_to_pos: torch.Tensor, few: bool = False, early: bool = False) -> torch.Tensor:
    """Sum rows [P, H] bf16 into tokens [M, H] bf16, in slot order, in float32, rounded once.

    few: tokens are few, so that more programs share a token's columns. early: slot_to_pos was written before the launch
    in front of this one began.
    """
    (M, k), width = slot_to_pos.shape, rows.shape[1]
    out = torch.empty(M, width, dtype=rows.dtype, device=rows.device)
    block = min(MAX_SUM_COLUMNS_OF_FEW if few else MAX_SUM_COLUMNS, next_power_of_2(width))
    overlap = overlaps(rows.device)
    eviction = "evict_first" if not few and M * k * width * rows.itemsize <= KEPT_BYTES else ""
    arguments = rows, slot_to_pos, out, width, k, block, eviction, overlap, early
    options = warps_for(block) | {"launch_pdl": overlap}
    launch_kernel(KERNELS, "combine_kernel", (M, -(-width // block)), arguments, options)
    return out

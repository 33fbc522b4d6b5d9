"""The experts by kernels: sort -> gather -> L1 -> L2 -> combine. Nothing waits for the device: a graph can hold it.

What holds rows has one for each slot, M * k, the most there can be; offsets[E] of them are used.
"""

from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from envoi.epilogue.api import Epilogue
from envoi.epilogue.library import expert_l1, expert_l2, left_by_l1
from envoi.gemm.config import power_of_two
from envoi.gemm.devices import implementation
from envoi.gemm.grouping import EXPERTS_ROWS, Grouping
from envoi.gemm.hopper_w4a16 import few
from envoi.gemm.select import run_kernels
from envoi.quant.formats import Scheme, format_named
from envoi.types import ExpertWeights, Matrix, QuantTensor

Launch = tuple[tuple[int, ...], tuple, dict[str, int]]  # grid, arguments, options

# Slots that a program of the sort takes at once; up to so many slots in all.
SORTED = ((512, 512), (1024, 4096), (4096, 1 << 31))
MAX_CHUNKS, MAX_SORTS = 8, 512  # chunks of the slots, and programs in all: each reads all ids
GATHERED, SUMMED = 2048, 1024  # columns of a program
COLUMNS_OF_WARP = 512
MANY_PROGRAMS = 4096


@dataclass(frozen=True)
class Places:
    """Where the slots' rows are when sorted by expert.

    offsets [E + 1] int32: expert e owns rows offsets[e] : offsets[e + 1].
    slot_to_pos [M, k] int32: the row of each slot, -1 = masked. Within an expert, rows keep the order of their slots.

    Example: topk_ids [[1, 0], [1, -1]] gives offsets [0, 1, 3], slot_to_pos [[1, 0], [2, -1]].
    """

    offsets: torch.Tensor
    slot_to_pos: torch.Tensor


def supported(device: torch.device) -> bool:
    """False where torch has to compute."""
    return implementation(device) != "torch"


def moe(
    tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, experts: ExpertWeights
) -> torch.Tensor:
    """The whole layer on one rank: tokens [M, H] bf16 -> [M, H] bf16. Slots whose id no expert has count as masked.

    For few tokens and 4-bit weights there are other kernels, whose sums along K are cut elsewhere.
    """
    if topk_ids.numel() == 0:
        return torch.zeros(tokens.shape, dtype=tokens.dtype, device=tokens.device)
    layer = few_layer(experts)
    if layer is not None and not few.supports(layer, *topk_ids.shape):
        return few.moe(tokens, topk_weights, topk_ids, layer)
    places = sort(topk_ids, experts.num_local_experts)
    rows, weights = gather(tokens, topk_weights, places, format_named(experts.format).activations)
    return combine(expert_mlp(rows, weights, places.offsets, experts), places.slot_to_pos)


def few_layer(experts: ExpertWeights) -> few.Layer | None:
    """The experts as the kernels for few tokens take them; None if they don't."""
    if experts.order != "fragments" or not isinstance(experts.gate_up, QuantTensor):
        return None
    return few.Layer(
        experts.gate_up, cast(QuantTensor, experts.down), experts.gate_up_bias, experts.down_bias, experts.activation,
        experts.swiglu_limit,
    )  # fmt: skip


def sort(topk_ids: torch.Tensor, num_experts: int) -> Places:
    """topk_ids [M, k] -> where each slot's row is."""
    places = empty_places(topk_ids, num_experts)
    _run("sort_kernel", sort_arguments(topk_ids, places))
    return places


def gather(
    tokens: torch.Tensor, topk_weights: torch.Tensor, places: Places, scheme: Scheme | None
) -> tuple[Matrix, torch.Tensor]:
    """The rows [M * k, H] of each expert, in a scheme of single rows or (None) in bf16, and the weight of each row."""
    rows = empty_rows(topk_weights.numel(), tokens.shape[1], scheme, tokens.device)
    weights = torch.empty(topk_weights.numel(), dtype=torch.float32, device=tokens.device)
    _run("gather_kernel", gather_arguments(tokens, topk_weights, places, rows, weights))
    return rows, weights


def expert_mlp(
    rows: Matrix, weights: torch.Tensor, offsets: torch.Tensor, experts: ExpertWeights,
    grouping: Grouping = EXPERTS_ROWS,
) -> torch.Tensor:  # fmt: skip
    """L1 -> activation -> quantise -> L2 on rows sorted by expert: [P, H] bf16, each times its weight.

    grouping: of the rows; with `to` they go there, and what is returned is `to`.
    Where L1 leaves bf16 (`left_by_l1`), one kernel more quantises it.
    """
    scheme = format_named(experts.format).activations
    inside = left_by_l1(scheme)
    has_bias = experts.gate_up_bias is not None
    l1 = expert_l1(experts.activation, experts.swiglu_limit, has_bias, inside)
    operands = {"weight": weights, "bias": experts.gate_up_bias} if has_bias else {"weight": weights}
    hidden = _grouped(rows, experts.gate_up, offsets, l1, operands, replace(grouping, to=None))
    if scheme is not None and inside is None:
        hidden = quantize_rows(cast(torch.Tensor, hidden), offsets, scheme)
    operands = {"weight": weights, "bias": experts.down_bias} if has_bias else {}
    return cast(torch.Tensor, _grouped(hidden, experts.down, offsets, expert_l2(has_bias), operands, grouping))


def quantize_rows(rows: torch.Tensor, offsets: torch.Tensor, scheme: Scheme) -> QuantTensor:
    """bf16 rows [P, C] in a scheme of single rows; those behind offsets[E] stay unwritten."""
    out = cast(QuantTensor, empty_rows(rows.shape[0], rows.shape[1], scheme, rows.device))
    if rows.shape[0]:
        _run("quantize_kernel", quantize_arguments(rows, offsets, out))
    return out


def combine(rows: torch.Tensor, slot_to_pos: torch.Tensor) -> torch.Tensor:
    """rows [P, H] bf16 -> [M, H] bf16: a token's slots summed in their order in fp32, rounded once."""
    out = torch.empty(slot_to_pos.shape[0], rows.shape[1], dtype=rows.dtype, device=rows.device)
    _run("combine_kernel", combine_arguments(rows, slot_to_pos, out))
    return out


def empty_rows(num_rows: int, width: int, scheme: Scheme | None, device: torch.device) -> Matrix:
    """Room for rows in a scheme of single rows, or (None) in bf16."""
    if scheme is None:
        return torch.empty(num_rows, width, dtype=torch.bfloat16, device=device)
    group = scheme.group_for((num_rows, width))
    values = torch.empty(num_rows, width, dtype=scheme.values, device=device)
    return QuantTensor(values, torch.empty(num_rows, width // group[1], dtype=scheme.sf, device=device), group)


def empty_places(topk_ids: torch.Tensor, num_experts: int) -> Places:
    """Room for where each slot's row is."""
    offsets = torch.empty(num_experts + 1, dtype=torch.int32, device=topk_ids.device)
    return Places(offsets, torch.empty(topk_ids.shape, dtype=torch.int32, device=topk_ids.device))


def sort_arguments(topk_ids: torch.Tensor, places: Places) -> Launch:
    """Grid, arguments and options of `sort_kernel`."""
    num_experts, num_slots = len(places.offsets) - 1, topk_ids.numel()
    block = next(block for block, most in SORTED if num_slots <= most)
    chunks = max(1, min(MAX_CHUNKS, -(-num_slots // block), MAX_SORTS // (num_experts + 1)))
    arguments = topk_ids.contiguous(), places.offsets, places.slot_to_pos, num_slots, num_experts, block
    return (num_experts + 1, chunks), arguments, {"num_warps": 4}


def gather_arguments(
    tokens: torch.Tensor, topk_weights: torch.Tensor, places: Places, rows: Matrix, weights: torch.Tensor
) -> Launch:
    """Grid, arguments and options of `gather_kernel`."""
    tokens = tokens if tokens.stride(1) == 1 else tokens.contiguous()
    (M, width), k = tokens.shape, topk_weights.shape[1]
    values, sf, block, *form = quantised(rows, width)
    arguments = (
        tokens, tokens.stride(0), topk_weights.contiguous(), places.slot_to_pos, values, sf, weights, width, k,
        block, power_of_two(k), *form,
    )  # fmt: skip
    return (M, -(-width // block)), arguments, warps(block)


def quantize_arguments(rows: torch.Tensor, offsets: torch.Tensor, out: QuantTensor) -> Launch:
    """Grid, arguments and options of `quantize_kernel`."""
    num_rows, width = rows.shape
    values, sf, block, *form = quantised(out, width)
    arguments = rows, values, sf, offsets, len(offsets) - 1, width, block, *form
    # Where most of the room is empty, a program a row would do little but start.
    return (min(num_rows, MANY_PROGRAMS), -(-width // block)), arguments, warps(block)


def combine_arguments(rows: torch.Tensor, slot_to_pos: torch.Tensor, out: torch.Tensor) -> Launch:
    """Grid, arguments and options of `combine_kernel`."""
    (M, k), width = slot_to_pos.shape, rows.shape[1]
    block = min(SUMMED, power_of_two(width))
    return (M, -(-width // block)), (rows, slot_to_pos, out, width, k, block), warps(block)


def quantised(rows: Matrix, width: int) -> tuple:
    """What kernels take of rows that they quantise: values, factors, columns of a program, GROUP, POWERS, HARDWARE.

    A program that finds one factor for a row has all of it.
    """
    if isinstance(rows, torch.Tensor):
        return rows, None, min(GATHERED, power_of_two(width)), 0, False, False
    whole = rows.group[1] == width and rows.sf.dtype == torch.float32
    block = power_of_two(width) if whole else min(GATHERED, power_of_two(width))
    group = block if whole else rows.group[1]
    powers = rows.sf.dtype == torch.float8_e8m0fnu
    sf = rows.sf.view(torch.uint8) if powers else rows.sf
    return rows.values.view(torch.uint8), sf, block, group, powers, _casts_e4m3(rows.device)


def _casts_e4m3(device: torch.device) -> bool:
    """Whether the GPU has the cast; "meta" stands for one that has."""
    if device.type != "cuda":
        return device.type == "meta"
    return torch.cuda.get_device_capability(device) >= (8, 9)


def warps(block: int) -> dict[str, int]:
    """Options of a program on so many columns."""
    return {"num_warps": min(16, max(4, block // COLUMNS_OF_WARP))}


def _run(name: str, given: Launch) -> None:
    from envoi.experts import kernel_triton
    from envoi.gemm.launch import launch

    launch(getattr(kernel_triton, name), *given)


def _grouped(
    rows: Matrix, weights: Matrix, offsets: torch.Tensor, epilogue: Epilogue, operands: dict[str, Any],
    grouping: Grouping,
) -> Matrix:  # fmt: skip
    """A grouped GEMM whose epilogue has one output; the rows of no expert aren't written."""
    outputs = run_kernels(rows, weights, offsets, epilogue.ir, torch.bfloat16, operands, grouping=grouping)
    values, *sf = cast(list[torch.Tensor], outputs)
    return QuantTensor(values, sf[0], (1, values.shape[1] // sf[0].shape[1])) if sf else values

"""GEMMs by expert with MXFP4 weights in the order for FP8 tokens: what the kernel can take, and its launch."""

from functools import cache
from typing import cast

import torch

from envoi.epilogues.ir import IR
from envoi.epilogues.lower import Lowered, lower
from envoi.epilogues.outputs import chunk_columns, deferred, empty_outputs, operand_tensors, reduces_rows, rows_must_fit
from envoi.ops.gemm.grouping import Grouping, RowMode
from envoi.ops.gemm.hopper.host import A_SF, as_stored, max_experts, with_scales
from envoi.ops.gemm.hopper_w4a8.config import ROW_BYTES, TILE, W4A8Config, w4a8_config
from envoi.quant.fp8_fragments import ORDER, e4m3_tables
from envoi.runtime import devices, workspace
from envoi.runtime.tma import descriptor, tma_ready, unswizzled_descriptor
from envoi.types import Matrix, QuantTensor


def why_not_w4a8(a: Matrix, b: Matrix, ir: IR, grouping: Grouping) -> str:
    """Return why the kernel can't run this; "" if it can."""
    if not isinstance(a, QuantTensor) or a.packed or a.sf.dtype != torch.float32 or a.group != (1, a.shape[-1]):
        return "the tokens' format"
    if not isinstance(b, QuantTensor) or b.order != ORDER:
        return "the weights' order"
    if grouping.write_tail:
        return "rows of no expert are wanted"
    if ir.takes_halves:
        return "halves of the weights' rows"
    if deferred(ir) or reduces_rows(ir) or rows_must_fit(ir):
        return "values of whole rows"
    return "" if chunk_columns(ir) <= TILE else f"a piece of {chunk_columns(ir)} columns"


def run_gemm(
    a: QuantTensor, b: QuantTensor, offsets: torch.Tensor, ir: IR, out_dtype: torch.dtype, operands: dict,
    grouping: Grouping, config: W4A8Config | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """Return the outputs of `envoi.grouped_gemm` but for rows of no expert, as a flat list.

    The product is of the weights without their scale, which is the epilogue's to multiply by, as with NVFP4.
    """
    from envoi.ops.gemm.hopper_w4a8.kernel import w4a8_kernel
    from envoi.runtime.launch import launch

    written = empty_outputs(ir, out_dtype, a.shape[0], b.shape[-2], a.device, grouping.to)
    if a.shape[0] > 0 and b.shape[0] > 0:
        scaled = with_scales(ir, "row", "")  # first times the tokens' factors
        tensors, pointers = operand_tensors(scaled, {A_SF: a.sf.reshape(-1), **operands}, b.shape[0])
        code = lower(scaled, out_dtype, "gluon", False, False, pointers, scattered=grouping.to is not None)
        config = config or chosen(a, b, grouping)
        given = arguments(a, b, offsets, code, tensors, written, config)
        launch(w4a8_kernel, (devices.num_sms(a.device) * config.ctas,), given, config.options)
    return written


def chosen(a: QuantTensor, b: QuantTensor, grouping: Grouping) -> W4A8Config:
    """Return the config for this call."""
    E, N, K = cast(tuple[int, int, int], b.shape)
    rows = grouping.likely_rows(a.shape[0])
    return w4a8_config(N, K, rows, E, devices.num_sms(a.device), looks_up=not b.scales_at_most_2)


def arguments(
    a: QuantTensor, b: QuantTensor, offsets: torch.Tensor, code: Lowered, operands: tuple,
    outputs: list[torch.Tensor], config: W4A8Config,
) -> tuple:  # fmt: skip
    """Return the kernel's arguments."""
    M, (E, N, K) = a.shape[0], cast(tuple[int, int, int], b.shape)
    nothing = torch.empty(0, dtype=torch.float32, device=a.device)  # no epilogue here reduces rows
    words = b.values.flatten().view(torch.int32).view(-1, 256)
    factors = b.sf.view(torch.uint8).flatten().view(torch.int32).view(-1, 32)
    tokens = tma_ready(a.values)
    few = descriptor(tokens, config.block_y // 8, ROW_BYTES) if config.widths > 1 else None
    return (
        descriptor(tokens, config.block_y, ROW_BYTES), few,
        unswizzled_descriptor(words, 4, 256), unswizzled_descriptor(factors, 2, 32), None,
        tables_on(a.device) if config.looks_up else None,
        operands or (0,), as_stored(outputs), offsets, nothing, nothing.view(torch.int32), M, N, K, E, config, code,
        RowMode.of(True, False), max_experts(E, False),
    )  # fmt: skip


def tables_on(device: torch.device) -> torch.Tensor:
    """Return the tables of `envoi.quant.fp8_fragments` on a device, int64 [16], kept for the life of the process."""
    return workspace.constant(_tables_on, 16, torch.int64, device)


@cache
def _tables_on(device: torch.device) -> torch.Tensor:
    tables = e4m3_tables().view(torch.int64).flatten()
    return workspace.in_another_thread(lambda: tables.to(device))

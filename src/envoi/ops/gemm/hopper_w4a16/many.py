"""GEMMs by expert with weights in fragment order: what the kernel for many tokens can take, and its launch."""

from functools import partial
from typing import cast

import torch

from envoi.epilogues.ir import IR
from envoi.epilogues.lower import Lowered
from envoi.epilogues.outputs import chunk_columns, rows_must_fit
from envoi.ops.gemm.grouping import Grouping, RowMode
from envoi.ops.gemm.hopper.host import as_stored, max_experts
from envoi.ops.gemm.hopper_mx.host import become_bf16, tokens_arguments
from envoi.ops.gemm.hopper_w4a8.config import TILE, W4A8Config, w4a8_config
from envoi.ops.gemm.hopper_w4a16.few import as_words, form_of
from envoi.ops.gemm.triton import host as triton_host
from envoi.runtime import devices, workspace
from envoi.runtime.math import cdiv
from envoi.runtime.tma import descriptor, tma_ready, unswizzled_descriptor
from envoi.types import Matrix, QuantTensor


def why_not_many(a: Matrix, b: Matrix, ir: IR, grouping: Grouping) -> str:
    """Return why the kernel can't run this; "" if it can."""
    if not become_bf16(a):
        return "the tokens' format"
    if not isinstance(b, QuantTensor) or b.order != "fragments":
        return "the weights' order"
    if grouping.write_tail:
        return "rows of no expert are wanted"
    if ir.takes_halves:
        return "halves of the weights' rows"
    if rows_must_fit(ir):
        return triton_host.why_not_rows(ir, b.shape[-2])
    return "" if chunk_columns(ir) <= TILE else f"a piece of {chunk_columns(ir)} columns"


def run_gemm(
    a: Matrix, b: QuantTensor, offsets: torch.Tensor, ir: IR, out_dtype: torch.dtype, operands: dict,
    grouping: Grouping, config: W4A8Config | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """Return the outputs of `envoi.grouped_gemm` but for rows of no expert, as a flat list.

    Tokens in MXFP8 are first widened to bf16, which holds their numbers, by a kernel of their own.
    """
    a = a if isinstance(a, torch.Tensor) else widened(a, offsets)
    launch_gemm = partial(_launch, a, b, offsets, config, grouping)
    return triton_host.run_with_rows(launch_gemm, a, b, offsets, ir, out_dtype, operands, grouping)


def widened(a: QuantTensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return tokens in MXFP8 [M, K] as bf16; rows of no expert stay unwritten."""
    from envoi.ops.gemm.hopper_mx.tokens import widen_kernel
    from envoi.runtime.launch import launch

    tokens = torch.empty(a.shape, dtype=torch.bfloat16, device=a.device)
    if tokens.numel():
        launch(widen_kernel, *tokens_arguments(a, 0, tokens, offsets), {})
    return tokens


def chosen(a: torch.Tensor, b: QuantTensor, code: Lowered, grouping: Grouping) -> W4A8Config:
    """Return the config for this call."""
    E, N, K = cast(tuple[int, int, int], b.shape)
    rows, form = grouping.likely_rows(a.shape[0]), form_of(b)
    widened = "int4" if form is not None else "nvfp4" if b.group[1] == 16 else "bf16"
    sms, reduces_rows = devices.num_sms(a.device), code.partials > 0
    return w4a8_config(N, K, rows, E, sms, widened=widened, reduces_rows=reduces_rows, int4=form)


def _launch(
    a: torch.Tensor, b: QuantTensor, offsets: torch.Tensor, config: W4A8Config | None, grouping: Grouping,
    code: Lowered, operands: tuple, outputs: list[torch.Tensor],
) -> None:  # fmt: skip
    from envoi.ops.gemm.hopper_w4a8.kernel import w4a8_kernel
    from envoi.runtime.launch import launch

    config = config or chosen(a, b, code, grouping)
    given = arguments(a, b, offsets, code, operands, outputs, config)
    launch(w4a8_kernel, (devices.num_sms(a.device) * config.ctas,), given, config.options)


def arguments(
    a: torch.Tensor, b: QuantTensor, offsets: torch.Tensor, code: Lowered, operands: tuple,
    outputs: list[torch.Tensor], config: W4A8Config,
) -> tuple:  # fmt: skip
    """Return the kernel's arguments."""
    M, (E, N, K) = a.shape[0], cast(tuple[int, int, int], b.shape)
    parts = torch.empty(code.partials * cdiv(N, TILE) * M, dtype=torch.float32, device=a.device)
    count = workspace.counters(M + config.block_y, a.device) if parts.numel() else parts.view(torch.int32)
    tokens = tma_ready(a)
    few = descriptor(tokens, config.block_y // 8, TILE) if config.widths > 1 else None
    words = b.values.flatten().view(torch.int32).view(-1, 256)
    factors = as_words(b.sf).view(-1, config.factor_words)
    zeros = None
    if b.zeros is not None:
        kind = torch.int16 if config.zero_bytes == TILE else torch.int32
        zeros = unswizzled_descriptor(b.zeros.flatten().view(kind).view(-1, 32), 1, 32)
    return (
        descriptor(tokens, config.block_y, TILE), few, unswizzled_descriptor(words, 2, 256),
        unswizzled_descriptor(factors, 1, config.factor_words), zeros, None, operands or (0,), as_stored(outputs),
        offsets, parts, count, M, N, K, E, config, code, RowMode.of(True, False), max_experts(E, False),
    )  # fmt: skip

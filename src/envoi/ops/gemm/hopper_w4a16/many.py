"""GEMMs by expert with weights in fragment order: what the kernel for many tokens can take, and its launch."""

from typing import cast

import torch

from envoi.epilogues.ir import IR
from envoi.epilogues.library import store
from envoi.epilogues.lower import Lowered, lower
from envoi.epilogues.outputs import chunk_columns, empty_outputs, operand_tensors, output_specs, rows_must_fit
from envoi.ops.gemm.grouping import Grouping, RowMode
from envoi.ops.gemm.hopper.host import as_stored, max_experts
from envoi.ops.gemm.hopper_w4a16.many_config import BLOCK_K, ROLE_M, ManyConfig, many_config
from envoi.ops.gemm.triton import host as triton_host
from envoi.runtime import devices, workspace
from envoi.runtime.math import cdiv
from envoi.runtime.tma import descriptor, tma_ready
from envoi.types import Matrix, QuantTensor


def why_not_many(a: Matrix, b: Matrix, ir: IR, grouping: Grouping) -> str:
    """Return why the kernel can't run this; "" if it can."""
    if not isinstance(a, torch.Tensor) or a.dtype != torch.bfloat16:
        return "the tokens' format"
    if not isinstance(b, QuantTensor) or b.order != "fragments":
        return "the weights' order"
    if grouping.write_tail:
        return "rows of no expert are wanted"
    if ir.takes_halves:
        return "halves of the weights' rows"
    if rows_must_fit(ir):
        return "whole rows" if b.shape[-2] <= triton_host.MAX_TILE_N else triton_host.why_not_triton(ir, b.shape[-2])
    return "" if chunk_columns(ir) <= ROLE_M else f"a piece of {chunk_columns(ir)} columns"


def run(
    a: torch.Tensor, b: QuantTensor, offsets: torch.Tensor, ir: IR, out_dtype: torch.dtype, operands: dict,
    grouping: Grouping, config: ManyConfig | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """Return the outputs of `envoi.grouped_gemm` but for rows of no expert, as a flat list."""
    M, N = a.shape[0], b.shape[-2]
    tensors, pointers = operand_tensors(ir, operands, b.shape[0])
    written = empty_outputs(ir, output_specs(ir, out_dtype), M, N, a.device, grouping.to)
    if M == 0:
        return triton_host.finish_outputs(ir, written, offsets)
    if rows_must_fit(ir):
        acc = torch.empty(M, N, dtype=torch.float32, device=a.device)
        plain = lower(store.ir, torch.float32, "gluon", False, False, frozenset())
        _launch(a, b, offsets, plain, (), [acc], grouping, config)
        triton_host.finish_rows(acc, ir, out_dtype, tensors, pointers, written, offsets, False)
    else:
        code = lower(ir, out_dtype, "gluon", False, False, pointers, scattered=grouping.to is not None)
        _launch(a, b, offsets, code, tensors, written, grouping, config)
    return triton_host.finish_outputs(ir, written, offsets)


def _launch(
    a: torch.Tensor, b: QuantTensor, offsets: torch.Tensor, code: Lowered, operands: tuple,
    outputs: list[torch.Tensor], grouping: Grouping, config: ManyConfig | None,
) -> None:  # fmt: skip
    from envoi.ops.gemm.hopper_w4a16.kernel_many import many_kernel
    from envoi.runtime.launch import launch

    config = config or many_config(b.shape[-1], grouping.likely_rows(a.shape[0]), b.shape[0])
    given = arguments(a, b, offsets, code, operands, outputs, config)
    launch(many_kernel, (devices.num_sms(a.device),), given, {"num_warps": config.num_warps})


def as_words(b: QuantTensor) -> torch.Tensor:
    """Return scale factors [E, N, groups] as the words of a row pair's in a tile: int32, or int64 of NVFP4."""
    return b.sf.view(torch.uint8).flatten().view(torch.int64 if b.group[1] == 16 else torch.int32)


def arguments(
    a: torch.Tensor, b: QuantTensor, offsets: torch.Tensor, code: Lowered, operands: tuple,
    outputs: list[torch.Tensor], config: ManyConfig,
) -> tuple:  # fmt: skip
    """Return the kernel's arguments."""
    M, (E, N, K) = a.shape[0], cast(tuple[int, int, int], b.shape)
    parts = torch.empty(code.partials * cdiv(N, ROLE_M) * M, dtype=torch.float32, device=a.device)
    count = workspace.counters(M + config.block_y, a.device) if parts.numel() else parts.view(torch.int32)
    return (
        descriptor(tma_ready(a), config.block_y, BLOCK_K), b.values.view(torch.int32), as_words(b),
        operands or (0,), as_stored(outputs), offsets, parts, count, M, N, K, E, config, code,
        RowMode.of(True, False), max_experts(E, False),
    )  # fmt: skip

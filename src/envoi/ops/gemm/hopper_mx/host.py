"""Host side of the Hopper GEMM for MX weights: supported calls, the two launches."""

from functools import partial
from typing import cast

import torch

from envoi.epilogues.ir import IR
from envoi.epilogues.lower import Lowered
from envoi.epilogues.outputs import chunk_columns, rows_must_fit
from envoi.ops.gemm.grouping import ALL_ROWS, Grouping, RowMode
from envoi.ops.gemm.hopper.host import as_stored, max_experts
from envoi.ops.gemm.hopper_mx.config import NARROW, MxConfig, default_config
from envoi.ops.gemm.triton import host as triton_host
from envoi.quant.pack import pad_factors
from envoi.runtime import devices, workspace
from envoi.runtime.math import cdiv
from envoi.runtime.tma import as_one_matrix, descriptor, is_tma_ready, tma_ready
from envoi.types import Matrix, QuantTensor

WIDENED_ROWS = 8  # rows of tokens that a program of `widen_kernel` widens


def why_not_mx(a: Matrix, b: Matrix, ir: IR) -> str:
    """Return why the kernel can't run this; "" if it can."""
    if 0 in (*a.shape, *b.shape):
        return "a matrix is empty"
    if not (isinstance(b, QuantTensor) and b.sf.dtype == torch.float8_e8m0fnu and b.group == (1, 32)):
        return "the weights' format"
    if b.order != "rows":
        return "the weights' order"
    if not become_bf16(a):
        return "the tokens' format"
    if ir.takes_halves:
        return "halves of the weights' rows"
    if rows_must_fit(ir):
        return triton_host.why_not_rows(ir, b.shape[-2])
    return "" if chunk_columns(ir) <= NARROW else f"a chunk of {chunk_columns(ir)} columns"


def tokens_arguments(
    a: Matrix, bits: int, out: torch.Tensor, offsets: torch.Tensor | None
) -> tuple[tuple[int, int], tuple]:
    """Return the grid and the arguments of `tokens.widen_kernel`, which writes tokens to `out` as bf16.

    K is in the order that the GEMM has for weights of `bits`; 0: as it is. offsets: int32 [E + 1], None for all rows;
    rows after offsets[E] are not written.
    """
    M, K = a.shape
    values, sf = (a, a) if isinstance(a, torch.Tensor) else (a.values, a.sf.view(torch.uint8))
    values, sf = (x if x.stride(-1) == 1 else x.contiguous() for x in (values, sf))
    return (cdiv(M, WIDENED_ROWS), cdiv(K, 512)), (
        values, sf, out, None if offsets is None else offsets[-1:], M, K, values.stride(0), sf.stride(0),
        out.stride(0), isinstance(a, QuantTensor), bits, WIDENED_ROWS, devices.on_gpu(out.device),
    )  # fmt: skip


def become_bf16(a: Matrix) -> bool:
    """Return True for tokens that `tokens.widen_kernel` makes bf16 without loss: in bf16 or MXFP8."""
    if isinstance(a, torch.Tensor):
        return a.dtype == torch.bfloat16
    return not a.packed and a.sf.dtype == torch.float8_e8m0fnu and a.group == (1, 32)


def factor_words(sf: torch.Tensor) -> torch.Tensor:
    """Return weights' scale factors [.., N, K / 32] as int32 [rows, K / 128]: shared if rows are on 16 bytes.

    A word that K ends in can't be shared: what follows K in it may be the code of NaN.
    """
    raw = sf.view(torch.uint8)
    columns = raw.shape[-1]
    if columns % 4 or not is_tma_ready(raw):
        raw = pad_factors(sf).view(torch.uint8)
    stride = raw.stride(-2)
    words = raw.as_strided((raw[..., 0].numel(), 4 * cdiv(columns, 4)), (stride, 1))
    return words.view(torch.int32)


def run_gemm(
    a: Matrix, b: Matrix, offsets: torch.Tensor | None, ir: IR, out_dtype: torch.dtype, operands: dict,
    config: MxConfig | None = None, grouping: Grouping = ALL_ROWS,
) -> list[torch.Tensor]:  # fmt: skip
    """Return the flat outputs of `envoi.gemm` or, with offsets, of `envoi.grouped_gemm`."""
    launch_gemm = partial(_launch, a, cast(QuantTensor, b), offsets, config, grouping)
    return triton_host.run_with_rows(launch_gemm, a, b, offsets, ir, out_dtype, operands, grouping)


def _launch(
    a: Matrix, b: QuantTensor, offsets: torch.Tensor | None, config: MxConfig | None, grouping: Grouping,
    code: Lowered, operands: tuple, outputs: list[torch.Tensor],
) -> None:  # fmt: skip
    from envoi.ops.gemm.hopper_mx.kernel import mx_kernel
    from envoi.ops.gemm.hopper_mx.tokens import widen_kernel
    from envoi.runtime.launch import launch_with_dependent

    (M, K), num_sms = a.shape, devices.num_sms(a.device)
    num_groups, bits = 0 if offsets is None else b.shape[0], 4 if b.packed else 8
    num_tokens = grouping.likely_rows(M)
    config = config or default_config(num_tokens, b.shape[-2], num_groups, num_sms, code, bits, b.scales_at_most_2)
    tokens = torch.empty(M, cdiv(K, 128) * 128, dtype=torch.bfloat16, device=a.device)
    grid, args = arguments(tokens, b, offsets, code, operands, outputs, config, num_sms, grouping.write_tail)
    launch_with_dependent(
        (widen_kernel, *tokens_arguments(a, config.bits, tokens, offsets), {}),
        (mx_kernel, grid, args, {"num_warps": config.num_warps}),
    )


def arguments(
    tokens: torch.Tensor, b: QuantTensor, offsets: torch.Tensor | None, code: Lowered, operands: tuple,
    outputs: list[torch.Tensor], config: MxConfig, num_sms: int, write_tail: bool = True,
) -> tuple[tuple[int], tuple]:  # fmt: skip
    """Return the grid and the kernel's arguments. tokens: widened, [M, K rounded up to 128]."""
    M, (N, K), device = tokens.shape[0], b.shape[-2:], tokens.device
    num_experts = 0 if offsets is None else b.shape[0]
    tiles = cdiv(M, config.block_m) * cdiv(N, config.block_n)
    words = as_one_matrix(tma_ready(b.values).view(torch.int32))
    partials = torch.empty(code.partials * cdiv(N, NARROW) * M, dtype=torch.float32, device=device)
    counters = workspace.counters(M + config.block_m, device) if partials.numel() else partials.view(torch.int32)
    return (num_sms if num_experts else min(tiles, num_sms),), (
        descriptor(words, config.block_x, config.words), descriptor(factor_words(b.sf), config.block_x, 4),
        descriptor(tokens, config.block_y, config.block_k), operands or (0,), as_stored(outputs),
        offsets,
        partials, counters, M, N, K, num_experts, tiles, config, code,
        RowMode.of(num_experts > 0, write_tail), max_experts(num_experts, write_tail),
    )  # fmt: skip

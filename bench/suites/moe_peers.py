"""Other libraries' MoE layers on one GPU, where they are installed: none of them is a dependency.

    vllm_triton      vLLM's fused_experts with its tuned configs, bf16 and fp8_block128
    vllm_deepgemm    vLLM's DeepGEMM experts, fp8_block128, from the rows on at which vLLM takes them
    vllm_marlin      vLLM's Marlin kernels, MXFP4 weights beside bf16 activations; its compiled operators suffice
    triton_kernels   Triton's kernels for gpt-oss, MXFP4 weights beside bf16 activations: slots sorted by expert (from a
                     matrix of bits that is made outside the time), the activation in the first GEMM, the sum over slots
                     in the second
    humming_*        Humming's products, see `peer_humming`
    flashinfer       FlashInfer's CUTLASS experts, see `peer_flashinfer`

Weights are converted outside the time. Each result is compared with float64 on the same weights first, and a peer whose
result is wrong isn't timed.
"""

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, cast

import torch
from torch.nn import functional

from bench.shapes import MoeShape
from bench.suites import peer_flashinfer, peer_humming
from bench.suites.peer_humming import aligned, blocks_of, import_operators
from bench.suites.torch_moe import Layer
from bench.timing import Run
from bench.trial import sample_rows
from envoi.quant.bits import unpack_nibbles
from envoi.quant.fragments import to_rows
from envoi.runtime.devices import num_sms
from envoi.tune.problems import relative_error
from envoi.types import QuantTensor

MAX_ERROR = 0.1
MARLIN_BLOCKS = (8, 16, 32, 48, 64)  # rows of a tile
MARLIN_TILE_K, MARLIN_TILE_N, MARLIN_PACK = 16, 64, 8
MARLIN_ALIGN_HIDDEN, MARLIN_ALIGN_INTERMEDIATE = 256, 128
OAI_ALPHA, OAI_LIMIT = 1.702, 7.0
DEEPGEMM_MIN_TOKENS = 128

Oracle = Callable[[Layer, torch.Tensor], torch.Tensor]
Maker = Callable[[Layer], tuple[Run, str]]  # the call, and the activation that it computes


def candidates(shape: MoeShape, layer: Layer, oracle: Oracle) -> dict[str, Callable[[], Run]]:
    """Return the peers of a format. oracle(layer, rows): float64 outputs of these tokens.

    A candidate raises ModuleNotFoundError if its library isn't installed, RuntimeError if its result is wrong.
    """
    exact = cache(lambda activation: oracle(_with(layer, activation), _rows(layer)))
    return {name: lambda make=make: _checked(make, layer, exact) for name, make in _makers(shape).items()}


def _makers(shape: MoeShape) -> dict[str, Maker]:
    blocks: dict[str, Maker] = {"vllm_triton": vllm_triton}
    if shape.num_tokens >= DEEPGEMM_MIN_TOKENS:
        blocks["vllm_deepgemm"] = vllm_deepgemm
    return {
        "bf16": {"vllm_triton": vllm_triton, "flashinfer": peer_flashinfer.bf16},
        "fp8_block128": {**blocks, "humming_w8a8": peer_humming.w8a8, "flashinfer": peer_flashinfer.fp8_block128},
        "mxfp4": {
            "vllm_marlin": vllm_marlin, "triton_kernels": triton_kernels, "humming_w4a16": peer_humming.w4a16,
            "flashinfer": peer_flashinfer.mxfp4,
        },
        "mxfp4_fp8": {"humming_w4a8": peer_humming.w4a8},
        "mxfp4_mxfp8": {"humming_w4a8": peer_humming.w4a8},
    }.get(shape.format, {})  # fmt: skip


def _with(layer: Layer, activation: str) -> Layer:
    limit = OAI_LIMIT if activation == "swiglu_oai" else None
    return replace(layer, packed=replace(layer.packed, activation=activation, swiglu_limit=limit))


def _rows(layer: Layer) -> torch.Tensor:
    return sample_rows(len(layer.tokens), layer.tokens.device)


def _checked(make: Maker, layer: Layer, exact: Callable[[str], torch.Tensor]) -> Run:
    run, activation = make(layer)
    error = relative_error(cast(torch.Tensor, run())[_rows(layer)], exact(activation))
    if not error <= MAX_ERROR:
        raise RuntimeError(f"its result differs from float64's by {error:.1e}")
    return run


# vLLM's Triton kernel


def vllm_triton(layer: Layer) -> tuple[Run, str]:
    """Return a call of vLLM's fused_experts, on weights of its own in the layer's format, and its activation."""
    fused: Any = importlib.import_module("vllm.model_executor.layers.fused_moe.fused_moe")
    gate_up, down, config = layer.gate_up, layer.down, None
    if layer.packed.format == "fp8_block128":
        made: Any = importlib.import_module("vllm.model_executor.layers.fused_moe.config")
        (gate_up, gate_up_sf), (down, down_sf) = blocks_of(gate_up), blocks_of(down)
        config = made.fp8_w8a8_moe_quant_config(w1_scale=gate_up_sf, w2_scale=down_sf, block_shape=[128, 128])
    weights, ids = layer.routing.topk_weights, layer.routing.topk_ids

    def run() -> torch.Tensor:
        return fused.fused_experts(layer.tokens, gate_up, down, weights, ids, quant_config=config)

    return run, "swiglu"


# vLLM's DeepGEMM experts


def vllm_deepgemm(layer: Layer) -> tuple[Run, str]:
    """Return a call of vLLM's steps around DeepGEMM's grouped products, on weights of its own, and its activation."""
    permute: Any = importlib.import_module("vllm.model_executor.layers.fused_moe.deep_gemm_utils")
    quant: Any = importlib.import_module("vllm.model_executor.layers.quantization.utils.fp8_utils")
    gemms: Any = importlib.import_module("vllm.utils.deep_gemm")
    gate_up, down = blocks_of(layer.gate_up), blocks_of(layer.down)
    weights, ids = layer.routing.topk_weights, layer.routing.topk_ids

    def product(rows: tuple, weight: tuple, ends: torch.Tensor) -> torch.Tensor:
        out = layer.tokens.new_empty(rows[0].shape[0], weight[0].shape[1])
        gemms.m_grouped_fp8_gemm_nt_contiguous(rows, weight, out, ends, use_psum_layout=True)
        return out

    def run() -> torch.Tensor:
        quantised = quant.per_token_group_quant_fp8(layer.tokens, 128)
        *rows, ends, places, align = permute.deepgemm_moe_permute(
            *quantised, ids, layer.num_experts, None, None, use_psum_layout=True
        )
        with gemms.mk_alignment_scope(align):
            h = product(tuple(rows), gate_up, ends)
            activated = quant.silu_mul_per_token_group_quant_fp8_colmajor(
                h, use_ue8m0=False, expert_ends=ends, expert_alignment=align
            )
            result = product(activated, down, ends)
        out = torch.empty_like(layer.tokens)
        permute.deepgemm_unpermute_and_reduce(result, ids, weights, places, None, out)
        return out

    return run, "swiglu"


# vLLM's Marlin


def vllm_marlin(layer: Layer) -> tuple[Run, str]:
    """Return a call of vLLM's Marlin operators on the layer's own MXFP4 weights, and its activation.

    Sizes are padded to what the kernels take, tokens too, outside the time.
    """
    import_operators()
    kind = importlib.import_module("vllm.scalar_type").scalar_types.float4_e2m1f.id
    gate_up, down = to_rows(cast(QuantTensor, layer.packed.gate_up)), to_rows(cast(QuantTensor, layer.packed.down))
    hidden, intermediate = layer.tokens.shape[1], down.shape[-1]
    more_hidden = -hidden % MARLIN_ALIGN_HIDDEN
    more_intermediate = -intermediate % MARLIN_ALIGN_INTERMEDIATE
    first = marlin_weights(gate_up, more_intermediate, more_hidden, halves=True)
    second = marlin_weights(down, more_hidden, more_intermediate, halves=False)
    tokens = functional.pad(layer.tokens, (0, more_hidden))
    workspace = torch.zeros(4 * num_sms(tokens.device), dtype=torch.int32, device=tokens.device)
    weights, ids = layer.routing.topk_weights, layer.routing.topk_ids
    (m, k), num_experts, width = ids.shape, layer.num_experts, intermediate + more_intermediate
    block = marlin_block(m * k, num_experts)
    moe_ops, ops = torch.ops._moe_C, torch.ops._C

    def product(x, out, w, slots, per_token: int, weighted: bool) -> torch.Tensor:
        values, sf = w
        return moe_ops.moe_wna16_marlin_gemm(
            x, out, values, None, sf, None, None, None, workspace, *slots, weights, block, per_token,
            weighted, kind, x.shape[0], out.shape[1], x.shape[1], False, True, False, -1, -1, -1,
        )  # fmt: skip

    def run() -> torch.Tensor:
        slots = aligned(ids, block, num_experts)
        h = product(tokens, tokens.new_empty(m * k, 2 * width), first, slots, k, False)
        activated = tokens.new_empty(m * k, width)
        ops.silu_and_mul(activated, h)
        rows = product(activated, tokens.new_empty(m * k, tokens.shape[1]), second, slots, 1, True)
        out = torch.empty_like(tokens)
        moe_ops.moe_sum(rows.view(m, k, -1), out)
        return out[:, :hidden]

    return run, "swiglu"


def marlin_block(num_slots: int, num_experts: int) -> int:
    """Return the rows of a tile: the fewest that the experts' mean number of rows nearly fills, as vLLM chooses."""
    fitting = (block for block in MARLIN_BLOCKS if num_slots / num_experts / block < 0.9)
    return next(fitting, MARLIN_BLOCKS[-1])


def marlin_weights(
    x: QuantTensor, more_rows: int, more_columns: int, halves: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert MXFP4 weights [E, N, K] by rows to Marlin's: int32 [E, K / 16, 2 N] and UE8M0 [E, K / 32, N].

    more_rows, more_columns: padding of N (of each half) and of K. halves: rows are gate, up in turn; Marlin's are all
    of gate, then all of up.
    """
    values, sf = [], []
    for matrix, factors in zip(x.values, x.sf.view(torch.uint8), strict=True):
        parts = [(matrix[0::2], factors[0::2]), (matrix[1::2], factors[1::2])] if halves else [(matrix, factors)]
        pairs = torch.cat([functional.pad(v, (0, more_columns // 2, 0, more_rows)) for v, _ in parts])
        powers = torch.cat([functional.pad(f, (0, more_columns // 32, 0, more_rows)) for _, f in parts])
        values.append(marlin_values(pairs))
        sf.append(marlin_factors(powers))
    return torch.stack(values), torch.stack(sf).view(torch.float8_e8m0fnu)


def marlin_values(values: torch.Tensor) -> torch.Tensor:
    """Put E2M1 pairs uint8 [N, K / 2] into Marlin's order: int32 [K / 16, 2 N].

    A thread (column, t) of a tile of 16 of K by 64 of N holds, for each 16 of N, K = 8 h + 2 t + b of two columns.
    """
    n, k = values.shape[0], 2 * values.shape[1]
    codes = unpack_nibbles(values).T.reshape(
        k // MARLIN_TILE_K, 2, 4, 2, n // MARLIN_TILE_N, 4, 2, 8
    )  # K tile, h, t, b | N tile, 16 columns, 8 columns, column
    words = codes.permute(0, 4, 7, 2, 5, 3, 6, 1).reshape(k // MARLIN_TILE_K, 2 * n, MARLIN_PACK).to(torch.int64)
    shifts = 4 * torch.arange(MARLIN_PACK, device=values.device)
    packed = (words << shifts).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def marlin_factors(sf: torch.Tensor) -> torch.Tensor:
    """Put scale factors uint8 [N, K / 32] into Marlin's order: uint8 [K / 32, N]."""
    n, groups = sf.shape
    by_thread = sf.T.reshape(groups, n // 64, 8, 8).transpose(2, 3)
    return by_thread.reshape(groups, n // 4, 2, 2).transpose(2, 3).reshape(groups, n).contiguous()


# triton_kernels


def triton_kernels(layer: Layer) -> tuple[Run, str]:
    """Return a call of triton_kernels' two GEMMs and routing on the layer's own MXFP4 weights, and its activation."""
    ogs: Any = importlib.import_module("triton_kernels.matmul_ogs")
    tensor: Any = importlib.import_module("triton_kernels.tensor")
    swiglu: Any = importlib.import_module("triton_kernels.swiglu").swiglu_fn
    first, second = (_converted(cast(QuantTensor, w)) for w in (layer.packed.gate_up, layer.packed.down))
    specs = ogs.FnSpecs("swiglu", swiglu, ("alpha", "limit"), reduction_n=2)
    activation = ogs.FusedActivation(specs, (OAI_ALPHA, OAI_LIMIT))
    ids, (m, k), num_experts = layer.routing.topk_ids, layer.routing.topk_ids.shape, layer.num_experts
    bits = bits_of(ids, num_experts)
    mask = tensor.Bitmatrix(bits, dtype=tensor.BIT, shape=[m, 32 * bits.shape[1]], shape_max=[m, None])
    narrow, weights = ids.to(torch.int16), layer.routing.topk_weights.to(layer.tokens.dtype)
    width = layer.down.shape[2]

    def run() -> torch.Tensor:
        chosen = tensor.SparseMatrix(indx=narrow, vals=weights, mask=mask)  # sorts the slots by expert
        by_row, by_expert = chosen.mask_metadata.row_sorted_indx, chosen.mask_metadata.col_sorted_indx
        ragged = tensor.make_ragged_tensor_metadata(chosen.mask_metadata.col_sum, by_row.shape[0])
        gates = chosen.vals.flatten()[by_expert]
        data = ogs.RoutingData(gates, ragged.block_sizes, num_experts, k, ragged)
        h, out = layer.tokens.new_empty(1, m * k, width), layer.tokens.new_empty(1, *layer.tokens.shape)
        ogs.matmul_ogs(
            layer.tokens, first[0], None, data, gather_indx=ogs.GatherIndx(by_expert, by_row),
            precision_config=first[1], fused_activation=activation, y=h,
        )  # fmt: skip
        ogs.matmul_ogs(
            h.view(m * k, width), second[0], None, data, scatter_indx=ogs.ScatterIndx(by_row, by_expert),
            precision_config=second[1], gammas=gates, y=out,
        )  # fmt: skip
        return out.view(layer.tokens.shape)

    return run, "swiglu_oai"


def bits_of(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return a bit for each token and expert, set where it is chosen: uint32 [M, num_experts / 32 rounded up]."""
    chosen = ids.new_zeros(len(ids), -(-num_experts // 32) * 32, dtype=torch.int64)
    chosen.scatter_(1, ids.long(), 1)
    places = 2 ** torch.arange(32, dtype=torch.int64, device=ids.device)
    return (chosen.view(len(ids), -1, 32) * places).sum(2).to(torch.uint32)


def _converted(x: QuantTensor) -> tuple[Any, Any]:
    """Convert MXFP4 weights [E, N, K] to triton_kernels' tensor [E, K, N], and the GEMM's precision config."""
    ogs: Any = importlib.import_module("triton_kernels.matmul_ogs")
    tensor: Any = importlib.import_module("triton_kernels.tensor")
    layouts: Any = importlib.import_module("triton_kernels.tensor_details.layout")
    numerics: Any = importlib.import_module("triton_kernels.numerics")
    flags: Any = importlib.import_module("triton_kernels.matmul_ogs_details.opt_flags")
    rows = to_rows(x)
    flags.update_opt_flags_constraints({"split_k": 1})
    layout, options = layouts.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    sf_layout, sf_options = layouts.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=8)
    wrapped = tensor.wrap_torch_tensor(rows.values.transpose(-2, -1), dtype=tensor.FP4)
    factors = tensor.wrap_torch_tensor(rows.sf.view(torch.uint8).transpose(-2, -1))
    config = ogs.PrecisionConfig(
        weight_scale=tensor.convert_layout(factors, sf_layout, **sf_options),
        flex_ctx=ogs.FlexCtx(rhs_data=numerics.InFlexData()),
    )
    return tensor.convert_layout(wrapped, layout, **options), config

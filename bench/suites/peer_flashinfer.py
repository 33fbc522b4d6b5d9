"""FlashInfer's CUTLASS experts on one GPU: bf16, FP8 in blocks beside bf16 tokens, MXFP4 beside bf16 tokens.

It compiles its kernels at the first call, which takes minutes, and tries its tactics there; neither is timed.
"""

import importlib
from typing import Any, cast

import torch
from torch.nn import functional

from bench.suites.peer_humming import blocks_of
from bench.suites.torch_moe import Layer
from bench.timing import Run
from envoi.quant.fragments import to_rows
from envoi.types import QuantTensor

MXFP4_ALIGN = 128


def bf16(layer: Layer) -> tuple[Run, str]:
    """Return a call on the layer's bf16 weights, and its activation."""
    return _call(layer, layer.tokens, up_first(layer.gate_up), layer.down, []), "swiglu"


def fp8_block128(layer: Layer) -> tuple[Run, str]:
    """Return a call on weights of its own with a scale per 128x128, and its activation."""
    (gate_up, gate_up_sf), (down, down_sf) = blocks_of(layer.gate_up), blocks_of(layer.down)
    values = up_first(gate_up.view(torch.uint8)).view(gate_up.dtype)
    scales = [up_first(gate_up_sf), down_sf]
    return _call(layer, layer.tokens, values, down, scales, use_deepseek_fp8_block_scale=True), "swiglu"


def mxfp4(layer: Layer) -> tuple[Run, str]:
    """Return a call on the layer's own MXFP4 weights, and its activation. Sizes are padded, outside the time."""
    moe: Any = importlib.import_module("flashinfer.fused_moe")
    weights, scales = [], []
    gate_up, down = (to_rows(cast(QuantTensor, w)) for w in (layer.packed.gate_up, layer.packed.down))
    for values, sf in (_halves(gate_up), (down.values, down.sf.view(torch.uint8))):
        padded = _padded(values, MXFP4_ALIGN // 2), _padded(sf, MXFP4_ALIGN // 32)
        weights.append(moe.interleave_moe_weights_for_sm90_mixed_gemm(padded[0].flatten(1, -2), "fp4"))
        scales.append(moe.interleave_moe_scales_for_sm90_mixed_gemm(padded[1].flatten(1, -2), 32))
    tokens = functional.pad(layer.tokens, (0, -layer.tokens.shape[1] % MXFP4_ALIGN)).contiguous()
    return _call(layer, tokens, weights[0], weights[1], scales, use_w4_group_scaling=True), "swiglu"


def up_first(rows: torch.Tensor) -> torch.Tensor:
    """Return [E, 2I, ..] of gate, then up, as up, then gate."""
    return torch.cat(rows.chunk(2, 1)[::-1], 1).contiguous()


def _halves(x: QuantTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and factors of rows that are gate and up in turn as [E, 2, I, ..]: up, then gate."""
    parts = x.values, x.sf.view(torch.uint8)
    return cast(tuple[torch.Tensor, torch.Tensor], tuple(torch.stack((p[:, 1::2], p[:, 0::2]), 1) for p in parts))


def _padded(x: torch.Tensor, columns: int) -> torch.Tensor:
    """Pad rows (the last dimension but one) to 128 and columns to a multiple, with zeros."""
    return functional.pad(x, (0, -x.shape[-1] % columns, 0, -x.shape[-2] % MXFP4_ALIGN)).contiguous()


def _call(
    layer: Layer, tokens: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, scales: list[torch.Tensor],
    **how: bool,
) -> Run:  # fmt: skip
    flashinfer: Any = importlib.import_module("flashinfer")
    moe: Any = importlib.import_module("flashinfer.fused_moe")
    weights, ids, hidden = layer.routing.topk_weights, layer.routing.topk_ids, layer.tokens.shape[1]

    def run() -> torch.Tensor:
        out = moe.cutlass_fused_moe(tokens, ids, weights, gate_up, down, tokens.dtype, scales, **how)
        return (out[0] if isinstance(out, (list, tuple)) else out)[:, :hidden]

    with flashinfer.autotune(True):
        run()
    return run

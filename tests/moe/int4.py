"""Random MoE layers with INT4 weights as checkpoints have them."""

from dataclasses import dataclass, replace

import torch

from envoi.ops.moe import pack
from envoi.quant import dequantize
from envoi.quant.bits import pack_nibbles
from envoi.types import ExpertWeights, QuantTensor
from tests.moe.layers import Layer


@dataclass(frozen=True)
class Form:
    """Columns that share a factor, the factors' dtype, and whether there are zero points."""

    columns: int = 32
    dtype: torch.dtype = torch.bfloat16
    zeros: bool = False


FORMS = {
    "kimi": Form(), "gptq": Form(128, torch.float16), "awq": Form(128, torch.float16, True),
    "32-zeros": Form(32, torch.bfloat16, True), "32-half": Form(32, torch.float16),
    "64-zeros": Form(64, torch.bfloat16, True),
}  # fmt: skip


def quantised(weight: torch.Tensor, form: Form, seed: int = 0) -> QuantTensor:
    """Quantise weights [E, N, K] by rows: nearest integers, zero points at random where the form has them."""
    source = torch.Generator(weight.device).manual_seed(seed)
    groups = weight.float().unflatten(-1, (-1, form.columns))
    shape = groups.shape[:-1]
    zeros = torch.full(shape, 8, dtype=torch.uint8, device=weight.device)
    if form.zeros:
        zeros = torch.randint(0, 16, shape, generator=source, device=weight.device).to(torch.uint8)
    # A zero point at an end leaves one side of zero without levels: clipped, as a bad checkpoint would be.
    sf = (groups.abs().amax(-1) / 7.5).clamp(min=1e-6).to(form.dtype)
    q = (groups / sf.float()[..., None]).round() + zeros[..., None]
    return QuantTensor(
        pack_nibbles(q.clamp(0, 15).to(torch.uint8).flatten(-2)), sf, (1, form.columns),
        zeros=zeros if form.zeros else None,
    )  # fmt: skip


def packed(layer: Layer, form: Form) -> ExpertWeights:
    """Pack a layer's weights in INT4."""
    return _pack(layer, quantised(layer.gate_up, form), quantised(layer.down, form, seed=1), "int4")


def in_bf16(layer: Layer, form: Form) -> ExpertWeights:
    """Pack the same numbers rounded to bf16."""
    given = quantised(layer.gate_up, form), quantised(layer.down, form, seed=1)
    return _pack(layer, *(dequantize(x).bfloat16() for x in given), "bf16")


def mostly_zero(layer: Layer, form: Form, mean: float) -> tuple[Layer, ExpertWeights, ExpertWeights]:
    """Return a layer of tokens with a mean, and its weights in INT4 and the same in bf16: one a group isn't zero.

    Zero points are 0 or 15, so that all products of a kernel that doesn't subtract them first have the same sign.
    """
    source = torch.Generator().manual_seed(0)

    def weights(experts: int, rows: int, columns: int, size: float) -> QuantTensor:
        shape = experts, rows, columns // form.columns
        zeros = torch.randint(0, 2, shape, generator=source).to(torch.uint8) * 15
        sf = (torch.rand(shape, generator=source) + 0.5) * (size / 15 / shape[-1] ** 0.5)
        q = zeros[..., None].expand(*shape, form.columns).clone()
        outliers = torch.randint(0, form.columns, (*shape, 1), generator=source)
        q.scatter_(-1, outliers, 15 - zeros[..., None])
        x = QuantTensor(pack_nibbles(q.flatten(-2)), sf.to(form.dtype), (1, form.columns), zeros=zeros)
        return x.to(layer.tokens.device)

    (E, N, K), (_, H, inner) = layer.gate_up.shape, layer.down.shape
    gate_up, down = weights(E, N, K, 1 / mean), weights(E, H, inner, 1.0)
    wide = dequantize(gate_up).bfloat16(), dequantize(down).bfloat16()
    shifted = replace(layer, tokens=layer.tokens + mean)
    return shifted, _pack(layer, gate_up, down, "int4"), _pack(layer, wide[0], wide[1], "bf16")


def _pack(layer: Layer, gate_up, down, format: str) -> ExpertWeights:
    return pack(
        gate_up, down, format, activation=layer.activation, swiglu_limit=layer.limit, gate_up_bias=layer.gate_up_bias,
        down_bias=layer.down_bias,
    )  # fmt: skip


def random_int4(experts: int, N: int, K: int, form: Form, seed: int = 0) -> QuantTensor:
    """Weights whose factors are powers of two times 1 to 3, on the GPU, by rows."""
    source = torch.Generator("cuda").manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=source, device="cuda", dtype=torch.uint8)

    shape = experts, N, K // form.columns
    sf = draw(1, 4, *shape).to(form.dtype) * 2.0 ** draw(0, 3, *shape).to(form.dtype)
    zeros = draw(0, 16, *shape) if form.zeros else None
    return QuantTensor(draw(0, 256, experts, N, K // 2), sf, (1, form.columns), zeros=zeros)

"""Launches of an MoE layer for few tokens on Hopper, MXFP4 or INT4 weights: permute -> L1 -> L2, which overlap.

The order of the weights says what tokens are. "fragments": bf16, or MXFP8's numbers (`Layer.mxfp8`), split into two
E4M3, or as they are where weights have zero points. `fp8_fragments.ORDER`: FP8 with a scale each, as in
`envoi.ops.gemm.hopper_w4a8`: equal E4M3 tokens, equal exact weights, rows of L1 in bf16 that are quantised bit for bit
as `envoi.quant.quantize` does. But sums along K are cut where the work is shared out, which depends on the routing, so
that bits may differ from those of the kernel for many tokens.
"""

from dataclasses import dataclass

import torch

from envoi.ops.gemm.hopper_w4a8.host import tables_on
from envoi.ops.gemm.hopper_w4a16.few_config import FewConfig, Int4Form, few_configs
from envoi.quant.fp8_fragments import ORDER as FP8_ORDER
from envoi.quant.fragments import TILE
from envoi.runtime import devices, workspace
from envoi.runtime.math import next_power_of_2
from envoi.runtime.program import Launch
from envoi.spans import span
from envoi.types import QuantTensor

MAX_TOPK = 32
REGISTERS = 128
COUNTED, EXPERTS = 256, 16  # slots counted at once, experts of a program
PERMUTING = 128  # slots up to which each has a program of its own


@dataclass(frozen=True)
class Layer:
    """Experts of one rank: gate_up [E, 2I, H], interleaved, and down [E, H, I] in an order, biases float32."""

    gate_up: QuantTensor
    down: QuantTensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    activation: str
    limit: float | None
    mxfp8: bool = False  # tokens and L1's rows are rounded to MXFP8

    @property
    def num_experts(self) -> int:
        """E."""
        return self.gate_up.shape[0]

    @property
    def fp8(self) -> bool:
        """Return True if tokens are FP8."""
        return self.gate_up.order == FP8_ORDER

    @property
    def bf16(self) -> bool:
        """Return True if tokens stay bf16, as both weights have zero points."""
        return self.gate_up.zeros is not None


@dataclass(frozen=True)
class Buffers:
    """Buffers of one call: P = num_tokens * num_topk rows. routed, hidden: tokens as `few_kernel` reads them.

    Of MXFP8's numbers low is 0, and not written. With FP8 tokens routed is uint8 [P, H], hidden bf16 [P, I], and
    hidden_factors int32 [P]. With bf16 tokens both are bf16, [P, H] and [P, I], without factors.
    """

    offsets: torch.Tensor  # int32 [E + 1]
    slot_to_pos: torch.Tensor  # int32 [num_tokens, num_topk]
    row_weights: torch.Tensor  # float32 [P]
    routed: torch.Tensor  # uint8 [P, 2 H]
    routed_factors: torch.Tensor | None  # float32 [P]
    hidden: torch.Tensor  # uint8 [P, 2 I]
    hidden_factors: torch.Tensor | None  # float32 [P, I / 32]
    rows: torch.Tensor  # bf16 [P, H]


def rows(
    tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer: Layer
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the layer on tokens [M, H] bf16; return its rows [P, H] bf16 and the row of each slot, int32 [M, k], or -1.

    topk_ids and topk_weights [M, k] have at least one slot. Slots whose id no expert has count as masked.
    """
    from envoi.runtime.launch import launch

    tokens = tokens if tokens.stride(-1) == 1 else tokens.contiguous()
    topk_weights, topk_ids = topk_weights.contiguous(), topk_ids.contiguous()
    buffers = empty_buffers(tokens, topk_ids, layer)
    configs = configs_of(layer, topk_ids.numel())
    for name, call in (
        ("permute", permute_launch(tokens, topk_weights, topk_ids, layer, buffers)),
        ("L1", gemm_launch(layer, buffers, topk_ids, configs[0])),
        ("L2", gemm_launch(layer, buffers, topk_ids, configs[1])),
    ):
        with span(name):
            launch(*call)
    return buffers.rows, buffers.slot_to_pos


def configs_of(layer: Layer, num_slots: int) -> tuple[FewConfig, FewConfig]:
    """Return the configs of L1 and of L2."""
    return few_configs(
        layer.gate_up.shape[-1], layer.down.shape[-1], layer.num_experts, num_slots, layer.activation, layer.limit,
        layer.gate_up_bias is not None, layer.fp8, not (layer.gate_up.scales_at_most_2 and layer.down.scales_at_most_2),
        (form_of(layer.gate_up), form_of(layer.down)), layer.mxfp8,
    )  # fmt: skip


def form_of(x: QuantTensor) -> Int4Form | None:
    """Return the form of INT4 weights in fragments, None for others."""
    if not x.integers:
        return None
    return Int4Form(TILE // x.group[1], x.sf.dtype == torch.float16, x.zeros is not None)


def empty_buffers(tokens: torch.Tensor, topk_ids: torch.Tensor, layer: Layer) -> Buffers:
    """Allocate the buffers of a call."""
    H, P, intermediate = tokens.shape[1], topk_ids.numel(), layer.down.shape[-1]

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=tokens.device)

    if layer.bf16:
        routed, hidden = empty(P, H, dtype=torch.bfloat16), empty(P, intermediate, dtype=torch.bfloat16)
        factors = None, None
    elif layer.fp8:
        routed, hidden = empty(P, H, dtype=torch.uint8), empty(P, intermediate, dtype=torch.bfloat16)
        factors = empty(P), empty(P, dtype=torch.int32)
    else:
        routed, hidden = empty(P, 2 * H, dtype=torch.uint8), empty(P, 2 * intermediate, dtype=torch.uint8)
        factors = empty(P), empty(P, intermediate // 32)
    return Buffers(
        empty(layer.num_experts + 1, dtype=torch.int32), empty(*topk_ids.shape, dtype=torch.int32), empty(P), routed,
        factors[0], hidden, factors[1], empty(P, H, dtype=torch.bfloat16),
    )  # fmt: skip


def permute_launch(
    tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer: Layer, buffers: Buffers
) -> Launch:
    """Build the launch that sorts slots by expert, and splits their tokens into two E4M3, quantises or copies them."""
    from envoi.ops.gemm.hopper_w4a16.tokens import permute_kernel

    (M, H), k, E, on_gpu = tokens.shape, topk_ids.shape[1], layer.num_experts, devices.on_gpu(tokens.device)
    block = min(COUNTED, max(16, next_power_of_2(topk_ids.numel())))
    each = k if M * k <= PERMUTING else 1
    arguments = (
        tokens, tokens.stride(0), topk_weights, topk_ids, buffers.offsets, buffers.slot_to_pos, buffers.routed,
        buffers.routed_factors, buffers.row_weights, buffers.hidden_factors if layer.fp8 else None, M, E, H, k,
        next_power_of_2(k), block, next_power_of_2(H), EXPERTS, each, layer.mxfp8, on_gpu,
    )  # fmt: skip
    return Launch(permute_kernel, (M * each + -(-(E + 1) // EXPERTS),), arguments, {"num_warps": 8})


def gemm_launch(layer: Layer, buffers: Buffers, topk_ids: torch.Tensor, config: FewConfig) -> Launch:
    """Build the launch of L1 or L2, which the config says."""
    from envoi.ops.gemm.hopper_w4a16.kernel_few import few_kernel

    device = buffers.rows.device
    num_ctas = config.ctas_per_sm * devices.num_sms(device)
    num_sums = num_ctas * 16 * config.num_warps * config.tile_tokens
    sums = torch.empty(num_sums, dtype=torch.float32, device=device)
    flags = workspace.counters(num_ctas, device)
    if config.is_l1:
        weights, bias = layer.gate_up, layer.gate_up_bias
        sides = buffers.routed, buffers.routed_factors, buffers.hidden, buffers.hidden_factors
    else:
        weights, bias = layer.down, layer.down_bias
        sides = buffers.hidden, buffers.hidden_factors, buffers.rows, buffers.hidden_factors
    values, factors, out, out_factors = sides
    values = values if config.quantises else values.view(torch.float8_e4m3fn)
    tables = tables_on(device) if config.looks_up else None
    arguments = (
        values, factors, weights.values.view(torch.int32), as_words(weights.sf), weights.zeros, weights.scale, tables,
        buffers.row_weights if bias is None else bias, buffers.row_weights, out, out_factors, buffers.offsets, topk_ids,
        sums, flags, weights.shape[-2] // 64, layer.num_experts, topk_ids.numel(), config,
    )  # fmt: skip
    options = {"num_warps": config.num_warps, "maxnreg": REGISTERS, "launch_pdl": True}
    return Launch(few_kernel, (num_ctas,), arguments, options)


def as_words(sf: torch.Tensor) -> torch.Tensor:
    """Scale factors [E, N, K / 32] as int32; K is a multiple of 64 only, so that rows needn't be whole words."""
    return sf.flatten().view(torch.uint8).view(torch.int32)

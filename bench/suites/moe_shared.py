"""Shared expert of the routed ones' size: weights for it, a layer that has it as one more expert, and a call without.

Baselines other than Envoi's own take the layer whose routing names the shared expert, as servers that fuse it do; the
weights of its slots are made outside their time.
"""

from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from bench.shapes import MoeShape
from bench.suites.torch_moe import Layer
from bench.timing import Run
from envoi.epilogues.library import swiglu, swiglu_fp8
from envoi.experts import pack, with_shared
from envoi.ops.gemm import gemm
from envoi.ops.moe import moe, reference
from envoi.ops.moe.permute import quantize_rows
from envoi.quant import quantize
from envoi.quant.formats import format_named
from envoi.quant.pack import interleave_gate_up
from envoi.tune.problems import generator
from envoi.types import ExpertWeights, Matrix, Routing

GATED = "shared gated"
ENDINGS = {"bf16": swiglu, "fp8_block128": swiglu_fp8}  # of the first GEMM, whose result the second one takes


@dataclass(frozen=True)
class Shared:
    """Shared expert in bf16: gate_up [1, 2I, H], gate, then up; down [1, H, I]; gate float32 [H] or None: weight 1."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate: torch.Tensor | None


def draw(shape: MoeShape, device: torch.device) -> Shared:
    """Draw the shared expert of a case."""
    h, i = shape.hidden, shape.intermediate
    source = generator(device, h, i, shape.num_experts, shape.num_tokens, 1)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=source, device=device) * sizes[-1] ** -0.5

    gate = normal(h) if shape.shared == GATED else None
    return Shared(normal(1, 2 * i, h).bfloat16(), normal(1, h, i).bfloat16(), gate)


def join(routed: Layer, shared: Shared) -> tuple[ExpertWeights, Layer]:
    """Return the experts with the shared one, which add its slots themselves, and the layer whose routing has them."""
    experts = with_shared(routed.packed, pack(shared.gate_up, shared.down, routed.packed.format), shared.gate)
    r, count = routed.routing, routed.num_experts
    weights, ids = reference.with_shared(routed.tokens, r.topk_weights, r.topk_ids, count, 1, experts.shared_gate)
    gate_up, down = torch.cat((routed.gate_up, shared.gate_up)), torch.cat((routed.down, shared.down))
    packed = replace(experts, num_shared=0, shared_gate=None)
    return experts, Layer(routed.tokens, Routing(weights, ids, count + 1), gate_up, down, packed, 0)


def separate(routed: Layer, shared: Shared) -> Run:
    """Return a call of the routed experts, the shared one by two GEMMs, its weight by torch, and a sum."""
    format = routed.packed.format
    first, second = (_packed(x, format) for x in (interleave_gate_up(shared.gate_up[0], dim=-2), shared.down[0]))
    row = None if shared.gate is None else shared.gate.bfloat16()[None]
    ends = torch.tensor([0, len(routed.tokens)], dtype=torch.int32, device=routed.tokens.device)

    def run() -> torch.Tensor:
        h = gemm(_quantised(routed.tokens, ends, format), first, ENDINGS[format])
        y = gemm(h, second, out_dtype=torch.bfloat16)
        if row is not None:
            y = functional.linear(routed.tokens, row).sigmoid() * y
        return moe(routed.tokens, routed.routing, routed.packed) + y

    return run


def _packed(weight: torch.Tensor, format: str) -> Matrix:
    scheme = format_named(format).weights
    return weight.contiguous() if scheme is None else quantize(weight.contiguous(), scheme)


def _quantised(tokens: torch.Tensor, ends: torch.Tensor, format: str) -> Matrix:
    scheme = format_named(format).activations
    if scheme is None:
        return tokens
    return quantize_rows(tokens, ends, scheme) if tokens.is_cuda else quantize(tokens, scheme)

"""Activations as a user writes them, the same in torch, and layers that have them in float64."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

import envoi
from envoi.epilogues import gelu, halves, pairs, relu, sigmoid, silu, tanh, where
from envoi.ops.moe.packing import unpack
from envoi.types import ExpertWeights
from tests.moe.layers import Layer, make


@dataclass(frozen=True)
class Own:
    """function: what a user passes. meant: the same on float64 tensors, without the language. relative: how much more
    of an error it makes of the accumulator's than a SiLU does."""

    function: Callable
    meant: Callable
    relative: float = 1.0
    limit: float | None = None


def reglu(gate, up):
    return relu(gate) * up


def clipped(gate, up, slope=0.3):
    return where(gate > 1.5, 1.5 + slope * (gate - 1.5), tanh(gate)) * (up**2 + up / 2)


def quick_gelu(up):
    return up * sigmoid(1.702 * up)


@envoi.epilogue
def by_pairs(acc):
    gate, up = pairs(acc)
    return gelu(gate, "tanh") * up + gate


@envoi.epilogue
def by_halves(acc):
    gate, up = halves(acc)
    return silu(gate) * abs(up)


@envoi.epilogue
def of_one(acc):
    return relu(acc) - 0.1 * acc


OWN = {
    "reglu": Own(reglu, lambda gate, up: gate.clamp(min=0) * up),
    "clamped": Own(lambda gate, up: up * sigmoid(gate), lambda gate, up: up * torch.sigmoid(gate), limit=0.7),
    "clipped": Own(
        clipped,
        lambda gate, up: torch.where(gate > 1.5, 1.5 + 0.3 * (gate - 1.5), gate.tanh()) * (up * up + up / 2), 2.0,
    ),
    "quick_gelu": Own(quick_gelu, lambda up: up * torch.sigmoid(1.702 * up)),
    "by_pairs": Own(by_pairs, lambda gate, up: torch.nn.functional.gelu(gate, approximate="tanh") * up + gate),
    "by_halves": Own(by_halves, lambda gate, up: torch.nn.functional.silu(gate) * up.abs()),
    "of_one": Own(of_one, lambda up: up.clamp(min=0) - 0.1 * up),
}  # fmt: skip
UNGATED = ("quick_gelu", "of_one")


def layer_of(name: str, **sizes) -> Layer:
    """Make a layer with an activation of OWN."""
    stand_in = "silu" if name in UNGATED else "swiglu"
    layer = make(activation=stand_in, limit=OWN[name].limit, **sizes)
    layer.activation = OWN[name].function
    return layer


def oracle(layer: Layer, packed: ExpertWeights, name: str) -> torch.Tensor:
    """Compute the layer in float64 on weights as packed, with the activation as torch has it."""
    gate_up, down, gate_up_bias, down_bias = unpack(packed, "concat", torch.float64)
    out = torch.zeros(layer.tokens.shape, dtype=torch.float64)
    for expert in range(layer.routing.num_experts):
        token, slot = (layer.routing.topk_ids == expert).nonzero(as_tuple=True)
        h = layer.tokens[token].double() @ gate_up[expert].T
        h = h if gate_up_bias is None else h + gate_up_bias[expert]
        parts = (h,) if name in UNGATED else h.chunk(2, dim=1)
        limit = OWN[name].limit
        if limit is not None:
            parts = parts[0].clamp(max=limit), parts[1].clamp(-limit, limit)
        y = OWN[name].meant(*parts) @ down[expert].T
        y = y if down_bias is None else y + down_bias[expert]
        out.index_add_(0, token, y * layer.routing.topk_weights[token, slot, None].double())
    return out

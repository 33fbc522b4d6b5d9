"""The operator's view of the experts: torch custom operators take flat tensors and plain values, not dataclasses."""

import torch

from envoi.check import expect_tensor
from envoi.quant.formats import Scheme, format_named
from envoi.types import ExpertWeights, Matrix, QuantTensor, Routing


def flatten(experts: ExpertWeights) -> tuple:
    """ExpertWeights -> the operator arguments that `unflatten` takes."""
    gate_up, gate_up_sf = _split(experts.gate_up)
    down, down_sf = _split(experts.down)
    return (
        gate_up, gate_up_sf, experts.gate_up_bias, down, down_sf, experts.down_bias,
        experts.format, experts.activation, experts.swiglu_limit, _tame(experts.gate_up), _tame(experts.down),
        experts.order,
    )  # fmt: skip


def unflatten(
    gate_up,
    gate_up_sf,
    gate_up_bias,
    down,
    down_sf,
    down_bias,
    format,
    activation,
    swiglu_limit,
    gate_up_tame,
    down_tame,
    order,
) -> ExpertWeights:
    """The inverse of `flatten`."""
    scheme = format_named(format).weights
    return ExpertWeights(
        _join(gate_up, gate_up_sf, scheme, gate_up_tame, order), _join(down, down_sf, scheme, down_tame, order),
        format, activation, swiglu_limit, gate_up_bias, down_bias,
    )  # fmt: skip


def _split(weight: Matrix) -> tuple[torch.Tensor, torch.Tensor | None]:
    return (weight, None) if isinstance(weight, torch.Tensor) else (weight.values, weight.sf)


def _tame(weight: Matrix) -> bool:
    return isinstance(weight, QuantTensor) and weight.tame


def _join(values: torch.Tensor, sf: torch.Tensor | None, scheme: Scheme | None, tame: bool, order: str) -> Matrix:
    if sf is None or scheme is None:
        return values
    packed = 2 if values.dtype == torch.uint8 else 1
    group = scheme.group_for((*values.shape[:-1], values.shape[-1] * packed))
    return QuantTensor(values, sf, group, tame=tame, order=order)


def check_tokens(tokens: torch.Tensor, routing: Routing, experts: ExpertWeights) -> None:
    """Raise ValueError unless tokens and routing have the dtypes, shapes and device that go with the experts."""
    if not isinstance(routing, Routing):
        raise ValueError(f"routing: expected an envoi.Routing, got {type(routing).__name__}")
    if not isinstance(experts, ExpertWeights):
        raise ValueError(f"experts: expected ExpertWeights from envoi.experts.pack, got {type(experts).__name__}")
    expect_tensor("tokens", tokens, torch.bfloat16, ("num_tokens", experts.hidden), experts.device)
    slots = (tokens.shape[0], "num_topk")
    ids = expect_tensor("routing.topk_ids", routing.topk_ids, torch.int32, slots, tokens.device)
    expect_tensor("routing.topk_weights", routing.topk_weights, torch.float32, ids.shape, tokens.device)


def check_ids(topk_ids: torch.Tensor, num_experts: int) -> None:
    """Raise ValueError if an id is neither -1 nor an expert, naming the first such slot. Waits for the device."""
    bad = (topk_ids < -1) | (topk_ids >= num_experts)
    if bool(bad.any()):
        token, slot = (int(i) for i in bad.nonzero()[0])
        raise ValueError(
            f"routing.topk_ids: expected ids from 0 to {num_experts - 1}, or -1 for a masked slot, "
            f"got {int(topk_ids[token, slot])} at token {token}, slot {slot}"
        )

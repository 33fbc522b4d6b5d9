"""Arguments of the MoE operators: torch custom operators take flat tensors and plain values, not dataclasses."""

from dataclasses import replace

import torch

from envoi.check import expect_no_gradients, expect_tensor
from envoi.quant.formats import INT4, Scheme, format_named
from envoi.runtime.custom_op import autocast_dtype
from envoi.runtime.prepared import exactly
from envoi.types import ExpertWeights, Matrix, QuantTensor, Routing, expect_experts, expect_routing

HALVES = torch.bfloat16, torch.float16
IDS, WEIGHTS = (torch.int32, torch.int64), (torch.float32, *HALVES)
INT32 = torch.iinfo(torch.int32)
NUM_SHARED_AT = 17  # place of num_shared in `flatten`
PARTS = (".values", ".sf", ".scale", ".zeros", "_bias")
TENSORS = (*(f"{side}{part}" for side in ("gate_up", "down") for part in PARTS), "shared_gate")


def flatten(experts: ExpertWeights) -> tuple:
    """Return the experts as the operator arguments that `unflatten` takes."""
    gate_up, gate_up_sf, gate_up_scale, gate_up_zeros = _split(experts.gate_up)
    down, down_sf, down_scale, down_zeros = _split(experts.down)
    return (
        gate_up, gate_up_sf, experts.gate_up_bias, down, down_sf, experts.down_bias,
        experts.format, experts.activation, experts.swiglu_limit, _bounded(experts.gate_up), _bounded(experts.down),
        experts.order, experts.gate_up_layout, gate_up_scale, down_scale, gate_up_zeros, down_zeros,
        experts.num_shared, experts.shared_gate,
    )  # fmt: skip


def constants_of(experts: ExpertWeights) -> tuple:
    """Return what a call depends on but for the tensors that `tensors_of` returns."""
    forms = []
    for x in (experts.gate_up, experts.down):
        forms.append((x.group, x.scales_at_most_2, x.order) if isinstance(x, QuantTensor) else None)
    limit = exactly(experts.swiglu_limit)
    kept = experts.padding, experts.num_shared
    return experts.format, experts.activation, limit, experts.gate_up_layout, *kept, *forms


def tensors_of(experts: ExpertWeights) -> tuple[torch.Tensor | None, ...]:
    """Return the experts' tensors in the order of TENSORS, None for those that they don't have."""
    sides = *_split(experts.gate_up), experts.gate_up_bias, *_split(experts.down), experts.down_bias
    return *sides, experts.shared_gate


def scale_of(weight: Matrix) -> torch.Tensor | None:
    """Return the scales that a weight has on top of its factors, float32 [E, N], or None."""
    return weight.scale if isinstance(weight, QuantTensor) else None


def rows_in_bf16(experts: ExpertWeights) -> bool:
    """Return True if L1 and L2 read rows of MXFP8's numbers in bf16, which holds them all: kernels for fragments do."""
    return experts.order == "fragments" and format_named(experts.format).activations is not None


def rows_scheme(experts: ExpertWeights) -> Scheme | None:
    """Return the scheme of the rows that L1 and L2 read; None = bf16."""
    return None if rows_in_bf16(experts) else format_named(experts.format).activations


def columns_of(weight: Matrix, bias: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Return the operands of an expert GEMM's epilogue that belong to the weight's rows: its scales and its bias."""
    found = {"scale": scale_of(weight), "bias": bias}
    return {name: x for name, x in found.items() if x is not None}


def unflatten(
    gate_up, gate_up_sf, gate_up_bias, down, down_sf, down_bias, format, activation, swiglu_limit, gate_up_bounded,
    down_bounded, order, gate_up_layout, gate_up_scale, down_scale, gate_up_zeros, down_zeros, num_shared, shared_gate,
) -> ExpertWeights:  # fmt: skip
    """Inverse of `flatten`."""
    scheme = format_named(format).weights
    sides = (
        _join(gate_up, gate_up_sf, gate_up_scale, gate_up_zeros, scheme, gate_up_bounded, order),
        _join(down, down_sf, down_scale, down_zeros, scheme, down_bounded, order),
    )
    rest = format, activation, swiglu_limit, gate_up_bias, down_bias, gate_up_layout
    return ExpertWeights(*sides, *rest, num_shared=num_shared, shared_gate=shared_gate)


def _split(weight: Matrix) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    if isinstance(weight, torch.Tensor):
        return weight, None, None, None
    return weight.values, weight.sf, weight.scale, weight.zeros


def _bounded(weight: Matrix) -> bool:
    return isinstance(weight, QuantTensor) and weight.scales_at_most_2


def _join(
    values: torch.Tensor, sf: torch.Tensor | None, scale: torch.Tensor | None, zeros: torch.Tensor | None,
    scheme: Scheme | None, bounded: bool, order: str,
) -> Matrix:  # fmt: skip
    if sf is None or scheme is None:
        return values
    packed = 2 if values.dtype == torch.uint8 else 1
    columns = values.shape[-1] * packed
    # INT4 has as many factors as its writer wanted.
    group = (1, columns // sf.shape[-1]) if scheme == INT4 else scheme.group_for((*values.shape[:-1], columns))
    return QuantTensor(values, sf, group, scale, scales_at_most_2=bounded, order=order, zeros=zeros)


def as_rows(tokens: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, Routing, torch.dtype]:
    """Return a caller's arguments as tokens [M, H] bf16 and a routing of [M, k], and the output's dtype.

    Raises nothing: arguments that can't be converted are returned unchanged, and `check_tokens` refuses them.
    """
    given = (tokens, routing.topk_weights, routing.topk_ids) if isinstance(routing, Routing) else (None,)
    if not all(isinstance(x, torch.Tensor) for x in given):
        return tokens, routing, torch.bfloat16
    lead, cast = tokens.shape[:-1], autocast_dtype(tokens.device)
    dtype = tokens.dtype if cast is None else cast
    weights, ids = (_flat(x, lead) for x in (routing.topk_weights, routing.topk_ids))
    if tokens.dim() == 3:
        tokens = tokens.flatten(0, 1)
    if tokens.dtype == torch.float16 or (cast is not None and tokens.dtype == torch.float32):
        tokens = tokens.to(torch.bfloat16)
    if weights is routing.topk_weights and ids is routing.topk_ids:
        return tokens, routing, dtype
    return tokens, replace(routing, topk_weights=weights, topk_ids=ids), dtype


def widened(topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights in float32 and ids in int32, for what reads no other."""
    if topk_weights.dtype in HALVES:
        topk_weights = topk_weights.float()
    if topk_ids.dtype == torch.int64:  # an id that int32 can't hold mustn't become another
        topk_ids = topk_ids.clamp(INT32.min, INT32.max).to(torch.int32)
    return topk_weights, topk_ids


def _flat(x: torch.Tensor, lead: torch.Size) -> torch.Tensor:
    """Flatten [B, S, k] to [B * S, k] if tokens are [B, S, H]; lead: their shape but for H."""
    return x.flatten(0, 1) if len(lead) == 2 and x.dim() == 3 and x.shape[:2] == lead else x


def check_call(tokens: torch.Tensor, routing: Routing, experts: ExpertWeights) -> None:
    """Raise ValueError for arguments that the operator `moe_parallel` would refuse before its peers hear of it.

    Refused are a routing that isn't one, and tensors that aren't dense, have gradients or are on meta. Reads no values.
    """
    expect_routing(routing)
    given = {"tokens": tokens, "routing.topk_weights": routing.topk_weights, "routing.topk_ids": routing.topk_ids}
    for name, x in given.items():
        if expect_tensor(name, x).is_nested:
            raise ValueError(f"{name}: expected a dense tensor, got a nested one")
        if x.is_meta and experts.device.type != "meta":
            raise ValueError(f"{name}: expected a tensor on {experts.device}, got one on meta, which has no values")
    expect_no_gradients((*given, "experts"), (*given.values(), [*tensors_of(experts)]))


def check_tokens(tokens: torch.Tensor, routing: Routing, experts: ExpertWeights) -> None:
    """Raise ValueError unless tokens and routing have the dtypes, shapes and device that go with the experts."""
    expect_routing(routing)
    expect_experts(experts)
    expect_tensor("tokens", tokens, HALVES, ("num_tokens", experts.hidden), experts.device)
    slots = (tokens.shape[0], "num_topk")
    ids = expect_tensor("routing.topk_ids", routing.topk_ids, IDS, slots, tokens.device)
    expect_tensor("routing.topk_weights", routing.topk_weights, WEIGHTS, ids.shape, tokens.device)


def check_ids(topk_ids: torch.Tensor, num_experts: int) -> None:
    """Raise ValueError if an id is neither -1 nor an expert, naming the first such slot. Waits for the device."""
    bad = (topk_ids < -1) | (topk_ids >= num_experts)
    if bool(bad.any()):
        token, slot = (int(i) for i in bad.nonzero()[0])
        raise ValueError(
            f"routing.topk_ids: expected ids from 0 to {num_experts - 1}, or -1 for a masked slot, "
            f"got {int(topk_ids[token, slot])} at token {token}, slot {slot}"
        )


def check_map(expert_map: torch.Tensor, num_experts: int) -> None:
    """Raise ValueError if a number in a map [ids] is neither -1 nor an expert. Waits for the device."""
    bad = expert_map[(expert_map < -1) | (expert_map >= num_experts)]
    if len(bad):
        raise ValueError(f"expert_map: expected numbers from -1 to {num_experts - 1}, got {int(bad[0])}")


def empty_out(tokens, *arguments):
    """Return an empty tensor with the operators' shape and dtype, [M, H] like tokens: all that tracing needs."""
    return torch.empty_like(tokens, memory_format=torch.contiguous_format)


def mlp_flops(tokens, topk_weights, topk_ids, *arguments):
    """Count the FLOPs of both GEMMs for every slot, masked ones too: only the device knows which are masked.

    Slots of shared experts count. Takes the arguments of the operators of `envoi.moe` and `ExpertParallel.moe`. Across
    ranks it counts the slots of this rank's tokens, whichever rank owns their experts.
    """
    first = next(place for place, x in enumerate(arguments) if isinstance(x, torch.Tensor))
    gate_up, down = arguments[first], arguments[first + 3]  # as `flatten` has them
    intermediate = down.shape[2] * (2 if down.dtype == torch.uint8 else 1)
    num_slots = topk_ids.numel() + len(tokens) * arguments[first + NUM_SHARED_AT]
    return 2 * num_slots * tokens.shape[1] * (gate_up.shape[1] + intermediate)

"""Shared experts, which every token passes: their weights after those of the routed ones.

A shared expert has any intermediate size. It is cut along that into parts of the routed experts' size, whose outputs
add up to its own, and the last of which is filled up with zeros: its layer has so many experts, and a token so many
slots, more.

    I = 2048: routed expert 0 | 1 | .. | E - 1 | shared one, 0 : 2048 | 2048 : 4096 | 4096 : 5000 and 1144 zeros
"""

from dataclasses import replace
from typing import cast

import torch

from envoi.check import dtype_name, expect_tensor
from envoi.epilogues.activation import ACTIVATIONS, computed
from envoi.ops.moe.packing import FLOATS
from envoi.quant.bits import as_bytes, concatenate
from envoi.quant.formats import format_named
from envoi.quant.fragments import to_rows
from envoi.quant.pack import deinterleave_gate_up, interleave_gate_up, with_checked_scales
from envoi.types import ExpertWeights, Matrix, QuantTensor, expect_experts, has_gate

MIDDLE = 8  # zero point of INT4
ROWS, COLUMNS = 1, 2  # axes of weights [E, rows, columns]


def with_shared(experts: ExpertWeights, shared: ExpertWeights, gate: torch.Tensor | None = None) -> ExpertWeights:
    """Return experts with shared ones, which `envoi.moe` and `ExpertParallel` add to a token's slots.

    experts: from `envoi.experts.pack`, E routed ones. shared: from `pack` too, one or more of any intermediate size, of
        the same format, hidden size, activation and limit, both with biases or neither.
    gate [H] or [1, H], floats: a token's weight of the shared experts is sigmoid(token @ gate), as in Qwen2-MoE and
        Qwen3-Next; None: it is 1, as in DeepSeek-V3. Kept in float32, and so computed.

    A shared expert takes ceil(its size / I) places after the routed ones, as which its weights are stored without a
    change: where it is cut, so are groups of its factors. Over ranks each rank has all of them, and a token's are
    computed where the token is. Copies all weights, on their device: experts packed from tensors that have the shared
    ones at the end need no copy, but `dataclasses.replace(experts, num_shared=..)`.
    Example: E = 256 experts of 2048 and a shared one of 4096: E + 2 experts, of which num_shared is 2.
    Raises ValueError that says what differs, or why the parts wouldn't have the numbers of the whole.
    """
    expect_experts(experts)
    _check(experts, shared)
    layout = experts.gate_up_layout
    routed, parts = _by_rows(experts), _in_layout_of(_by_rows(shared), layout)
    size, count = experts.intermediate, -(-shared.intermediate // experts.intermediate)
    _check_zeros(experts, size * count - shared.intermediate)
    both = has_gate(experts.activation)
    ranges, per = (2, 1) if both and layout == "concat" else (1, 2 if both else 1)
    scheme = format_named(experts.format).weights
    gate_up = _cut(parts.gate_up, ROWS, size * per, count, ranges, "gate_up")
    down = _cut(parts.down, COLUMNS, size, count, 1, "down", scheme is not None and scheme.group[1] == 0)
    bias, down_bias = routed.gate_up_bias, routed.down_bias
    if bias is not None and down_bias is not None:
        of_parts = cast(torch.Tensor, parts.gate_up_bias)[:, :, None]
        bias = torch.cat((bias, _cut_tensor(of_parts, ROWS, size * per, count, ranges, 0)[:, :, 0]))
        once = cast(torch.Tensor, parts.down_bias)[:, None]  # the other parts' are zeros
        down_bias = torch.cat((down_bias, torch.nn.functional.pad(once, (0, 0, 0, count - 1)).flatten(0, 1)))
    joined = replace(
        routed, gate_up=_joined(routed.gate_up, gate_up, "gate_up"), down=_joined(routed.down, down, "down"),
        gate_up_bias=bias, down_bias=down_bias, padding=0, num_shared=shared.num_local_experts * count,
        shared_gate=None if gate is None else _as_row(gate, experts),
    )  # fmt: skip
    return ExpertWeights.arrange(joined)


def _check(experts: ExpertWeights, shared: ExpertWeights) -> None:
    """Raise ValueError unless routed and shared experts can be one layer's."""
    if not isinstance(shared, ExpertWeights):
        raise ValueError(f"shared: expected ExpertWeights from envoi.experts.pack, got {type(shared).__name__}")
    if not shared.num_local_experts:
        raise ValueError("shared: expected at least one expert, got none")
    for name, given in (("experts", experts), ("shared", shared)):
        if given.num_shared:
            raise ValueError(f"{name}: expected experts without shared ones, got {given.num_shared} of them")
    for name in ("format", "hidden", "activation", "swiglu_limit", "device"):
        want, came = getattr(experts, name), getattr(shared, name)
        if want != came:
            raise ValueError(f"shared.{name}: expected {want!r}, as the routed experts', got {came!r}")
    if (experts.down_bias is None) != (shared.down_bias is None):
        need, came = ("no biases", "some") if experts.down_bias is None else ("biases", "none")
        raise ValueError(f"shared.down_bias: expected {need}, as the routed experts have, got {came}")


def _check_zeros(experts: ExpertWeights, added: int) -> None:
    """Raise ValueError where rows of zeros, of which the last part has `added`, would change its other numbers."""
    if not added or experts.activation in ACTIVATIONS:
        return
    zeros = [torch.zeros(1, 1, device="cpu")] * (1 + has_gate(experts.activation))
    if computed(experts.activation, *zeros).any():
        raise ValueError(
            f"shared.intermediate: expected a multiple of {experts.intermediate} for an activation that isn't zero at "
            f"zero, as {added} zeros would fill the last part"
        )


def _as_row(gate: torch.Tensor, experts: ExpertWeights) -> torch.Tensor:
    """Return a gate, [H] or [1, H], as float32 [H] of its own."""
    expect_tensor("gate", gate, FLOATS, None, experts.device)
    row = gate[0] if gate.dim() == 2 and len(gate) == 1 else gate
    return expect_tensor("gate", row, None, (experts.hidden,)).detach().to(torch.float32, copy=True)


def _by_rows(experts: ExpertWeights) -> ExpertWeights:
    """Return experts with both weights by rows, a copy if they are in another order."""
    sides = (experts.gate_up, experts.down)
    gate_up, down = (to_rows(x) if isinstance(x, QuantTensor) else x for x in sides)
    return replace(experts, gate_up=gate_up, down=down)


def _in_layout_of(experts: ExpertWeights, layout: str) -> ExpertWeights:
    """Return experts by rows with gate and up in a layout. Raises ValueError if they share factors there."""
    x, given = experts.gate_up, experts.gate_up_layout
    if given == layout or not has_gate(experts.activation):
        return replace(experts, gate_up_layout=layout)

    def moved(rows: torch.Tensor, dim: int = -2) -> torch.Tensor:
        move = interleave_gate_up if layout == "interleaved" else deinterleave_gate_up
        return move(as_bytes(rows), dim=dim).view(rows.dtype)

    if isinstance(x, torch.Tensor):
        x = moved(x)
    elif x.group[0] != 1:
        raise ValueError(
            f"shared.gate_up_layout: expected {layout!r}, as the routed experts', for blocks of rows that share "
            f"factors, got {given!r}: pack them with packed_layout={layout!r}"
        )
    else:
        scale = None if x.scale is None else moved(x.scale, -1)
        zeros = None if x.zeros is None else moved(x.zeros)
        x = replace(x, values=moved(x.values), sf=moved(x.sf), scale=scale, zeros=zeros)
    bias = None if experts.gate_up_bias is None else moved(experts.gate_up_bias, -1)
    return replace(experts, gate_up=x, gate_up_bias=bias, gate_up_layout=layout)


def _cut(
    x: Matrix, axis: int, size: int, count: int, ranges: int, name: str, by_row: bool = False
) -> Matrix:  # fmt: skip
    """Cut each of S weights along an axis into `count` parts of `size`, the last one filled up with zeros.

    ranges: of the axis, one after the other, each of which is cut. by_row: factors are whole rows'. Returns
    [S * count, ..], the parts of a weight in order. Raises ValueError if a group of factors would be cut.
    """
    if isinstance(x, torch.Tensor):
        return _cut_tensor(x, axis, size, count, ranges, 0)
    side, packed = x.group[axis - 1], 2 if x.packed and axis == COLUMNS else 1
    nothing = (MIDDLE << 4) + MIDDLE if x.integers else 0
    values = _cut_tensor(x.values, axis, size // packed, count, ranges, nothing)
    if not by_row and (size % side or x.shape[axis] // ranges % side):
        raise ValueError(
            f"shared.{name}: expected groups whose {side} {'rows' if axis == ROWS else 'columns'} divide {size}, the "
            f"routed experts' size, got {x}"
        )

    def parts_of(factors: torch.Tensor, nothing: int | None) -> torch.Tensor:
        if by_row:
            return as_bytes(factors).repeat_interleave(count, 0).view(factors.dtype)
        return _cut_tensor(factors, axis, size // side, count, ranges, nothing)

    scale = x.scale
    if scale is not None and axis == ROWS:
        scale = _cut_tensor(scale[:, :, None], ROWS, size, count, ranges, None)[:, :, 0]
    elif scale is not None:
        scale = scale.repeat_interleave(count, 0)
    group = (x.group[0], size) if by_row else x.group
    zeros = None if x.zeros is None else parts_of(x.zeros, MIDDLE)
    return replace(x, values=values, sf=parts_of(x.sf, None), group=group, scale=scale, zeros=zeros)


def _cut_tensor(x: torch.Tensor, axis: int, size: int, count: int, ranges: int, fill: int | None) -> torch.Tensor:
    """Cut a tensor [S, rows, columns] as `_cut` says. fill: bytes of what is added; None: the last row, or column.

    A factor of zeros may be any: the last one keeps what holds for all, such as that none is above 2.
    """
    raw = as_bytes(x).unflatten(axis, (ranges, -1))
    added = size * count - raw.shape[axis + 1]
    if added:
        shape = (*raw.shape[: axis + 1], added, *raw.shape[axis + 2 :])
        last = raw.narrow(axis + 1, raw.shape[axis + 1] - 1, 1).expand(shape)
        more = last if fill is None else torch.full_like(last, fill)
        raw = torch.cat((raw, more), axis + 1)
    parts = raw.unflatten(axis + 1, (count, size)).movedim(axis + 1, 1)  # [S, count, ..]
    return parts.flatten(0, 1).flatten(axis, axis + 1).contiguous().view(x.dtype)


def _joined(routed: Matrix, shared: Matrix, name: str) -> Matrix:
    """Return routed and shared weights of one format, by rows, as one."""
    if isinstance(routed, torch.Tensor):
        return concatenate([routed, cast(torch.Tensor, shared)])
    sides = routed, _in_groups_of(routed, cast(QuantTensor, shared), name)
    zeros, scale = None, None
    if any(x.zeros is not None for x in sides):
        zeros = torch.cat([_zeros_of(x) for x in sides])
    if routed.scale is not None:
        scale = torch.cat([cast(torch.Tensor, x.scale) for x in sides])
    values, sf = concatenate([x.values for x in sides]), concatenate([x.sf for x in sides])
    return with_checked_scales(replace(routed, values=values, sf=sf, scale=scale, zeros=zeros))


def _zeros_of(x: QuantTensor) -> torch.Tensor:
    """Return INT4's zero points, also where they are all the one that None means."""
    return x.sf.new_full(x.sf.shape, MIDDLE, dtype=torch.uint8) if x.zeros is None else x.zeros


def _in_groups_of(routed: QuantTensor, shared: QuantTensor, name: str) -> QuantTensor:
    """Return shared weights with groups of the routed ones' size: factors are repeated where that makes them so."""
    if routed.sf.dtype != shared.sf.dtype:
        need, came = dtype_name(routed.sf.dtype), dtype_name(shared.sf.dtype)
        raise ValueError(f"shared.{name}: expected factors in {need}, as the routed experts', got {came}")
    if routed.group == shared.group:
        return shared
    (rows, columns), (came_rows, came_columns) = routed.group, shared.group
    if (rows, came_rows) != (1, 1) or came_columns % columns:
        raise ValueError(
            f"shared.{name}: expected groups of {rows} x {columns}, as the routed experts', or of a multiple, got "
            f"{came_rows} x {came_columns}"
        )
    times = came_columns // columns
    zeros = None if shared.zeros is None else shared.zeros.repeat_interleave(times, 2)
    return replace(shared, sf=shared.sf.repeat_interleave(times, 2), zeros=zeros, group=routed.group)

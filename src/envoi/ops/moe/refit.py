"""Weights in memory that is in use: packed over their own bytes, and new ones in the place of packed ones."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from envoi.check import describe, dtype_name
from envoi.ops.moe.op import TENSORS, tensors_of
from envoi.ops.moe.packing import pack
from envoi.quant.bits import as_bytes
from envoi.types import ExpertWeights, Matrix, QuantTensor, has_gate


def refit(experts: ExpertWeights, gate_up: Matrix, down: Matrix, **given: Any) -> ExpertWeights:
    """Pack weights as `experts` are packed, into their memory; see `ExpertWeights.update_`."""
    # For swiglu_oai, None in `pack` means 7.
    limit = math.inf if experts.swiglu_limit is None and experts.activation == "swiglu_oai" else experts.swiglu_limit
    layout = experts.gate_up_layout if has_gate(experts.activation) else None
    new = pack(
        gate_up, down, experts.format, packed_layout=layout, activation=experts.activation, swiglu_limit=limit, **given
    ).to(experts.device)
    # No arguments of `pack`: a caller writes the gate in place.
    new = replace(new, num_shared=experts.num_shared, shared_gate=experts.shared_gate)
    for name in ("gate_up", "down"):
        _check_promises(name, getattr(experts, name), getattr(new, name))
    pairs = list(_pairs(experts, new))
    with torch.inference_mode():  # in which tensors of both kinds may be written to
        for x, y in pairs:
            if x.data_ptr() != y.data_ptr():
                as_bytes(x).copy_(as_bytes(y))
    return experts


def _check_promises(name: str, old: Matrix, new: Matrix) -> None:
    """Raise ValueError unless kernels that were chosen for a weight read the new one."""
    if not isinstance(old, QuantTensor) or not isinstance(new, QuantTensor):
        return
    if old.order != new.order:
        raise ValueError(
            f"{name}: expected weights that are packed in the order {old.order!r}, as those in place, got some in "
            f"{new.order!r}; pack them anew"
        )
    if old.scales_at_most_2 and not new.scales_at_most_2:
        need = "factors near their row's" if old.order == "fp8_fragments" else "scale factors of at most 2"
        raise ValueError(f"{name}: expected {need} and no NaN, as in place, got others; pack them anew")


def _pairs(old: ExpertWeights, new: ExpertWeights) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the tensors in place and the new ones. Raises ValueError if they don't fit."""
    for name, x, y in zip(TENSORS, tensors_of(old), tensors_of(new), strict=True):
        if x is None and y is None:
            continue
        if x is None or y is None or (x.shape, x.dtype) != (y.shape, y.dtype):
            need = "None" if x is None else f"{dtype_name(x.dtype)} {list(x.shape)}"
            raise ValueError(f"{name}: expected {need}, as in place, got {'None' if y is None else describe(y)}")
        yield x, y


ExpertWeights.refit = staticmethod(refit)

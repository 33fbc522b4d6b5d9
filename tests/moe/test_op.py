"""Arguments of the MoE operators: everything that decides a call's launches is in the key of prepared calls."""

from dataclasses import fields, replace

import pytest
import torch

from envoi.ops.gemm import api as gemm
from envoi.ops.moe.op import constants_of, tensors_of
from envoi.types import ExpertWeights, QuantTensor
from tests.moe.layers import make

OTHERS = {
    "format": "fp8_row",
    "activation": "swiglu_oai",
    "swiglu_limit": 7.0,
    "gate_up_layout": "concat",
    "padding": 8,
    "num_shared": 1,
}


def weights() -> ExpertWeights:
    return replace(make(bias=True).pack("mxfp8"), num_shared=2, shared_gate=torch.ones(256))


@pytest.mark.parametrize("name", [field.name for field in fields(ExpertWeights)])
def test_every_field_of_the_experts_is_in_the_key(name):
    experts = weights()
    value = getattr(experts, name)
    if isinstance(value, torch.Tensor):
        assert any(value is x for x in tensors_of(experts))
    elif isinstance(value, QuantTensor):
        assert [x for x in (value.values, value.sf) if not any(x is y for y in tensors_of(experts))] == []
    else:
        assert constants_of(replace(experts, **{name: OTHERS[name]})) != constants_of(experts)


@pytest.mark.parametrize("side", ["gate_up", "down"])
@pytest.mark.parametrize(
    "change",
    [
        {"group": (1, 64)},
        {"scales_at_most_2": False},
        {"order": "fragments"},
        {"scale": torch.ones(1)},
        {"zeros": torch.ones(1)},
    ],
)
def test_every_field_of_quantised_weights_is_in_the_key(side, change):
    experts = weights()
    weight = getattr(experts, side)
    assert weight.scales_at_most_2
    other = replace(experts, **{side: replace(weight, **change)})
    tensor = change.get("scale", change.get("zeros"))
    if tensor is not None:
        assert sum(tensor is x for x in tensors_of(other)) == 1
        with pytest.raises(ValueError, match="a scale for the whole tensor, or zero points"):  # no GEMM takes one
            gemm._given(torch.ones(1), getattr(other, side))
    else:
        assert constants_of(other) != constants_of(experts)
        assert gemm._given(torch.ones(1), weight)[0] != gemm._given(torch.ones(1), getattr(other, side))[0]
    known = {"values", "sf", "scale", "group", "scales_at_most_2", "order", "zeros"}
    assert {field.name for field in fields(QuantTensor)} == known

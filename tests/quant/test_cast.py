"""Casts: against the scalar code, at the edges, and over shapes."""

import pytest
import torch

from envoi.quant import dequantize, quantize
from envoi.types import QuantTensor


@pytest.mark.parametrize("group", [None, 128, (128,), "1x128"])
def test_a_group_that_is_no_pair_is_refused(group):
    with pytest.raises(ValueError, match="^group: expected the rows and the columns that share a scale factor, got "):
        QuantTensor(torch.zeros(2, 128, dtype=torch.float8_e4m3fn), torch.ones(2, 1), group)


def test_last_groups_may_be_smaller():
    values, sf = torch.ones(2, 192, 160).to(torch.float8_e4m3fn), torch.tensor([[1.0, 2.0], [3.0, 4.0]]).expand(2, 2, 2)
    x = dequantize(QuantTensor(values, sf, (128, 128)))
    assert [x[1, 127, 127], x[1, 127, 128], x[1, 128, 127], x[1, 191, 159]] == [1, 2, 3, 4]
    assert x.shape == (2, 192, 160)


@pytest.mark.parametrize(("scheme", "least"), [("mxfp4", 2.98e38), ("mxfp8", 3.3e38)])
def test_what_rounds_to_two_to_the_128_is_in_float64(scheme, least):
    """Float32 has no such number; a scale factor of half the size would clip the group's largest instead."""
    q = quantize(torch.tensor([[least, -least, 1e38, *[0.0] * 29]]), scheme)
    assert dequantize(q, torch.float64)[0, :2].tolist() == [2.0**128, -(2.0**128)]
    assert dequantize(q)[0, :2].tolist() == [torch.inf, -torch.inf] and 0.7e38 < dequantize(q)[0, 2] < 1.3e38


VALUES, FACTORS = torch.ones(2, 64).to(torch.float8_e4m3fn), torch.ones(2, 2)


@pytest.mark.parametrize(
    ("message", "parts"),
    [
        ("q.values: expected float8_e4m3fn or uint8, got NoneType", {"values": None}),
        ("q.values: expected float8_e4m3fn or uint8, got bfloat16 [2, 64]", {"values": torch.ones(2, 64).bfloat16()}),
        ("q.values: expected [.., R, C], got float8_e4m3fn [64]", {"values": VALUES[0]}),
        ("q.sf: expected tensor, got NoneType", {"sf": None}),
        ("q.sf: expected tensor, got float 1.0", {"sf": 1.0}),
        ("q.scale: expected tensor, got int 3", {"scale": 3}),
        ("q.scale: expected tensor [2], got float32 [5]", {"scale": torch.ones(5)}),
        ("q.zeros: expected tensor, got int 8", {"zeros": 8}),
    ],
)
def test_parts_that_are_refused(message, parts):
    q = QuantTensor(**{"values": VALUES, "sf": FACTORS, "group": (1, 32)} | parts)
    with pytest.raises(ValueError) as caught:
        dequantize(q)
    assert str(caught.value) == message

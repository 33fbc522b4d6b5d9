"""INT4 weights: what they mean in float64, the order of fragments and back, quantising, saving, packing."""

from dataclasses import replace

import pytest
import torch

from envoi.experts import from_state_dict, pack, state_dict, unpack
from envoi.quant import dequantize
from envoi.quant.bits import unpack_nibbles
from envoi.quant.fragments import to_fragments, to_rows, why_not_fragments
from envoi.quant.int4 import from_codes, quantize_int4, to_codes
from envoi.types import QuantTensor
from tests.helpers.accuracy import assert_same_bits

FORMS = [
    (columns, dtype, zeros) for columns in (32, 64, 192) for dtype in (torch.bfloat16, torch.float16)
    for zeros in (False, True)
]  # fmt: skip


def weights(columns: int, dtype: torch.dtype, zeros: bool, experts=2, rows=128, K=192, seed=0) -> QuantTensor:
    source = torch.Generator().manual_seed(seed)

    def draw(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=source, dtype=torch.uint8)

    shape = experts, rows, K // columns
    sf = torch.randn(shape, generator=source).to(dtype)
    points = draw(16, *shape) if zeros else None
    return QuantTensor(draw(256, experts, rows, K // 2), sf, (1, columns), zeros=points)


def meaning(x: QuantTensor) -> torch.Tensor:
    """Widen by hand: (q - zero) * factor in float64."""
    q, columns = unpack_nibbles(x.values).double(), x.group[1]
    zeros = torch.full(x.sf.shape, 8.0).double() if x.zeros is None else x.zeros.double()
    return (q - zeros.repeat_interleave(columns, -1)) * x.sf.double().repeat_interleave(columns, -1)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_number_by_rows_and_in_fragments(form):
    x = weights(*form)
    assert_same_bits(dequantize(x, torch.float64), meaning(x))
    copied = replace(x, values=x.values.clone(), sf=x.sf.clone(), zeros=None if x.zeros is None else x.zeros.clone())
    there = to_fragments(copied)
    assert (there.order, there.group, there.values.data_ptr()) == (
        "fragments", (1, min(form[0], 64)), copied.values.data_ptr()
    )  # fmt: skip
    assert_same_bits(dequantize(there, torch.float64), meaning(x))
    assert_same_bits(to_rows(there).values, x.values)


@pytest.mark.parametrize("zeros", [False, True])
def test_every_number_is_where_the_docstring_says(zeros):
    x, steps = weights(32, torch.bfloat16, zeros, experts=1), 3
    codes = unpack_nibbles(x.values)[0] if zeros else to_codes(unpack_nibbles(x.values)[0])
    there = to_fragments(replace(x, values=x.values.clone(), sf=x.sf.clone()))
    by = there.values.view(2, steps, 4, 8, 4, 2, 2, 2, 2)
    sf = there.sf.view(2, steps, 4, 8, 2, 2)
    for row in range(0, 128, 3):
        tile, warp, g, half = row // 64, row % 64 // 16, row % 16 // 2, row % 2
        for k in range(192):
            step, block, k16, k8, t, b = k // 64, k % 64 // 32, k % 32 // 16, k % 16 // 8, k % 8 // 2, k % 2
            byte = int(by[tile, step, warp, g, t, k16, half, b, k8])
            assert int(codes[row, k]) == (byte >> 4 if block else byte & 15)
            assert sf[tile, step, warp, g, block, half] == x.sf[0, row, k // 32]


def test_codes_are_a_sign_and_a_magnitude():
    q = torch.arange(16, dtype=torch.uint8)
    codes = to_codes(q)
    assert sorted(codes.tolist()) == list(range(16))
    assert_same_bits(from_codes(codes), q)
    magnitude, sign = (codes >> 1).int(), (codes & 1).int()
    assert torch.equal(torch.where(sign == 1, -magnitude - 1, magnitude), q.int() - 8)


def test_what_the_order_does_not_take():
    x = weights(32, torch.bfloat16, True)
    assert why_not_fragments(x) == ""
    assert "multiples of 64" in why_not_fragments(weights(32, torch.bfloat16, True, rows=96))
    assert "share a factor" in why_not_fragments(weights(96, torch.bfloat16, True))


def test_quantising():
    w = torch.randn(3, 64, 128, generator=torch.Generator().manual_seed(0))
    w[0, 0], w[1, 1, 5], w[2, 2, 70] = 0.0, torch.nan, torch.inf
    x = quantize_int4(w)
    got = dequantize(x)
    assert (x.group, x.sf.dtype, x.zeros) == ((1, 32), torch.bfloat16, None)
    assert bool((got[0, 0] == 0).all())
    assert got.isnan().sum() == 64
    assert bool(got[1, 1, :32].isnan().all() & got[2, 2, 64:96].isnan().all())
    fine = ~got.isnan()
    # Half a level, and half of the largest magnitude's that 7 doesn't reach; the factor's rounding.
    most = (x.sf.float() * 0.55).repeat_interleave(32, -1)
    assert bool(((got - w).abs()[fine] <= most[fine]).all())


@pytest.mark.parametrize("form", FORMS[:8], ids=str)
@pytest.mark.parametrize("layout", ["concat", "interleaved"])
def test_packing_keeps_every_number(form, layout):
    gate_up, down = weights(*form, rows=384, K=384), weights(*form, rows=384, K=192)
    for given in (
        pack(gate_up, down, gate_up_layout=layout),
        pack(gate_up.values, down.values, "int4", gate_up_sf=gate_up.sf, down_sf=down.sf, gate_up_zeros=gate_up.zeros,
             down_zeros=down.zeros, gate_up_layout=layout),
    ):  # fmt: skip
        assert given.format == "int4"
        restored = from_state_dict(state_dict(given))
        for experts in (given, restored):
            got = unpack(experts, layout, torch.float64)
            assert_same_bits(got[0], meaning(gate_up))
            assert_same_bits(got[1], meaning(down))


def refusals():
    x, y = weights(32, torch.bfloat16, True, rows=256, K=128), weights(32, torch.bfloat16, True, rows=128, K=128)
    given = {"gate_up_sf": x.sf, "down_sf": y.sf, "gate_up_zeros": x.zeros, "down_zeros": y.zeros}
    return x, y, [
        ({"gate_up_zeros": x.zeros + 1}, r"gate_up_zeros: expected zero points from 0 to 15, got 16"),
        ({"gate_up_zeros": x.zeros.int()}, r"gate_up_zeros: expected uint8"),
        ({"gate_up_zeros": x.zeros[:, :-1]}, r"gate_up_zeros: expected"),
        ({"gate_up_sf": x.sf.float()}, r"gate_up_sf: expected bfloat16 or float16"),
        ({"gate_up_sf": x.sf[..., :3], "gate_up_zeros": None}, r"gate_up_sf: expected factors for equal parts of 128"),
        ({"gate_up_sf": None}, r"gate_up_zeros: expected None beside weights without gate_up_sf"),
        ({"gate_up_scale": torch.ones(2)}, r"gate_up_scale, weight_block_size: expected None beside INT4"),
    ], given  # fmt: skip


@pytest.mark.parametrize("number", range(7))
def test_refusals(number):
    x, y, cases, given = refusals()
    changes, match = cases[number]
    with pytest.raises(ValueError, match=match):
        pack(x.values, y.values, "int4", **{**given, **changes})

"""The kernel in front of the GEMMs for few tokens and 4-bit weights: sorting, and splitting or quantising tokens."""

from dataclasses import replace

import pytest
import torch

from envoi.ops.gemm.hopper_w4a16 import few
from envoi.ops.moe.reference import permute, sort_slots
from envoi.quant import dequantize, quantize
from envoi.quant.fp8_fragments import ORDER
from envoi.types import QuantTensor
from tests.helpers.accuracy import assert_same_bits

HIDDEN = 192


def layer(experts: int, order: str = "fragments") -> few.Layer:
    def empty(rows: int, columns: int) -> QuantTensor:
        values = torch.empty(experts, rows, columns // 2, dtype=torch.uint8)
        sf = torch.empty(experts, rows, columns // 32, dtype=torch.float8_e8m0fnu)
        return QuantTensor(values, sf, (1, 32), scales_at_most_2=True, order=order)

    return few.Layer(empty(128, HIDDEN), empty(HIDDEN, 64), None, None, "swiglu", None)


def with_zeros(experts: int) -> few.Layer:
    """INT4 weights that have zero points."""

    def of(x: QuantTensor) -> QuantTensor:
        shape = *x.shape[:-1], x.shape[-1] // 64
        zeros = torch.empty(shape, dtype=torch.uint8)
        return QuantTensor(x.values, torch.empty(shape, dtype=torch.float16), (1, 64), order=x.order, zeros=zeros)

    given = layer(experts)
    return replace(given, gate_up=of(given.gate_up), down=of(given.down))


def permuted(tokens, weights, ids, experts, order="fragments", given=None) -> few.Buffers:
    given = given or layer(experts, order)
    buffers = few.empty_buffers(tokens, ids, given)
    for name in ("routed", "routed_factors", "row_weights", "hidden_factors"):
        if getattr(buffers, name) is not None:
            getattr(buffers, name).view(torch.uint8).fill_(255)
    kernel, grid, arguments, options = few.permute_launch(tokens, weights, ids, given, buffers)
    kernel[grid](*arguments, **options)
    return buffers


def joined(buffers: few.Buffers, rows: int, has_low: bool = True) -> torch.Tensor:
    """high + low, or high alone, in the order of K, without the factor of rows."""
    both = buffers.routed[:rows].view(torch.float8_e4m3fn).double().view(rows, HIDDEN // 32, 2, 32)
    parts = both.sum(2) if has_low else both[:, :, 0]
    places = parts.view(rows, HIDDEN // 32, 2, 4, 2, 2)  # k16, t, b, k8
    return places.permute(0, 1, 2, 5, 3, 4).reshape(rows, HIDDEN)


@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 3, 2), (7, 5, 3), (20, 40, 4), (3, 2, 32)])
def test_rows_are_tokens_by_expert(tokens, experts, k):
    source = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=source).bfloat16() * torch.logspace(-9, 9, tokens)[:, None].bfloat16()
    ids = torch.randint(-2, experts + 2, (tokens, k), generator=source, dtype=torch.int32)
    weights = torch.rand(tokens, k, generator=source)
    masked = torch.where((ids < 0) | (ids >= experts), -1, ids)
    want = permute(x, weights, masked, experts)
    got = permuted(x, weights, ids, experts)
    assert_same_bits(got.offsets, want.offsets)
    used = len(want.topk_weights)
    places = torch.full((tokens * k,), -1, dtype=torch.int32)
    places[sort_slots(masked, experts)[0].long()] = torch.arange(used, dtype=torch.int32)
    assert_same_bits(got.slot_to_pos, places.view(tokens, k))
    assert_same_bits(got.row_weights[:used], want.topk_weights)
    rows = joined(got, used) * got.routed_factors[:used, None].double() / 32
    error = (rows - want.rows.double()).abs().amax(1) / want.rows.double().abs().amax(1).clamp(min=1e-30)
    assert float(error.max() if used else 0) <= 2.0**-17
    assert bool((got.routed[used:] == 255).all())
    assert bool(got.routed_factors[used:].isnan().all())


@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 3, 2), (7, 5, 3)])
def test_mxfp8_rows_are_one_number_of_e4m3_each(tokens, experts, k):
    """But for groups that are far smaller than a row's largest number."""
    source = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=source)
    x = (x.sign() * x.abs().clamp(min=2**-6) * torch.logspace(-9, 9, tokens)[:, None]).bfloat16()
    x[:, :32] *= 2.0**-3
    if tokens > 1:
        x[-1, 32:64], x[0] = 2.0**-20 * x[-1, 64:96], 0.0
    ids = torch.randint(0, experts, (tokens, k), generator=source, dtype=torch.int32)
    weights = torch.rand(tokens, k, generator=source)
    want = permute(x, weights, ids, experts)
    got = permuted(x, weights, ids, experts, given=replace(layer(experts), mxfp8=True))
    rows = joined(got, tokens * k, has_low=False) * got.routed_factors[:, None].double() / 32
    assert bool((got.routed.view(-1, 2, 32)[:, 1] == 255).all()), "nobody reads what would be 0"
    rounded = dequantize(quantize(want.rows, "mxfp8"), torch.float64)
    assert not torch.equal(rounded, want.rows.double())
    ordinary = torch.cat((rows[:, :32], rows[:, 64:]), 1), torch.cat((rounded[:, :32], rounded[:, 64:]), 1)
    assert torch.equal(*ordinary)
    error = (rows - rounded).abs().amax(1) / rounded.abs().amax(1).clamp(min=1e-30)
    assert float(error.max()) <= 2.0**-17


@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 3, 2), (7, 5, 3), (3, 2, 32)])
def test_fp8_rows_are_quantised_tokens_by_expert(tokens, experts, k):
    source = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=source).bfloat16() * torch.logspace(-9, 9, tokens)[:, None].bfloat16()
    x[-1, 3] = 0.0
    x[0] = 0.0 if tokens > 1 else x[0]
    x[tokens // 2, 5] = torch.inf if tokens == 3 else torch.nan if tokens == 7 else 1.0
    ids = torch.randint(-2, experts + 2, (tokens, k), generator=source, dtype=torch.int32)
    weights = torch.rand(tokens, k, generator=source)
    want = permute(x, weights, torch.where((ids < 0) | (ids >= experts), -1, ids), experts)
    got = permuted(x, weights, ids, experts, ORDER)
    assert_same_bits(got.offsets, want.offsets)
    used = len(want.topk_weights)
    assert_same_bits(got.row_weights[:used], want.topk_weights)
    rows = quantize(want.rows, "fp8_row")
    assert got.routed.shape == (tokens * k, HIDDEN)
    assert_same_bits(got.routed[:used], rows.values.view(torch.uint8))
    assert_same_bits(got.routed_factors[:used], rows.sf.flatten())
    assert bool((got.routed[used:] == 255).all())
    # The first GEMM counts the largest magnitudes of its rows up from 0; other rows aren't touched.
    assert bool((got.hidden_factors[:used] == 0).all())
    assert bool((got.hidden_factors[used:] == -1).all())


@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 3, 2), (7, 5, 3), (45, 2, 32)])
def test_where_weights_have_zero_points_rows_are_tokens_as_they_are(tokens, experts, k):
    source = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=source).bfloat16() * torch.logspace(-30, 30, tokens)[:, None].bfloat16()
    x[-1, 3] = torch.nan
    ids = torch.randint(-2, experts + 2, (tokens, k), generator=source, dtype=torch.int32)
    weights = torch.rand(tokens, k, generator=source)
    want = permute(x, weights, torch.where((ids < 0) | (ids >= experts), -1, ids), experts)
    got = permuted(x, weights, ids, experts, given=with_zeros(experts))
    used = len(want.topk_weights)
    assert_same_bits(got.offsets, want.offsets)
    assert_same_bits(got.row_weights[:used], want.topk_weights)
    assert_same_bits(got.routed[:used], want.rows)
    assert bool((got.routed[used:].view(torch.uint8) == 255).all())
    assert got.routed_factors is None and got.hidden_factors is None
    assert got.hidden.dtype == torch.bfloat16


def test_what_is_not_far_below_the_largest_is_exact():
    x = (torch.randint(-255, 256, (1, HIDDEN), generator=torch.Generator().manual_seed(0)) * 0.5).bfloat16()
    x[0, 0] = 128.0
    got = permuted(x, torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32), 1)
    assert torch.equal(joined(got, 1) * got.routed_factors[0].double() / 32, x.double())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_number_makes_its_rows_factor_nan(bad):
    x = torch.ones(3, HIDDEN).bfloat16()
    x[1, 7] = bad
    got = permuted(x, torch.ones(3, 1), torch.zeros(3, 1, dtype=torch.int32), 1)
    assert got.routed_factors.isnan().tolist() == [False, True, False]


def test_ids_and_weights_are_read_as_they_are():
    tokens, weights = torch.randn(5, HIDDEN).bfloat16(), torch.rand(5, 3).bfloat16()
    ids = torch.randint(-1, 4, (5, 3), dtype=torch.int32)
    wide = torch.where(ids < 0, 2**32 + 1, ids.long())
    got, want = permuted(tokens, weights, wide, 4), permuted(tokens, weights.float(), ids, 4)
    rows = int(want.offsets[4])
    assert_same_bits(got.slot_to_pos, want.slot_to_pos)
    assert_same_bits(got.row_weights[:rows], want.row_weights[:rows])

"""Weight packing: order of rows, and the search for MXFP4's scales."""

from dataclasses import replace

import pytest
import torch

from envoi.quant import SCHEMES, dequantize, quantize
from envoi.quant.bits import e2m1_encode, pack_nibbles
from envoi.quant.pack import deinterleave_gate_up, interleave_gate_up, pack_weight, with_checked_scales


def test_gate_and_up_take_turns():
    gate, up = torch.arange(6.0).view(1, 3, 2), 10 + torch.arange(6.0).view(1, 3, 2)
    both = interleave_gate_up(torch.cat((gate, up), dim=1))
    assert torch.equal(both[:, 0::2], gate)
    assert torch.equal(both[:, 1::2], up)
    assert torch.equal(deinterleave_gate_up(both), torch.cat((gate, up), dim=1))


@pytest.mark.parametrize("dim", [-1, -2, 0, 1, 2])
def test_the_inverse_along_every_side(dim):
    x = torch.randn(4, 6, 8)
    assert torch.equal(deinterleave_gate_up(interleave_gate_up(x, dim), dim), x)
    assert torch.equal(interleave_gate_up(deinterleave_gate_up(x, dim), dim), x)


def test_the_search_is_never_worse_in_any_group():
    w = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * 10 ** torch.linspace(-3, 2, 64).unsqueeze(1)
    packed, plain = pack_weight(w, SCHEMES["mxfp4"], "w"), quantize(w, "mxfp4")

    def errors(q):
        return (dequantize(q) - w).square().unflatten(-1, (-1, 32)).sum(-1)

    assert bool((errors(packed) <= errors(plain)).all())
    assert bool((errors(packed) < errors(plain)).any())


def codes_with(w: torch.Tensor, sf: torch.Tensor) -> torch.Tensor:
    """Return packed nibbles of weights [R, 32] under UE8M0 bytes [R, 1]."""
    scale = torch.exp2(sf.float() - 127)
    return pack_nibbles(e2m1_encode(w.float() / scale))


def in_halves(errors: torch.Tensor) -> list[float]:
    """Add up the squares of each row of errors as halves, in float32, number by number."""
    sums = []
    for row in errors.square().tolist():
        while len(row) > 1:
            half = len(row) // 2
            row = [float(torch.tensor(a) + torch.tensor(b)) for a, b in zip(row[:half], row[half:], strict=True)]
        sums += row
    return sums


def test_near_ties_are_decided_in_one_order():
    # Two scales have equal errors in one of a thousand groups, of which adding in another order decides some otherwise.
    source = torch.Generator().manual_seed(0)
    powers = torch.randint(-6, 6, (100_000, 32), generator=source)
    w = (torch.randn(100_000, 32, generator=source) * torch.exp2(powers.float())).bfloat16()
    wide = quantize(w, "mxfp4")
    narrow = torch.where(wide.sf.view(torch.uint8) > 1, wide.sf.view(torch.uint8) - 1, wide.sf.view(torch.uint8))
    of_narrow = replace(wide, values=codes_with(w, narrow), sf=narrow.view(torch.float8_e8m0fnu))
    exact = [(dequantize(q, torch.float64) - w.double()).square().sum(-1) for q in (wide, of_narrow)]
    near = (exact[0] - exact[1]).abs() < 1e-6 * exact[0]
    assert 20 < int(near.sum()) < 500
    packed = pack_weight(w[near], SCHEMES["mxfp4"], "w")
    sums = [in_halves(dequantize(q)[near] - w[near].float()) for q in (wide, of_narrow)]
    want = [b < a for a, b in zip(*sums, strict=True)]
    got = packed.sf.view(torch.uint8).flatten() == narrow[near].flatten()
    assert got.tolist() == want


@pytest.mark.gpu
def test_a_gpu_packs_the_same_bits():
    w = (torch.randn(8, 1024, 2048, generator=torch.Generator().manual_seed(0)) / 32).bfloat16()
    for name in ("mxfp4", "nvfp4"):
        here, there = (pack_weight(x, SCHEMES[name], "w") for x in (w, w.cuda()))
        assert torch.equal(here.values, there.values.cpu()), name
        assert torch.equal(here.sf.view(torch.uint8), there.sf.cpu().view(torch.uint8)), name


def test_a_group_with_nan_stays_nan():
    w = torch.randn(2, 64)
    w[0, 3] = torch.nan
    got = dequantize(pack_weight(w, SCHEMES["mxfp4"], "w"))
    assert bool(got[0, :32].isnan().all())
    assert bool(got[0, 32:].isfinite().all())


@pytest.mark.parametrize("scheme", ["mxfp4", "mxfp8"])
def test_packed_scales_are_at_most_2_unless_one_is_large_or_nan(scheme):
    w = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    assert pack_weight(w, SCHEMES[scheme], "w").scales_at_most_2
    assert not quantize(w, scheme).scales_at_most_2  # not checked
    assert not pack_weight(w * 1e6, SCHEMES[scheme], "w").scales_at_most_2
    w[3, 3] = float("nan")
    assert not pack_weight(w, SCHEMES[scheme], "w").scales_at_most_2


def test_an_element_that_is_nan_breaks_the_promise():
    x = quantize(torch.ones(4, 32), "mxfp8")
    assert with_checked_scales(x).scales_at_most_2
    x.values.view(torch.uint8)[2, 5] = 0xFF
    assert not with_checked_scales(x).scales_at_most_2

"""4-bit weights in the order of tensor cores' fragments: the places of the docstring, and back."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from envoi.ops.gemm import grouped_gemm
from envoi.quant import dequantize, fragments, quantize
from envoi.quant.bits import unpack_nibbles
from envoi.quant.fragments import to_fragments, to_rows, why_not_fragments
from envoi.types import QuantTensor
from tests.helpers.accuracy import assert_same_bits


def weights(experts=2, rows=128, columns=192, seed=0) -> QuantTensor:
    """Tame, with random factors."""
    source = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (experts, rows, columns // 2), generator=source, dtype=torch.uint8)
    sf = torch.randint(0, 129, (experts, rows, columns // 32), generator=source, dtype=torch.uint8)
    return QuantTensor(values, sf.view(torch.float8_e8m0fnu), (1, 32), scales_at_most_2=True)


def nvfp4(experts=2, rows=128, columns=192, seed=0) -> QuantTensor:
    """Every factor that the order takes: none negative, none NaN; a scale for each row."""
    source = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (experts, rows, columns // 2), generator=source, dtype=torch.uint8)
    sf = torch.randint(0, 0x7F, (experts, rows, columns // 16), generator=source, dtype=torch.uint8)
    scale = torch.rand(experts, rows, generator=source)
    return QuantTensor(values, sf.view(torch.float8_e4m3fn), (1, 16), scale)


def copied(x: QuantTensor) -> QuantTensor:
    return replace(x, values=x.values.clone(), sf=x.sf.view(torch.uint8).clone().view(x.sf.dtype))


@pytest.mark.parametrize("weights", [weights, nvfp4])
def test_there_and_back(weights):
    x = weights()
    there = to_fragments(copied(x))
    assert (there.order, there.shape, there.sf.shape) == ("fragments", x.shape, x.sf.shape)
    assert not torch.equal(there.values, x.values)
    back = to_rows(there)
    assert back.order == "rows"
    assert_same_bits(back.values, x.values)
    assert back.sf.dtype == x.sf.dtype
    assert_same_bits(back.sf.view(torch.uint8), x.sf.view(torch.uint8))


@pytest.mark.parametrize("weights", [weights, nvfp4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dequantising_sees_the_same_numbers(dtype, weights):
    x = weights(3)
    there = to_fragments(copied(x))
    assert_same_bits(dequantize(there, dtype), dequantize(x, dtype))
    one = replace(there, values=there.values[1], sf=there.sf[1], scale=None if x.scale is None else x.scale[1])
    assert_same_bits(dequantize(one, dtype), dequantize(x, dtype)[1])


@pytest.mark.parametrize("weights", [weights, nvfp4])
def test_every_number_is_where_the_docstring_says(weights):
    x, steps = weights(1), 3
    codes = unpack_nibbles(x.values)[0]
    there = to_fragments(copied(x))
    by = there.values.view(2, steps, 4, 8, 4, 2, 2, 2, 2)
    sf = there.sf.view(torch.uint8).view(2, steps, 4, 8, 2, -1, 2)  # block, k16 if it has a factor of its own, half
    for row in range(128):
        tile, warp, g, half = row // 64, row % 64 // 16, row % 16 // 2, row % 2
        for k in range(192):
            step, block, k16, k8, t, b = k // 64, k % 64 // 32, k % 32 // 16, k % 16 // 8, k % 8 // 2, k % 2
            byte = int(by[tile, step, warp, g, t, k16, half, b, k8])
            first = byte & 7 | byte >> 2 & 8
            second = byte >> 4 & 8 | byte >> 2 & 6 | byte >> 6 & 1
            assert int(codes[row, k]) == (second if block else first)
            factor = sf[tile, step, warp, g, block, k16 * (sf.shape[5] - 1), half]
            assert factor == x.sf.view(torch.uint8)[0, row, k // x.group[1]]


@pytest.mark.parametrize("weights", [weights, nvfp4])
def test_parts_of_the_experts_are_reordered_as_all_of_them(monkeypatch, weights):
    x = weights(5)
    together = to_fragments(copied(x))
    monkeypatch.setattr(fragments, "PART_BYTES", x.values[:2].nbytes)
    there = to_fragments(copied(x))
    assert_same_bits(there.values, together.values)
    assert_same_bits(there.sf.view(torch.uint8), together.sf.view(torch.uint8))


class Asked(TorchDispatchMode):
    """Recorder of the sizes of new tensors, in bytes."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.untyped_storage().data_ptr() not in given:
            self.sizes.append(found.untyped_storage().nbytes())
        return found


def test_many_experts_take_no_memory_that_vllm_uses_once():
    x = weights(16, 2048, 2048)  # of 2 MiB, and 128 KiB of factors
    with Asked() as asked:
        to_fragments(x)
    assert max(asked.sizes) >= 32 << 20
    once = [size for size in asked.sizes if 1 << 20 < size <= 10 << 20]
    assert len(once) <= 1, "of all experts' factors alone: see PART_BYTES"


@pytest.mark.parametrize(
    ("why", "x"),
    [
        ("a scale factor is above 2", replace(weights(), scales_at_most_2=False)),
        ("multiples of 64", weights(rows=96)),
        ("multiples of 64", weights(columns=160)),
        ("it isn't MXFP4, NVFP4 or INT4", quantize(torch.randn(1, 64, 64), "mxfp8")),
        ("multiples of 64", nvfp4(rows=96)),
        ("a scale factor is negative or NaN", replace(nvfp4(), sf=(-nvfp4().sf.float()).to(torch.float8_e4m3fn))),
        ("a scale factor is negative or NaN", replace(nvfp4(), sf=torch.full_like(nvfp4().sf, torch.nan))),
        ("it is in this order already", to_fragments(weights())),
    ],
)
def test_refusals(why, x):
    with pytest.raises(ValueError, match=why):
        to_fragments(x)


def test_what_can_be_put_into_the_order():
    assert why_not_fragments(weights()) == why_not_fragments(nvfp4()) == ""


def test_a_public_gemm_refuses_the_order():
    rows, offsets = torch.randn(4, 192).bfloat16(), torch.tensor([0, 2, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"weights.order: expected 'rows', got 'fragments'"):
        grouped_gemm(rows, to_fragments(weights()), offsets)

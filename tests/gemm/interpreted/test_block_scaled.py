"""Block-scaled products of Triton's kernels, as Blackwell runs them, with a stand-in for the instruction."""

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from envoi.epilogues.library import expert_l1, store
from envoi.ops.gemm import gemm, reference
from envoi.ops.gemm.triton import host
from envoi.ops.moe import moe
from envoi.quant import quantize
from envoi.quant.bits import e2m1_decode, unpack_nibbles
from envoi.types import QuantTensor
from tests.gemm.interpreted.sides import assert_close, expected, run
from tests.helpers.accuracy import assert_same_bits, relative_error
from tests.helpers.inputs import normal
from tests.moe.layers import make
from tests.moe.test_moe import BOUNDS
from tools.oracles.gemm import oracle
from tools.oracles.moe import moe_oracle

SCALED = [("mxfp8", "mxfp4"), ("fp8_row", "mxfp4"), ("mxfp8", "mxfp8"), ("mxfp4", "mxfp4"), ("fp8_row", "mxfp8"),
          ("mxfp8", "fp8_row"), ("fp8_tensor", "mxfp4")]  # fmt: skip
WIDENED = [("nvfp4", "nvfp4"), ("fp8_row", "fp8_row"), ("fp8_1x128", "mxfp4"), (None, "mxfp4"), (None, None)]


def numbers(data: np.ndarray, is_pairs: bool) -> torch.Tensor:
    """Return bytes [rows, K] of E4M3, or [rows, K / 2] of two E2M1, as float64."""
    raw = torch.from_numpy(np.ascontiguousarray(data).view(np.uint8))
    return e2m1_decode(unpack_nibbles(raw)).double() if is_pairs else raw.view(torch.float8_e4m3fn).double()


def factors(data: np.ndarray) -> torch.Tensor:
    """Return UE8M0 factors [rows, K / 32] as float64 [rows, K]."""
    sf = torch.from_numpy(np.ascontiguousarray(data)).view(torch.float8_e8m0fnu)
    return sf.float().double().repeat_interleave(32, 1)


@pytest.fixture(autouse=True)
def products(monkeypatch):
    """Let a CPU stand for Blackwell; return the left matrices' rows and both kinds of each block-scaled product."""
    made = []

    def create_dot_scaled(self, x, x_sf, x_kind, y, y_sf, y_kind, fast_math, x_k_pack, y_k_pack, acc):
        is_pairs = [kind == self_kinds["e2m1"] for kind in (x_kind, y_kind)]
        made.append((x.data.shape[0], *is_pairs))
        left = numbers(x.data, is_pairs[0]) * factors(x_sf.data)
        right = numbers(y.data.T, is_pairs[1]) * factors(y_sf.data)
        total = torch.from_numpy(acc.data).double() + left @ right.T
        return interpreter.TensorHandle(total.float().numpy(), tl.float32)

    from triton._C.libtriton import ir

    self_kinds = {"e2m1": ir.ScaleDotElemTypeTY.E2M1}
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot_scaled", create_dot_scaled, raising=False)
    monkeypatch.setattr(host, "has_tcgen05", lambda device: True)
    return made


def cast(x: torch.Tensor, scheme: str | None):
    return x.bfloat16() if scheme is None else quantize(x, scheme)


@pytest.mark.parametrize(("for_a", "for_b"), SCALED)
@pytest.mark.parametrize(("m", "n", "k"), [(17, 130, 256), (60, 40, 384), (129, 300, 128)])
def test_formats(for_a, for_b, m, n, k, products):
    a, b = cast(normal(m, k), for_a), cast(normal(n, k, seed=1), for_b)
    got, want = gemm(a, b, out_dtype=torch.float32), reference.accumulate(a, b)
    assert_close([got], [want], [oracle(a, b)], 5e-8)
    is_pairs = for_a == "mxfp4", for_b == "mxfp4"
    rows, *kinds = zip(*products, strict=True)
    assert set(zip(*kinds, strict=True)) == {is_pairs if m >= 128 else is_pairs[::-1]}
    assert min(rows) >= min(128, n)  # the left side has the 128 rows that the instruction takes


@pytest.mark.parametrize(("for_a", "for_b"), WIDENED)
def test_other_formats_are_widened(for_a, for_b, products):
    a, b = cast(normal(17, 256), for_a), cast(normal(24, 256, seed=1), for_b)
    assert relative_error(gemm(a, b, out_dtype=torch.float32), oracle(a, b)) < 1e-6
    assert not products


def test_groups_of_other_sizes_are_widened(products):
    a = quantize(normal(17, 192), "mxfp8")
    wide = QuantTensor(a.values, a.sf.view(torch.uint8)[:, ::2].contiguous().view(a.sf.dtype), (1, 64))
    b = quantize(normal(24, 192, seed=1), "fp8_row")
    assert relative_error(gemm(wide, b, out_dtype=torch.float32), oracle(wide, b)) < 1e-6
    assert not products


@pytest.mark.parametrize("k", [32, 96, 160, 352])
def test_a_last_step_that_isnt_whole(k, products):
    for m in (5, 130):
        a, b = quantize(normal(m, k), "mxfp8"), quantize(normal(40, k, seed=1), "mxfp4")
        assert_close([gemm(a, b, out_dtype=torch.float32)], [reference.accumulate(a, b)], [oracle(a, b)], 5e-8)
    assert products.count((64, True, False)) == -(-k // 128)  # few rows: the weights are on the left
    assert products.count((128, False, True)) == 2 * -(-k // 128)


def test_strides(products):
    w = quantize(normal(24, 256, seed=1), "mxfp4")
    b = QuantTensor(w.values.T.contiguous().T, w.sf.view(torch.uint8).T.contiguous().T.view(w.sf.dtype), w.group)
    q = quantize(normal(40, 256), "mxfp8")
    a = QuantTensor(q.values[::2], q.sf[::2], q.group)
    assert_same_bits(gemm(a, b), gemm(QuantTensor(a.values.contiguous(), a.sf.contiguous(), a.group), w))
    assert products


@pytest.mark.parametrize("exponents", [(0, 240), (100, 154)])
def test_factors_far_apart(exponents):
    a, b = quantize(normal(9, 128).bfloat16().float(), "mxfp8"), quantize(normal(40, 128, seed=1), "mxfp4")
    first, last = exponents
    sf = torch.tensor([first, last, 127, 126], dtype=torch.uint8).repeat(40, 1).view(torch.float8_e8m0fnu)
    b = QuantTensor(b.values, sf, b.group)
    assert relative_error(gemm(a, b, out_dtype=torch.float32), oracle(a, b)) < 1e-6


def test_nan_factors_stay_in_their_rows():
    a, b = quantize(normal(20, 64), "mxfp8"), quantize(normal(40, 64, seed=1), "mxfp4")
    a.sf.view(torch.uint8)[3, 1] = 255
    b.sf.view(torch.uint8)[7, 0] = 255
    found = gemm(a, b).isnan()
    want = torch.zeros(20, 40, dtype=torch.bool)
    want[3], want[:, 7] = True, True
    assert torch.equal(found, want)


@pytest.mark.parametrize("offsets", [[0, 8, 16, 24, 32], [0, 0, 30, 30, 32], [0, 0, 0, 0, 0], [0, 5, 9, 9, 20]])
@pytest.mark.parametrize("for_a", ["mxfp8", "fp8_row"])
def test_experts(offsets, for_a):
    a, b = cast(normal(32, 160), for_a), cast(normal(4, 24, 160, seed=1), "mxfp4")
    want = expected(a, b, store, offsets, wide=True)
    assert_close(run(a, b, store, offsets), expected(a, b, store, offsets), want, 1e-7)


def test_a_gated_epilogue_that_quantises(products):
    a, b = quantize(normal(150, 128), "mxfp8"), quantize(normal(2, 256, 128, seed=1), "mxfp4")
    ending, operands = expert_l1("swiglu_oai", 7.0, True, "mxfp8"), {"bias": normal(2, 256, seed=2)}
    operands["weight"] = normal(150, seed=3)
    used = {operand.name: operands[operand.name] for operand in ending.ir.operands}
    values, sf = run(a, b, ending, [0, 130, 150], **used)
    want_values, want_sf = expected(a, b, ending, [0, 130, 150], **used)
    assert torch.equal(sf.view(torch.uint8), want_sf.view(torch.uint8))
    assert relative_error(values.double(), want_values.double()) < 1e-2
    assert products


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4_mxfp8", "mxfp4_fp8"])
def test_layers(format, products):
    layer = make(tokens=9, experts=4, k=2, hidden=160, intermediate=96, bias=True, activation="swiglu_oai", limit=7.0)
    experts = layer.pack(format)
    want = moe_oracle(layer.tokens, layer.routing.topk_weights, layer.routing.topk_ids, experts)
    assert relative_error(moe(layer.tokens, layer.routing, experts), want) < 1.5 * BOUNDS[format]
    assert products

"""Tiles with just as many tokens, or features, as are needed on a GPU: the bits of widths that are powers of two."""

from dataclasses import replace

import pytest
import torch

from envoi import gemm
from envoi.epilogues import Col, Row, Tile, epilogue, gelu, row_max, row_sum
from envoi.epilogues.library import absmax, gelu_residual, linear, scale_bias_relu, store, swiglu
from envoi.epilogues.reference import evaluate
from envoi.ops.gemm.hopper import host, tune, two_kernels
from envoi.ops.gemm.hopper.config import NARROWED_FEATURES, Config, fitted, why_not
from envoi.quant import SCHEMES, dequantize, quantize
from envoi.runtime.devices import num_sms
from envoi.types import Matrix, QuantTensor
from tests.gemm.test_gpu import normal
from tests.helpers.accuracy import assert_same_bits, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("tidy_gpu")]
BF16 = torch.bfloat16


@epilogue
def two_outputs(acc, c: Tile, alpha: Row, bias: Col):
    return acc * alpha + c, gelu(acc + bias)


def matrix(rows: int, columns: int, kind: str, seed: int) -> Matrix:
    if kind == "fp16":
        return normal(rows, columns, seed=seed, dtype=torch.float16)
    x = normal(rows, columns, seed=seed)
    return x if kind == "bf16" else quantize(x, SCHEMES[kind])


def operands_of(ep, M: int, N: int) -> dict:
    shapes = {"alpha": (M,), "bias": (N,), "c": (M, N), "residual": (M, N)}
    found = {o.name: normal(*shapes[o.name], seed=7) for o in ep.ir.operands if o.kind != "Scalar"}
    return found | {o.name: 0.5 for o in ep.ir.operands if o.kind == "Scalar"}


def run(a: Matrix, b: Matrix, ep, operands: dict, config: Config, out_dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    """Run a GEMM with a config, in one kernel; the outputs are NaN before: see `tidy_gpu`."""

    def forced(problem, code, *_):
        chosen = fitted(problem, config, code)
        assert why_not(problem, chosen, code) == ""
        return chosen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "choose", forced)
        patch.setattr(two_kernels, "pay", lambda *_: False)
        return host.run_gemm(a, b, None, ep.ir, out_dtype, operands)


def tile(tokens: int, consumers: int, k: int, pingpong: bool = False) -> Config:
    return Config(64, consumers, tokens, k, 12, swap_ab=True, pingpong=pingpong)


def of_features(features: int, consumers: int, k: int, pingpong: bool = False) -> Config:
    columns = min(64, features & -features)
    return Config(64, consumers, features, k, 12, epilogue_columns=columns, pingpong=pingpong)


def assert_right(
    width: int, consumers: int, pingpong: bool, ep, kind: str, M: int, N: int, K: int, make=tile, **named
) -> None:  # fmt: skip
    k = 128 if kind == "fp8_row" else 64
    a, b, operands = matrix(M, K, kind, 0), matrix(N, K, kind, 1), operands_of(ep, M, N)
    got = run(a, b, ep, operands, make(width, consumers, k, pingpong), **named)
    one = Config(64, 2, 128, k, 4, epilogue_columns=64)
    for x, y in zip(got, run(a, b, ep, operands, one, **named), strict=True):
        assert_same_bits(x, y)
    wide = [x.double() if isinstance(x, torch.Tensor) else dequantize(x).double() for x in (a, b)]
    for x, y in zip(got, evaluate(ep.ir, wide[0] @ wide[1].T, operands), strict=True):
        assert isinstance(y, torch.Tensor) and relative_error(x, y) < 4e-3


CONSUMERS = [(1, False), (2, False), (2, True), (3, False)]


@pytest.mark.parametrize(("consumers", "pingpong"), CONSUMERS)
@pytest.mark.parametrize("tokens", [72, 88, 96, 104, 136, 152, 176, 184, 200])
def test_tiles_of_every_kind_of_width(tokens, consumers, pingpong):
    for M in (65, tokens, tokens + 1, 3 * tokens - 5, 1000):
        assert_right(tokens, consumers, pingpong, store, "bf16", M, 1096, 264)


@pytest.mark.parametrize("tokens", [208, 216, 224, 232, 240, 248])
@pytest.mark.parametrize(("consumers", "pingpong"), CONSUMERS[:3])
def test_wide_tiles(tokens, consumers, pingpong):
    for M in (tokens - 7, 2 * tokens, 1001):
        assert_right(tokens, consumers, pingpong, store, "bf16", M, 520, 200)


@pytest.mark.parametrize("ep", [scale_bias_relu, gelu_residual, linear, two_outputs], ids=lambda ep: ep.ir.name)
@pytest.mark.parametrize(
    ("tokens", "consumers", "pingpong"), [(88, 1, False), (152, 2, False), (200, 2, True), (112, 3, False)]
)
@pytest.mark.parametrize("kind", ["bf16", "fp8_row"])
def test_epilogues(ep, tokens, consumers, pingpong, kind):
    for M in (81, 500):
        assert_right(tokens, consumers, pingpong, ep, kind, M, 1104, 384)


@pytest.mark.parametrize(("consumers", "pingpong"), CONSUMERS[:3])
@pytest.mark.parametrize("features", NARROWED_FEATURES)
def test_tiles_of_a_divisor_of_the_features(features, consumers, pingpong):
    """The last tile of the second N has columns after the last feature, which aren't stored."""
    for M, N in ((65, 7 * features), (200, 3 * features + 8), (1000, 5 * features)):
        assert_right(features, consumers, pingpong, store, "bf16", M, N, 264, of_features)


@pytest.mark.parametrize("ep", [scale_bias_relu, gelu_residual, linear, two_outputs], ids=lambda ep: ep.ir.name)
@pytest.mark.parametrize(("features", "consumers", "pingpong"), [(80, 2, False), (176, 1, False), (144, 2, True)])
@pytest.mark.parametrize("kind", ["bf16", "fp8_row"])
def test_epilogues_on_a_divisor_of_the_features(ep, features, consumers, pingpong, kind):
    for M in (81, 500):
        assert_right(features, consumers, pingpong, ep, kind, M, 9 * features, 384, of_features)


@pytest.mark.parametrize(("kind", "K"), [("fp16", 72), ("bf16", 8), ("fp8_row", 16), ("fp8_row", 4096), ("bf16", 6152)])
def test_sizes_along_k(kind, K):
    for tokens, consumers, pingpong in ((104, 2, False), (136, 3, False), (216, 2, True)):
        assert_right(tokens, consumers, pingpong, store, kind, 300, 648, K)


def test_outputs_in_float32():
    for tokens, consumers in ((96, 2), (184, 1)):
        assert_right(tokens, consumers, False, store, "bf16", 300, 648, 512, out_dtype=torch.float32)


def test_more_tiles_than_multiprocessors():
    for tokens, consumers, pingpong in ((72, 1, False), (72, 2, True), (96, 2, False), (96, 3, False)):
        assert_right(tokens, consumers, pingpong, gelu_residual, "bf16", 3001, 5128, 136)


@epilogue
def three_outputs(acc):
    return acc, gelu(acc), acc * 2.0


def test_a_third_output_gets_other_tiles():
    """Only two outputs have TMA descriptors; a narrowed tile can't store from registers."""
    for M in (150, 385):
        a, b = matrix(M, 512, "bf16", 0), matrix(12288, 512, "bf16", 1)
        assert isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        got = gemm(a, b, three_outputs)
        for x, y in zip(got, evaluate(three_outputs.ir, a.double() @ b.double().T, {}), strict=True):
            assert isinstance(y, torch.Tensor) and relative_error(x, y) < 4e-3


def test_what_no_number_stands_for_stays_in_its_row():
    a, b = matrix(400, 256, "bf16", 0), matrix(520, 256, "bf16", 1)
    assert isinstance(a, torch.Tensor) and not isinstance(b, QuantTensor)
    a[199, 3], a[200, 5] = torch.nan, torch.inf
    (got,) = run(a, b, store, {}, tile(200, 2, 64))
    assert got[199].isnan().all() and not got[200].isfinite().any()
    assert got[[i for i in range(400) if i not in (199, 200)]].isfinite().all()


def test_the_bits_are_the_same_a_hundred_times():
    a, b, operands = matrix(777, 1024, "bf16", 0), matrix(2048, 1024, "bf16", 1), operands_of(gelu_residual, 777, 2048)
    config = replace(tile(200, 2, 64), pingpong=True)
    (first,) = run(a, b, gelu_residual, operands, config)
    for _ in range(100):
        assert_same_bits(run(a, b, gelu_residual, operands, config)[0], first)


# Few tokens: no TMA stores what leaves, any epilogue and parts along K


@epilogue
def sums_and_maxima(acc, bias: Col):
    h = acc + bias
    return h, row_sum(h), row_max(h)


def few(tokens: int, consumers: int, k: int, split_k: int) -> Config:
    return Config(64, consumers, tokens, k, 12, swap_ab=True, split_k=split_k)


@pytest.mark.parametrize("ep", [store, gelu_residual, two_outputs, three_outputs, absmax, sums_and_maxima, swiglu])
@pytest.mark.parametrize(("tokens", "consumers", "split_k"), [(24, 1, 1), (40, 2, 1), (48, 1, 3), (56, 2, 2)])
@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp8_row"])
def test_few_tokens(ep, tokens, consumers, split_k, kind):
    N, K = 1112, 392
    k = 128 if kind == "fp8_row" else 64
    for M in (1, tokens - 7, tokens, 57):
        a, b, operands = matrix(M, K, kind, 0), matrix(N, K, kind, 1), operands_of(ep, M, N)
        got = run(a, b, ep, operands, few(tokens, consumers, k, split_k))
        one = few(64 if tokens > 32 else 32, consumers, k, split_k)
        for x, y in zip(got, run(a, b, ep, operands, one), strict=True):
            assert_same_bits(x, y)
        wide = [x.double() if isinstance(x, torch.Tensor) else dequantize(x).double() for x in (a, b)]
        for x, y in zip(got, evaluate(ep.ir, wide[0] @ wide[1].T, operands), strict=True):
            assert isinstance(y, torch.Tensor) and relative_error(x, y) < 4e-3


def test_nothing_is_written_behind_the_last_of_few_tokens():
    a, b = matrix(64, 512, "bf16", 0), matrix(1024, 512, "bf16", 1)
    assert isinstance(a, torch.Tensor)
    rows = torch.full((64, 1024), 7.0, dtype=BF16, device="cuda")
    for M in (41, 48, 33):
        rows.fill_(7.0)
        call = host.call_of(a[:M].contiguous(), b, None, store.ir, BF16, {})
        config = fitted(host.problem_of(call), few(48, 1, 64, 1), call.code)
        host.launch_gemm(replace(call, outputs=[rows[:M]]), config, num_sms(a.device))
        assert (rows[M:] == 7.0).all() and not (rows[:M] == 7.0).all(dim=1).any()


def test_few_tokens_that_are_no_number_stay_in_their_row():
    a, b = matrix(53, 256, "bf16", 0), matrix(520, 256, "bf16", 1)
    assert isinstance(a, torch.Tensor)
    a[52, 3], a[17, 5] = torch.nan, torch.inf
    (got,) = run(a, b, store, {}, few(56, 1, 64, 1))
    assert got[52].isnan().all() and not got[17].isfinite().any()
    assert got[[i for i in range(53) if i not in (17, 52)]].isfinite().all()

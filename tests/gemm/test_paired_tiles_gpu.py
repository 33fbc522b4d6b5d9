"""Pairs of tiles on a GPU: an L1 that quantises itself stores the bits of a bf16 L1 and the kernel that quantises."""

from dataclasses import replace

import pytest
import torch

from envoi.epilogues import epilogue, pairs, quantize, round_bf16, silu
from envoi.epilogues.library import expert_l1
from envoi.ops.gemm import grouped_gemm
from envoi.ops.gemm.backend import run_kernels
from envoi.ops.gemm.grouping import EXPERTS_ROWS
from envoi.ops.gemm.hopper import tune
from envoi.ops.gemm.hopper.config import Config, fitted, why_not
from envoi.ops.moe import moe
from envoi.ops.moe.permute import quantize_rows
from envoi.quant import SCHEMES
from envoi.quant import quantize as cast_to
from envoi.runtime import prepared
from envoi.types import QuantTensor
from tests.gemm.test_gpu import normal
from tests.helpers.accuracy import assert_same_bits
from tests.helpers.choices import force
from tests.moe.layers import Layer, assert_replays_repeat, make
from tests.moe.test_gpu import assert_right, on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("tidy_gpu")]
ROWS_OF_NONE = 70
COUNTS = {
    "round the tiles' heights": [0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 256, 0, 321],
    "one expert takes all": [0, 0, 2000, 0],
    "one row": [1],
    "none at all": [0, 0],
    "many experts": [7 * i % 40 for i in range(200)],
    "long ones": [1500, 1, 1700, 900],
}
CONFIGS = {
    "wide": Config(64, 2, 128, 128, 5, wide_tail_tiles=True, paired_tiles=True),
    "wide, few stages": Config(64, 2, 128, 128, 3, wide_tail_tiles=True, paired_tiles=True),
    "square": Config(64, 2, 128, 128, 6, paired_tiles=True),
    "one consumer, two blocks a stage": Config(64, 1, 128, 256, 4, paired_tiles=True),
    "one consumer": Config(64, 1, 128, 128, 2, paired_tiles=True),
}
KINDS = {
    "swiglu": ("swiglu", None, False),
    "swiglu_oai with a bias": ("swiglu_oai", 7.0, True),
    "geglu, limited": ("geglu", 3.0, False),
}


def breaking(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Return rows of very different magnitudes, some of zeros, some with a NaN or an infinity."""
    x = normal(rows, columns, seed=seed).float() * torch.logspace(-12, 12, rows, device="cuda")[:, None]
    x[5::97] = 0.0
    x[11::101, 3], x[13::103, 5] = torch.nan, torch.inf
    return x.bfloat16()


def both_ways(counts: list[int], N: int, K: int, kind: str, layout: str) -> tuple[QuantTensor, QuantTensor, int]:
    """Return the rows that L1 quantises itself, those that the kernel after it quantises, and the number of rows."""
    activation, limit, has_bias = KINDS[kind]
    used, E = sum(counts), len(counts)
    rows = cast_to(breaking(used + ROWS_OF_NONE, K, 0), "fp8_1x128")
    weights = cast_to(normal(E, N, K, seed=1), "fp8_128x128")
    offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    operands = {"weight": normal(used + ROWS_OF_NONE, seed=3).float()}
    if has_bias:
        operands["bias"] = normal(E, N, seed=2)
    in_bf16 = expert_l1(activation, limit, has_bias, None, layout).ir
    in_pairs = expert_l1(activation, limit, has_bias, "fp8_1x128", layout, True).ir
    (stored,) = run_kernels(rows, weights, offsets, in_bf16, torch.bfloat16, operands, EXPERTS_ROWS)
    values, sf = run_kernels(rows, weights, offsets, in_pairs, torch.bfloat16, operands, EXPERTS_ROWS)
    return QuantTensor(values, sf, (1, 128)), quantize_rows(stored, offsets, SCHEMES["fp8_1x128"]), used


def assert_same_rows(got: QuantTensor, want: QuantTensor, used: int) -> None:
    """Assert the same bits in the rows that belong to experts, and that no other row was written."""
    assert got.values.shape == want.values.shape
    assert_same_bits(got.values[:used], want.values[:used])
    assert_same_bits(got.sf[:used], want.sf[:used])
    assert bool(got.sf[used:].isnan().all()), "somebody wrote scale factors of no expert"
    untouched = torch.empty(1, dtype=got.values.dtype, device="cuda").view(torch.uint8)
    assert bool((got.values[used:].view(torch.uint8) == untouched).all()), "somebody wrote rows of no expert"


@pytest.fixture
def config(request, monkeypatch):
    """Make the kernel use a config for pairs, and the same without pairs for everything else."""
    chosen = CONFIGS[request.param]

    def forced(problem, code, *_):
        one = fitted(problem, replace(chosen, paired_tiles=code.paired), code)
        assert why_not(problem, one, code) == ""
        return one

    monkeypatch.setattr(tune, "choose", forced)


@pytest.mark.parametrize("config", CONFIGS, indirect=True)
@pytest.mark.parametrize("layout", ["interleaved", "concat"])
@pytest.mark.parametrize("counts", COUNTS)
def test_bits_of_the_kernel_after(config, layout, counts):
    for N, K in ((1024, 640), (4096, 256)):
        assert_same_rows(*both_ways(COUNTS[counts], N, K, "swiglu", layout))


@pytest.mark.parametrize("config", ["wide", "square"], indirect=True)
@pytest.mark.parametrize("layout", ["interleaved", "concat"])
@pytest.mark.parametrize("kind", KINDS)
def test_activations(config, layout, kind):
    assert_same_rows(*both_ways(COUNTS["round the tiles' heights"], 1024, 1024, kind, layout))


@pytest.mark.parametrize("K", [128, 256, 384, 512, 1152])
@pytest.mark.parametrize("N", [256, 512, 768, 1536, 2816])
def test_sizes(N, K):
    for counts in (COUNTS["round the tiles' heights"], COUNTS["long ones"]):
        assert_same_rows(*both_ways(counts, N, K, "swiglu", "interleaved"))


@pytest.mark.parametrize("layout", ["interleaved", "concat"])
def test_the_same_bits_each_time(layout):
    first, _, used = both_ways(COUNTS["long ones"], 4096, 1024, "swiglu", layout)
    for _ in range(20):
        again, _, _ = both_ways(COUNTS["long ones"], 4096, 1024, "swiglu", layout)
        assert_same_rows(again, first, used)


@epilogue
def in_groups(acc):
    gate, up = pairs(acc)
    return quantize(round_bf16(silu(gate) * up), "fp8_e4m3", group=128)


@epilogue
def in_bf16(acc):
    gate, up = pairs(acc)
    return silu(gate) * up


@pytest.mark.parametrize("config", ["wide", "square", "one consumer"], indirect=True)
def test_a_users_epilogue_and_rows_after_the_last_expert(config):
    counts = COUNTS["round the tiles' heights"]
    rows = cast_to(normal(sum(counts) + ROWS_OF_NONE, 512), "fp8_1x128")
    weights = cast_to(normal(len(counts), 1024, 512, seed=1), "fp8_128x128")
    offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    got = grouped_gemm(rows, weights, offsets, in_groups)
    want = cast_to(grouped_gemm(rows, weights, offsets, in_bf16), "fp8_1x128")
    assert_same_bits(got.values, want.values)
    assert_same_bits(got.sf, want.sf)


@pytest.fixture
def forced(monkeypatch):
    yield lambda wanted: force(monkeypatch, pairs=wanted)
    monkeypatch.undo()
    prepared.clear()


LAYERS = {
    "as chosen": {"tokens": 1500},
    "concat": {"tokens": 1500, "packed_layout": "concat"},
    "few tokens": {"tokens": 9},
    "biases": {"tokens": 700, "activation": "swiglu_oai", "bias": True},
    "not a multiple of 256": {"tokens": 700, "intermediate": 384},
    "a gate is missing": {"tokens": 700, "activation": "relu2"},
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_layers_bits(name, forced):
    sizes = {"experts": 16, "k": 4, "hidden": 1024, "intermediate": 512, **LAYERS[name]}
    layer = on_gpu(make(**sizes))
    packed = layer.pack("fp8_block128")
    found = []
    for wanted in (None, False) if name == "few tokens" else (None, False, True):
        forced(wanted)
        found += [moe(layer.tokens, layer.routing, packed) for _ in range(4)]  # the last ones are prepared
    for other in found[1:]:
        assert_same_bits(other, found[0])


def test_pairs_are_launched_where_they_should_be(forced, monkeypatch):
    chosen = []
    choose = tune.choose
    monkeypatch.setattr(tune, "choose", lambda *given: chosen.append(choose(*given)) or chosen[-1])
    layer = on_gpu(make(tokens=1500, experts=16, k=4, hidden=1024, intermediate=512))
    packed = layer.pack("fp8_block128")
    for wanted in (True, False):
        forced(wanted)
        chosen.clear()
        moe(layer.tokens, layer.routing, packed)
        assert [config.paired_tiles for config in chosen] == [wanted, False]


def test_error_is_at_most_twice_the_references(forced):
    forced(True)
    assert_right(make(tokens=300, hidden=512, intermediate=256), "fp8_block128")


def test_a_graph(forced):
    forced(True)
    layer: Layer = on_gpu(make(tokens=900, experts=16, k=4, hidden=1024, intermediate=512))
    assert_replays_repeat(layer, layer.pack("fp8_block128"))


def test_factors_in_powers_of_two():
    counts = COUNTS["round the tiles' heights"]
    rows = cast_to(normal(sum(counts), 512), "fp8_1x128")
    weights = cast_to(normal(len(counts), 1024, 512, seed=1), "fp8_128x128")
    powers = weights.sf.log2().round().exp2()
    offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    floats, bytes_ = (
        grouped_gemm(rows, replace(weights, sf=sf), offsets, in_groups)
        for sf in (powers, powers.to(torch.float8_e8m0fnu))
    )
    assert_same_bits(floats.values, bytes_.values)
    assert_same_bits(floats.sf, bytes_.sf)

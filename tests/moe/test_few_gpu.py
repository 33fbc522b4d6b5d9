"""Kernel for few tokens on a Hopper GPU: the bits of the kernels for many, on sizes and routings chosen to break."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from envoi.ops.moe import moe
from envoi.ops.moe.decode.bf16_fp8 import host
from envoi.ops.moe.experts import run_layer
from envoi.types import ExpertWeights, QuantTensor, Routing
from tests.helpers.accuracy import assert_same_bits, relative_error
from tests.helpers.choices import force
from tests.helpers.launches import assert_same_code, watched
from tests.moe.layers import (
    Layer,
    assert_a_graph_serves,
    assert_others_keep_their_bits,
    assert_same_bits_each_time,
    make,
)
from tests.moe.test_gpu import on_gpu
from tests.moe.test_moe import KINDS
from tools.kernel_cases import moe_decode as cases
from tools.oracles.moe import moe_oracle

pytestmark = [pytest.mark.gpu(arch="sm_90"), pytest.mark.usefixtures("tidy_gpu")]

FORMATS = ("bf16", "fp8_block128")
# Powers of two and not; one step of K; an odd number of steps; chunks of tokens whole and not, and small ones.
SIZES = {
    "bf16": [(2048, 768), (2880, 2880), (64, 64), (192, 320), (3968, 256), (1536, 1408), (4096, 2048)],
    "fp8_block128": [(2048, 768), (128, 128), (384, 640), (5120, 256), (1536, 1408), (4096, 2048), (1152, 4992)],
}  # fmt: skip


@pytest.fixture
def few(monkeypatch) -> list[str]:
    """Let the kernel run whatever the number of rows; one item for each call of it."""
    ran: list[str] = []
    run = host.run
    monkeypatch.setattr(host, "run", lambda *given: ran.append("few") or run(*given))
    force(monkeypatch, decode=True)
    return ran


def by_many(packed: ExpertWeights, layer: Layer, monkeypatch) -> torch.Tensor:
    """Return what the kernels for many tokens give."""
    with monkeypatch.context() as context:
        force(context, decode=False)
        return run_layer(layer.tokens, layer.routing.topk_weights, layer.routing.topk_ids, packed)


def check(layer: Layer, format: str, few: list[str], monkeypatch, packed: ExpertWeights | None = None) -> torch.Tensor:
    """Assert that the kernel ran, with the others' bits, close to float64."""
    packed = packed or layer.pack(format)
    before = len(few)
    got = run_layer(layer.tokens, layer.routing.topk_weights, layer.routing.topk_ids, packed)
    assert len(few) == before + 1
    assert_same_bits(got, by_many(packed, layer, monkeypatch))
    return got


@pytest.mark.parametrize(
    ("format", "hidden", "intermediate"), [(format, *size) for format in FORMATS for size in SIZES[format]]
)
@pytest.mark.parametrize("tokens", [1, 9, 50])
def test_sizes(format, hidden, intermediate, tokens, few, monkeypatch):
    layer = on_gpu(make(tokens, 6, 4, hidden, intermediate))
    got, packed = check(layer, format, few, monkeypatch), layer.pack(format)
    want = moe_oracle(layer.tokens, layer.routing.topk_weights, layer.routing.topk_ids, packed)
    assert relative_error(got, want) <= (5e-3 if format == "bf16" else 6e-2)


@pytest.mark.parametrize("kind", [*KINDS, "geglu", "silu", "relu2"])
@pytest.mark.parametrize("layout", ["concat", "interleaved"])
@pytest.mark.parametrize("format", FORMATS)
def test_activations(format, layout, kind, few, monkeypatch):
    given = KINDS.get(kind, {"activation": kind, "bias": True})
    if given.get("activation") in ("silu", "relu2"):
        layout = None
    check(on_gpu(make(24, 8, 3, 512, 384, packed_layout=layout, **given)), format, few, monkeypatch)


@pytest.mark.parametrize(
    ("tokens", "experts", "k"),
    [
        (3, 128, 8), (64, 128, 8), (100, 128, 4), (9, 512, 32), (200, 3, 2), (8, 33, 4), (512, 2, 1), (1, 1, 1),
        (17, 200, 30), (16, 512, 32),
    ],
)  # fmt: skip
@pytest.mark.parametrize("format", FORMATS)
def test_numbers_of_experts_and_slots(format, tokens, experts, k, few, monkeypatch):
    check(on_gpu(make(tokens, experts, k, 256, 128)), format, few, monkeypatch)


@pytest.mark.parametrize("format", FORMATS)
def test_hostile_routing(format, few, monkeypatch):
    layer = on_gpu(make(tokens=48, experts=6, k=4, hidden=512, intermediate=256))
    slots = torch.arange(192, device="cuda").view(48, 4)
    for ids in (
        torch.full_like(slots, 5), torch.full_like(slots, 0), slots % 2, torch.where(slots % 3 == 0, slots % 6, -1),
        torch.where(slots == 100, 3, -1), slots - 90, torch.full_like(slots, -1), torch.full_like(slots, 6),
    ):  # fmt: skip
        packed, routing = layer.pack(format), Routing(layer.routing.topk_weights, ids.int(), 6)
        got = check(replace(layer, routing=routing), format, few, monkeypatch, packed)
        nobody = ((ids < 0) | (ids > 5)).all(1)
        assert bool((got[nobody] == 0).all())


@pytest.mark.parametrize("format", FORMATS)
def test_any_tensors(format, few, monkeypatch):
    layer = on_gpu(make(tokens=11, experts=16, k=4, hidden=512, intermediate=256))
    packed, want = layer.pack(format), None
    want = by_many(packed, layer, monkeypatch)
    wide = torch.zeros(11, 1040, dtype=torch.bfloat16, device="cuda")
    odd = torch.zeros(11 * 512 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(11, 512)
    strided = torch.zeros(11, 520, dtype=torch.bfloat16, device="cuda")
    for place in (wide[:, 16:528], odd, strided[:, :512], strided[:, 8:], torch.empty_like(layer.tokens.T).T):
        place.copy_(layer.tokens)
        routing = Routing(layer.routing.topk_weights.bfloat16().float(), layer.routing.topk_ids.long(), 16)
        got = run_layer(place, layer.routing.topk_weights, routing.topk_ids, packed)
        assert_same_bits(got, want)
    far = torch.zeros(11, 9, dtype=torch.int64, device="cuda")[:, 1::2].copy_(layer.routing.topk_ids)
    assert_same_bits(run_layer(layer.tokens, layer.routing.topk_weights, far, packed), want)
    nobody = run_layer(layer.tokens, layer.routing.topk_weights, far + (1 << 32), packed)
    assert bool((nobody == 0).all())
    half = layer.routing.topk_weights.bfloat16()
    got = run_layer(layer.tokens, half, layer.routing.topk_ids, packed)
    halved = replace(layer, routing=replace(layer.routing, topk_weights=half.float()))
    assert_same_bits(got, by_many(packed, halved, monkeypatch))
    assert len(few) == 8


def test_power_of_two_factors(few, monkeypatch):
    layer = on_gpu(make(tokens=20, experts=8, k=3, hidden=512, intermediate=384))
    packed = layer.pack("fp8_block128")

    def rounded(weights: QuantTensor) -> QuantTensor:
        bits = weights.sf.log2().round().add(127).to(torch.uint8)
        bits[0, 0, 0], bits[1, 0, 1] = 0, 255  # 2^-127 and NaN
        return replace(weights, sf=bits.view(torch.float8_e8m0fnu))

    packed = replace(packed, gate_up=rounded(packed.gate_up), down=rounded(packed.down))
    got = check(layer, "fp8_block128", few, monkeypatch, packed)
    assert bool(got.isnan().any())
    assert not bool(got.isnan().all())


@pytest.mark.parametrize("format", FORMATS)
def test_a_tokens_bits_do_not_depend_on_the_others(format, few):
    layer = on_gpu(make(tokens=24, hidden=512, intermediate=256, masked=0.0))
    packed = layer.pack(format)
    clean = moe(layer.tokens, layer.routing, packed)
    for first in (0, 3, 23):  # alone, or with fewer others
        part = slice(first, min(first + 5, 24))
        routing = Routing(layer.routing.topk_weights[part], layer.routing.topk_ids[part], 8)
        assert_same_bits(moe(layer.tokens[part], routing, packed), clean[part])
    assert_others_keep_their_bits(layer, packed)
    assert few


@pytest.mark.parametrize("format", FORMATS)
def test_the_same_bits_a_hundred_times(format, few):
    layer = on_gpu(make(tokens=30, experts=16, k=4, hidden=1024, intermediate=640))
    assert_same_bits_each_time(layer, layer.pack(format))
    assert few


@pytest.mark.parametrize("format", FORMATS)
def test_a_graph_serves_other_routings(format, few):
    layers = [on_gpu(make(tokens=8, masked=masked, seed=i)) for i, masked in enumerate((0.0, 0.5, 1.0))]
    packed, given = layers[0].pack(format), on_gpu(make(tokens=8))
    want = [moe(layer.tokens, layer.routing, packed) for layer in layers]
    assert_a_graph_serves(given, packed, layers, want)
    assert few


def test_what_it_does_not_take(few):
    layer = on_gpu(make(tokens=4, hidden=256, intermediate=96))  # 96 isn't a multiple of 64
    moe(layer.tokens, layer.routing, layer.pack())
    moe(layer.tokens, on_gpu(make(tokens=4)).routing, on_gpu(make()).pack("fp8_row"))
    many = on_gpu(make(tokens=200, k=3))
    moe(many.tokens, many.routing, many.pack())
    for format in FORMATS:
        wide = on_gpu(make(tokens=4, hidden=128, intermediate=14336))  # tokens of L2 don't fit beside the stages
        moe(wide.tokens, wide.routing, wide.pack(format))
    assert few == []


@cache
def launched() -> dict[str, str]:
    """What runs on the registered layer."""
    seen: dict[str, str] = {}
    source = torch.Generator("cuda").manual_seed(0)

    with watched(lambda sha256, kernel: seen.setdefault(sha256, kernel.asm["ptx"])):
        for case in cases.CASES:
            experts = cases.experts_of(case)._map(lambda x: torch.ones(x.shape, device="cuda").to(x.dtype))
            x = torch.randn(case.num_tokens, cases.HIDDEN, generator=source, device="cuda").bfloat16()
            order = torch.rand(case.num_tokens, cases.NUM_EXPERTS, generator=source, device="cuda")
            ids = order.topk(cases.NUM_TOPK).indices.int()
            run_layer(x, torch.rand(ids.shape, generator=source, device="cuda"), ids, experts)
    return seen


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_what_runs_is_what_was_counted(case):
    assert_same_code(case.title, cases.launch_of(case), launched())

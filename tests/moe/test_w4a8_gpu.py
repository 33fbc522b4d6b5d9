"""MXFP4 weights and FP8 tokens on a Hopper GPU: layers beside float64 with the format's roundings, by both kernels."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from envoi.epilogues.activation import activate
from envoi.ops.gemm.hopper_w4a16 import few
from envoi.ops.moe import moe
from envoi.ops.moe.choose import DECODE_MX_ACTIVATIONS
from envoi.ops.moe.layer import run_layer
from envoi.ops.moe.packing import unpack
from envoi.quant import dequantize, quantize
from envoi.quant.fp8_fragments import LEAST_SHIFT, ORDER, SPREAD, to_fp8_fragments
from envoi.types import ExpertWeights, QuantTensor
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
from tests.moe.test_gpu import on_gpu, with_ids
from tests.moe.test_moe import KINDS
from tests.test_spans import STEPS, seen
from tools.kernel_cases import gemm_hopper_w4a16 as cases

pytestmark = [pytest.mark.gpu(arch="sm_90"), pytest.mark.usefixtures("tidy_gpu")]

# Sums of FP8 products keep 14 bits, which now and then moves a number of L1's rows to the next of E4M3.
# One of a single token's few rows weighs most: a number's next is 1/16 of it.
MOST = 3e-2  # tokens and rows in FP8 alone: 4.5e-2
# Powers of two and their neighbours; K in whole groups of steps, and not; one step; CTAs of 4, 8 and 16 warps.
SIZES = [(2880, 2880), (2048, 1408), (1536, 768), (64, 64), (128, 192), (704, 576), (4096, 512), (7168, 192)]


@pytest.fixture(autouse=True, params=["few", "many"])
def ran(request, monkeypatch) -> list[str]:
    """Have the kernels for few tokens run, or that for many: the first name. More names: calls of the former."""
    names: list[str] = [request.param]
    original = few.moe
    force(monkeypatch, decode_mx=request.param == "few")
    monkeypatch.setattr(few, "moe", lambda *given: names.append("few") or original(*given))
    return names


def rounded_oracle(layer: Layer, packed: ExpertWeights) -> torch.Tensor:
    """Compute the layer in float64 on the packed weights, but for what is rounded: tokens, L1's rows, L2's rows."""
    gate_up, down, gate_up_bias, down_bias = unpack(packed, "interleaved", torch.float64)
    out = torch.zeros(layer.tokens.shape, dtype=torch.float64, device="cuda")

    def in_fp8(rows: torch.Tensor) -> torch.Tensor:
        return dequantize(quantize(rows.bfloat16(), "fp8_row"), torch.float64)

    for expert in range(packed.num_local_experts):
        token, slot = (layer.routing.topk_ids == expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        weights = layer.routing.topk_weights[token, slot].double().unsqueeze(1)
        h = in_fp8(layer.tokens[token]) @ gate_up[expert].T
        h = h if gate_up_bias is None else h + gate_up_bias[expert]
        y = in_fp8(activate(h, packed.activation, packed.swiglu_limit) * weights) @ down[expert].T
        y = y if down_bias is None else y + down_bias[expert] * weights
        out.index_add_(0, token, y.bfloat16().double())
    return out


def outputs(layer: Layer, ran: list[bool], packed: ExpertWeights | None = None) -> torch.Tensor:
    packed = packed or layer.pack("mxfp4_fp8")
    assert packed.order == ORDER
    del ran[1:]
    got = moe(layer.tokens, layer.routing, packed)
    assert ran[1:] == (["few"] if ran[0] == "few" and layer.activation in DECODE_MX_ACTIVATIONS else [])
    assert relative_error(got, rounded_oracle(layer, packed)) <= MOST
    return got


@pytest.mark.parametrize(("hidden", "intermediate"), SIZES)
@pytest.mark.parametrize("tokens", [1, 9, 40, 90])
def test_sizes(hidden, intermediate, tokens, ran):
    outputs(on_gpu(make(tokens, 5, 4, hidden, intermediate, bias=True, activation="swiglu_oai")), ran)


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if KINDS[kind].get("activation", "swiglu").startswith("swiglu")]
)
@pytest.mark.parametrize("tokens", [3, 30])
def test_activations(tokens, kind, ran):
    outputs(on_gpu(make(tokens=tokens, hidden=512, intermediate=320, **KINDS[kind])), ran)


@pytest.mark.parametrize(
    ("tokens", "experts", "k"), [(3, 128, 8), (100, 128, 4), (9, 512, 32), (200, 3, 2), (8, 33, 4)]
)
def test_numbers_of_experts(tokens, experts, k, ran):
    outputs(on_gpu(make(tokens, experts, k, 192, 128)), ran)


@pytest.mark.parametrize("spread", [-5 - LEAST_SHIFT, SPREAD])
def test_factors_far_apart(spread, ran):
    layer = on_gpu(make(tokens=20, experts=6, k=4, hidden=704, intermediate=320))
    source = torch.Generator("cuda").manual_seed(0)

    def weights(N: int, K: int) -> QuantTensor:
        values = torch.randint(0, 256, (6, N, K // 2), generator=source, device="cuda", dtype=torch.uint8)
        sf = torch.randint(121 - spread, 122, (6, N, K // 32), generator=source, device="cuda", dtype=torch.uint8)
        return to_fp8_fragments(QuantTensor(values, sf.view(torch.float8_e8m0fnu), (1, 32)))

    packed = ExpertWeights(weights(640, 704), weights(704, 320), "mxfp4_fp8")
    assert packed.gate_up.scales_at_most_2 == (spread < SPREAD)
    outputs(layer, ran, packed)


def test_hostile_routing(ran):
    layer = on_gpu(make(tokens=48, experts=6, k=4, hidden=512, intermediate=256))
    slots = torch.arange(192, device="cuda").view(48, 4)
    for ids in (torch.full_like(slots, 5), slots % 2, torch.where(slots % 3 == 0, slots % 6, -1)):
        outputs(with_ids(layer, ids), ran)
    masked = moe(layer.tokens, with_ids(layer, torch.full_like(slots, -1)).routing, layer.pack("mxfp4_fp8"))
    assert bool((masked == 0).all())


def test_the_same_bits_a_hundred_times():
    layer = on_gpu(make(tokens=30, experts=16, k=4, hidden=1024, intermediate=704))
    assert_same_bits_each_time(layer, layer.pack("mxfp4_fp8"))


def test_a_graph_serves_other_routings():
    layers = [on_gpu(make(tokens=8, masked=masked, seed=i)) for i, masked in enumerate((0.0, 0.5, 1.0))]
    packed, given = layers[0].pack("mxfp4_fp8"), on_gpu(make(tokens=8))
    want = [moe(layer.tokens, layer.routing, packed) for layer in layers]
    assert_a_graph_serves(given, packed, layers, want)


def test_the_steps_have_names():
    layer = on_gpu(make(tokens=8))
    packed = layer.pack("mxfp4_fp8")
    found = [name for name, _ in seen(lambda: moe(layer.tokens, layer.routing, packed))]
    assert [name for name in found if name in STEPS] == STEPS


def test_a_tokens_bits_do_not_depend_on_the_others_numbers():
    layer = on_gpu(make(tokens=24, hidden=512, intermediate=256, masked=0.0))
    assert_others_keep_their_bits(layer, layer.pack("mxfp4_fp8"))


def test_tokens_of_very_different_sizes(ran):
    layer = on_gpu(make(tokens=24, hidden=512, intermediate=256))
    layer.tokens *= torch.logspace(-12, 6, 24, device="cuda")[:, None].bfloat16()
    packed = layer.pack("mxfp4_fp8")
    got, want = outputs(layer, ran, packed), rounded_oracle(layer, packed)
    used = (layer.routing.topk_ids >= 0).any(1)
    errors = (got[used] - want[used]).norm(dim=1) / want[used].norm(dim=1)
    assert float(errors.max()) < 3 * MOST


def test_the_number_of_tokens_does_not_matter_if_batch_invariant(ran):
    many = on_gpu(make(tokens=500, hidden=512, intermediate=256, masked=0.0))
    packed = many.pack("mxfp4_fp8")
    all_of_them = moe(many.tokens, many.routing, packed, batch_invariant=True)
    ids, weights = many.routing.topk_ids[:9], many.routing.topk_weights[:9]
    routing = replace(many.routing, topk_ids=ids, topk_weights=weights)
    assert_same_bits(moe(many.tokens[:9], routing, packed, batch_invariant=True), all_of_them[:9])
    assert ran[1:] == []
    assert relative_error(all_of_them, rounded_oracle(many, packed)) <= MOST


@cache
def launched() -> dict[str, str]:
    """What runs on gpt-oss-20b's layer and on a larger one, for the numbers of tokens that the registry has."""
    found: dict[str, str] = {}
    source = torch.Generator("cuda").manual_seed(0)

    def weights(N: int, K: int, spread: int) -> QuantTensor:
        values = torch.randint(0, 256, (32, N, K // 2), generator=source, device="cuda", dtype=torch.uint8)
        sf = torch.randint(118 - spread, 119, (32, N, K // 32), generator=source, device="cuda", dtype=torch.uint8)
        return to_fp8_fragments(QuantTensor(values, sf.view(torch.float8_e8m0fnu), (1, 32)))

    def layer(hidden: int, intermediate: int, spread: int = 2) -> ExpertWeights:
        biases = torch.randn(32, 2 * intermediate, device="cuda"), torch.randn(32, hidden, device="cuda")
        given = weights(2 * intermediate, hidden, spread), weights(hidden, intermediate, spread)
        return ExpertWeights(*given, "mxfp4_fp8", "swiglu_oai", 7.0, *biases)

    with watched(lambda sha256, kernel: found.setdefault(sha256, kernel.asm["ptx"])):
        for sizes, looks_up in sorted({(case.sizes, case.looks_up) for case in of_fp8()}):
            experts = layer(*sizes, *((SPREAD,) if looks_up else ()))
            for tokens in sorted({c.num_tokens for c in of_fp8() if (c.sizes, c.looks_up) == (sizes, looks_up)}):
                x = torch.randn(tokens, sizes[0], generator=source, device="cuda").bfloat16()
                ids = torch.rand(tokens, 32, generator=source, device="cuda").topk(4).indices.int()
                run_layer(x, torch.rand(tokens, 4, generator=source, device="cuda"), ids, experts)
    return found


def of_fp8() -> list[cases.Case]:
    return [case for case in cases.CASES if case.fp8]


@pytest.mark.parametrize("ran", ["few"], indirect=True)
@pytest.mark.parametrize("case", of_fp8(), ids=lambda case: case.name)
def test_what_runs_is_what_was_counted(case, monkeypatch):
    monkeypatch.undo()  # as many tokens as usual
    assert_same_code(case.title, cases.launch_of(case), launched())

"""INT4 weights and bf16 tokens on a Hopper GPU, beside float64 and the same weights in bf16: forms of every kind,
both kernels, sizes and routings chosen to break. Bits, where every sum is exact, are in `test_four_bits_gpu`."""

from functools import cache

import pytest
import torch

from envoi.ops.gemm.hopper_w4a16 import few
from envoi.ops.moe import experts as kernels_layer
from envoi.ops.moe import moe
from envoi.ops.moe.choose import DECODE_MX_ACTIVATIONS
from envoi.ops.moe.experts import run_layer
from envoi.quant import dequantize
from envoi.quant.fragments import to_fragments
from envoi.types import ExpertWeights, QuantTensor, Routing
from tests.helpers.accuracy import assert_same_bits, relative_error
from tests.helpers.choices import force
from tests.helpers.launches import assert_same_code, watched
from tests.moe.int4 import FORMS, Form, in_bf16, mostly_zero, packed, random_int4
from tests.moe.layers import (
    Layer,
    assert_a_graph_serves,
    assert_others_keep_their_bits,
    assert_replays_repeat,
    assert_same_bits_each_time,
    make,
)
from tests.moe.test_gpu import on_gpu, with_ids
from tests.moe.test_moe import KINDS
from tools.kernel_cases import gemm_hopper_w4a16 as cases
from tools.oracles.moe import moe_oracle

pytestmark = [pytest.mark.gpu(arch="sm_90"), pytest.mark.usefixtures("tidy_gpu")]

# K in whole groups of steps, and not; one step of K; more K than fits twice.
SIZES = [(2880, 2880), (2048, 1408), (2048, 768), (64, 64), (128, 192), (4096, 1536), (7168, 512)]
KIMI, HALF, ZEROS = Form(), Form(64, torch.float16), Form(64, torch.float16, True)


@pytest.fixture(params=["few", "many"])
def kernels(request, monkeypatch) -> list[str]:
    """Which kernels are to run, and which have."""
    force(monkeypatch, decode_mx=request.param == "few")
    ran: list[str] = []
    for name, module, function in (("few", few, "rows"), ("many", kernels_layer, "run_experts")):
        original = getattr(module, function)
        monkeypatch.setattr(
            module, function, lambda *given, name=name, original=original: ran.append(name) or original(*given)
        )
    ran.append(request.param)
    return ran


def judged(
    layer: Layer, form: Form, experts: ExpertWeights | None = None, wide: ExpertWeights | None = None
) -> torch.Tensor:
    """Return outputs, whose error against float64 is checked to be that of the same weights in bf16, or less."""
    experts = packed(layer, form) if experts is None else experts
    wide = in_bf16(layer, form) if wide is None else wide
    assert experts.order == "fragments"
    got = moe(layer.tokens, layer.routing, experts)
    want = moe_oracle(layer.tokens, layer.routing.topk_weights, layer.routing.topk_ids, experts)
    usual = relative_error(moe(layer.tokens, layer.routing, wide), want)
    assert relative_error(got, want) <= usual * (1.05 if got.numel() > 5000 else 1.5) + 1e-4
    return got


def outputs(layer: Layer, kernels: list[str], form: Form) -> torch.Tensor:
    experts = packed(layer, form)
    few_takes = experts.activation in DECODE_MX_ACTIVATIONS
    got = judged(layer, form, experts)
    assert kernels[1] == (kernels[0] if few_takes else "many")
    return got


@pytest.mark.parametrize(
    ("form", "hidden", "intermediate"),
    [
        *((KIMI, *sizes) for sizes in SIZES),
        (HALF, 2880, 2880),
        (ZEROS, 2880, 2880),
        (HALF, 7168, 512),
        (ZEROS, 7168, 512),
        (ZEROS, 4096, 1536),
        (ZEROS, 128, 192),
    ],
)
@pytest.mark.parametrize("tokens", [1, 16, 70])
def test_sizes(form, hidden, intermediate, tokens, kernels):
    outputs(on_gpu(make(tokens, 5, 4, hidden, intermediate, bias=True, activation="swiglu_oai")), kernels, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [3, 40, 600])
def test_forms(form, tokens, kernels):
    outputs(on_gpu(make(tokens, hidden=1024, intermediate=384, bias=True)), kernels, FORMS[form])


@pytest.mark.parametrize("mean", [1.0, 4.0])
@pytest.mark.parametrize("form", [form for form in FORMS.values() if form.zeros])
@pytest.mark.parametrize("tokens", [1, 16, 70])
def test_weights_that_are_mostly_zero_and_tokens_with_a_mean(tokens, form, mean, kernels):
    layer = on_gpu(make(tokens, 5, 4, hidden=2048, intermediate=768, masked=0.0))
    layer, experts, wide = mostly_zero(layer, form, mean)
    judged(layer, form, experts, wide)
    assert kernels[1] == kernels[0]


@pytest.mark.parametrize("kind", KINDS)
def test_activations(kind, kernels):
    outputs(on_gpu(make(tokens=40, hidden=512, intermediate=320, **KINDS[kind])), kernels, KIMI)


@pytest.mark.parametrize(
    ("tokens", "experts", "k"), [(3, 128, 8), (100, 128, 4), (9, 512, 32), (200, 3, 2), (8, 33, 4), (16, 384, 8)]
)
def test_numbers_of_experts(tokens, experts, k, kernels):
    outputs(on_gpu(make(tokens, experts, k, 192, 128)), kernels, KIMI)


@pytest.mark.parametrize("form", [KIMI, ZEROS], ids=["kimi", "zeros"])
def test_hostile_routing(kernels, form):
    layer = on_gpu(make(tokens=48, experts=6, k=4, hidden=512, intermediate=256))
    slots = torch.arange(192, device="cuda").view(48, 4)
    for ids in (torch.full_like(slots, 5), slots % 2, torch.where(slots % 3 == 0, slots % 6, -1)):
        judged(with_ids(layer, ids), form)
    masked = moe(layer.tokens, with_ids(layer, torch.full_like(slots, -1)).routing, packed(layer, form))
    assert bool((masked == 0).all())
    none = Routing(*(x[:0] for x in (layer.routing.topk_weights, layer.routing.topk_ids)), 6)
    assert moe(layer.tokens[:0], none, packed(layer, form)).shape == (0, 512)


@pytest.mark.parametrize("form", [KIMI, ZEROS], ids=["kimi", "zeros"])
def test_the_same_bits_each_time(kernels, form):
    layer = on_gpu(make(tokens=30, experts=16, k=4, hidden=1024, intermediate=704))
    assert_same_bits_each_time(layer, packed(layer, form))
    assert_replays_repeat(layer, packed(layer, form))


def test_a_graph_serves_other_routings(kernels):
    layers = [on_gpu(make(tokens=8, masked=masked, seed=i)) for i, masked in enumerate((0.0, 0.5, 1.0))]
    experts, given = packed(layers[0], KIMI), on_gpu(make(tokens=8))
    want = [moe(layer.tokens, layer.routing, experts) for layer in layers]
    assert_a_graph_serves(given, experts, layers, want)


@pytest.mark.parametrize("form", [KIMI, ZEROS], ids=["kimi", "zeros"])
def test_a_tokens_bits_do_not_depend_on_the_others_numbers(kernels, form):
    layer = on_gpu(make(tokens=24, hidden=512, intermediate=256, masked=0.0))
    assert_others_keep_their_bits(layer, packed(layer, form))


def test_tokens_of_very_different_sizes(kernels):
    layer = on_gpu(make(tokens=24, hidden=512, intermediate=256))
    layer.tokens *= torch.logspace(-12, 6, 24, device="cuda")[:, None].bfloat16()
    got, experts = outputs(layer, kernels, KIMI), packed(layer, KIMI)
    want = moe_oracle(layer.tokens, layer.routing.topk_weights, layer.routing.topk_ids, experts)
    used = (layer.routing.topk_ids >= 0).any(1)
    errors = (got[used] - want[used]).norm(dim=1) / want[used].norm(dim=1)
    assert float(errors.max()) < 15e-3


def test_batch_invariant(kernels):
    layer = on_gpu(make(tokens=600, hidden=512, intermediate=256, masked=0.0))
    experts, routing = packed(layer, KIMI), layer.routing
    whole = moe(layer.tokens, routing, experts, batch_invariant=True)
    for count in (1, 7, 60, 300):
        part = Routing(routing.topk_weights[:count], routing.topk_ids[:count], 8)
        assert_same_bits(moe(layer.tokens[:count], part, experts, batch_invariant=True), whole[:count])


@pytest.mark.parametrize("tokens", [1, 40, 600])
def test_weights_that_cannot_be_put_into_the_order_stay_right(tokens):
    layer = on_gpu(make(tokens=tokens, hidden=512, intermediate=96, bias=True))  # no multiple of 64
    experts = packed(layer, KIMI)
    assert experts.order == "rows"
    got = moe(layer.tokens, layer.routing, experts)
    assert_same_bits(got, moe(layer.tokens, layer.routing, in_bf16(layer, KIMI)))


def test_packing_takes_no_more_memory():
    layer = on_gpu(make(tokens=1, experts=4, hidden=2880, intermediate=2880))
    experts = packed(layer, KIMI)
    for weight, plain in ((experts.gate_up, layer.gate_up), (experts.down, layer.down)):
        assert weight.values.untyped_storage().nbytes() == plain.numel() // 2
        assert weight.sf.untyped_storage().nbytes() == plain.numel() // 16


@cache
def launched(form: cases.Int4) -> dict[str, str]:
    """What runs on layers of the registry's sizes, for the numbers of tokens that it has."""
    seen: dict[str, str] = {}

    def weights(N: int, K: int) -> QuantTensor:
        return to_fragments(random_int4(32, N, K, Form(form.columns, form.dtype, form.zeros)))

    with watched(lambda sha256, kernel: seen.setdefault(sha256, kernel.asm["ptx"])):
        for hidden, intermediate in dict.fromkeys(case.sizes for case in cases.CASES if case.int4 == form):
            biases = torch.randn(32, 2 * intermediate, device="cuda"), torch.randn(32, hidden, device="cuda")
            given = weights(2 * intermediate, hidden), weights(hidden, intermediate)
            experts = ExpertWeights(*given, "int4", "swiglu_oai", 7.0, *biases)
            for tokens in sorted({c.num_tokens for c in cases.CASES if c.int4 == form and c.sizes[0] == hidden}):
                x = torch.randn(tokens, hidden, device="cuda").bfloat16()
                ids = torch.rand(tokens, 32, device="cuda").topk(4).indices.int()
                run_layer(x, torch.rand(tokens, 4, device="cuda"), ids, experts)
    return seen


@pytest.mark.parametrize("case", [case for case in cases.CASES if case.int4], ids=lambda case: case.name)
def test_what_runs_is_what_was_counted(case):
    assert_same_code(case.title, cases.launch_of(case), launched(case.int4))


def test_moving_to_the_gpu_keeps_every_number():
    layer = make(tokens=4, hidden=256, intermediate=128)
    here = packed(layer, ZEROS)
    there = here.to("cuda")
    assert there.order == "fragments"
    for a, b in ((here.gate_up, there.gate_up), (here.down, there.down)):
        assert torch.equal(dequantize(a, torch.float64), dequantize(b, torch.float64).cpu())

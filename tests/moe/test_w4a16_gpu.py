"""4-bit weights and bf16 tokens on a Hopper GPU: both kernels beside float64, on sizes and routings chosen to break."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from envoi.ops.gemm.grouping import EXPERTS_ROWS
from envoi.ops.gemm.hopper_w4a16 import few
from envoi.ops.moe import layer as kernels_layer
from envoi.ops.moe import moe
from envoi.ops.moe.experts import run_experts
from envoi.ops.moe.layer import run_layer
from envoi.ops.moe.permute import gather_rows, sort_slots
from envoi.quant.fragments import to_fragments
from envoi.types import ExpertWeights, QuantTensor
from tests.helpers.accuracy import assert_same_bits, relative_error
from tests.helpers.choices import force
from tests.helpers.launches import assert_same_code, watched
from tests.moe.layers import (
    MOST,
    Layer,
    assert_a_graph_serves,
    assert_others_keep_their_bits,
    assert_same_bits_each_time,
    judged,
    make,
)
from tests.moe.test_gpu import on_gpu, with_ids
from tests.moe.test_moe import KINDS
from tests.test_spans import STEPS, seen
from tools.kernel_cases import gemm_hopper_w4a16 as cases
from tools.oracles.moe import moe_oracle

pytestmark = [pytest.mark.gpu(arch="sm_90"), pytest.mark.usefixtures("tidy_gpu")]

# Powers of two and their neighbours; K in whole groups of steps, and not; one step of K; more K than fits twice.
SIZES = [(2880, 2880), (2048, 1408), (2048, 768), (1536, 1536), (64, 64), (128, 192), (4096, 1536), (7168, 512)]


@pytest.fixture(params=["few", "many"])
def kernels(request, monkeypatch) -> list[str]:
    """Which kernels are to run, and which have."""
    force(monkeypatch, decode_mx=request.param == "few")
    ran: list[str] = []
    for name, module, function in (("few", few, "moe"), ("many", kernels_layer, "run_experts")):
        original = getattr(module, function)
        monkeypatch.setattr(
            module, function, lambda *given, name=name, original=original: ran.append(name) or original(*given)
        )
    ran.append(request.param)
    return ran


def outputs(layer: Layer, kernels: list[str]) -> torch.Tensor:
    packed = layer.pack("mxfp4")
    assert packed.order == "fragments"
    got = moe(layer.tokens, layer.routing, packed)
    assert set(kernels) == {kernels[0]}
    assert len(kernels) > 1
    return judged(got, layer, packed)


@pytest.mark.parametrize(("hidden", "intermediate"), SIZES)
@pytest.mark.parametrize("tokens", [1, 16, 70])
def test_sizes(hidden, intermediate, tokens, kernels):
    outputs(on_gpu(make(tokens, 5, 4, hidden, intermediate, bias=True, activation="swiglu_oai")), kernels)


@pytest.mark.parametrize("kind", KINDS)
def test_activations(kind, kernels):
    outputs(on_gpu(make(tokens=40, hidden=512, intermediate=320, **KINDS[kind])), kernels)


@pytest.mark.parametrize(
    ("tokens", "experts", "k"), [(3, 128, 8), (100, 128, 4), (9, 512, 32), (200, 3, 2), (8, 33, 4)]
)
def test_numbers_of_experts(tokens, experts, k, kernels):
    outputs(on_gpu(make(tokens, experts, k, 192, 128)), kernels)


def test_hostile_routing(kernels):
    layer = on_gpu(make(tokens=48, experts=6, k=4, hidden=512, intermediate=256))
    slots = torch.arange(192, device="cuda").view(48, 4)
    for ids in (torch.full_like(slots, 5), slots % 2, torch.where(slots % 3 == 0, slots % 6, -1)):
        outputs(with_ids(layer, ids), kernels)
    masked = moe(layer.tokens, with_ids(layer, torch.full_like(slots, -1)).routing, layer.pack("mxfp4"))
    assert bool((masked == 0).all())


def test_the_same_bits_a_hundred_times(kernels):
    layer = on_gpu(make(tokens=30, experts=16, k=4, hidden=1024, intermediate=704))
    assert_same_bits_each_time(layer, layer.pack("mxfp4"))


def test_a_graph_serves_other_routings(kernels):
    layers = [on_gpu(make(tokens=8, masked=masked, seed=i)) for i, masked in enumerate((0.0, 0.5, 1.0))]
    packed, given = layers[0].pack("mxfp4"), on_gpu(make(tokens=8))
    want = [moe(layer.tokens, layer.routing, packed) for layer in layers]
    assert_a_graph_serves(given, packed, layers, want)


def test_the_steps_have_names(kernels):
    layer = on_gpu(make(tokens=8))
    packed = layer.pack("mxfp4")
    found = [name for name, _ in seen(lambda: moe(layer.tokens, layer.routing, packed))]
    assert [name for name in found if name in STEPS] == STEPS


def test_a_tokens_bits_do_not_depend_on_the_others_numbers(kernels):
    layer = on_gpu(make(tokens=24, hidden=512, intermediate=256, masked=0.0))
    assert_others_keep_their_bits(layer, layer.pack("mxfp4"))


def test_tokens_of_very_different_sizes(kernels):
    layer = on_gpu(make(tokens=24, hidden=512, intermediate=256))
    layer.tokens *= torch.logspace(-12, 6, 24, device="cuda")[:, None].bfloat16()
    got, packed = outputs(layer, kernels), layer.pack("mxfp4")
    want = moe_oracle(layer.tokens, layer.routing.topk_weights, layer.routing.topk_ids, packed)
    used = (layer.routing.topk_ids >= 0).any(1)
    errors = (got[used] - want[used]).norm(dim=1) / want[used].norm(dim=1)
    assert float(errors.max()) < 3 * MOST


def test_weights_that_cannot_be_put_into_the_order_stay_right():
    wide = on_gpu(make(tokens=40, hidden=512, intermediate=96))  # 96 isn't a multiple of 64
    large = on_gpu(make(tokens=40, hidden=512, intermediate=128))
    large = replace(large, gate_up=large.gate_up * 2.0**20)  # factors above 2
    for layer in (wide, large):
        packed = layer.pack("mxfp4")
        assert packed.order == "rows"
        want = moe_oracle(layer.tokens, layer.routing.topk_weights, layer.routing.topk_ids, packed)
        assert relative_error(moe(layer.tokens, layer.routing, packed), want) <= MOST


def test_packing_takes_no_more_memory():
    layer = on_gpu(make(tokens=1, experts=4, hidden=2880, intermediate=2880))
    packed = layer.pack("mxfp4")
    for weight, plain in ((packed.gate_up, layer.gate_up), (packed.down, layer.down)):
        assert weight.values.untyped_storage().nbytes() == plain.numel() // 2
        assert weight.sf.untyped_storage().nbytes() == plain.numel() // 32


def test_no_tokens():
    layer = on_gpu(make(tokens=0))
    assert moe(layer.tokens, layer.routing, layer.pack("mxfp4")).shape == (0, 256)


@cache
def launched() -> dict[str, str]:
    """What runs on gpt-oss-20b's layer, for the numbers of tokens that the registry has."""
    seen: dict[str, str] = {}
    source = torch.Generator("cuda").manual_seed(0)

    def weights(N: int, K: int) -> QuantTensor:
        values = torch.randint(0, 256, (32, N, K // 2), generator=source, device="cuda", dtype=torch.uint8)
        sf = torch.randint(110, 124, (32, N, K // 32), generator=source, device="cuda", dtype=torch.uint8)
        return to_fragments(QuantTensor(values, sf.view(torch.float8_e8m0fnu), (1, 32), scales_at_most_2=True))

    def layer(hidden: int, intermediate: int) -> ExpertWeights:
        biases = torch.randn(32, 2 * intermediate, device="cuda"), torch.randn(32, hidden, device="cuda")
        given = weights(2 * intermediate, hidden), weights(hidden, intermediate)
        return ExpertWeights(*given, "mxfp4", "swiglu_oai", 7.0, *biases)

    other, experts = layer(*cases.OTHER_SIZES), layer(2880, 2880)
    with watched(lambda sha256, kernel: seen.setdefault(sha256, kernel.asm["ptx"])):
        for tokens in sorted({case.num_tokens for case in cases.CASES if not case.fp8}):
            x = torch.randn(tokens, 2880, generator=source, device="cuda").bfloat16()
            ids = torch.rand(tokens, 32, generator=source, device="cuda").topk(4).indices.int()
            routed = torch.rand(tokens, 4, generator=source, device="cuda")
            run_layer(x, routed, ids, experts)
            if tokens == 64:
                run_layer(torch.randn(64, cases.OTHER_SIZES[0], device="cuda").bfloat16(), routed, ids, other)
        sent = torch.full((16384, 2880), torch.nan, device="cuda", dtype=torch.bfloat16)
        to = sent.data_ptr() + 2 * 2880 * torch.arange(16384, device="cuda")
        row_map = sort_slots(ids, 32)
        rows, row_weights = gather_rows(x, torch.rand(tokens, 4, device="cuda"), row_map, None)
        run_experts(rows, row_weights, row_map.offsets, experts, replace(EXPERTS_ROWS, to=to))
        stayed = run_experts(rows, row_weights, row_map.offsets, experts)
    assert_same_bits(sent, stayed)
    return seen


@pytest.mark.parametrize(
    "case", [case for case in cases.CASES if not (case.nvfp4 or case.fp8)], ids=lambda case: case.name
)
def test_what_runs_is_what_was_counted(case):
    assert_same_code(case.title, cases.launch_of(case), launched())

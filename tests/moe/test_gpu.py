"""Experts on a GPU: each step's bits, the path against the reference on a CPU, no waiting, graphs, the code."""

import re
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from envoi.ops.moe import moe, reference
from envoi.ops.moe.permute import add_shared, combine_rows, gather_rows, map_ids, quantize_rows, sort_slots
from envoi.quant import FORMATS, SCHEMES
from envoi.types import ExpertWeights, Routing
from tests.helpers.accuracy import assert_at_most_twice, assert_same_bits, relative_error
from tests.helpers.launches import assert_same_code, watched
from tests.moe.layers import Layer, assert_a_graph_serves, assert_same_bits_each_time, eager_bf16, make, with_ids
from tests.moe.own import OWN, layer_of, oracle
from tests.moe.steps import (
    SINGLE_ROWS,
    judge_combined,
    judge_gathered,
    judge_quantised,
    judge_sorted,
    of_sizes,
    random_ids,
)
from tests.moe.test_moe import BOUNDS, KINDS
from tests.moe.test_own_activation import bound
from tests.moe.test_shared import gate_of
from tools.kernel_cases import moe as cases
from tools.oracles.moe import moe_oracle

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("tidy_gpu")]


SIZES = [(1, 1, 1), (7, 3, 2), (64, 32, 6), (513, 8, 8), (2048, 32, 6), (8192, 256, 8), (1000, 1024, 32)]


@pytest.mark.parametrize(("tokens", "experts", "k"), SIZES)
def test_sorting(tokens, experts, k):
    for ids in (random_ids(tokens, experts, k, device="cuda"), torch.full((tokens, k), experts - 1).int().cuda()):
        judge_sorted(ids, experts)


@pytest.mark.parametrize(("format", "hidden"), of_sizes(128, 2880, 4096, 7168))
def test_gathered_rows_have_the_references_bits(format, hidden):
    tokens = torch.randn(300, hidden, generator=torch.Generator("cuda").manual_seed(0), device="cuda")
    tokens = (tokens * torch.logspace(-6, 6, 300, device="cuda")[:, None]).bfloat16()
    judge_gathered(tokens, random_ids(300, 8, 6, device="cuda"), 8, format)


@pytest.mark.parametrize("scheme", SINGLE_ROWS)
def test_quantised_rows_have_the_references_bits(scheme):
    rows = torch.randn(500, 2048, generator=torch.Generator("cuda").manual_seed(0), device="cuda").bfloat16()
    judge_quantised(rows, [0, 400, 490], scheme)


@pytest.mark.parametrize(("width", "k"), [(8, 1), (2880, 4), (4096, 6), (7168, 32)])
def test_combine_against_a_loop(width, k):
    judge_combined(200, width, k, "cuda")


def on_gpu(layer: Layer) -> Layer:
    moved = {key: x.cuda() if isinstance(x, torch.Tensor) else x for key, x in vars(layer).items()}
    routing = layer.routing
    moved["routing"] = Routing(routing.topk_weights.cuda(), routing.topk_ids.cuda(), routing.num_experts)
    return Layer(**moved)


def run(layer: Layer, format: str = "bf16") -> torch.Tensor:
    return moe(layer.tokens, layer.routing, layer.pack(format))


def arguments(layer: Layer, format: str) -> tuple:
    return layer.tokens, layer.routing.topk_weights, layer.routing.topk_ids, layer.pack(format)


def assert_right(layer: Layer, format: str, more: float = 1.0) -> torch.Tensor:
    """Assert at most twice the error of the reference on the CPU, where `layer` is, and at most the format's, times
    `more`; return the GPU's output."""
    got, want = run(on_gpu(layer), format).cpu(), moe_oracle(*arguments(layer, format))
    assert_at_most_twice(got, reference.moe(*arguments(layer, format)), want)
    assert relative_error(got, want) < 1.5 * BOUNDS[format] * more
    return got


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_error_is_at_most_twice_the_references(format, kind):
    assert_right(make(tokens=200, hidden=512, intermediate=256, **KINDS[kind]), format)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("tokens", [3, 300])
def test_users_own_activations(tokens, name, format):
    layer = layer_of(name, tokens=tokens, hidden=512, intermediate=256)
    got = assert_right(layer, format, OWN[name].relative)
    assert relative_error(got, oracle(layer, layer.pack(format), name)) < 1.5 * bound(format, OWN[name])


@pytest.mark.parametrize("tokens", [1, 5, 64, 700])
@pytest.mark.parametrize("format", FORMATS)
def test_tokens(format, tokens):
    assert_right(make(tokens=tokens, experts=16, k=4, hidden=512, intermediate=256), format)


def test_bf16_is_as_good_as_torchs():
    layer = on_gpu(make(tokens=500, hidden=1024, intermediate=512, bias=True))
    assert_at_most_twice(run(layer), eager_bf16(layer), moe_oracle(*arguments(layer, "bf16")))


@pytest.mark.parametrize("format", [f for f in FORMATS if f != "fp8_block128"])
def test_hidden_2880(format):
    assert_right(make(60, 8, 4, 2880, 320, activation="swiglu_oai", bias=True), format)


@pytest.mark.parametrize("format", FORMATS)
def test_hostile_routing(format):
    layer = make(tokens=150, experts=6, k=4)
    skewed = torch.multinomial(1 / torch.arange(1.0, 7), 600, replacement=True, generator=torch.manual_seed(0))
    for ids in (torch.full((150, 4), 3), skewed.view(150, 4), torch.arange(600).view(150, 4) % 2):
        assert_right(with_ids(layer, ids), format)
    masked = run(on_gpu(with_ids(layer, torch.full((150, 4), -1))), format)
    assert_same_bits(masked, torch.zeros_like(masked))
    assert run(on_gpu(make(tokens=0)), format).shape == (0, 256)
    assert_right(make(tokens=70, experts=1, k=1), format)


@pytest.mark.parametrize("format", ["bf16", "fp8_block128", "mxfp4"])
@pytest.mark.parametrize(("experts", "k"), [(40, 32), (256, 8), (513, 4)])
def test_many_experts(experts, k, format):
    assert_right(make(tokens=100, experts=experts, k=k, hidden=128, intermediate=128), format)


@pytest.mark.parametrize("format", ["bf16", "fp8_row", "fp8_block128"])
def test_layers_that_follow_each_other_have_the_bits_of_layers_apart(format):
    layers = [on_gpu(make(tokens=96, experts=8, k=4, hidden=1024, intermediate=512, seed=seed)) for seed in range(3)]
    packed = [layer.pack(format) for layer in layers]

    def chained(apart: bool) -> torch.Tensor:
        tokens = layers[0].tokens
        for i in range(24):
            tokens = moe(tokens, layers[i % 3].routing, packed[(i + 1) % 3])
            if apart:
                torch.cuda.synchronize()
            if i % 2:
                tokens = 64 * tokens
        return tokens

    assert_same_bits(chained(False), chained(True))


@pytest.mark.parametrize("format", FORMATS)
def test_bad_tokens_spoil_no_others(format):
    layer = on_gpu(make(tokens=200, masked=0.0))
    clean = run(layer, format)
    layer.tokens[7, 100], layer.tokens[150, 0] = torch.nan, torch.inf
    got = run(layer, format)
    others = torch.tensor([i for i in range(200) if i not in (7, 150)])
    assert_same_bits(got[others], clean[others])
    assert bool(got[[7, 150]].isnan().any(1).all())


@pytest.mark.parametrize("format", FORMATS)
def test_the_same_bits_a_hundred_times(format):
    layer = on_gpu(make(tokens=300, experts=16, k=4, hidden=512, intermediate=256))
    assert_same_bits_each_time(layer, layer.pack(format))


@pytest.mark.parametrize("format", FORMATS)
def test_nothing_waits_and_a_graph_serves_other_routings(format):
    layers = [on_gpu(make(tokens=130, masked=masked, seed=i)) for i, masked in enumerate((0.0, 0.5, 1.0))]
    packed = layers[0].pack(format)
    want = [moe(layer.tokens, layer.routing, packed) for layer in layers]
    given = on_gpu(make(tokens=130))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        moe(given.tokens, given.routing, packed)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_a_graph_serves(given, packed, layers, want)


AROUND_GEMMS = [c for c in cases.KERNELS if "sm_90" in c.arches and not re.search("both-gemms|l1", c.name)]


@cache
def launched() -> dict[str, str]:
    """Launch the kernels around the GEMMs on sizes for which they are compiled as the registry's: {hash: PTX}."""
    seen: dict[str, str] = {}
    tokens, ids = torch.randn(96, 4096, device="cuda").bfloat16(), random_ids(96, 32, 6, device="cuda")
    rows = torch.randn(576, 2048, device="cuda").bfloat16()
    with watched(lambda sha256, kernel: seen.setdefault(sha256, kernel.asm["ptx"])):
        sort_slots(map_ids(random_ids(2048, 32, 6, device="cuda"), torch.arange(32, dtype=torch.int32).cuda()), 32)
        sort_slots(random_ids(8192, 32, 6, device="cuda"), 32)
        for gate in (None, gate_of(4096).cuda()):
            shared = cast(ExpertWeights, SimpleNamespace(num_shared=1, num_routed=32, shared_gate=gate))
            add_shared(tokens, torch.rand(96, 6, device="cuda"), ids, shared)
        row_map = sort_slots(ids, 32)
        for scheme in (None, *SINGLE_ROWS):
            gather_rows(tokens, torch.rand(96, 6, device="cuda"), row_map, SCHEMES[scheme] if scheme else None)
        for scheme in SINGLE_ROWS:
            quantize_rows(rows, row_map.offsets, SCHEMES[scheme])
        combine_rows(torch.randn(576, 4096, device="cuda").bfloat16(), row_map.slot_to_pos)
    return seen


@pytest.mark.gpu(arch="sm_90")
@pytest.mark.parametrize("case", AROUND_GEMMS, ids=lambda case: case.name)
def test_what_runs_is_what_was_counted(case):
    assert_same_code(case.name, case.launch(), launched())


@pytest.mark.parametrize("tokens", [3, 300])
@pytest.mark.parametrize("format", FORMATS)
def test_ids_and_weights_are_read_as_they_are(format, tokens):
    layer = on_gpu(make(tokens=tokens))
    routing = layer.routing
    weights = routing.topk_weights.bfloat16()
    packed = layer.pack(format)
    want = moe(layer.tokens, replace(routing, topk_weights=weights.float()), packed)
    wide = routing.topk_ids.long()
    assert_same_bits(moe(layer.tokens, replace(routing, topk_ids=wide, topk_weights=weights), packed), want)
    masked = torch.where(wide == 1, 2**32 + 1, wide)  # no expert, though its lower half is one
    want = moe(layer.tokens, replace(routing, topk_ids=torch.where(wide == 1, -1, wide).int()), packed)
    assert_same_bits(moe(layer.tokens, replace(routing, topk_ids=masked), packed), want)


@pytest.mark.parametrize("tokens", [3, 300])
@pytest.mark.parametrize("format", FORMATS)
def test_a_map_keeps_the_experts_that_are_here(format, tokens):
    layer = on_gpu(make(tokens=tokens))
    packed, num_here = layer.pack(format), layer.routing.num_experts
    expert_map = torch.full((3 * num_here,), -1, dtype=torch.int32, device="cuda")
    expert_map[1::3] = torch.arange(num_here, dtype=torch.int32, device="cuda")
    given = torch.randint(-1, 3 * num_here + 1, layer.routing.topk_ids.shape, dtype=torch.int32, device="cuda")
    ids = reference.mapped(given.cpu(), expert_map.cpu()).cuda()
    want = moe(layer.tokens, replace(layer.routing, topk_ids=ids), packed)
    routing = replace(layer.routing, topk_ids=given, num_experts=3 * num_here)
    for _ in range(3):  # planned, replayed, found by its form
        assert_same_bits(moe(layer.tokens, routing, packed, expert_map=expert_map), want)
    wide = replace(routing, topk_ids=given.long())
    assert_same_bits(moe(layer.tokens, wide, packed, expert_map=expert_map), want)
    out, graph = torch.empty_like(want), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        moe(layer.tokens, routing, packed, expert_map=expert_map, out=out)
    graph.replay()
    assert_same_bits(out, want)

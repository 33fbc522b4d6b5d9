"""What serving engines need: reasons before weights exist, maps of experts, weights in given memory and refits."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode

import envoi
from envoi.ops.moe import packing
from envoi.quant import FORMATS, dequantize
from envoi.runtime.devices import Target, standing_for
from envoi.types import ExpertWeights, QuantTensor, Routing, has_gate
from tests.helpers.accuracy import assert_same_bits
from tests.moe.layers import make
from tests.moe.stored import pairs, power_bytes

ACTIVATIONS = ("swiglu", "swiglu_oai", "geglu", "geglu_tanh", "silu", "relu2", "swish")
SIZES = (0, 8, 16, 40, 48, 64, 96, 100, 128, 128, 192, 256, 256, 384, 2880)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def drawn(seed: int) -> dict:
    draw = random.Random(seed)
    return {
        "format": draw.choice([*FORMATS, "int4"] if draw.random() < 0.05 else [*FORMATS]),
        "activation": draw.choice(ACTIVATIONS),
        "hidden": draw.choice(SIZES), "intermediate": draw.choice(SIZES[1:]),
        "num_experts": draw.choice((1, 3, 8)), "top_k": draw.choice((1, 2, 8)),
        "bias": draw.random() < 0.3, "swiglu_limit": draw.choice((None, None, None, 7.0, 7.0, 0.0)),
        "swiglu_alpha": draw.choice((None, None, None, None, None, 1.5)),
        "weight_block_size": draw.choice((None, None, None, None, (128, 128), (128, 128), (256, 128), (64, 64))),
    }  # fmt: skip


def packed_on_meta(c: dict) -> ExpertWeights:
    """Pack weights without memory as a checkpoint of the format has them."""
    H, I, E, format = c["hidden"], c["intermediate"], c["num_experts"], FORMATS.get(c["format"])  # noqa: E741
    block = c["weight_block_size"]
    parts = 2 if has_gate(c["activation"]) else 1
    given = {"gate_up": [parts * I, H], "down": [H, I]}
    tensors = {}
    for name, (rows, columns) in given.items():
        scheme = None if format is None else format.weights
        if scheme is None or 0 in (rows, columns) or (block is None and scheme.name == "fp8_128x128"):
            tensors[name] = meta(E, rows, columns)  # to be quantised
            continue
        side = block or scheme.group_for((rows, columns))
        ranges = parts if name == "gate_up" and block else 1
        factors = ranges * -(-rows // ranges // side[0]), -(-columns // side[1])
        tensors[name] = meta(E, rows, columns // (2 if scheme.values == torch.uint8 else 1), dtype=scheme.values)
        tensors[f"{name}_sf"] = meta(E, *factors, dtype=scheme.sf)
    if c["bias"]:
        tensors |= {"gate_up_bias": meta(E, parts * I), "down_bias": meta(E, H)}
    options = {name: c[name] for name in ("format", "activation", "swiglu_limit", "swiglu_alpha")}
    return packing.pack(**tensors, **options, weight_block_size=block)


def judged(c: dict) -> str | None:
    """Return the error of packing and of planning calls with one and with many tokens, None if there is none."""
    try:
        with standing_for(Target("sm_90")):
            experts = packed_on_meta(c)
        for count in (1, 300):
            slots = [meta(count, c["top_k"], dtype=dtype) for dtype in (torch.float32, torch.int32)]
            envoi.plan(envoi.moe, meta(count, c["hidden"]), Routing(*slots, c["num_experts"]), experts)
    except ValueError as error:
        return str(error)
    return None


def test_supports_says_what_packing_and_planning_say():
    counts = [0, 0]
    for seed in range(150):
        c = drawn(seed)
        said, want = envoi.supports(**c), judged(c)
        assert (said is None) == (want is None), f"{c}: {said} / {want}"
        counts[said is None] += 1
    assert min(counts) > 20, "both answers are drawn"


def test_supports_names_the_argument():
    sizes = {"hidden": 2048, "intermediate": 768, "num_experts": 128, "top_k": 8}
    assert envoi.supports("fp8_block128", **sizes) is None
    said = envoi.supports("fp8_block128", **sizes | {"intermediate": 96})
    assert said is not None and said.startswith("intermediate: expected a positive multiple of 128")
    assert envoi.supports("fp8_block128", **sizes | {"intermediate": 96}, weight_block_size=(128, 128)) is None
    assert envoi.supports("fp8_block128", **sizes, weight_block_size=(256, 128)) is None
    for format, block in (("fp8_row", (128, 128)), ("bf16", (128, 128)), ("fp8_row", "x")):
        assert envoi.supports(format, **sizes, weight_block_size=block) is not None  # pyright: ignore[reportArgumentType]
    assert "num_experts: expected" in str(envoi.supports("bf16", **sizes | {"num_experts": 0}))
    assert "top_k: expected" in str(envoi.supports("bf16", **sizes | {"top_k": 0}))
    assert "arch: expected" in str(envoi.supports("bf16", **sizes, arch="gfx942"))
    assert "bias: expected True or False, got str 'no'" in str(envoi.supports("bf16", **sizes, bias="no"))  # pyright: ignore[reportArgumentType]
    assert "activation: expected" in str(envoi.supports("bf16", **sizes, activation="tanh"))


def test_a_map_keeps_the_experts_that_are_here():
    layer = make(tokens=40, experts=12, k=4)
    here = torch.tensor([7, 2, 11, 4])
    expert_map = torch.full((12,), -1, dtype=torch.int32)
    expert_map[here] = torch.arange(4, dtype=torch.int32)
    ids = layer.routing.topk_ids
    local = torch.tensor([[int(expert_map[e]) if e >= 0 else -1 for e in row] for row in ids.tolist()])
    experts = packing.pack(layer.gate_up[here], layer.down[here])
    want = envoi.moe(layer.tokens, Routing(layer.routing.topk_weights, local.int(), 4), experts)
    for given in (ids, ids.long()):
        routing = replace(layer.routing, topk_ids=given)
        assert_same_bits(envoi.moe(layer.tokens, routing, experts, expert_map=expert_map), want)
    out = torch.empty_like(want)
    assert envoi.moe(layer.tokens, layer.routing, experts, expert_map=expert_map, out=out) is out
    assert_same_bits(out, want)
    compiled = torch.compile(envoi.moe, backend="aot_eager", fullgraph=True)
    assert_same_bits(compiled(layer.tokens, layer.routing, experts, expert_map=expert_map), want)


def test_a_map_is_checked():
    layer = make(tokens=4, experts=8)
    experts = layer.pack()
    for bad, say in (
        (torch.zeros(8), "expert_map: expected int32 \\[8\\], got float32 \\[8\\]"),
        (torch.zeros(7, dtype=torch.int32), "expert_map: expected int32 \\[8\\], got int32 \\[7\\]"),
        (torch.arange(1, 9, dtype=torch.int32), "expert_map: expected numbers from -1 to 7, got 8"),
        ([0] * 8, "expert_map: expected int32 \\[8\\], got list"),
    ):
        with pytest.raises(ValueError, match=say):
            envoi.moe(layer.tokens, layer.routing, experts, expert_map=bad)
    counted = replace(layer.routing, num_experts=np.int64(8))
    with pytest.raises(ValueError, match="expert_map: expected int32 \\[8\\], got int32 \\[9\\]"):
        envoi.moe(layer.tokens, counted, experts, expert_map=torch.zeros(9, dtype=torch.int32))
    ids = layer.routing.topk_ids.clone()
    ids[1, 0] = 8
    good = torch.arange(8, dtype=torch.int32)
    deep = replace(layer.routing, topk_ids=ids[None], topk_weights=layer.routing.topk_weights[None])
    with pytest.raises(ValueError, match="ids from 0 to 7, or -1 for a masked slot, got 8 at token 1, slot 0"):
        envoi.moe(layer.tokens[None], deep, experts, expert_map=good)
    with pytest.raises(ValueError, match="ids from 0 to 7, or -1 for a masked slot, got 8 at token 1, slot 0"):
        envoi.moe(layer.tokens, replace(layer.routing, topk_ids=ids), experts, expert_map=good)


def test_a_mapped_call_can_be_planned():
    experts = ExpertWeights(meta(4, 512, 256), meta(4, 256, 256), "bf16")
    slots = meta(600, 8, dtype=torch.float32), meta(600, 8, dtype=torch.int32)
    tokens, expert_map = meta(600, 256), meta(16, dtype=torch.int32)
    for count in (600, 2):  # by kernels for many tokens and for few
        given = tokens[:count], Routing(*(x[:count] for x in slots), 16), experts
        made = envoi.plan(envoi.moe, *given, expert_map=expert_map)
        here = envoi.plan(envoi.moe, given[0], replace(given[1], num_experts=4), experts)
        names = [[launch.kernel for launch in found.launches] for found in (made, here)]
        assert names[0] == ["map_kernel", *names[1]] and made.outputs.shape == (count, 256)
        assert made.workspace_bytes == here.workspace_bytes + -(-count * 8 * 4 // 512) * 512


def test_a_mapped_call_without_values():
    layer = make(tokens=5, experts=8)
    with FakeTensorMode(allow_non_fake_inputs=True):
        routing = Routing(torch.empty(5, 3), torch.empty(5, 3, dtype=torch.int32), 12)
        expert_map = torch.empty(12, dtype=torch.int32)
        found = envoi.moe(torch.empty_like(layer.tokens), routing, layer.pack(), expert_map=expert_map)
    assert isinstance(found, FakeTensor) and found.shape == layer.tokens.shape and found.dtype == torch.bfloat16


def mxfp4(E: int = 3, H: int = 128, I: int = 64, seed: int = 0) -> tuple[torch.Tensor, ...]:  # noqa: E741
    return (
        pairs(E, 2 * I, H // 2, seed=seed), pairs(E, H, I // 2, seed=seed + 1),
        power_bytes(E, 2 * I, H // 32, seed=seed + 2), power_bytes(E, H, I // 32, seed=seed + 3),
    )  # fmt: skip


def assert_equal_experts(x: ExpertWeights, y: ExpertWeights) -> None:
    for one, two in zip((x.gate_up, x.down), (y.gate_up, y.down), strict=True):
        wide = [x if isinstance(x, torch.Tensor) else dequantize(x, torch.float64) for x in (one, two)]
        assert_same_bits(*wide)
    for one, two in zip((x.gate_up_bias, x.down_bias), (y.gate_up_bias, y.down_bias), strict=True):
        assert (one is None) == (two is None)
        if one is not None and two is not None:
            assert_same_bits(one, two)


@pytest.mark.parametrize("format", ["mxfp4", "mxfp4_fp8"])
@pytest.mark.parametrize("layout", ["interleaved", "concat"])
def test_weights_in_place_are_held_once(packs_for_hopper, layout, format):
    gate_up, down, gate_up_sf, down_sf = mxfp4()
    options = {"format": format, "gate_up_layout": layout}
    want = packing.pack(gate_up, down, gate_up_sf=gate_up_sf, down_sf=down_sf, **options)
    mine = [x.clone() for x in (gate_up, down, gate_up_sf, down_sf)]
    got = packing.pack(*mine[:2], gate_up_sf=mine[2], down_sf=mine[3], in_place=True, **options)
    assert got.order == want.order == ("fragments" if format == "mxfp4" else "fp8_fragments")
    assert_equal_experts(got, want)
    assert isinstance(got.gate_up, QuantTensor) and isinstance(got.down, QuantTensor)
    held = got.gate_up.values, got.down.values, got.gate_up.sf, got.down.sf
    assert [x.data_ptr() for x in held] == [x.data_ptr() for x in mine]
    assert not torch.equal(mine[0], gate_up), "the caller's memory is written over"


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("activation", ["swiglu_oai", "relu2"])
def test_a_refit_changes_the_numbers_alone(packs_for_hopper, format, activation):
    first, second = (make(bias=True, activation=activation, seed=seed) for seed in (0, 1))
    if has_gate(activation):  # not the default, so that it is kept
        first.limit = second.limit = 3.0
    experts, want = first.pack(format), second.pack(format)
    addresses = [x.data_ptr() for x in envoi.experts.state_dict(experts).values()][:-1]
    biases = {"gate_up_bias": second.gate_up_bias, "down_bias": second.down_bias}
    assert experts.update_(second.gate_up, second.down, **biases) is experts
    assert [x.data_ptr() for x in envoi.experts.state_dict(experts).values()][:-1] == addresses
    assert_equal_experts(experts, want)
    assert_same_bits(envoi.moe(first.tokens, first.routing, experts), envoi.moe(first.tokens, first.routing, want))


def test_a_refit_from_the_memory_that_is_packed(packs_for_hopper):
    """An engine that loads anew writes rows where the fragments are."""
    memory = mxfp4()
    experts = packing.pack(*memory[:2], gate_up_sf=memory[2], down_sf=memory[3], in_place=True)
    fresh = mxfp4(seed=20)
    for x, y in zip(memory, fresh, strict=True):
        x.copy_(y)
    experts.update_(*memory[:2], gate_up_sf=memory[2], down_sf=memory[3])
    want = packing.pack(*fresh[:2], gate_up_sf=fresh[2], down_sf=fresh[3])
    assert_equal_experts(experts, want)


def test_a_refit_of_views_copies_nothing():
    layer = make()
    experts = layer.pack()
    layer.gate_up.mul_(2)
    experts.update_(layer.gate_up, layer.down)
    assert isinstance(experts.gate_up, torch.Tensor) and experts.gate_up.data_ptr() == layer.gate_up.data_ptr()


def test_a_refit_is_refused_before_anything_is_written(packs_for_hopper):
    gate_up, down, gate_up_sf, down_sf = mxfp4()
    experts = packing.pack(gate_up, down, gate_up_sf=gate_up_sf, down_sf=down_sf)
    before = [x.clone() for x in envoi.experts.state_dict(experts).values()]
    large = down_sf.clone()
    large[0, 0, 0] = 130
    given = {"gate_up_sf": gate_up_sf, "down_sf": down_sf}
    for changed, say in (
        ({"down_sf": large}, "expected weights that are packed in the order 'fragments'"),
        ({"gate_up": gate_up[:2], "gate_up_sf": gate_up_sf[:2], "down": down[:2], "down_sf": down_sf[:2]},
         "gate_up.values: expected uint8 \\[3, 128, 64\\], as in place, got uint8 \\[2, 128, 64\\]"),
        ({"gate_up_bias": torch.zeros(3, 128), "down_bias": torch.zeros(3, 128)},
         "gate_up_bias: expected None, as in place, got"),
        ({"gate_up_layout": "both"}, "gate_up_layout: expected one of"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=say):
            experts.update_(**{"gate_up": gate_up, "down": down} | given | changed)
    for x, y in zip(before, envoi.experts.state_dict(experts).values(), strict=True):
        assert_same_bits(x, y)


def test_a_promise_of_small_factors_is_kept():
    """Kernels that a graph holds don't check factors that were at most 2."""
    gate_up, down, gate_up_sf, down_sf = mxfp4()
    experts = packing.pack(gate_up, down, "mxfp4_mxfp8", gate_up_sf=gate_up_sf, down_sf=down_sf)
    large = gate_up_sf.clone()
    large[0, 0, 0] = 130
    with pytest.raises(ValueError, match="gate_up: expected scale factors of at most 2"):
        experts.update_(gate_up, down, gate_up_sf=large, down_sf=down_sf)

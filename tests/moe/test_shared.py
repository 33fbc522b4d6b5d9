"""Shared experts: their weights' parts, number for number, and layers with them against float64 oracles."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from envoi.epilogues import silu
from envoi.experts import from_state_dict, pack, state_dict, unpack, with_shared
from envoi.ops.moe import moe, packing, reference
from envoi.ops.moe.permute import SHARED_SLOTS, AddedSlots
from envoi.quant import FORMATS
from envoi.types import ExpertWeights, Routing
from tests.helpers.accuracy import assert_same_bits, relative_error
from tests.helpers.slow import mostly_slow
from tests.moe.layers import Layer, make
from tests.moe.test_moe import BOUNDS
from tools.oracles.moe import moe_oracle

SMALL = {"tokens": 9, "experts": 4, "k": 2, "hidden": 256, "intermediate": 256}
# Intermediate sizes of a shared expert beside routed ones of 256: smaller, equal, a multiple, and one more.
SIZES = {"smaller": 128, "equal": 256, "twice": 512, "more": 640}
# Layouts of gate and up, activations and biases, of both.
KINDS = {
    "concat": {}, "interleaved": {"packed_layout": "interleaved"}, "no gate": {"activation": "relu2"},
    "biases": {"bias": True, "activation": "swiglu_oai"},
}  # fmt: skip


def shared_layer(size: int, count: int = 1, seed: int = 9, **kind) -> Layer:
    """Make experts of this intermediate size that every token passes: a layer whose routing names all of them."""
    return make(**{**SMALL, "experts": count, "k": count, "intermediate": size, **kind}, masked=0.0, seed=seed)


def gate_of(hidden: int = SMALL["hidden"]) -> torch.Tensor:
    return torch.randn(hidden, generator=torch.Generator().manual_seed(5)) / hidden**0.5


def weights_of(tokens: torch.Tensor, count: int, gate: torch.Tensor | None) -> torch.Tensor:
    """Return a token's weight of shared experts in float64, [M, count]."""
    one = torch.ones(len(tokens), dtype=torch.float64, device=tokens.device)
    given = one if gate is None else (tokens.double() @ gate.double().to(tokens.device)).sigmoid()
    return given[:, None].expand(-1, count)


def oracle(layer: Layer, routed: ExpertWeights, shared: ExpertWeights, gate: torch.Tensor | None) -> torch.Tensor:
    """Compute the layer in float64 from routed experts and whole shared ones, as packed."""
    count = shared.num_local_experts
    every = torch.arange(count, device=layer.tokens.device).expand(len(layer.tokens), count)
    r = layer.routing
    of_routed = moe_oracle(layer.tokens, r.topk_weights, r.topk_ids, routed)
    return of_routed + moe_oracle(layer.tokens, weights_of(layer.tokens, count, gate), every, shared)


def parts_of(whole: torch.Tensor, axis: int, size: int, ranges: int = 1) -> torch.Tensor:
    """Cut weights in plain numbers, by a loop."""
    found = []
    for expert in whole:
        pieces = [list(part.split(size, axis - 1)) for part in expert.chunk(ranges, axis - 1)]
        for of_ranges in pieces:
            short = size - of_ranges[-1].shape[axis - 1]
            pad = [0, 0, 0, short] if axis == 1 else [0, short]
            of_ranges[-1] = torch.nn.functional.pad(of_ranges[-1], pad)
        found += [torch.cat(part, axis - 1) for part in zip(*pieces, strict=True)]
    return torch.stack(found)


@pytest.mark.parametrize(("format", "kind"), mostly_slow(
    product(FORMATS, KINDS),
    [case for case in product(FORMATS, KINDS) if case[1] == "concat" or case[0] in ("bf16", "fp8_block128", "mxfp4")],
))  # fmt: skip
def test_parts_have_the_numbers_of_the_whole(format, kind):
    """Of two shared experts of each size, in every format and layout."""
    if kind == "interleaved" and format == "fp8_block128":
        kind = "concat"  # below
    layer = make(**SMALL, **KINDS[kind])
    routed = layer.pack(format)
    for size in SIZES.values():
        shared = shared_layer(size, 2, **KINDS[kind]).pack(format)
        found = with_shared(routed, shared)
        count = -(-size // 256)
        assert (found.num_shared, found.num_routed, found.num_local_experts) == (2 * count, 4, 4 + 2 * count)
        assert found.order == routed.order and found.gate_up_layout == routed.gate_up_layout
        ranges = 2 if layer.gate_up.shape[1] == 512 else 1
        want = unpack(routed), unpack(shared)
        got = unpack(found)
        for name, axis, each in (("gate_up", 1, ranges), ("down", 2, 1)):
            i = ("gate_up", "down").index(name)
            cut = parts_of(want[1][i], axis, 256, each)
            assert torch.equal(got[i], torch.cat((want[0][i], cut))), (name, size)
        if "bias" in KINDS[kind]:
            cut = parts_of(want[1][2][:, :, None], 1, 256, ranges)[:, :, 0]
            assert torch.equal(got[2], torch.cat((want[0][2], cut)))
            assert torch.equal(got[3][4:].view(2, count, -1).sum(1), want[1][3])


@pytest.mark.parametrize("format", ["mxfp4", "mxfp4_fp8", "nvfp4", "mxfp8"])
def test_in_the_order_of_hoppers_kernels(monkeypatch, format):
    """Packed for them, a shared expert of 640 is cut between tiles, and filled up with zeros."""
    layer, shared = make(**SMALL), shared_layer(640)
    want = unpack(with_shared(layer.pack(format), shared.pack(format)))
    monkeypatch.setattr(packing, "implementation", lambda device: "hopper")
    routed = layer.pack(format)
    found = with_shared(routed, shared.pack(format))
    assert found.order == routed.order and (found.order == "rows") == (format == "mxfp8")
    assert found.gate_up.scales_at_most_2 == routed.gate_up.scales_at_most_2
    assert found.down.scales_at_most_2 == routed.down.scales_at_most_2
    for got, expected in zip(unpack(found)[:2], want[:2], strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_a_layer_is_the_sum_of_routed_and_shared_experts(format, gated):
    layer, gate = make(**SMALL), gate_of() if gated else None
    routed = layer.pack(format)
    for size in SIZES.values():
        shared = shared_layer(size).pack(format)
        got = moe(layer.tokens, layer.routing, with_shared(routed, shared, gate))
        assert relative_error(got, oracle(layer, routed, shared, gate)) < BOUNDS[format]


def test_slots_written_by_hand_give_the_same_bits():
    layer, gate = make(**SMALL), gate_of()
    for given in (None, gate):
        experts = with_shared(layer.pack(), shared_layer(640, 1).pack(), given)
        r, every = layer.routing, torch.arange(4, 7, dtype=torch.int32).expand(9, 3)
        weights = torch.ones(9, 3)
        if given is not None:
            weights = (layer.tokens.float() * gate).sum(1).double().sigmoid().float()[:, None].expand(9, 3)
        by_hand = Routing(torch.cat((r.topk_weights, weights), 1), torch.cat((r.topk_ids, every), 1), 7)
        plain = replace(experts, num_shared=0, shared_gate=None)
        assert_same_bits(moe(layer.tokens, layer.routing, experts), moe(layer.tokens, by_hand, plain))


def test_what_callers_pass():
    """Ids in int64, weights in bf16, tokens in three dimensions or none, no slot at all, a map of the experts here."""
    layer = make(**SMALL)
    routed, shared = layer.pack(), shared_layer(256).pack()
    experts, r = with_shared(routed, shared), layer.routing
    want = moe(layer.tokens, r, experts)
    assert_same_bits(moe(layer.tokens, replace(r, topk_ids=r.topk_ids.long()), experts), want)
    half = replace(r, topk_weights=r.topk_weights.bfloat16())
    assert_same_bits(
        moe(layer.tokens, half, experts), moe(layer.tokens, replace(r, topk_weights=half.topk_weights.float()), experts)
    )
    longer = Routing(r.topk_weights[None], r.topk_ids[None], 4)
    assert_same_bits(moe(layer.tokens[None], longer, experts), want[None])
    assert moe(layer.tokens[:0], Routing(r.topk_weights[:0], r.topk_ids[:0], 4), experts).shape == (0, 256)
    none = Routing(r.topk_weights[:, :0], r.topk_ids[:, :0], 4)
    alone = Routing(torch.ones(9, 1), torch.zeros(9, 1, dtype=torch.int32), 1)
    assert_same_bits(moe(layer.tokens, none, experts), moe(layer.tokens, alone, shared))
    masked = replace(r, topk_ids=torch.full_like(r.topk_ids, -1))
    assert_same_bits(moe(layer.tokens, masked, experts), moe(layer.tokens, alone, shared))
    expert_map = torch.tensor([2, -1, 0, 3, 1, -1], dtype=torch.int32)
    ids = torch.randint(-1, 6, (9, 2), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    here = torch.where(ids < 0, -1, expert_map[ids.clamp(min=0).long()])
    got = moe(layer.tokens, Routing(r.topk_weights, ids, 6), experts, expert_map=expert_map)
    assert_same_bits(got, moe(layer.tokens, replace(r, topk_ids=here), experts))


def test_a_routing_names_routed_experts_alone():
    layer = make(**SMALL)
    experts = with_shared(layer.pack(), shared_layer(256).pack())
    with pytest.raises(ValueError, match="experts: expected all 5 experts of the routing, got 4"):
        moe(layer.tokens, replace(layer.routing, num_experts=5), experts)
    ids = layer.routing.topk_ids.clone()
    ids[3, 1] = 4
    with pytest.raises(ValueError, match="expected ids from 0 to 3, or -1 for a masked slot, got 4 at token 3, slot 1"):
        moe(layer.tokens, replace(layer.routing, topk_ids=ids), experts)
    wrong = torch.tensor([0, 4, 1, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match="expert_map: expected numbers from -1 to 3, got 4"):
        moe(layer.tokens, layer.routing, experts, expert_map=wrong)


def test_blocks_and_groups_that_a_checkpoint_stores():
    """FP8 blocks whose last is smaller, INT4 of larger groups than the routed experts' and with zero points."""
    source = torch.Generator().manual_seed(1)

    def fp8(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=source).to(torch.float8_e4m3fn)

    def stored(count: int, size: int) -> ExpertWeights:
        blocks = -(-size // 128)
        return pack(
            fp8(count, 2 * size, 256), fp8(count, 256, size), weight_block_size=(128, 128),
            gate_up_sf=torch.rand(count, 2 * blocks, 2, generator=source) + 0.5,
            down_sf=torch.rand(count, 2, blocks, generator=source) + 0.5,
        )  # fmt: skip

    def integers(count: int, size: int, group: int, zeros: bool) -> ExpertWeights:
        def one(name: str, rows: int, columns: int) -> dict:
            shape = count, rows, columns // group
            found = {
                name: torch.randint(256, (count, rows, columns // 2), generator=source, dtype=torch.uint8),
                f"{name}_sf": (torch.rand(shape, generator=source) + 0.5).bfloat16(),
            }
            points = {f"{name}_zeros": torch.randint(16, shape, generator=source, dtype=torch.uint8)}
            return found | (points if zeros else {})

        return pack(**one("gate_up", 2 * size, 256), **one("down", 256, size), format="int4")

    pairs = [
        (stored(4, 192), stored(1, 320)), (stored(4, 256), stored(2, 100)),
        (integers(4, 256, 32, False), integers(1, 384, 128, True)),
        (integers(4, 256, 32, True), integers(1, 320, 64, False)),
        (integers(4, 256, 64, True), integers(1, 512, 64, True)),
    ]  # fmt: skip
    layer = make(**SMALL)
    for routed, shared in pairs:
        found = with_shared(routed, shared)
        assert found.num_shared == -(-shared.intermediate // routed.intermediate) * shared.num_local_experts
        got, want = moe(layer.tokens, layer.routing, found), oracle(layer, routed, shared, None)
        assert relative_error(got, want) < BOUNDS[routed.format]


REFUSED = [
    ({}, {"format": "mxfp4"}, "shared.format: expected 'bf16', as the routed experts', got 'mxfp4'"),
    ({}, {"activation": "geglu"}, "shared.activation: expected 'swiglu', as the routed experts', got 'geglu'"),
    ({}, {"limit": 3.0}, "shared.swiglu_limit: expected None, as the routed experts', got 3.0"),
    ({}, {"bias": True}, "shared.down_bias: expected no biases, as the routed experts have, got some"),
    ({"bias": True}, {}, "shared.down_bias: expected biases, as the routed experts have, got none"),
    ({}, {"hidden": 128}, "shared.hidden: expected 256, as the routed experts', got 128"),
    (
        {"format": "fp8_block128"}, {"format": "fp8_block128", "packed_layout": "interleaved"},
        "shared.gate_up_layout: expected 'concat', as the routed experts', for blocks of rows that share factors, got",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other", "said"), REFUSED)
def test_what_cannot_be_one_layer_is_refused_by_name(one, other, said):
    def packed(given: dict, seed: int) -> ExpertWeights:
        given = dict(given)
        format = given.pop("format", "bf16")
        return make(**{**SMALL, **given}, seed=seed).pack(format)

    with pytest.raises(ValueError, match="^" + said):
        with_shared(packed(one, 0), packed(other, 1))


def test_other_things_are_refused_by_name():
    routed, shared = make(**SMALL).pack(), shared_layer(256).pack()
    found = with_shared(routed, shared)
    for given, said in (
        ((found, shared), "experts: expected experts without shared ones, got 1 of them"),
        ((routed, found), "shared: expected experts without shared ones, got 1 of them"),
        ((routed, routed.gate_up), "shared: expected ExpertWeights from envoi.experts.pack, got Tensor"),
        ((None, shared), "experts: expected ExpertWeights from envoi.experts.pack, got NoneType"),
        ((routed, shared, torch.ones(128)), "gate: expected .* \\[256\\], got float32 \\[128\\]"),
        ((routed, shared, torch.ones(2, 256)), "gate: expected .* \\[256\\], got float32 \\[2, 256\\]"),
        ((routed, shared, torch.ones(256, dtype=torch.int32)), "gate: expected .*, got int32"),
    ):
        with pytest.raises(ValueError, match="^" + said):
            with_shared(*given)
    for count in (5, -1, 1.5):
        with pytest.raises(ValueError, match=f"^num_shared: expected 0 to 4, got {count}"):
            replace(routed, num_shared=count)
    empty = replace(routed, gate_up=routed.gate_up[:0], down=routed.down[:0])
    with pytest.raises(ValueError, match="^shared: expected at least one expert, got none"):
        with_shared(routed, empty)
    for gate, came in ((torch.ones(256).bfloat16(), "bfloat16"), (torch.ones(1, 256), r"float32 \[1, 256\]")):
        with pytest.raises(ValueError, match=f"^shared_gate: expected float32 \\[256\\], got {came}"):
            replace(routed, num_shared=1, shared_gate=gate)
    for given in (routed, replace(routed, num_shared=1, shared_gate=torch.ones(256))):
        with pytest.raises(ValueError, match=r"^shared_gate: expected None with num_shared=0, got float32 \[256\]"):
            replace(given, num_shared=0, shared_gate=torch.ones(256))
    with pytest.raises(ValueError, match="^shared_gate: expected a tensor on cpu"):
        replace(routed, num_shared=1, shared_gate=torch.ones(256, device="meta"))


def test_a_gate_does_not_depend_on_other_tokens():
    tokens = torch.randn(120, 2048, generator=torch.Generator().manual_seed(7)).bfloat16()
    weights, ids = torch.zeros(120, 0), torch.zeros(120, 0, dtype=torch.int32)

    def weigh(part: slice) -> torch.Tensor:
        return reference.with_shared(tokens[part], weights[part], ids[part], 4, 1, gate_of(2048))[0]

    want = weigh(slice(None))
    for first, last in ((0, 1), (3, 4), (5, 12), (30, 60), (7, 107)):
        assert_same_bits(weigh(slice(first, last)), want[first:last])


def test_biases_are_cut_whatever_the_default_device():
    layers = make(**SMALL, bias=True), shared_layer(512, bias=True)
    with torch.device("meta"):
        found = with_shared(*(layer.pack() for layer in layers))
    assert found.down_bias.device.type == "cpu" and not found.down_bias[5].any()


def test_zeros_that_an_activation_does_not_keep_are_refused():
    def shifted(gate, up):
        return (silu(gate) + 1.0) * (up + 1.0)

    def packed(size: int) -> ExpertWeights:
        layer = make(**{**SMALL, "intermediate": size})
        return pack(layer.gate_up, layer.down, "fp8_row", activation=shifted)

    with pytest.raises(ValueError, match="^shared.intermediate: expected a multiple of 256 for an activation that"):
        with_shared(packed(256), packed(128))
    assert with_shared(packed(256), packed(512)).num_shared == 8


def test_int4_groups_that_are_smaller_are_refused():
    def integers(group: int) -> ExpertWeights:
        values = torch.zeros(1, 512, 128, dtype=torch.uint8), torch.zeros(1, 256, 128, dtype=torch.uint8)
        sf = [torch.ones(1, x.shape[1], 256 // group).bfloat16() for x in values]
        return pack(*values, "int4", gate_up_sf=sf[0], down_sf=sf[1])

    with pytest.raises(ValueError, match="^shared.gate_up: expected groups of 1 x 64, .* or of a multiple, got 1 x 32"):
        with_shared(integers(64), integers(32))


def test_they_are_saved_and_written_over_with_the_layer():
    layer, gate = make(**SMALL), gate_of()
    for format in ("bf16", "mxfp4"):
        experts = with_shared(layer.pack(format), shared_layer(512).pack(format), gate[None].bfloat16())
        want = moe(layer.tokens, layer.routing, experts)
        back = from_state_dict(state_dict(experts))
        assert (back.num_shared, back.shared_gate.dtype) == (2, torch.float32)
        assert_same_bits(moe(layer.tokens, layer.routing, back), want)
        assert_same_bits(moe(layer.tokens, layer.routing, experts.to("cpu")), want)
        other = make(**{**SMALL, "experts": 6}, seed=4)
        back.update_(other.gate_up, other.down)
        fresh = replace(pack(other.gate_up, other.down, format), num_shared=2, shared_gate=back.shared_gate)
        assert_same_bits(moe(layer.tokens, layer.routing, back), moe(layer.tokens, layer.routing, fresh))


def test_compiled_calls_and_their_flops():
    layer = make(**SMALL)
    experts = with_shared(layer.pack(), shared_layer(512).pack(), gate_of())

    def step(tokens):
        return moe(tokens, layer.routing, experts) * 2

    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(layer.tokens), step(layer.tokens))
    with FlopCounterMode(display=False) as counter:
        moe(layer.tokens, layer.routing, experts)
    assert counter.get_total_flops() == 2 * 9 * (2 + 2) * 256 * (512 + 256)


def test_slots_without_a_gate_are_compiled_once_for_all_sizes():
    """Check that neither the columns nor the slots of a token, which such a kernel doesn't read, are its constants."""
    found = []
    for k, hidden in ((2, 256), (8, 4096), (16, 2880)):
        tokens, ids = torch.zeros(3, hidden), torch.zeros(3, k, dtype=torch.int32)
        for read in (tokens, ids):  # a placement gives ids in place of tokens
            added = AddedSlots.of(read, ids, 1, None, SHARED_SLOTS)
            found.append((added.form, added.sizes[2]))
    assert len(set(found)) == 1

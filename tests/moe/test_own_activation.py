"""Users' own activations of experts: functions of gate and up, or of up, in every format; as text; refused."""

import copy
from itertools import product

import pytest
import torch

import envoi
from envoi.epilogues import relu, row_sum, sigmoid, silu
from envoi.epilogues.activation import expect_activation, written
from envoi.ops.moe import moe, pack
from envoi.ops.moe.op import constants_of
from envoi.quant import FORMATS
from envoi.runtime.devices import Target
from envoi.runtime.planned_kernels import compile_at, find
from envoi.types import has_gate
from tests.helpers.accuracy import assert_same_bits, relative_error
from tests.helpers.slow import mostly_slow
from tests.moe.layers import make
from tests.moe.own import OWN, UNGATED, Own, layer_of, oracle, reglu
from tests.moe.test_moe import BOUNDS
from tests.test_types import same
from tools.oracles.moe import moe_oracle


def bound(format: str, own: Own) -> float:
    return BOUNDS[format] * own.relative


CROSSED = [*product(["bf16"], OWN), *product(FORMATS, ["clipped"])]  # each format, and each function


@pytest.mark.parametrize(("format", "name"), mostly_slow(product(FORMATS, OWN), quick=CROSSED))
def test_the_layer_is_that_of_float64(format, name):
    layer = layer_of(name, bias=name in ("reglu", "of_one"))
    packed = layer.pack(format)
    assert packed.intermediate == 128
    want = oracle(layer, packed, name)
    assert relative_error(moe(layer.tokens, layer.routing, packed), want) < bound(format, OWN[name])
    slots = layer.routing.topk_weights, layer.routing.topk_ids
    assert relative_error(moe_oracle(layer.tokens, *slots, packed), want) < 1e-12


@pytest.mark.parametrize(("format", "layout"), [
    ("bf16", "concat"), ("bf16", "interleaved"), ("fp8_row", "concat"), ("fp8_block128", "concat"),
])  # fmt: skip
def test_in_both_layouts(format, layout):
    layer = layer_of("clipped")
    layer.packed_layout = layout
    packed = layer.pack(format)
    got = moe(layer.tokens, layer.routing, packed)
    assert relative_error(got, oracle(layer, packed, "clipped")) < bound(format, OWN["clipped"])


@pytest.mark.parametrize("name", OWN)
def test_the_text_is_all_that_is_kept(name, tmp_path):
    layer = layer_of(name, tokens=7)
    packed = layer.pack("fp8_row")
    assert expect_activation(packed.activation) == packed.activation
    assert has_gate(packed.activation) == (name not in UNGATED)
    want = moe(layer.tokens, layer.routing, packed)
    envoi.experts.save(packed, tmp_path / "experts.safetensors")
    torch.save(packed, tmp_path / "experts.pt")
    for again in (
        envoi.experts.load(tmp_path / "experts.safetensors"), torch.load(tmp_path / "experts.pt"),
        envoi.experts.from_state_dict(envoi.experts.state_dict(packed)), copy.deepcopy(packed),
    ):  # fmt: skip
        assert same(again, packed)
        assert_same_bits(moe(layer.tokens, layer.routing, again), want)


def test_calls_of_two_functions_are_two():
    layer = make(tokens=7)
    first, second = (
        pack(layer.gate_up, layer.down, activation=f) for f in (lambda g, u: relu(g) * u, lambda g, u: silu(g) * u)
    )
    assert constants_of(first) != constants_of(second)
    again = pack(layer.gate_up, layer.down, activation=lambda x, y: relu(x) * y)
    assert constants_of(first) == constants_of(again)
    assert_same_bits(moe(layer.tokens, layer.routing, second), moe(layer.tokens, layer.routing, layer.pack()))


@pytest.mark.parametrize("name", ["reglu", "of_one"])
def test_compiles_as_one_graph(name):
    layer = layer_of(name, tokens=7)
    packed = layer.pack("mxfp8")
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(layer.tokens, layer.routing, packed), moe(layer.tokens, layer.routing, packed))


@pytest.mark.parametrize("alpha", [1.0, 1.5, 1.702])
def test_swiglu_oai_with_another_slope(alpha):
    layer = make(bias=True)
    packed = pack(
        layer.gate_up, layer.down, activation="swiglu_oai", swiglu_alpha=alpha, gate_up_bias=layer.gate_up_bias,
        down_bias=layer.down_bias,
    )  # fmt: skip
    assert (packed.activation == "swiglu_oai") == (alpha == 1.702)
    assert packed.swiglu_limit == 7.0
    own = Own(reglu, lambda gate, up: (up + 1) * gate * torch.sigmoid(alpha * gate), limit=7.0)
    OWN["slope"] = own
    try:
        assert relative_error(moe(layer.tokens, layer.routing, packed), oracle(layer, packed, "slope")) < 0.006
    finally:
        del OWN["slope"]


class Call:
    """Call of a layer with an activation of its own for a number of tokens, as compiling processes repeat it."""

    def __init__(self, format: str, name: str):
        self.format, self.activation, self.rows = format, written(OWN[name].function), 256 - 128 * (name in UNGATED)

    def __call__(self, num_tokens: int) -> None:
        from envoi.ops.moe.support import experts_without_memory
        from envoi.ops.moe.warm_up import LayerCall

        experts = experts_without_memory(256, 128, 4, self.format, self.activation, False)
        assert experts.gate_up.shape[-2] == self.rows
        LayerCall(experts, 2)(num_tokens)


@pytest.mark.parametrize(("format", "name"), mostly_slow([
    ("bf16", "clipped"), ("fp8_block128", "reglu"), ("mxfp8", "of_one"), ("mxfp4", "by_halves"),
    ("mxfp4", "quick_gelu"), ("mxfp4_mxfp8", "clamped"), ("fp8_row", "by_pairs"),
], quick=[("bf16", "clipped"), ("mxfp4_mxfp8", "clamped")]))  # fmt: skip
def test_hoppers_kernels_compile(format, name):
    call, target = Call(format, name), Target("sm_90")
    sites = find([call], target, (1, 1000, 3000))
    gemms = {digest: site for digest, site in sites.items() if site.launch in _gemms(call, target, site.num_tokens)}
    assert gemms
    assert [compile_at([call], target, False, site) for site in gemms.values()] == [""] * len(gemms)


def _gemms(call: Call, target: Target, num_tokens: int) -> set[int]:
    """Return the place of L1 among a call's launches: the first kernel of a GEMM, or of both."""
    from envoi.runtime.planned_kernels import launches_of

    names = [kernel.fn.__module__ for kernel, *_ in launches_of(call, num_tokens, target)]
    of_gemms = (".gemm.", ".one_launch.", ".decode.")
    return {next(place for place, name in enumerate(names) if any(part in name for part in of_gemms))}


def test_kernels_for_few_tokens_leave_it_to_the_others(packs_for_hopper):
    from envoi.ops.moe.choose import why_not_decode_mx

    packed = layer_of("reglu").pack("mxfp4")
    assert packed.order == "fragments"
    assert why_not_decode_mx(packed, 1) == "the activation"


WRONG = [
    (lambda gate, up: up, "expected all that it takes to take part in what it returns"),
    (lambda: 1.0, "got one that needs none"),
    (lambda a, b, c: a, "got one that needs a, b, c"),
    (lambda up, *, slope: up, "got one that needs up, slope"),
    (lambda up: 1.0, "expected one value for each gate and up as its result, got float"),
    (lambda up: up > 1, "got a mask; use where"),
    (lambda gate, up: (gate, up), "got tuple"),
    (lambda gate, up: row_sum(gate) * up, "row_sum isn't possible in an activation"),
    (lambda up: torch.relu(up), "only the functions of envoi.epilogues work"),
    (lambda up: up if up > 0 else 0.0, "can't decide a branch"),
    (lambda up: envoi.epilogues.cast(up, "bf16"), "got a mask|cast isn't possible"),
    (torch.nn.functional.gelu, "expected a Python function, got <built-in function gelu>"),
    (3, "or a function of gate and up, or of up, got 3"),
    ("tanh", "activation: expected one of 'swiglu', .*, got 'tanh'"),
]


@pytest.mark.parametrize(("activation", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_refusals(activation, message):
    layer = make()
    with pytest.raises(ValueError, match=message):
        pack(layer.gate_up, layer.down, activation=activation)


def test_an_epilogue_with_operands_is_refused():
    @envoi.epilogue
    def biased(acc, bias: envoi.epilogues.Col):
        return silu(acc + bias)

    with pytest.raises(ValueError, match="expected no operands, got bias: Col"):
        written(biased)


def test_what_goes_with_an_activation():
    layer = make()
    up = layer.gate_up[:, :128]
    with pytest.raises(ValueError, match="swiglu_limit: expected None for 'activation.up.: .* which has no gate"):
        pack(up, layer.down, activation=lambda up: sigmoid(up), swiglu_limit=7.0)
    with pytest.raises(ValueError, match="swiglu_alpha: expected None for 'swiglu'; 'swiglu_oai' has it, got 1.5"):
        pack(layer.gate_up, layer.down, swiglu_alpha=1.5)
    with pytest.raises(ValueError, match="swiglu_alpha: expected a number"):
        pack(layer.gate_up, layer.down, activation="swiglu_oai", swiglu_alpha=float("nan"))
    with pytest.raises(ValueError, match="down: expected .* .8, 256, 256., got bfloat16 .8, 256, 128."):
        pack(layer.gate_up, layer.down, activation=lambda up: relu(up))


TEXTS = [
    "x(gate, up): %2 = exec %0; %2", "x(up): %1 = mul %0; %1", "x(up): %1 = relu %0 %0; %1", "x(up): %1 = relu %1; %1",
    "x(up): %2 = relu %0; %2", "x(up): %1 = relu %0; %7", "x(up): %1 = relu %0", "x(up): %1 = mul 1.0 2.0; %1",
    "x(up): %1 = gelu %0 approximate=fast; %1", "x(up): %1 = gelu %0; %1", "x(up): %1 = relu %0 slope=1.0; %1",
    "x(up): %1 = mul %0 1e39; %1", "x(up): %1 = gt %0 1.0; %1", "x(up): %1 = add %0 up; %1", ": %0", "x(): %0",
    "x(up): %1 = row_sum %0; %1", "x(up): %1 = even %0; %1", "x(up): %1 = pow %0 exponent=half; %1",
    "x(up): " + "; ".join(f"%{i} = relu %{i - 1}" for i in range(1, 300)) + "; %299",
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS, ids=[text[:40] for text in TEXTS])
def test_texts_that_nothing_wrote(text, tmp_path):
    with pytest.raises(ValueError, match="activation: expected a text that envoi.experts.pack has written, "):
        expect_activation(text)


def test_a_file_with_another_text_is_refused(tmp_path):
    state = envoi.experts.state_dict(make(tokens=2).pack())
    said = bytes(state["envoi"].tolist()).replace(b'"swiglu"', b'"x(up): %1 = exec %0; %1"')
    state["envoi"] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
    with pytest.raises(ValueError, match="state: activation: expected a text that envoi.experts.pack has written"):
        envoi.experts.from_state_dict(state)

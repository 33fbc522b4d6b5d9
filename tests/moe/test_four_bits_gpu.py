"""4-bit weights on a Hopper GPU beside float64, by the kernels for few tokens and for many.

Sizes, factors and routings are chosen to break; bits are compared where every sum is exact.
"""

from dataclasses import dataclass, field, replace
from functools import cache

import pytest
import torch

from envoi.epilogues.library import expert_l1, store
from envoi.ops.gemm.grouping import EXPERTS_ROWS
from envoi.ops.gemm.hopper_w4a8.config import TILES, config_of, fitted
from envoi.ops.gemm.hopper_w4a16 import few, many
from envoi.ops.moe import experts as kernels_layer
from envoi.ops.moe import moe, pack, unpack
from envoi.ops.moe.choose import DECODE_MX_ACTIVATIONS
from envoi.ops.moe.experts import run_experts, run_layer
from envoi.ops.moe.permute import gather_rows, sort_slots
from envoi.quant import SCHEMES, dequantize, format_named, quantize
from envoi.quant.fp8_fragments import LEAST_SHIFT, SPREAD, to_fp8_fragments
from envoi.quant.fragments import to_fragments
from envoi.types import ExpertWeights, QuantTensor, Routing
from tests.helpers.accuracy import assert_same_bits, relative_error
from tests.helpers.choices import force
from tests.helpers.launches import assert_same_code, watched
from tests.moe.int4 import Form, random_int4
from tests.moe.layers import (
    MOST,
    Layer,
    assert_a_graph_serves,
    assert_others_keep_their_bits,
    assert_replays_repeat,
    assert_same_bits_each_time,
    judged,
    make,
)
from tests.moe.test_gpu import on_gpu, with_ids
from tests.moe.test_moe import KINDS
from tests.test_spans import STEPS, seen
from tools.kernel_cases import gemm_hopper_w4a16 as cases
from tools.oracles.moe import activate, moe_oracle

pytestmark = [pytest.mark.gpu(arch="sm_90"), pytest.mark.usefixtures("tidy_gpu")]

ORDERS = {"mxfp4": "fragments", "mxfp4_fp8": "fp8_fragments", "mxfp4_mxfp8": "fragments", "nvfp4": "fragments"}
# Sums of FP8 products keep 14 bits, which now and then moves a number of L1's rows to the next of E4M3.
# One of a single token's few rows weighs most: a number's next is 1/16 of it.
MOST_FP8 = 3e-2  # tokens and rows in FP8 alone: 4.5e-2
# By products of bf16 hardly a number is moved.
MOST_ROUNDED = {
    "mxfp4_fp8 few": MOST_FP8,
    "mxfp4_fp8 many": MOST_FP8,
    "mxfp4_mxfp8 few": MOST_FP8,
    "mxfp4_mxfp8 many": 1e-2,
}
# Powers of two and their neighbours; K in whole groups of steps, and not; one step of K; more K than fits twice.
SIZES = [
    (2880, 2880), (2048, 1408), (1408, 2880), (2048, 768), (1536, 1536), (64, 64), (128, 192), (704, 576), (4096, 1536),
    (7168, 512), (7168, 192),
]  # fmt: skip


@dataclass
class Kernels:
    """Kernels that are to run, those for few tokens or for many, in a format. ran: which have, in first calls."""

    format: str
    which: str
    ran: list[str] = field(default_factory=list)

    @property
    def most(self) -> float:
        """Most that the error may be to float64 with tokens and L1's rows rounded alike; 0 where they aren't."""
        return MOST_ROUNDED.get(f"{self.format} {self.which}", 0.0)


@pytest.fixture(params=["mxfp4 few", "mxfp4 many", *MOST_ROUNDED, "nvfp4 many"])
def kernels(request, monkeypatch) -> Kernels:
    """Have these kernels run, whatever the number of rows."""
    made = Kernels(*request.param.split())
    force(monkeypatch, decode_mx=made.which == "few")
    for name, module, function in (("few", few, "rows"), ("many", kernels_layer, "run_experts")):
        original = getattr(module, function)
        monkeypatch.setattr(
            module, function, lambda *given, name=name, original=original: made.ran.append(name) or original(*given)
        )
    return made


def rounded_oracle(layer: Layer, packed: ExpertWeights) -> torch.Tensor:
    """Compute the layer in float64 on the packed weights, but for what is rounded: tokens, L1's rows, L2's rows."""
    gate_up, down, gate_up_bias, down_bias = unpack(packed, "interleaved", torch.float64)
    out = torch.zeros(layer.tokens.shape, dtype=torch.float64, device="cuda")

    def in_fp8(rows: torch.Tensor) -> torch.Tensor:
        if packed.format == "mxfp4_mxfp8":
            return dequantize(quantize(rows, "mxfp8"), torch.float64)
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


def oracle_of(layer: Layer, packed: ExpertWeights) -> torch.Tensor:
    if packed.format in ("mxfp4_fp8", "mxfp4_mxfp8"):
        return rounded_oracle(layer, packed)
    return moe_oracle(layer.tokens, layer.routing.topk_weights, layer.routing.topk_ids, packed)


def outputs(layer: Layer, kernels: Kernels, packed: ExpertWeights | None = None) -> torch.Tensor:
    packed = packed or layer.pack(kernels.format)
    assert packed.order == ORDERS[kernels.format]
    got = moe(layer.tokens, layer.routing, packed)
    # A call like an earlier one is launched again without a call of theirs.
    assert set(kernels.ran) == {kernels.which if layer.activation in DECODE_MX_ACTIVATIONS else "many"}
    if kernels.most:
        assert relative_error(got, rounded_oracle(layer, packed)) <= kernels.most
        return got
    return judged(got, layer, packed)


@pytest.mark.parametrize(("hidden", "intermediate"), SIZES)
@pytest.mark.parametrize("tokens", [1, 16, 90])
def test_sizes(hidden, intermediate, tokens, kernels):
    outputs(on_gpu(make(tokens, 5, 4, hidden, intermediate, bias=True, activation="swiglu_oai")), kernels)


@pytest.mark.parametrize("kernels", ["mxfp4 many", "nvfp4 many"], indirect=True)
@pytest.mark.parametrize("tokens", [700, 900])
def test_many_tokens(tokens, kernels):
    outputs(on_gpu(make(tokens, 5, 4, 2048, 1408, bias=True, activation="swiglu_oai")), kernels)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [3, 40])
def test_activations(tokens, kind, kernels):
    outputs(on_gpu(make(tokens=tokens, hidden=512, intermediate=320, **KINDS[kind])), kernels)


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
    packed = layer.pack(kernels.format)
    masked = moe(layer.tokens, with_ids(layer, torch.full_like(slots, -1)).routing, packed)
    assert bool((masked == 0).all())
    none = Routing(layer.routing.topk_weights[:0], layer.routing.topk_ids[:0], 6)
    assert moe(layer.tokens[:0], none, packed).shape == (0, 512)


def test_the_same_bits_a_hundred_times(kernels):
    layer = on_gpu(make(tokens=30, experts=16, k=4, hidden=1024, intermediate=704))
    assert_same_bits_each_time(layer, layer.pack(kernels.format))
    assert_replays_repeat(layer, layer.pack(kernels.format))


def test_a_graph_serves_other_routings(kernels):
    layers = [on_gpu(make(tokens=8, masked=masked, seed=i)) for i, masked in enumerate((0.0, 0.5, 1.0))]
    packed, given = layers[0].pack(kernels.format), on_gpu(make(tokens=8))
    want = [moe(layer.tokens, layer.routing, packed) for layer in layers]
    assert_a_graph_serves(given, packed, layers, want)


def test_the_steps_have_names(kernels):
    layer = on_gpu(make(tokens=8))
    packed = layer.pack(kernels.format)
    found = [name for name, _ in seen(lambda: moe(layer.tokens, layer.routing, packed))]
    assert [name for name in found if name in STEPS] == STEPS


def test_a_tokens_bits_do_not_depend_on_the_others_numbers(kernels):
    layer = on_gpu(make(tokens=24, hidden=512, intermediate=256, masked=0.0))
    assert_others_keep_their_bits(layer, layer.pack(kernels.format))


@pytest.mark.parametrize("kernels", ["mxfp4 few", "mxfp4 many", *MOST_ROUNDED], indirect=True)
def test_tokens_of_very_different_sizes(kernels):
    layer = on_gpu(make(tokens=24, hidden=512, intermediate=256))
    layer.tokens *= torch.logspace(-12, 6, 24, device="cuda")[:, None].bfloat16()
    packed = layer.pack(kernels.format)
    got, want = outputs(layer, kernels, packed), oracle_of(layer, packed)
    used = (layer.routing.topk_ids >= 0).any(1)
    errors = (got[used] - want[used]).norm(dim=1) / want[used].norm(dim=1)
    assert float(errors.max()) < 3 * (kernels.most or MOST)


@pytest.mark.parametrize(("kernels", "group"), [("mxfp4 many", 32), ("nvfp4 many", 16)], indirect=["kernels"])
def test_packing_takes_no_more_memory(kernels, group):
    layer = on_gpu(make(tokens=1, experts=4, hidden=2880, intermediate=2880))
    packed = layer.pack(kernels.format)
    for weight, plain in ((packed.gate_up, layer.gate_up), (packed.down, layer.down)):
        assert weight.values.untyped_storage().nbytes() == plain.numel() // 2
        assert weight.sf.untyped_storage().nbytes() == plain.numel() // group


def test_mxfp4_that_cannot_be_put_into_the_order_stays_right():
    wide = on_gpu(make(tokens=40, hidden=512, intermediate=96))  # 96 isn't a multiple of 64
    large = on_gpu(make(tokens=40, hidden=512, intermediate=128))
    large = replace(large, gate_up=large.gate_up * 2.0**20)  # factors above 2
    for layer in (wide, large):
        for format, most in (("mxfp4", MOST), ("mxfp4_mxfp8", 1e-2)):
            packed = layer.pack(format)
            assert packed.order == "rows"
            assert relative_error(moe(layer.tokens, layer.routing, packed), oracle_of(layer, packed)) <= most


# MXFP8's numbers in bf16


def test_rows_of_other_ranks_in_mxfp8_have_the_bits_of_rows_in_bf16():
    layer = on_gpu(make(tokens=200, hidden=512, intermediate=256, bias=True))
    packed, slots = layer.pack("mxfp4_mxfp8"), sort_slots(layer.routing.topk_ids, 8)
    given = layer.tokens, layer.routing.topk_weights, slots, SCHEMES["mxfp8"]
    (rows, weights), (kept, _) = gather_rows(*given), gather_rows(*given, in_bf16=True)
    used = int(slots.offsets[-1])
    assert 0 < used < len(weights)
    got, want = (run_experts(x, weights, slots.offsets, packed)[:used] for x in (rows, kept))
    assert_same_bits(got, want)


@pytest.mark.parametrize("tile", [tile[:2] for tile in TILES["bf16"]])
def test_rows_of_l1_have_all_numbers_of_mxfp8(tile):
    """Also NaN and infinite ones, small and large ones."""
    rows, H, inside = 150, 320, 192
    tokens = torch.randn(rows, H, device="cuda").bfloat16()
    tokens[7, 3], tokens[8] = torch.nan, 0.0
    weight = torch.logspace(-36, 30, rows, device="cuda")
    weight[20] = torch.inf
    gate_up = to_fragments(replace(random_mxfp4(3, 2 * inside, H, (110, 124)), scales_at_most_2=True))
    offsets = torch.tensor([0, 1, 1, rows - 2], dtype=torch.int32, device="cuda")
    config = fitted(config_of(*tile, H, 3, widened="bf16"))

    def ran(in_bf16: bool) -> list[torch.Tensor]:
        ir = expert_l1("swiglu", 7.0, False, "mxfp8", in_bf16=in_bf16).ir
        outputs = many.run_gemm(tokens, gate_up, offsets, ir, torch.bfloat16, {"weight": weight}, EXPERTS_ROWS, config)
        return [part[: rows - 2] for part in outputs]

    (got,), (values, sf) = ran(True), ran(False)
    want = dequantize(QuantTensor(values, sf, (1, 32)))
    assert bool(want.isnan().any(1)[[7, 20]].all())
    assert_same_bits(got.float().nan_to_num(-1.0) + 0.0, want.nan_to_num(-1.0) + 0.0)


# FP8 tokens


def random_mxfp4(experts: int, N: int, K: int, factors: tuple[int, int], seed: int = 0) -> QuantTensor:
    """Random weights whose factors are any of these bytes of UE8M0, a range; on the GPU, by rows."""
    source = torch.Generator("cuda").manual_seed(seed)
    values = torch.randint(0, 256, (experts, N, K // 2), generator=source, device="cuda", dtype=torch.uint8)
    sf = torch.randint(*factors, (experts, N, K // 32), generator=source, device="cuda", dtype=torch.uint8)
    return QuantTensor(values, sf.view(torch.float8_e8m0fnu), (1, 32))


@pytest.mark.parametrize("kernels", ["mxfp4_fp8 few", "mxfp4_fp8 many"], indirect=True)
@pytest.mark.parametrize("spread", [-5 - LEAST_SHIFT, SPREAD])
def test_factors_far_apart(spread, kernels):
    layer = on_gpu(make(tokens=20, experts=6, k=4, hidden=704, intermediate=320))
    weights = [
        to_fp8_fragments(random_mxfp4(6, N, K, (121 - spread, 122), seed))
        for seed, (N, K) in enumerate(((640, 704), (704, 320)))
    ]
    packed = ExpertWeights(*weights, "mxfp4_fp8")
    assert packed.gate_up.scales_at_most_2 == (spread < SPREAD)
    outputs(layer, kernels, packed)


@pytest.mark.parametrize("kernels", MOST_ROUNDED, indirect=True)
def test_the_number_of_tokens_does_not_matter_if_batch_invariant(kernels):
    layer = on_gpu(make(tokens=500, hidden=512, intermediate=256, masked=0.0))
    packed = layer.pack(kernels.format)
    whole = moe(layer.tokens, layer.routing, packed, batch_invariant=True)
    assert_parts_have_its_bits(layer, packed, whole, (9,), batch_invariant=True)
    assert "few" not in kernels.ran
    assert relative_error(whole, rounded_oracle(layer, packed)) <= kernels.most


def assert_parts_have_its_bits(layer: Layer, packed: ExpertWeights, whole: torch.Tensor, counts, **options) -> None:
    """Assert that the first tokens alone have the bits that they have among all."""
    for count in counts:
        part = replace(
            layer.routing, topk_weights=layer.routing.topk_weights[:count], topk_ids=layer.routing.topk_ids[:count]
        )
        assert_same_bits(moe(layer.tokens[:count], part, packed, **options), whole[:count])


# NVFP4


def random_nvfp4(experts: int, N: int, K: int, codes: tuple[int, int], seed: int = 0) -> QuantTensor:
    """Random weights whose factors are any of these bytes of E4M3, a range; on the GPU, by rows, without a scale."""
    source = torch.Generator("cuda").manual_seed(seed)

    def draw(low: int, high: int, columns: int) -> torch.Tensor:
        return torch.randint(low, high, (experts, N, columns), generator=source, device="cuda", dtype=torch.uint8)

    return QuantTensor(draw(0, 256, K // 2), draw(*codes, K // 16).view(torch.float8_e4m3fn), (1, 16))


def pack_nvfp4(gate_up: QuantTensor, down: QuantTensor, gate_up_scale, down_scale, **biases) -> ExpertWeights:
    return pack(
        gate_up.values, down.values, gate_up_sf=gate_up.sf, down_sf=down.sf, gate_up_scale=gate_up_scale,
        down_scale=down_scale, **biases,
    )  # fmt: skip


@pytest.mark.parametrize("codes", [(0, 0x7F), (0, 8), (0, 1), (0x78, 0x7F)], ids=["all", "subnormal", "zero", "large"])
@pytest.mark.parametrize("tokens", [5, 300])
def test_factors_of_every_kind_under_scales_of_gate_and_of_up(codes, tokens):
    E, H, inside = 4, 320, 192
    layer = on_gpu(make(tokens=tokens, experts=E, k=2, hidden=H, intermediate=inside, bias=True))
    weights = random_nvfp4(E, 2 * inside, H, codes), random_nvfp4(E, H, inside, codes, seed=1)
    largest = 6 * float(torch.tensor([codes[1] - 1]).to(torch.uint8).view(torch.float8_e4m3fn).float()) or 1.0
    scale = torch.rand(E, 2, device="cuda").add(0.1) * torch.tensor([1.0, 3.0], device="cuda") / largest / H**0.5
    biases = {"gate_up_bias": layer.gate_up_bias, "down_bias": layer.down_bias}
    experts = pack_nvfp4(*weights, scale, scale[:, 1].contiguous(), **biases)
    assert experts.order == "fragments"
    judged(moe(layer.tokens, layer.routing, experts), layer, experts)


@pytest.mark.parametrize(("intermediate", "batch_invariant"), [(256, False), (80, True)], ids=["own", "triton"])
def test_bits_of_nvfp4_do_not_depend_on_the_number_of_tokens(intermediate, batch_invariant):
    layer = on_gpu(make(tokens=2000, hidden=512, intermediate=intermediate, bias=True))
    packed = layer.pack("nvfp4")
    whole = moe(layer.tokens, layer.routing, packed, batch_invariant=batch_invariant)
    assert_parts_have_its_bits(layer, packed, whole, (1, 7, 60, 300, 1100), batch_invariant=batch_invariant)


@pytest.mark.parametrize("tokens", [1, 40, 600])
def test_nvfp4_that_cannot_be_put_into_the_order_stays_right(tokens):
    narrow = on_gpu(make(tokens=tokens, hidden=512, intermediate=80, bias=True))  # no multiple of 64
    layer = on_gpu(make(tokens=tokens, experts=4, k=2, hidden=320, intermediate=192))
    gate_up, down = random_nvfp4(4, 384, 320, (0, 0x7F)), random_nvfp4(4, 320, 192, (0, 0x7F), seed=1)
    gate_up.sf.view(torch.uint8)[1, 7, 3] |= 0x80  # a negative factor
    scale = torch.full((4,), 1e-4, device="cuda")
    for one, packed in ((narrow, narrow.pack("nvfp4")), (layer, pack_nvfp4(gate_up, down, scale, scale))):
        assert packed.order == "rows"
        judged(moe(one.tokens, one.routing, packed), one, packed)


# Many tokens, NVFP4 and INT4


# Kinds of random weights whose products with 0, 1 and -1 are multiples of one power of two, and columns of K after
# which no sum would be exact. Of NVFP4 ranges of factors' codes.
EXACT = {
    "nvfp4-small": ((0, 0x21), 704), "nvfp4-large": ((0x40, 0x7F), 128), "int4-32": (Form(), 704),
    "int4-32-half-zeros": (Form(32, torch.float16, True), 704), "int4-64-half": (Form(64, torch.float16), 704),
    "int4-64-half-zeros": (Form(64, torch.float16, True), 704),
}  # fmt: skip


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("tile", [tile[:2] for tile in TILES["bf16"]])
@pytest.mark.parametrize("K", [64, 128, 320, 704])
def test_bits_where_every_sum_is_exact(kind, tile, K):
    """Tokens are 0, 1 and -1; weights are numbers that bf16 holds, and no sum needs more than 24 bits."""
    E, N, rows = 3, 192, 150
    form, most = EXACT[kind]
    source = torch.Generator("cuda").manual_seed(K)
    tokens = torch.randint(-1, 2, (rows, K), generator=source, device="cuda").bfloat16()
    tokens[:, most:] = 0
    int4 = isinstance(form, Form)
    weights = random_int4(E, N, K, form, seed=K) if int4 else random_nvfp4(E, N, K, form, seed=K)
    offsets = torch.tensor([0, 1, 1, rows - 2], dtype=torch.int32, device="cuda")
    wide = dequantize(weights, torch.float64)
    want = torch.cat([tokens[:1].double() @ wide[0].T, tokens[1 : rows - 2].double() @ wide[2].T])
    there = to_fragments(weights)
    config = fitted(config_of(*tile, K, E, widened="int4" if int4 else "nvfp4", int4=few.form_of(there)))
    (got,) = many.run_gemm(tokens, there, offsets, store.ir, torch.float32, {}, EXPERTS_ROWS, config)
    assert_same_bits(got[: rows - 2], want.float())


# Kernels of the registry


def experts_of(format: str, hidden: int, intermediate: int, spread: int = 2, E: int = 32) -> ExpertWeights:
    """Return E experts with random bytes. spread: of the powers of two beside FP8 tokens."""
    sizes = (2 * intermediate, hidden), (hidden, intermediate)
    if format == "nvfp4":
        weights = [
            replace(to_fragments(random_nvfp4(E, N, K, (0x20, 0x40))), scale=torch.full((E, N), 0.01).cuda())
            for N, K in sizes
        ]
    elif format == "mxfp4_fp8":
        weights = [to_fp8_fragments(random_mxfp4(E, N, K, (118 - spread, 119))) for N, K in sizes]
    else:
        weights = [to_fragments(replace(random_mxfp4(E, N, K, (110, 124)), scales_at_most_2=True)) for N, K in sizes]
    biases = torch.randn(E, 2 * intermediate, device="cuda"), torch.randn(E, hidden, device="cuda")
    return ExpertWeights(*weights, format, "swiglu_oai", 7.0, *biases)


def format_of(case: cases.Case) -> str:
    return "mxfp4_fp8" if case.fp8 else "mxfp4_mxfp8" if case.mxfp8 else "nvfp4" if case.nvfp4 else "mxfp4"


def call(tokens: int, experts: ExpertWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a layer of random tokens; return them and their experts' ids."""
    x = torch.randn(tokens, experts.hidden, device="cuda").bfloat16()
    ids = torch.rand(tokens, experts.num_local_experts, device="cuda").topk(4).indices.int()
    run_layer(x, torch.rand(tokens, 4, device="cuda"), ids, experts)
    return x, ids


@cache
def launched(format: str) -> dict[str, str]:
    """Return what runs on gpt-oss-20b's layer and on others, for the numbers of tokens that the registry has."""
    found: dict[str, str] = {}
    own = [case for case in CASES if format_of(case) == format]
    with watched(lambda sha256, kernel: found.setdefault(sha256, kernel.asm["ptx"])):
        layers = {case: (case.sizes, case.looks_up, case.num_experts) for case in own}
        for layer in sorted(set(layers.values())):
            sizes, looks_up, num_experts = layer
            experts = experts_of(format, *sizes, SPREAD if looks_up else 2, num_experts)
            for tokens in sorted({case.num_tokens for case in own if layers[case] == layer}):
                x, ids = call(tokens, experts)
                if tokens == 4096 and format in ("mxfp4", "mxfp4_mxfp8"):
                    sent_and_widened(x, ids, experts)
    return found


def sent_and_widened(x: torch.Tensor, ids: torch.Tensor, experts: ExpertWeights) -> None:
    """Run a layer's experts on rows as other ranks send them, and store theirs at addresses."""
    sent = torch.full((ids.numel(), experts.hidden), torch.nan, device="cuda", dtype=torch.bfloat16)
    to = sent.data_ptr() + 2 * experts.hidden * torch.arange(len(sent), device="cuda")
    row_map, scheme = sort_slots(ids, 32), format_named(experts.format).activations
    rows, weights = gather_rows(x, torch.rand(ids.shape, device="cuda"), row_map, scheme)
    run_experts(rows, weights, row_map.offsets, experts, replace(EXPERTS_ROWS, to=to))
    assert_same_bits(sent, run_experts(rows, weights, row_map.offsets, experts))


CASES = [case for case in cases.CASES if case.int4 is None]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_what_runs_is_what_was_counted(case):
    assert_same_code(case.title, cases.launch_of(case), launched(format_of(case)))

"""NVFP4 weights and bf16 tokens on a Hopper GPU, beside float64: factors of every kind, sizes and routings chosen to
break; and bits, where every sum is exact."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from envoi.epilogues.library import store
from envoi.ops.gemm.grouping import EXPERTS_ROWS
from envoi.ops.gemm.hopper_w4a8.config import TILES, config_of, fitted
from envoi.ops.gemm.hopper_w4a16 import many
from envoi.ops.moe import moe, pack
from envoi.ops.moe.choose import why_not_decode_mx
from envoi.ops.moe.layer import run_layer
from envoi.quant import dequantize
from envoi.quant.fragments import to_fragments
from envoi.types import ExpertWeights, QuantTensor, Routing
from tests.helpers.accuracy import assert_same_bits
from tests.helpers.launches import assert_same_code, watched
from tests.moe.layers import (
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
from tools.kernel_cases import gemm_hopper_w4a16 as cases

pytestmark = [pytest.mark.gpu(arch="sm_90"), pytest.mark.usefixtures("tidy_gpu")]

# Powers of two and their neighbours; K in whole groups of steps, and not; one step of K.
SIZES = [(2880, 2880), (2048, 1408), (1408, 2880), (2048, 768), (64, 64), (128, 192), (7168, 512)]
GROUP = (1, 16)


def outputs(layer: Layer) -> torch.Tensor:
    experts = layer.pack("nvfp4")
    assert experts.order == "fragments"
    assert why_not_decode_mx(experts, 1)
    return judged(moe(layer.tokens, layer.routing, experts), layer, experts)


def random_weights(experts: int, N: int, K: int, codes: tuple[int, int], seed: int = 0) -> QuantTensor:
    """Random weights whose factors are any of these bytes of E4M3, a range; on the GPU, by rows, without a scale."""
    source = torch.Generator("cuda").manual_seed(seed)

    def draw(low: int, high: int, columns: int) -> torch.Tensor:
        return torch.randint(low, high, (experts, N, columns), generator=source, device="cuda", dtype=torch.uint8)

    return QuantTensor(draw(0, 256, K // 2), draw(*codes, K // 16).view(torch.float8_e4m3fn), GROUP)


@pytest.mark.parametrize(("hidden", "intermediate"), SIZES)
@pytest.mark.parametrize("tokens", [1, 16, 70, 700])
def test_sizes(hidden, intermediate, tokens):
    outputs(on_gpu(make(tokens, 5, 4, hidden, intermediate, bias=True, activation="swiglu_oai")))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [3, 40, 900])
def test_activations(kind, tokens):
    outputs(on_gpu(make(tokens=tokens, hidden=512, intermediate=320, **KINDS[kind])))


@pytest.mark.parametrize(("tokens", "experts", "k"), [(3, 128, 8), (100, 128, 4), (9, 512, 32), (200, 3, 2)])
def test_numbers_of_experts(tokens, experts, k):
    outputs(on_gpu(make(tokens, experts, k, 192, 128)))


def test_hostile_routing():
    layer = on_gpu(make(tokens=48, experts=6, k=4, hidden=512, intermediate=256))
    slots = torch.arange(192, device="cuda").view(48, 4)
    for ids in (torch.full_like(slots, 5), slots % 2, torch.where(slots % 3 == 0, slots % 6, -1)):
        outputs(with_ids(layer, ids))
    masked = moe(layer.tokens, with_ids(layer, torch.full_like(slots, -1)).routing, layer.pack("nvfp4"))
    assert bool((masked == 0).all())
    assert moe(layer.tokens[:0], Routing(*(x[:0] for x in (layer.routing.topk_weights, layer.routing.topk_ids)), 6),
               layer.pack("nvfp4")).shape == (0, 512)  # fmt: skip


@pytest.mark.parametrize("codes", [(0, 0x7F), (0, 8), (0, 1), (0x78, 0x7F)], ids=["all", "subnormal", "zero", "large"])
@pytest.mark.parametrize("tokens", [5, 300])
def test_factors_of_every_kind_under_scales_of_gate_and_of_up(codes, tokens):
    E, H, inside = 4, 320, 192
    layer = on_gpu(make(tokens=tokens, experts=E, k=2, hidden=H, intermediate=inside, bias=True))
    gate_up, down = random_weights(E, 2 * inside, H, codes), random_weights(E, H, inside, codes, seed=1)
    largest = 6 * float(torch.tensor([codes[1] - 1]).to(torch.uint8).view(torch.float8_e4m3fn).float()) or 1.0
    scale = torch.rand(E, 2, device="cuda").add(0.1) * torch.tensor([1.0, 3.0], device="cuda") / largest / H**0.5
    experts = pack(
        gate_up.values, down.values, gate_up_sf=gate_up.sf, down_sf=down.sf, gate_up_scale=scale,
        down_scale=scale[:, 1].contiguous(), gate_up_bias=layer.gate_up_bias, down_bias=layer.down_bias,
    )  # fmt: skip
    assert experts.order == "fragments"
    judged(moe(layer.tokens, layer.routing, experts), layer, experts)


@pytest.mark.parametrize("codes", [(0, 0x21), (0x40, 0x7F)], ids=["small", "large"])
@pytest.mark.parametrize("tile", [tile[:2] for tile in TILES["bf16"]])
@pytest.mark.parametrize("K", [64, 128, 320, 704])
def test_bits_where_every_sum_is_exact(codes, tile, K):
    """Tokens are 0, 1 and -1, and products multiples of one power of two, so that no sum needs more than 24 bits."""
    E, N, rows = 3, 192, 150
    source = torch.Generator("cuda").manual_seed(K)
    tokens = torch.randint(-1, 2, (rows, K), generator=source, device="cuda").bfloat16()
    tokens[:, 128:] = 0 if codes[1] > 0x40 else tokens[:, 128:]
    weights = random_weights(E, N, K, codes, seed=K)
    offsets = torch.tensor([0, 1, 1, rows - 2], dtype=torch.int32, device="cuda")
    wide = dequantize(weights, torch.float64)
    want = torch.cat([tokens[:1].double() @ wide[0].T, tokens[1 : rows - 2].double() @ wide[2].T])
    config = fitted(config_of(*tile, K, E, widened="nvfp4"))
    (got,) = many.run(tokens, to_fragments(weights), offsets, store.ir, torch.float32, {}, EXPERTS_ROWS, config)
    assert_same_bits(got[: rows - 2], want.float())


def test_the_same_bits_a_hundred_times():
    layer = on_gpu(make(tokens=30, experts=16, k=4, hidden=1024, intermediate=704))
    assert_same_bits_each_time(layer, layer.pack("nvfp4"))
    assert_replays_repeat(layer, layer.pack("nvfp4"))


def test_a_graph_serves_other_routings():
    layers = [on_gpu(make(tokens=8, masked=masked, seed=i)) for i, masked in enumerate((0.0, 0.5, 1.0))]
    experts, given = layers[0].pack("nvfp4"), on_gpu(make(tokens=8))
    want = [moe(layer.tokens, layer.routing, experts) for layer in layers]
    assert_a_graph_serves(given, experts, layers, want)


def test_a_tokens_bits_do_not_depend_on_the_others():
    layer = on_gpu(make(tokens=24, hidden=512, intermediate=256, masked=0.0))
    assert_others_keep_their_bits(layer, layer.pack("nvfp4"))
    layer = on_gpu(make(tokens=2000, hidden=512, intermediate=256, bias=True))
    experts, routing = layer.pack("nvfp4"), layer.routing
    whole = moe(layer.tokens, routing, experts)
    for count in (1, 7, 60, 300, 1100):
        part = Routing(routing.topk_weights[:count], routing.topk_ids[:count], 8)
        assert_same_bits(moe(layer.tokens[:count], part, experts), whole[:count])


@pytest.mark.parametrize("tokens", [1, 40, 600])
def test_weights_that_cannot_be_put_into_the_order_stay_right(tokens):
    narrow = on_gpu(make(tokens=tokens, hidden=512, intermediate=80, bias=True))  # no multiple of 64
    assert narrow.pack("nvfp4").order == "rows"
    packed = narrow.pack("nvfp4")
    judged(moe(narrow.tokens, narrow.routing, packed), narrow, packed)
    layer = on_gpu(make(tokens=tokens, experts=4, k=2, hidden=320, intermediate=192))
    gate_up, down = random_weights(4, 384, 320, (0, 0x7F)), random_weights(4, 320, 192, (0, 0x7F), seed=1)
    gate_up.sf.view(torch.uint8)[1, 7, 3] |= 0x80  # a negative factor
    scale = torch.full((4,), 1e-4, device="cuda")
    experts = pack(gate_up.values, down.values, gate_up_sf=gate_up.sf, down_sf=down.sf, gate_up_scale=scale,
                   down_scale=scale)  # fmt: skip
    assert experts.order == "rows"
    judged(moe(layer.tokens, layer.routing, experts), layer, experts)


def test_batch_invariant_keeps_bits_where_triton_computes():
    layer = on_gpu(make(tokens=300, hidden=512, intermediate=80, masked=0.0))
    experts, routing = layer.pack("nvfp4"), layer.routing
    whole = moe(layer.tokens, routing, experts, batch_invariant=True)
    for count in (1, 7, 60):
        part = Routing(routing.topk_weights[:count], routing.topk_ids[:count], 8)
        assert_same_bits(moe(layer.tokens[:count], part, experts, batch_invariant=True), whole[:count])


def test_packing_takes_no_more_memory():
    layer = on_gpu(make(tokens=1, experts=4, hidden=2880, intermediate=2880))
    experts = layer.pack("nvfp4")
    for weight, plain in ((experts.gate_up, layer.gate_up), (experts.down, layer.down)):
        assert weight.values.untyped_storage().nbytes() == plain.numel() // 2
        assert weight.sf.untyped_storage().nbytes() == plain.numel() // 16


@cache
def launched() -> dict[str, str]:
    """What runs on a layer of gpt-oss-20b's sizes, for the numbers of tokens that the registry has."""
    seen: dict[str, str] = {}
    source = torch.Generator("cuda").manual_seed(0)

    def weights(N: int, K: int) -> QuantTensor:
        return replace(to_fragments(random_weights(32, N, K, (0x20, 0x40))), scale=torch.full((32, N), 0.01).cuda())

    biases = torch.randn(32, 5760, device="cuda"), torch.randn(32, 2880, device="cuda")
    experts = ExpertWeights(weights(5760, 2880), weights(2880, 2880), "nvfp4", "swiglu_oai", 7.0, *biases)
    with watched(lambda sha256, kernel: seen.setdefault(sha256, kernel.asm["ptx"])):
        for tokens in sorted({case.num_tokens for case in cases.CASES if case.nvfp4}):
            x = torch.randn(tokens, 2880, generator=source, device="cuda").bfloat16()
            ids = torch.rand(tokens, 32, generator=source, device="cuda").topk(4).indices.int()
            run_layer(x, torch.rand(tokens, 4, generator=source, device="cuda"), ids, experts)
    return seen


@pytest.mark.parametrize("case", [case for case in cases.CASES if case.nvfp4], ids=lambda case: case.name)
def test_what_runs_is_what_was_counted(case):
    assert_same_code(case.title, cases.launch_of(case), launched())

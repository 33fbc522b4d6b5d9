"""The kernels for 4-bit weights and bf16 tokens, as far as no GPU is needed: the PTX that widens, configs, limits."""

import itertools
from dataclasses import replace

import pytest
import torch

from envoi.ops.gemm.hopper_w4a16 import few, fragments
from envoi.ops.gemm.hopper_w4a16.few_config import MAX_EXPERTS, Int4Form, few_configs
from envoi.ops.moe import pack
from envoi.ops.moe.choose import decode_mx_pays, why_not_decode_mx
from envoi.ops.moe.warm_up import LayerCall
from envoi.quant.bits import e2m1_decode
from envoi.quant.fp8_fragments import to_fp8_fragments
from envoi.quant.fragments import LARGEST_CODE, _values_to_fragments, to_fragments
from envoi.quant.pack import LARGEST_SCALE_BYTE
from envoi.runtime import triton_compat
from envoi.runtime.devices import SHARED_BYTES, Target, standing_for
from envoi.runtime.planned_kernels import launches_of
from envoi.types import ExpertWeights, QuantTensor
from tests.gemm.test_mx_widening import bf16, run


def all_pairs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bytes [256] that hold every code of block 0 with every one of block 1, and these codes."""
    first, second = torch.arange(16).repeat(16), torch.arange(16).repeat_interleave(16)
    return (second & 8) << 4 | (second & 1) << 6 | (first & 8) << 2 | (second & 6) << 2 | (first & 7), first, second


def words_of(by: torch.Tensor) -> torch.Tensor:
    """Four different bytes a word."""
    return by | by.roll(1) << 8 | by.roll(2) << 16 | by.roll(3) << 24


def test_the_bytes_are_those_of_the_order():
    by, first, second = all_pairs()
    x = torch.zeros(64, 32, dtype=torch.uint8)  # one tile; a byte of it holds codes of K and of K + 32
    codes = torch.zeros(64, 64, dtype=torch.uint8)
    codes[:8, :32], codes[:8, 32:] = first.view(8, 32).to(torch.uint8), second.view(8, 32).to(torch.uint8)
    x = codes[:, 0::2] | codes[:, 1::2] << 4
    got = _values_to_fragments(x).flatten().long()
    assert sorted(got[got != 0].tolist()) == sorted(by[by != 0].tolist())


def test_every_pair_of_weights_becomes_e4m3():
    by, first, second = all_pairs()
    registers = {"$2": words_of(by), "$48": by}
    run(fragments.E4M3_CODE.value, registers)
    for k4 in range(4):
        for name, codes in (("$0", first), ("$1", second)):
            got = (registers[name] >> 8 * k4 & 0xFF).to(torch.uint8).view(torch.float8_e4m3fn).float()
            assert torch.equal(got * 2**6, e2m1_decode(codes.roll(k4)))


def test_every_pair_of_weights_under_every_factor_becomes_bf16():
    by, first, second = all_pairs()
    words = words_of(by)
    for byte in range(LARGEST_SCALE_BYTE + 1):
        other = (byte + 77) % (LARGEST_SCALE_BYTE + 1)
        # Words (k16, half) differ, and so do the factors (block, half).
        registers = {f"${16 + 8 * k16 + 2 * half}": words.roll(k16 + 2 * half) for k16 in (0, 1) for half in (0, 1)}
        registers["$48"] = torch.full_like(words, byte | other << 8 | other << 16 | byte << 24)
        run(fragments.bf16_code(), registers)
        for block, codes in enumerate((first, second)):
            for k16 in (0, 1):
                for k8 in (0, 1):
                    for half in (0, 1):
                        word = registers[f"${8 * block + 4 * k16 + 2 * k8 + half}"]
                        factor = 2.0 ** ((byte if block == half else other) - 127)
                        for b in (0, 1):
                            want = e2m1_decode(codes.roll(2 * b + k8 + k16 + 2 * half)).double() * factor
                            assert torch.equal(bf16(word >> 16 * b & 0xFFFF).double(), want.bfloat16().double())


def test_every_pair_of_weights_under_every_nvfp4_factor_becomes_bf16():
    by, first, second = all_pairs()
    words = words_of(by)
    codes = torch.arange(LARGEST_CODE + 1)
    values = codes.to(torch.uint8).view(torch.float8_e4m3fn).double()
    for byte in codes.tolist():
        # All eight factors differ: (block, k16, half).
        bytes_ = [(byte + 17 * i) % (LARGEST_CODE + 1) for i in range(8)]
        registers = {f"${16 + 8 * k16 + 2 * half}": words.roll(k16 + 2 * half) for k16 in (0, 1) for half in (0, 1)}
        registers["$48"] = torch.full_like(words, sum(b << 8 * i for i, b in enumerate(bytes_)))
        run(fragments.nvfp4_code(), registers)
        for block, k16, k8, half, b in itertools.product((0, 1), repeat=5):
            word = registers[f"${8 * block + 4 * k16 + 2 * k8 + half}"]
            x = e2m1_decode((second if block else first).roll(2 * b + k8 + k16 + 2 * half)).double()
            got = bf16(word >> 16 * b & 0xFFFF).double() * fragments.NVFP4_UP.value
            assert torch.equal(got, x * values[bytes_[4 * block + 2 * k16 + half]])


HOPPER = Target("sm_90", 132)
SIZES = [(2880, 2880), (2048, 768), (4096, 1536), (7168, 2048), (64, 64), (2048, 1408), (12288, 4096)]


@pytest.mark.parametrize(("hidden", "intermediate"), SIZES)
@pytest.mark.parametrize("slots", [1, 64, 200, 640])
def test_configs_fit(hidden, intermediate, slots):
    for config in few_configs(hidden, intermediate, 32, slots, "swiglu", None, True):
        assert config.shared_bytes <= SHARED_BYTES
        assert config.ctas_per_sm >= 1
        assert config.num_groups * config.unroll >= config.num_steps
    l1, l2 = few_configs(hidden, intermediate, 32, slots, "swiglu", None, True)
    # Else CTAs of the second GEMM wouldn't fit where those of the first were.
    assert (l1.shared_bytes, l1.tile_tokens, l1.num_warps) == (l2.shared_bytes, l2.tile_tokens, l2.num_warps)
    assert l1.num_steps * 64 == hidden
    assert l2.num_steps * 64 == intermediate


ZEROS = Int4Form(1, True, True), Int4Form(2, False, True)


@pytest.mark.parametrize("form", [None, Int4Form(2, False, False), *ZEROS])
@pytest.mark.parametrize(("hidden", "intermediate"), [*SIZES, (5120, 1536), (6144, 2560), (8192, 28672 // 8)])
@pytest.mark.parametrize("slots", [1, 64, 640])
def test_an_sm_is_full_of_warps_however_wide_tokens_are(hidden, intermediate, slots, form):
    configs = few_configs(hidden, intermediate, 32, slots, "swiglu", None, True, forms=(form, form))
    for config in configs:
        assert config.warps_per_sm == 16
        # Tokens and their factors, at a multiple of their length, are behind each other.
        tokens, factors = config.token_steps, config.num_k_groups // 32
        assert tokens % max(1, factors) == 0
        assert config.room_steps >= tokens + factors


@pytest.mark.parametrize("form", [None, Int4Form(2, False, False), *ZEROS])
@pytest.mark.parametrize(("hidden", "intermediate"), [*SIZES, (704, 2112), (6144, 2560), (1408, 6144)])
@pytest.mark.parametrize("slots", [1, 64, 640])
def test_views_as_large_as_the_buffer_take_the_same_tiles(hidden, intermediate, slots, form, monkeypatch):
    def configs(whole):
        monkeypatch.setattr(triton_compat, "WHOLE_VIEWS", whole)
        return few_configs.__wrapped__(hidden, intermediate, 32, slots, "swiglu", None, True, forms=(form, form))

    def shape(config):
        return config.tile_tokens, config.num_warps, config.ctas_per_sm

    for part, whole in zip(configs(False), configs(True), strict=True):
        assert shape(whole) == shape(part)
        assert whole.room_steps - part.room_steps in range(8)
        # Views of slabs and of factors fill the buffer, and no warp copies what another does.
        assert whole.room_steps % whole.slab == 0
        assert whole.slab % (whole.num_warps // 2) == 0
        assert whole.num_slabs * whole.slab == whole.token_steps
        assert whole.room_steps * 32 % max(1, whole.num_k_groups) == 0


def test_tiles_of_16_take_as_wide_tokens_as_fit():
    def tile(hidden, form=None):
        return few_configs(hidden, 2048, 32, 640, "swiglu", None, True, forms=(form, form))[0].tile_tokens

    assert [tile(7168), tile(7232)] == [16, 8]
    assert [tile(7168, ZEROS[0]), tile(7232, ZEROS[0])] == [16, 8]


@pytest.mark.parametrize(("hidden", "intermediate"), [*SIZES, (7168, 4096), (192, 7168)])
@pytest.mark.parametrize("slots", [1, 64, 200, 640])
def test_configs_of_fp8_tokens_fit(hidden, intermediate, slots):
    l1, l2 = few_configs(hidden, intermediate, 32, slots, "swiglu", None, True, True, slots == 64)
    assert (l1.shared_bytes, l1.tile_tokens, l1.num_warps) == (l2.shared_bytes, l2.tile_tokens, l2.num_warps)
    for config, K in ((l1, hidden), (l2, intermediate)):
        assert config.num_groups * config.unroll * 64 >= K
        assert config.zero_tail == (K // 64 % config.unroll > 0)
        assert config.looks_up == (slots == 64)
        assert config.quantises != config.is_l1
        assert config.shared_bytes <= SHARED_BYTES
        assert 1 <= config.ctas_per_sm <= 16 // config.num_warps
    assert l1.tile_tokens == (8 if slots < 200 else 16)
    assert not l1.late


def layer(experts=8, hidden=256, intermediate=128, put=to_fragments) -> ExpertWeights:
    def meta(rows: int, columns: int) -> QuantTensor:
        values = torch.zeros(experts, rows, columns // 2, dtype=torch.uint8)
        sf = torch.zeros(experts, rows, columns // 32, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        return put(QuantTensor(values, sf, (1, 32), scales_at_most_2=True))

    return ExpertWeights(meta(2 * intermediate, hidden), meta(hidden, intermediate), "mxfp4")


def test_what_the_kernels_for_few_tokens_take():
    assert why_not_decode_mx(layer(), 4) == ""
    assert decode_mx_pays(layer(), 8 * 16, 1) and not decode_mx_pays(layer(), 8 * 16 + 1, 1)
    assert why_not_decode_mx(layer(), few.MAX_TOPK + 1) == "too many experts"
    assert why_not_decode_mx(layer(MAX_EXPERTS + 1, hidden=64, intermediate=64), 1) == "too many experts"
    assert why_not_decode_mx(layer(1, hidden=16384, intermediate=64), 1) == "tokens too wide for shared memory"
    zeros = torch.zeros(1, 256, 2, dtype=torch.uint8)
    mixed = replace(layer(1), gate_up=replace(layer(1).gate_up, zeros=zeros))
    assert why_not_decode_mx(mixed, 1) == "zero points of one of the weights alone"
    by_rows = replace(layer(), down=replace(layer().down, order="rows"))
    assert why_not_decode_mx(by_rows, 1) == "the weights' order"


def test_what_the_kernels_for_few_fp8_tokens_take():
    fp8 = layer(put=to_fp8_fragments)
    assert why_not_decode_mx(fp8, 1) == ""
    assert decode_mx_pays(fp8, 8 * 6, 1) and not decode_mx_pays(fp8, 8 * 6 + 1, 1)
    assert why_not_decode_mx(replace(layer(), down=fp8.down), 1) == "the weights' order"
    # Half the bytes of tokens split into two.
    assert why_not_decode_mx(layer(1, hidden=14336, intermediate=64, put=to_fp8_fragments), 1) == ""
    assert why_not_decode_mx(layer(1, hidden=32768, intermediate=64, put=to_fp8_fragments), 1) != ""


@pytest.mark.parametrize("format", ["mxfp4", "mxfp4_fp8", "nvfp4", "int4"])
def test_a_rank_without_experts_runs_the_layer_as_others_do(format):
    with standing_for(HOPPER):
        none = torch.zeros(0, 256, 128).bfloat16(), torch.zeros(0, 128, 128).bfloat16()
        experts = (layer(0, 128, 128) if format == "mxfp4" else pack(*none, format)).to("meta")
        assert "fragments" in experts.order
        launched = launches_of(LayerCall(experts, 2), 3, HOPPER)
    kernels = [kernel.fn.__name__ for kernel, *_ in launched]
    assert kernels[:2] == ["map_kernel", "sort_kernel"]  # a warm-up has a map
    assert kernels[-1] == "combine_kernel"
    assert "w4a8_kernel" not in kernels

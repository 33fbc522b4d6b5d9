"""Which kernels run a layer: choices on both sides of each boundary."""

from functools import cache

import pytest

from envoi.ops.gemm.grouping import EXPERTS_ROWS, Grouping
from envoi.ops.moe.choose import Choice, LayerPath, choose_experts, choose_layer
from envoi.ops.moe.support import experts_without_memory
from envoi.runtime.devices import Target, standing_for
from envoi.types import ExpertWeights

HOPPER, BLACKWELL = Target("sm_90", 132), Target("sm_100", 148)


@cache
def experts(
    format: str, sizes: tuple[int, int, int] = (4096, 2048, 32), activation: str = "swiglu", target: Target = HOPPER
) -> ExpertWeights:
    hidden, intermediate, count = sizes
    with standing_for(target):
        return experts_without_memory(hidden, intermediate, count, format, activation, bias=False)


def hopper(l1: str, l2: str = "", in_pairs: bool = False) -> Choice:
    return Choice(LayerPath.GEMMS, l1, l2 or l1, in_pairs)


DECODE, DECODE_MX, ONE_LAUNCH = Choice(LayerPath.DECODE), Choice(LayerPath.DECODE_MX), Choice(LayerPath.ONE_LAUNCH)
W4A16, W4A8, MX, PLAIN = (hopper(kernels) for kernels in ("w4a16", "w4a8", "hopper_mx", "hopper"))
TRITON = hopper("triton")

# Slots of all tokens, one a token, of 32 experts of 4096 x 2048.
BOUNDARIES = [
    ("bf16", 84, DECODE), ("bf16", 85, PLAIN), ("fp8_row", 1, PLAIN),  # 29.8 experts are used, of 50 MB each
    ("fp8_block128", 32, DECODE), ("fp8_block128", 32 + 1, ONE_LAUNCH),
    ("fp8_block128", 256 * 32, ONE_LAUNCH), ("fp8_block128", 256 * 32 + 1, hopper("hopper", in_pairs=True)),
    ("fp8_block128", 768 * 32 - 1, hopper("hopper", in_pairs=True)), ("fp8_block128", 768 * 32, ONE_LAUNCH),
    ("mxfp4", 16 * 32, DECODE_MX), ("mxfp4", 16 * 32 + 1, W4A16),
    ("mxfp4_fp8", 6 * 32, DECODE_MX), ("mxfp4_fp8", 6 * 32 + 1, W4A8),
    ("mxfp4_mxfp8", 16 * 32, DECODE_MX), ("mxfp4_mxfp8", 16 * 32 + 1, W4A16),
    ("mxfp8", 1, MX), ("nvfp4", 1, W4A16), ("nvfp4", 4096, W4A16),
]  # fmt: skip


@pytest.mark.parametrize(("format", "slots", "want"), BOUNDARIES)
def test_both_sides_of_a_boundary(format, slots, want):
    with standing_for(HOPPER):
        assert choose_layer(experts(format), slots, 1) == want


@pytest.mark.parametrize(
    ("sizes", "most"), [((2048, 1024, 64), 4 * 64), ((2880, 2880, 32), 4 * 32), ((4096, 512, 64), 4 * 64)]
)
def test_few_tokens_in_bf16_up_to_four_rows_an_expert(sizes, most):
    with standing_for(HOPPER):
        assert [choose_layer(experts("bf16", sizes), slots, 1) for slots in (most, most + 1)] == [DECODE, PLAIN]


@pytest.mark.parametrize("format", ["mxfp4", "int4"])
@pytest.mark.parametrize("sizes", [(8192, 2048, 32), (2048, 7232, 32)])
def test_tokens_too_wide_for_tiles_of_16_are_few_up_to_4_rows_an_expert(format, sizes):
    with standing_for(HOPPER):
        assert choose_layer(experts(format, sizes), 4 * 32, 1) == DECODE_MX
        assert choose_layer(experts(format, sizes), 4 * 32 + 1, 1) == W4A16


@pytest.mark.parametrize(
    ("format", "sizes", "activation", "want"),
    [
        ("mxfp4", (96, 64, 4), "swiglu", MX),  # no whole fragments
        ("mxfp4_mxfp8", (96, 64, 4), "swiglu", MX),
        ("mxfp4", (128, 64, 4), "geglu", W4A16),
        ("mxfp4", (16384, 64, 4), "swiglu", W4A16),  # tokens too wide for shared memory
        ("mxfp4", (64, 64, 513), "swiglu", W4A16),
        ("bf16", (96, 64, 4), "swiglu", PLAIN),  # a step of K isn't whole
        ("bf16", (128, 64, 513), "swiglu", PLAIN),
        ("fp8_block128", (128, 128, 4), "relu2", DECODE),
    ],
)
def test_sizes_and_activations_that_few_tokens_decide(format, sizes, activation, want):
    with standing_for(HOPPER):
        assert choose_layer(experts(format, sizes, activation), 2, 1) == want


def test_options_and_other_gpus():
    with standing_for(HOPPER):
        assert choose_layer(experts("mxfp4"), 8, 4, batch_invariant=True) == W4A16
        assert choose_layer(experts("bf16"), 8, 4, batch_invariant=True) == DECODE, "the bits of many tokens"
        assert choose_layer(experts("bf16"), 1, 33) == PLAIN, "more slots of a token than the kernel has room for"
        packed = experts("fp8_block128")
        assert choose_experts(packed, 8192, Grouping(False, expected=512 * 32)).path is LayerPath.GEMMS
        assert choose_experts(packed, 1 << 20, Grouping(False, expected=64 * 32)) == ONE_LAUNCH
        assert choose_experts(packed, 64 * 32, Grouping()).path is LayerPath.GEMMS
        assert choose_experts(packed, 0, EXPERTS_ROWS).path in (LayerPath.GEMMS, LayerPath.ONE_LAUNCH)
    with standing_for(BLACKWELL):
        for format in ("bf16", "fp8_block128", "mxfp4", "mxfp4_fp8", "nvfp4"):
            assert choose_layer(experts(format, target=BLACKWELL), 1, 1) == TRITON

"""Tiles with just as many tokens as are needed, without a GPU: which there are, what they load, what is compiled."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from envoi.epilogues import Col, Row, Tile, epilogue, gelu, library, pairs, row_sum
from envoi.epilogues.lower import lower
from envoi.ops.gemm.hopper import config as configs
from envoi.ops.gemm.hopper import host
from envoi.ops.gemm.hopper.candidates import candidates, default_config
from envoi.ops.gemm.hopper.config import NARROWED, Config, Problem, fitted, why_not
from envoi.ops.gemm.hopper.kernel import gemm_kernel
from envoi.ops.gemm.hopper.tile_scheduler import TileScheduler
from envoi.runtime import triton_compat
from envoi.tune import problems
from tests.helpers.slow import mostly_slow
from tools.kernel_cases import gemm_hopper as cases
from tools.kernel_cases.gemm_hopper import CASES, inputs, planned
from tools.machine_code.compile import compile_launch

NUM_SMS = 132
PLAIN = Problem(385, 12288, 4096, 2)


def lowered(ep, loaded: tuple[str, ...] = (), tma: bool = True):
    return lower(ep.ir, torch.bfloat16, "gluon", False, tma, frozenset(), loaded)


STORE = lowered(library.store)


def tile(tokens: int, consumers: int = 2, **changes) -> Config:
    return replace(Config(64, consumers, tokens, 64, 12, swap_ab=True), **changes)


# Which there are


@pytest.mark.parametrize("M", [65, 72, 100, 128, 129, 256, 257, 385, 1000, 1591, 5000, 16384])
def test_tiles_share_all_tokens_equally(M):
    found = {config.block_y for config in candidates(replace(PLAIN, M=M), STORE) if config.stored_in_boxes}
    assert found <= set(NARROWED)
    for tokens in found:
        num_tiles = -(-M // tokens)
        assert num_tiles * tokens - M < 8 * num_tiles, "a tile of eight tokens fewer would do"
    for num_tiles in range(1, -(-M // 72) + 1):  # whatever the number of tiles, the narrowest that are enough are there
        enough = 8 * -(-M // (8 * num_tiles))
        assert enough in found or enough not in NARROWED or enough < 72


@epilogue
def two_outputs(acc, c: Tile, alpha: Row, bias: Col):
    return acc * alpha + c, gelu(acc + bias)


@epilogue
def three_outputs(acc):
    return acc, gelu(acc), acc * 2.0


@epilogue
def summed(acc):
    return acc, row_sum(acc)


@epilogue
def halved(acc):
    gate, up = pairs(acc)
    return gate * up


@pytest.mark.parametrize(
    ("code", "are_there"),
    [
        (STORE, True), (lowered(library.scale_bias_relu), True), (lowered(two_outputs, ("c",)), True),
        (lowered(library.gelu_residual, ("residual",)), True), (lowered(summed), False), (lowered(halved), False),
        (lowered(three_outputs), False),  # one is stored from registers
        (lowered(library.absmax), False), (lowered(library.swiglu_fp8), False),
        (lowered(library.store, tma=False), False),
    ],
)  # fmt: skip
def test_they_are_for_outputs_of_which_every_element_has_its_own_accumulator(code, are_there):
    problem = replace(PLAIN, tma_operand_bytes=2.0 * len(code.tma_operands))
    assert any(config.narrowed for config in candidates(problem, code)) == are_there
    why = why_not(problem, fitted(problem, tile(208), code), code)
    assert (why == "") == are_there
    assert are_there or why.startswith(
        ("block_y: expected at most 64 tokens or a power of two unless outputs", "epilogue_columns: expected")
    )


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (tile(208, split_k=2), "split_k: expected 1 beside 208 columns"),
        (tile(80, swap_ab=False, epilogue_columns=16, split_k=2), "split_k: expected 1 beside 80 columns"),
        (tile(80, swap_ab=False), "epilogue_columns: expected a multiple of 1 that divides 80, got 64"),
        (tile(72, swap_ab=False), "block_y: expected a power of two from 8 to 256, or one of (96, 160, 192, 80, 112,"),
        (tile(204), "block_y: expected a power of two from 8 to 256, or one of (24, 40, 48, 56, 72,"),
        (tile(64 + 1), "block_y: expected a power of two"),
        (tile(208, 3, num_stages=3), "consumers: expected at most 100 accumulators"),
        (tile(208, block_k=128, num_stages=2), "block_k: expected rows of at most 128 bytes in a stage"),
        (tile(192, num_stages=4, epilogue_columns=32), "epilogue_columns: expected a multiple of 64 tokens, got 32"),
        (tile(208, num_stages=4, epilogue_columns=8), "epilogue_columns: expected a multiple of 16 tokens, got 8"),
        (tile(112, rows_per_consumer=128), "block_y: expected a power of two unless in a plain GEMM"),
    ],
)  # fmt: skip
def test_others_are_refused(config, why):
    assert why_not(PLAIN, config, STORE).startswith(why)


# Tiles with as many features as divide all of them


@pytest.mark.parametrize(
    ("N", "widths"),
    [(5120, {80}), (2880, {80, 144, 240}), (11264, {176}), (14336, {112, 224}), (4096, set()), (2624, set())],
)
def test_features_are_divided_equally(N, widths):
    problem = Problem(256, N, 4096, 2)
    found = [config for config in candidates(problem, STORE) if config.narrowed and not config.swap_ab]
    assert {config.block_y for config in found} == widths
    for config in found:
        assert N % config.block_y == 0 and config.num_chunks * config.epilogue_columns == config.block_y
        assert config.few_columns and not config.stored_in_boxes and config.split_k == 1
    assert not any(config.narrowed and not config.swap_ab for config in candidates(replace(problem, M=64), STORE))


@pytest.mark.parametrize(("M", "features", "main"), [(256, 80, 64), (320, 144, 128)])
def test_both_boxes_are_of_the_features(M, features, main):
    """The second descriptor is of the weights, and a tile stores in chunks that end with its last feature."""
    shape = problems.GemmShape(M, 40 * features, 1024)
    call = problems.planned(shape, NUM_SMS).call
    config = Config(64, 2, features, 64, 8, epilogue_columns=16)
    config = fitted(host.problem_of(call), config, call.code)
    arguments = dict(zip(gemm_kernel.arg_names, host.arguments(call, config, NUM_SMS)[1], strict=True))
    tokens, weights, tail, stored = (arguments[name] for name in ("x_desc", "y_desc", "rest_desc", "desc0"))
    assert (tokens.shape, tokens.block_shape) == ([M, 1024], [64, 64])
    assert weights.shape == tail.shape == [40 * features, 1024]
    assert (weights.block_shape, tail.block_shape) == ([main, 64], [16, 64])
    assert (stored.shape, stored.block_shape) == ([M, 40 * features], [64, 16])
    binary = compile_launch(cases.launch_with(call, config), "sm_90")
    assert set(re.findall(r"m64n(\d+)k16", binary.ptx)) == {str(features)}
    assert binary.stack_bytes == 0
    assert binary.shared_bytes <= configs.shared_bytes(host.problem_of(call), config, call.code)


# Few tokens


@pytest.mark.parametrize(
    ("M", "tokens"), [(1, 8), (16, 16), (17, 24), (24, 24), (32, 32), (33, 40), (42, 48), (49, 56), (56, 56), (57, 64)]
)
@pytest.mark.parametrize("ep", [library.store, library.absmax, library.swiglu, library.gelu_residual, three_outputs])
def test_few_tokens_have_a_tile_of_their_own_width(M, tokens, ep):
    """Weights then are read once, whatever the epilogue: nothing is stored by TMA."""
    code, problem = lowered(ep, tma=False), replace(PLAIN, M=M)
    found = [config for config in candidates(problem, code) if config.narrowed]
    assert {config.block_y for config in found} == ({tokens} if tokens & (tokens - 1) else set())
    assert not any(config.stored_in_boxes for config in found)
    assert any(config.block_y == tokens and config.swap_ab for config in candidates(problem, code))


# Times in us on an H200 of the best narrowed config and of the best other:
# notes/2026-11-gemm-sm90.md, "As wide as needed".
@pytest.mark.parametrize(
    ("M", "N", "K", "narrowed", "others"),
    [
        (385, 12288, 4096, 55.3, 69.2), (901, 2624, 6144, 45.1, 51.4), (1591, 2048, 4096, 39.6, 46.7),
        (293, 4096, 14336, 50.1, 55.7), (150, 7168, 8192, 38.4, 41.4), (1686, 2624, 6144, 74.8, 85.0),
        (190, 5120, 2048, 14.8, 13.2), (10784, 6144, 4096, 789.1, 788.4), (8463, 4096, 4096, 401.0, 397.4),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("larger_views")
def test_they_are_chosen_where_they_were_faster(M, N, K, narrowed, others):
    chosen = default_config(Problem(8 * -(-M // 8), N, K, 2), STORE, NUM_SMS)
    assert chosen is not None and chosen.narrowed == (narrowed < others)


# What they load


@pytest.mark.parametrize("tokens", NARROWED)
def test_boxes_have_all_tokens_of_a_tile_and_no_more(tokens):
    config = tile(tokens)
    num_main, tail = divmod(tokens, config.main_y)
    assert tail % config.small_box == 0 and tokens % config.small_box == 0
    boxes = num_main + tail // config.small_box
    assert config.boxes_per_stage == 2 + boxes
    assert boxes <= 10 and config.tensor_y in (32, 64, 128, 256) and config.tensor_y // 2 < tokens < config.tensor_y
    for box in (config.main_y, config.small_box):  # of TMA and of Triton
        assert box & (box - 1) == 0 and 8 <= box <= 256


@pytest.mark.parametrize("tokens", [72, 88, 152, 200, 208, 248])
@pytest.mark.parametrize("M", [65, 100, 150, 385, 1199])
def test_every_token_is_in_a_tile_and_the_last_tile_ends_with_the_last_token(M, tokens):
    config = fitted(replace(PLAIN, M=M), tile(tokens), STORE)
    assert config.tiles_overlap
    scheduler = SimpleNamespace(problem=SimpleNamespace(M=M, num_whole_tiles=0, cfg=config))
    firsts = [
        TileScheduler.ending_with_tokens.fn(scheduler, row, tokens, tokens)
        for row in range(0, M, tokens)
    ]  # fmt: skip
    assert set(range(M)) <= {row + i for row in firsts for i in range(tokens)}
    assert min(firsts) == 0 and len(set(firsts)) == len(firsts)
    assert firsts[-1] + tokens == M or len(firsts) == 1


def test_both_boxes_are_of_the_tokens():
    call, config = planned(inputs(next(case for case in CASES if case.name == "narrowed")))
    assert (config.num_consumers, config.block_y, config.main_y, config.small_box) == (3, 200, 64, 8)
    arguments = dict(zip(gemm_kernel.arg_names, host.arguments(call, config, NUM_SMS)[1], strict=True))
    weights, tokens, tail, stored = (arguments[name] for name in ("x_desc", "y_desc", "rest_desc", "desc0"))
    assert (weights.shape, weights.block_shape) == ([12288, 4096], [64, 64])
    assert tokens.shape == tail.shape == [385, 4096]
    assert (tokens.block_shape, tail.block_shape) == ([64, 64], [8, 64])
    assert (stored.shape, stored.block_shape) == ([385, 12288], [8, 64])
    assert config.stage_y == (config.block_y if triton_compat.LARGER_VIEWS else config.tensor_y)


# What is compiled


@epilogue
def two_of_each(acc, c: Tile, d: Tile):
    return acc * c + d, gelu(acc)


@pytest.mark.parametrize(("tokens", "consumers", "pingpong"), mostly_slow(
    [(88, 1, False), (152, 2, True), (104, 3, False)], quick=[(88, 1, False)]
))  # fmt: skip
def test_two_outputs_and_two_operands(tokens, consumers, pingpong, monkeypatch):
    monkeypatch.setitem(cases.EPILOGUES, "two_of_each", two_of_each)
    call, _ = planned(inputs(cases.Case("any", "two_of_each", 300, 4096, 4096)))
    assert len(call.code.tma_outputs) == len(call.code.tma_operands) == 2
    problem = host.problem_of(call)
    config = fitted(problem, tile(tokens, consumers, pingpong=pingpong), call.code)
    assert why_not(problem, config, call.code) == ""
    binary = compile_launch(cases.launch_with(call, config), "sm_90")
    assert binary.stack_bytes <= (0 if triton_compat.VERSION.startswith("3.6.") else 8)
    assert binary.shared_bytes <= configs.shared_bytes(problem, config, call.code)


@pytest.mark.parametrize(
    ("ep", "format", "config", "instruction"),
    mostly_slow([
        ("store", "bf16", tile(208), "m64n208k16.f32.bf16.bf16"),
        ("store", "fp16", tile(72, 1), "m64n72k16.f32.f16.f16"),
        ("gelu_residual", "bf16", tile(248, pingpong=True), "m64n248k16.f32.bf16.bf16"),
        ("scale_bias_relu", "fp8_row", tile(192, 3, block_k=128), "m64n192k32.f32.e4m3.e4m3"),
    ], quick=[("store", "fp16", tile(72, 1), "m64n72k16.f32.f16.f16")]),
)  # fmt: skip
def test_instructions_have_the_tiles_width(ep, format, config, instruction):
    call, _ = planned(inputs(cases.Case("any", ep, 385, 4096, 4096, format)))
    config = fitted(host.problem_of(call), config, call.code)
    assert why_not(host.problem_of(call), config, call.code) == ""
    binary = compile_launch(cases.launch_with(call, config), "sm_90")
    assert set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.([\w.]+)", binary.ptx)) == {instruction}
    assert binary.stack_bytes == 0
    assert binary.shared_bytes <= configs.shared_bytes(host.problem_of(call), config, call.code)

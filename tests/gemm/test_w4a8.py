"""The kernel for MXFP4 weights and FP8 tokens, as far as no GPU is needed: the PTX that widens, configs, limits."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from envoi.epilogues.library import expert_l1, expert_l2, store
from envoi.ops.gemm.grouping import ALL_ROWS, EXPERTS_ROWS
from envoi.ops.gemm.hopper_w4a8 import host
from envoi.ops.gemm.hopper_w4a8.config import MOST_COLUMNS, w4a8_config
from envoi.ops.gemm.hopper_w4a8.row_scales import pieces_of
from envoi.ops.gemm.hopper_w4a8.widening import HIGH, HIGH_OF_0, LOW, LOW_OF_0, WIDEN
from envoi.quant import quantize
from envoi.quant.fp8_fragments import LEAST_COMPUTED, NAN_INDEX, e4m3_tables, to_fp8_fragments
from envoi.runtime.devices import SHARED_BYTES
from tests.gemm.test_mx_widening import run

WORD = 0xFFFFFFFF


def test_computed_tables_are_those_in_memory():
    for index in range(LEAST_COMPUTED, NAN_INDEX):
        table = e4m3_tables()[index].view(torch.int32).tolist()
        assert table == [index * LOW.value + LOW_OF_0.value, index * HIGH.value + HIGH_OF_0.value]


def test_every_weight_at_every_place_becomes_e4m3_by_the_tables_of_its_blocks():
    source = torch.Generator().manual_seed(0)
    magnitudes, signs = torch.arange(8).repeat(2 * 64), torch.arange(2).repeat_interleave(8).repeat(64)
    # Weight i of block b, in every pair with another at another place: shuffled columns of all 16 codes.
    codes = [(magnitudes | signs << 3)[torch.randperm(len(magnitudes), generator=source)] for _ in range(8)]
    word = torch.zeros_like(magnitudes)
    for block in range(2):
        for i in range(4):
            code = codes[4 * block + i]
            word |= (code & 7) << (16 * block + 4 * i) | (code >> 3) << (8 * i + (3 if block else 7))
    tables = e4m3_tables()
    for first in range(NAN_INDEX + 1):
        second = (first + 5) % (NAN_INDEX + 1)
        words = [int(x) & WORD for index in (first, second) for x in tables[index].view(torch.int32)]
        registers = dict(zip(("$6", "$10", "$14", "$18"), (torch.full_like(word, x) for x in words), strict=True))
        registers["$2"] = word
        run(WIDEN.value, registers)
        for name, index, block in (("$0", first, 0), ("$1", second, 1)):
            for i in range(4):
                code = codes[4 * block + i]
                want = tables[index][code & 7].long() | (code >> 3) << 7
                assert torch.equal(registers[name] >> 8 * i & 0xFF, want)


@pytest.mark.parametrize("K", [64, 128, 704, 2880, 4096, 7168, 12288])
@pytest.mark.parametrize("rows", [1, 20, 64, 100, 384, 5000])
@pytest.mark.parametrize("looks_up", [False, True])
@pytest.mark.parametrize("widened", ["e4m3", "bf16", "nvfp4"])
def test_configs_fit(K, rows, looks_up, widened):
    config = w4a8_config(1536, K, 32 * rows, 32, 132, looks_up, widened)
    assert config.num_stages >= 2
    assert config.ctas * (config.num_stages * config.stage_bytes + 1024) < SHARED_BYTES
    assert config.num_steps * 64 == K
    assert (config.looks_up, config.widened) == (looks_up, widened)


def test_tiles_as_wide_as_experts_have_rows():
    assert [w4a8_config(4096, 2048, 64 * rows, 64, 132).block_y for rows in (2, 8, 100, 512)] == [16, 16, 128, 128]
    # Full tiles of 64 would be taken twice by half of the experts, tiles of 128 are half empty: a narrower one follows.
    assert w4a8_config(4096, 2048, 64 * 64, 64, 132).sizes in ((64, 32, 16, 8), (128, 64, 32, 16))
    assert all(w4a8_config(4096, 2048, 4096, E, 132).widths in (1, 4) for E in (1, 8, 128, 512))


def test_few_tiles_are_narrow_enough_for_all_multiprocessors():
    # 8 experts with 64 rows and 12 tiles of features: 96 tiles, fewer than multiprocessors.
    assert w4a8_config(1536, 2048, 8 * 64, 8, 132).block_y <= 64


@pytest.mark.parametrize("columns", [32, 64, 256, 320, 768, 1536, 2048, 2880, 7168, MOST_COLUMNS])
def test_pieces_of_a_row(columns):
    pieces = pieces_of.fn(columns)
    assert pieces[0][0] == 0
    assert all(first + size == after for (first, size), (after, _) in pairwise(pieces))
    assert columns <= sum(pieces[-1]) < columns + 256
    assert all(size & (size - 1) == 0 for _, size in pieces)


def test_rows_that_l1_can_quantise():
    tokens, b = quantize(torch.randn(4, 192), "fp8_row"), weights()
    assert host.why_not_quantised(tokens, b, expert_l1("swiglu", None, True, None).ir, EXPERTS_ROWS) == ""
    in_mx = expert_l1("swiglu", None, True, "mxfp8").ir
    assert host.why_not_quantised(tokens, b, in_mx, EXPERTS_ROWS) == "an output that isn't rows in bf16"
    wide = weights(rows=2 * MOST_COLUMNS + 128, columns=64)
    l1, tokens = expert_l1("swiglu", None, True, None).ir, quantize(torch.randn(4, 64), "fp8_row")
    assert host.why_not_quantised(tokens, wide, l1, EXPERTS_ROWS) == f"rows of {MOST_COLUMNS + 64} columns"


def weights(rows=128, columns=192):
    return to_fp8_fragments(quantize(torch.randn(2, rows, columns), "mxfp4"))


def test_what_the_kernel_takes():
    tokens, b, l1 = quantize(torch.randn(4, 192), "fp8_row"), weights(), expert_l1("swiglu", None, True, None).ir
    assert host.why_not_w4a8(tokens, b, l1, EXPERTS_ROWS) == ""
    assert host.why_not_w4a8(tokens, b, expert_l2(True, True).ir, EXPERTS_ROWS) == ""
    assert host.why_not_w4a8(tokens, b, l1, ALL_ROWS) == "rows of no expert are wanted"
    for others in (torch.randn(4, 192).bfloat16(), quantize(torch.randn(4, 192), "mxfp8")):
        assert host.why_not_w4a8(others, b, l1, EXPERTS_ROWS) == "the tokens' format"
    assert host.why_not_w4a8(tokens, replace(b, order="rows"), l1, EXPERTS_ROWS) == "the weights' order"
    in_halves = expert_l1("swiglu", None, True, None, "concat").ir
    assert host.why_not_w4a8(tokens, b, in_halves, EXPERTS_ROWS) == "halves of the weights' rows"


def test_only_the_tokens_factors_are_multiplied_by_the_kernel_itself():
    assert [operand.kind for operand in host.with_token_scale(store.ir).operands] == ["Row"]

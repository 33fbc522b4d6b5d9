"""The kernel for MXFP4 weights and FP8 tokens, as far as no GPU is needed: the PTX that widens, configs, limits."""

from dataclasses import replace

import pytest
import torch

from envoi.epilogues.library import expert_l1, expert_l2
from envoi.ops.gemm.grouping import ALL_ROWS, EXPERTS_ROWS
from envoi.ops.gemm.hopper_w4a8 import host
from envoi.ops.gemm.hopper_w4a8.config import w4a8_config
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


def chosen(rows: int, experts: int = 64, N: int = 4096, widened: str = "e4m3"):
    return w4a8_config(N, 2048, experts * rows, experts, 132, widened=widened)


def test_tiles_as_wide_as_experts_have_rows():
    assert [chosen(rows).block_y for rows in (2, 10, 90, 1024)] == [16, 16, 128, 128]
    assert [chosen(rows, widened="bf16").block_y for rows in (2, 10, 64, 1024)] == [16, 16, 128, 128]


def test_a_narrower_last_tile_is_taken_where_it_pays():
    # Of 64 rows half an FP8 tile of 128 stays empty, of 1000 a sixteenth, which whole tiles make up for.
    assert [chosen(rows).widths for rows in (64, 256, 1000)] == [4, 4, 1]
    assert [chosen(rows, widened="bf16").widths for rows in (64, 256, 1000)] == [4, 4, 4]


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

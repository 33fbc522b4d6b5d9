"""Blackwell GEMM without a Blackwell: required machine code, configs that can't fit, layout of scale factors."""

import dataclasses
import re

import pytest
import torch

from envoi.epilogues import library
from envoi.epilogues.lower import lower
from envoi.ops.gemm.blackwell import sf_layout
from envoi.ops.gemm.blackwell.config import BlackwellConfig, BlackwellProblem, shared_bytes, why_not
from envoi.runtime.devices import SHARED_BYTES
from tests.helpers.slow import mostly_slow
from tests.machine_code.test_kernels import record, unchanged
from tools.kernel_cases import gemm_blackwell as cases
from tools.kernel_cases import kernel_cases
from tools.machine_code import gate
from tools.machine_code.compile import compile_launch
from tools.machine_code.count import record_of

BF16, F8, U8 = cases.BF16, cases.F8, cases.U8
PLAIN = BlackwellConfig(256, 64, 4)


def check_roles(record, text, core, loads, stores, fetches):
    """Assert products, TMA both ways, tensor-memory loads of this width; no spill, no call but allocation guards."""
    families = record.families
    assert {name.partition(".")[0] for name in families["tensor core"]} == {core}
    assert families["tensor memory load"] == loads
    assert families["TMA load"] == fetches
    assert families["TMA store"] == {"UTMASTG.2D": stores}
    assert record.stack_bytes == 0
    assert not [family for family in families if "spill" in family]
    called = re.findall(r"CALL\S* (`\(\S+\))", text)
    assert called
    assert all(gate.allowed(name, text) for name in called)
    assert record.shared_bytes <= SHARED_BYTES
    assert any(name.startswith("USETMAXREG") for name in families["register budget"])


# Each instruction twice: before the warps specialise, and in the producer.
TWO = {"UTMALDG.2D": 2 * 2}
FACTORS = {"UTMALDG.2D": 2 * 2, "UTMALDG.5D": 2 * 2}
BY_NAME = {
    "gemm-sm100": ("UTCHMMA", {"LDTM.x64": 4}, 4, TWO),
    "gemm-sm100-swiglu": ("UTCHMMA", {"LDTM.x64": 4}, 4, TWO),
    "gemm-sm100-swiglu-fp8": ("UTCHMMA", {"LDTM.x64": 2}, 1, TWO),
    "gemm-sm100-grouped": ("UTCHMMA", {"LDTM.x64": 4}, 4, TWO),
    "gemm-sm100-fp8": ("UTCQMMA", {"LDTM.x64": 4}, 4, TWO),
    "gemm-sm100-mxfp8": ("UTCQMMA", {"LDTM.x64": 2}, 2, FACTORS),
    "gemm-sm100-mxfp8-mxfp4": ("UTCQMMA", {"LDTM.x64": 2}, 2, FACTORS),
    "gemm-sm100-mxfp4": ("UTCOMMA", {"LDTM.x64": 2}, 2, FACTORS),
    "gemm-sm100-nvfp4": ("UTCOMMA", {"LDTM.x64": 2}, 2, FACTORS),
    "gemm-sm100-experts": ("UTCQMMA", {"LDTM.x64": 2}, 2, FACTORS),
}


@pytest.mark.parametrize("name", mostly_slow(BY_NAME, quick=[]))
def test_registered(name):
    case = kernel_cases()[name]
    assert case.arches == ("sm_100", "sm_103")
    arch = case.arches[len(name) % 2]  # the code of the other differs in names of modifiers only
    record, text = record_of(compile_launch(case.launch(), arch))
    check_roles(record, text, *BY_NAME[name])
    copies = record.families.get("tensor memory copy", {})
    assert bool(copies) == (BY_NAME[name][3] is FACTORS)


# Configs that don't fit


STORE = lower(library.store.ir, BF16, "gluon", False, True, frozenset())
PROBLEM = BlackwellProblem(4096, 4096, 7168)
SCALED = BlackwellProblem(4096, 4096, 7168, 8, 8, sf_group=32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ""),
        ({"block_y": 192}, "block_y: expected 64, 128 or 256, got 192"),
        ({"block_k": 16}, "block_k: expected rows of 64 to 512 bytes, a power of two, got 16 elements in 32"),
        ({"num_stages": 1}, "num_stages: expected at least 2, got 1"),
        ({"num_stages": 5}, "shared memory: 5 stages and what leaves are 281088 bytes, there are 232448"),
        ({"num_accumulators": 3}, "num_accumulators: expected 1 or 2, got 3"),
        ({"num_warps": 2}, "num_warps: expected 4 or 8 for the epilogue, got 2"),
        ({"epilogue_columns": 96}, "epilogue_columns: expected a power of two from 16 to block_y = 256, got 96"),
        (
            {"epilogue_columns": 256},
            "epilogue_columns: 256 are 256 registers a thread of 4 warps, more than 128 leave none to compute",
        ),
        ({"sf_group": 32}, "sf_group: expected 0, as the operands have it, got 32"),
    ],
)
def test_refusals(change, words):
    reason = why_not(PROBLEM, dataclasses.replace(PLAIN, **change), STORE)
    assert reason.startswith(words) if words else not reason


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_y": 128}, ""),
        ({"num_accumulators": 1, "num_stages": 3}, ""),
        ({}, "tensor memory: 2 accumulators of 256 columns and 12 of scale factors are 524 columns, there are 512"),
        ({"block_y": 64}, "block_y: scale factors come by 128 columns, got 64"),
        ({"block_y": 128, "block_k": 64}, "block_k: four scale factors span 128 elements, got 64"),
    ],
)
def test_refusals_of_scale_factors(change, words):
    config = dataclasses.replace(BlackwellConfig(256, 128, 4, sf_group=32), **change)
    reason = why_not(SCALED, config, STORE)
    assert reason.startswith(words) if words else not reason


def test_refusals_of_problems():
    cut = dataclasses.replace(PLAIN, split_k=2)
    assert "K: expected at least 1" in why_not(dataclasses.replace(PROBLEM, K=0), PLAIN, STORE)
    assert "split_k: expected 1 in a grouped" in why_not(dataclasses.replace(PROBLEM, num_groups=8), cut, STORE)
    padded = dataclasses.replace(SCALED, padded=True, K=96)
    assert "FP4 beside FP8" in why_not(padded, BlackwellConfig(128, 128, 4, sf_group=32), STORE)
    quantised = lower(library.swiglu_fp8.ir, BF16, "gluon", False, True, frozenset())
    words = "epilogue_columns: expected a multiple of 256 columns for this epilogue, got 64"
    assert why_not(PROBLEM, PLAIN, quantised) == words
    concat = library.expert_l1("swiglu", None, False, None, "concat")
    halves = lower(concat.ir, BF16, "gluon", False, True, frozenset())
    assert why_not(PROBLEM, PLAIN, halves) == "epilogue: expected one that takes pairs of columns, got one of halves"
    whole = lower(library.absmax.ir, BF16, "gluon", True, True, frozenset())
    assert "whole rows of 4096 columns" in why_not(PROBLEM, PLAIN, whole)


@pytest.mark.parametrize("name", ["gemm-sm100", "gemm-sm100-mxfp8-mxfp4"])
def test_the_budget_counts_what_the_compiler_takes(name):
    scaled = name != "gemm-sm100"
    config = BlackwellConfig(128, 128, 4, sf_group=32) if scaled else PLAIN
    problem = dataclasses.replace(SCALED, padded=True) if scaled else PROBLEM
    taken = (unchanged(name, "sm_100") or record(name, "sm_100")[0]).shared_bytes
    assert taken <= shared_bytes(problem, config, STORE) < taken + 2560


# Scale factors


def at(packed, row, column):
    r = row % 128
    return packed[row // 128, column // 4].flatten()[(r % 32) * 16 + r // 32 * 4 + column % 4]


def test_factors_are_packed_in_blocks():
    sf = torch.randint(0, 255, (300, 10), dtype=torch.uint8)
    packed = sf_layout.pack_sf(sf.view(torch.float8_e8m0fnu))
    assert packed.shape == (3, 3, 2, 256)
    assert packed.dtype == torch.uint8
    for row, column in ((0, 0), (31, 3), (32, 4), (127, 9), (128, 0), (299, 9)):
        assert at(packed, row, column) == sf[row, column]
    assert packed.sum(dtype=torch.int64) == sf.sum(dtype=torch.int64)  # the rest is 0
    assert sf_layout.pack_sf(torch.ones(128, 4).to(torch.float8_e4m3fn)).dtype == torch.float8_e4m3fn


def test_each_expert_begins_with_a_block():
    offsets = torch.tensor([0, 5, 5, 140, 300], dtype=torch.int32)
    sf = torch.randint(1, 255, (310, 4), dtype=torch.uint8)
    packed = sf_layout.pack_sf(sf, offsets)
    assert packed.shape[0] == sf_layout.num_blocks(310, 4)
    first_block = (0, 1, 1, 3, 5)  # 5, 0, 135 and 160 rows; then those of no expert
    for row in range(310):
        expert = int((offsets[1:] <= row).sum())
        assert torch.equal(
            torch.stack([at(packed, first_block[expert] * 128 + row - int(offsets[expert]), c) for c in range(4)]),
            sf[row],
        )


def test_weights_of_experts_are_packed_one_by_one():
    sf = torch.randint(0, 255, (3, 130, 4), dtype=torch.uint8)
    packed = sf_layout.pack_sf(sf)
    assert packed.shape == (6, 1, 2, 256)
    assert at(packed[2:], 129, 3) == sf[1, 129, 3]

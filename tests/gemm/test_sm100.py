"""Blackwell GEMM without a Blackwell: required machine code, configs that can't fit."""

import dataclasses
import re

import pytest

from envoi.epilogues import library
from envoi.epilogues.lower import lower
from envoi.ops.gemm.blackwell.config import BlackwellConfig, BlackwellProblem, shared_bytes, why_not
from envoi.runtime.devices import SHARED_BYTES
from tests.helpers.slow import mostly_slow
from tests.machine_code.test_kernels import record, unchanged
from tools.kernel_cases import gemm_blackwell as cases
from tools.kernel_cases import kernel_cases
from tools.machine_code import gate
from tools.machine_code.compile import compile_launch
from tools.machine_code.count import record_of

BF16 = cases.BF16
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
PROBLEM = BlackwellProblem(7168)
SCALED = BlackwellProblem(7168, 8, 8, sf_group=32)
FP8 = BlackwellConfig(256, 128, 4, sf_group=32)


@pytest.mark.parametrize(
    ("problem", "config", "change", "words"),
    [
        (PROBLEM, PLAIN, {}, ""),
        (
            PROBLEM, PLAIN, {"num_stages": 5},
            "shared memory: 5 stages and what leaves are 281088 bytes, there are 232448",
        ),
        (PROBLEM, PLAIN, {"epilogue_columns": 512}, "epilogue_columns: expected at most block_y = 256, got 512"),
        (SCALED, FP8, {"block_y": 128}, ""),
        (SCALED, FP8, {"num_accumulators": 1, "num_stages": 3}, ""),
        (
            SCALED, FP8, {},
            "tensor memory: 2 accumulators of 256 columns and 12 of scale factors are 524 columns, there are 512",
        ),
        (
            dataclasses.replace(SCALED, padded=True, K=96), FP8, {},
            "block_k: FP4 beside FP8 comes in 128 or more, of a K in 64s, got 128 of 96",
        ),
    ],
)  # fmt: skip
def test_refusals(problem, config, change, words):
    assert why_not(problem, dataclasses.replace(config, **change), STORE) == words


@pytest.mark.parametrize("name", ["gemm-sm100", "gemm-sm100-mxfp8-mxfp4"])
def test_the_budget_counts_what_the_compiler_takes(name):
    scaled = name != "gemm-sm100"
    config = BlackwellConfig(128, 128, 4, sf_group=32) if scaled else PLAIN
    problem = dataclasses.replace(SCALED, padded=True) if scaled else PROBLEM
    taken = (unchanged(name, "sm_100") or record(name, "sm_100")[0]).shared_bytes
    assert taken <= shared_bytes(problem, config, STORE) < taken + 2560

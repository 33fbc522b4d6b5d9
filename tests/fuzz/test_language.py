"""The oracle of the epilogue language: each operation holds its value by torch, in an interval that is narrow."""

import pytest
import torch

import envoi.epilogues.vocabulary
from tests.fuzz import language
from tests.fuzz.approx import Approx, exact
from tests.fuzz.draw import Draw
from tests.fuzz.endings import Program

NAMES = vars(envoi.epilogues.vocabulary)
OPERATIONS = language.UNARY | language.BINARY | language.OVER_ROWS


def values(seed: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    return 4 * torch.randn(24, 32, generator=source, dtype=torch.float64).float().double()


def holds(interval: Approx, x: torch.Tensor) -> torch.Tensor:
    low, high = interval.ends()
    return (x >= low) & (x <= high) | (x.isnan() & interval.mid.isnan())


@pytest.mark.parametrize("text", OPERATIONS)
def test_an_operation(text):
    x, y = values(0), values(1)
    operands = (x, y) if text in language.BINARY else (x,)
    right = eval(text.format("x", "y"), {**NAMES, "x": x, "y": y})  # by Envoi's own, in float64
    found = OPERATIONS[text](*map(exact, operands))
    assert bool(holds(found, right.double()).all())
    assert bool((found.err <= 1e-4 * found.mid.abs() + 4e-5).all())
    assert not bool(holds(found, right + 1e-3 * (1 + right.abs())).any())


def test_drawn_epilogues_have_every_operation():
    """Also several tiles beside each other, both splits, every way of leaving and every reduction."""
    programs = [Program(Draw("epilogue", seed), grouped) for seed in range(1500) for grouped in (False, True)]
    assert {line.operation for program in programs for line in program.lines} == {"", *OPERATIONS}
    sources = [program.source() for program in programs]
    text = "".join(sources)
    for part in (
        "pairs(",
        "halves(",
        "cast(",
        "row_sum(",
        "col_absmax(",
        "total_max(",
        "HalfTile",
        "HalfCol",
        "Row",
        "topk(",
    ):
        assert part in text, part
    for part in ('"fp4_e2m1", 16', '"fp4_e2m1", 32', '"fp8_e4m3", 128', '"fp8_e4m3", "row"', '"fp8_e4m3", 32'):
        assert part in text, part
    assert not any("total_" in source for source in sources[1::2])  # refused with experts

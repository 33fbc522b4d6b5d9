"""The oracle of the epilogue language: each operation holds its value by torch, in an interval that is narrow."""

import pytest
import torch

import envoi.epilogue.vocabulary
from tools.fuzz import language
from tools.fuzz.approx import Approx, exact
from tools.fuzz.draw import Draw
from tools.fuzz.endings import Program, epilogue_of

NAMES = vars(envoi.epilogue.vocabulary)
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


@pytest.mark.parametrize("text", OPERATIONS)
def test_an_operation_on_intervals(text):
    """Whatever the operands are within their errors, the result holds the value."""
    x, y = values(2), values(3)
    wide = [Approx(v, torch.full_like(v, 0.25)) for v in (x, y)]
    found = OPERATIONS[text](*(wide if text in language.BINARY else wide[:1]))
    for seed in range(20):
        source = torch.Generator().manual_seed(seed)
        moved = [v + 0.25 * (2 * torch.rand(v.shape, generator=source, dtype=torch.float64) - 1) for v in (x, y)]
        right = eval(text.format("x", "y"), {**NAMES, "x": moved[0], "y": moved[1]})
        assert bool(holds(found, right.double()).all())


@pytest.mark.parametrize("text", [text for text in OPERATIONS if "where" not in text])
def test_nan_stays(text):
    x = values(4)
    x[3, 5] = torch.nan
    found = OPERATIONS[text](*((exact(x), exact(values(5))) if text in language.BINARY else (exact(x),)))
    assert bool(found.mid[3, 5].isnan() | found.err[3, 5].isinf())


def test_what_may_be_anything_stays_so():
    free = exact(values(6)).freed(torch.ones(24, 32, dtype=torch.bool))
    for text, operation in OPERATIONS.items():
        found = operation(*((free, exact(values(7))) if text in language.BINARY else (free,)))
        assert bool(found.err.isinf().all()), text


def test_drawn_epilogues_have_every_operation():
    """Also several tiles beside each other, both splits, every way of leaving and every reduction."""
    sources = [Program(Draw("epilogue", seed), grouped).source() for seed in range(1500) for grouped in (False, True)]
    text = "".join(sources)
    for operation in OPERATIONS:
        name = operation.partition("(")[0].split("{")[0].strip("{} ") or operation.strip("{} 01")[:1]
        assert name in text, operation
    for part in ("pairs(", "halves(", "cast(", "row_sum(", "col_absmax(", "total_max(", "HalfTile", "HalfCol", "Row"):
        assert part in text, part
    for part in ('"fp4_e2m1", 16', '"fp4_e2m1", 32', '"fp8_e4m3", 128', '"fp8_e4m3", "row"', '"fp8_e4m3", 32'):
        assert part in text, part
    assert not any("total_" in source for source in sources[1::2])  # refused with experts


def test_an_epilogue_that_computes_something_else_is_caught(monkeypatch):
    import envoi
    from tools.fuzz import run

    original, caught, ran = envoi.gemm, 0, 0
    for seed in range(400):
        _, case = run.draw_case("epilogue", seed, "small", "cpu")
        if "silu" not in case.text:
            continue

        changed = epilogue_of(case.text.partition("\n")[2].rpartition("\n")[0].replace("silu(", "relu("))
        monkeypatch.setattr(envoi, "gemm", lambda a, b, _, other=changed, **more: original(a, b, other, **more))
        result = run.attempt(case)
        monkeypatch.setattr(envoi, "gemm", original)
        ran += 1
        caught += bool(run.judged(case, result))
    assert ran >= 5
    assert caught >= ran // 2  # grouped ones ran as they are, and some cases have no row

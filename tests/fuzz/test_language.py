"""The oracle of the epilogue language: each operation holds its value by torch, in an interval that is narrow."""

import pytest
import torch

import envoi.epilogues.vocabulary
from tests.fuzz import language
from tests.fuzz.approx import Approx, exact
from tests.fuzz.draw import Draw
from tests.fuzz.endings import Program, epilogue_of
from tests.fuzz.outputs import wrong_columns

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


def test_an_epilogue_that_computes_something_else_is_caught(monkeypatch):
    import envoi
    from tests.fuzz import run

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


@pytest.mark.parametrize("err", [0.0, 0.01])
def test_columns_of_the_best(err):
    row = torch.tensor([[1.0, 5.0, torch.nan, 5.0, -torch.inf, 3.0]], dtype=torch.float64)
    x = Approx(row, torch.where(row.isfinite(), err, 0.0))
    best, chosen = language.best(x, 5), language.candidates(x)
    assert best.mid.tolist() == [[pytest.approx(5.0), pytest.approx(5.0), 3.0, 1.0, -torch.inf]]

    def said(*columns: int) -> str:
        return wrong_columns(torch.tensor([columns]), best, chosen, "ids")

    assert said(1, 3, 5, 0, -1) == ""
    assert bool(said(3, 1, 5, 0, -1)) == (err == 0.0), "a tie is only certain without an error"
    assert "isn't among" in said(1, 3, 0, 5, -1)
    assert "isn't among" in said(1, 2, 5, 0, -1)
    assert "twice" in said(1, 1, 5, 0, -1)
    assert "there isn't" in said(1, 3, 5, 6, -1)
    assert "there isn't" in said(1, 3, 5, 0, 4)
    assert "there isn't" in said(1, 3, 5, -1, -1)
    assert (
        wrong_columns(torch.tensor([[9, 9, 9, 9, 9]]), best.freed(torch.ones(1, 5, dtype=torch.bool)), chosen, "") == ""
    )

"""Checks of the same bits: from run to run, whatever the other rows, prepared or plain, from a graph or eager.

Each check takes a subject and a seed, makes `draws` calls and returns how many of them differ from the first. A check
compares bits, not numbers: NaN with the same NaN, the sign of a zero too.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from envoi.runtime import prepared, shortcuts
from tests.helpers.spoiled import spoil
from tests.promises.subjects import Subject

REFUSED = "refused while a graph is captured"  # the text of a result


@dataclass(frozen=True)
class Result:
    """Calls of a check, those that differ, and a word on the first of them."""

    count: int
    wrong: int
    text: str = ""

    def __add__(self, other: "Result") -> "Result":
        return Result(self.count + other.count, self.wrong + other.wrong, self.text or other.text)


def bits(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes of each row: uint8 [rows, bytes]."""
    return x.contiguous().view(len(x), -1).view(torch.uint8) if x.numel() else x.new_empty(len(x), 0, dtype=torch.uint8)


def same(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
    """Tell whether all tensors have equal shapes, dtypes and bits."""
    pairs = list(zip(got, want, strict=True))
    return all((a.shape, a.dtype) == (b.shape, b.dtype) and torch.equal(bits(a), bits(b)) for a, b in pairs)


def some_rows(draw: random.Random, subject: Subject, device: torch.device) -> torch.Tensor:
    """Draw rows: few or many of them, in order, at random, or one of them many times over."""
    most = subject.rows
    size = draw.choice((1, 2, draw.randint(1, most), draw.randint(1, min(most, 64)), draw.randint(1, most), most))
    kind = draw.choice(("first", "any", "any", "repeated"))
    if kind == "first":
        rows = list(range(size))
    elif kind == "any":
        rows = draw.sample(range(most), size)
    else:
        rows = [draw.randrange(most)] * size
        rows[draw.randrange(size)] = draw.randrange(most)
    return torch.tensor(rows, dtype=torch.int64, device=device)


def all_rows(subject: Subject, device: torch.device) -> torch.Tensor:
    """Return the numbers of all rows."""
    return torch.arange(subject.rows, device=device)


def other_rows(subject: Subject, seed: int, draws: int, device: torch.device) -> Result:
    """Compare what rows give beside some rows with what they give beside all."""
    draw = random.Random(f"{subject.name} {seed}")
    whole = [x.clone() for x in subject.run(*subject.given(all_rows(subject, device)))]
    wrong, text = 0, ""
    for _ in range(draws):
        rows = some_rows(draw, subject, device)
        got = subject.run(*subject.given(rows))
        if not same(got, [x[rows] for x in whole]):
            wrong += 1
            text = text or f"{len(rows)} rows differ from the same rows among {subject.rows}"
    return Result(draws, wrong, text)


def run_to_run(subject: Subject, seed: int, draws: int, device: torch.device) -> Result:
    """Repeat calls, each time with other values in the memory that is handed out."""
    draw = random.Random(f"{subject.name} again {seed}")
    wrong, text = 0, ""
    rows, want = all_rows(subject, device), None
    for number in range(draws):
        if number % 10 == 0:
            rows, want = (some_rows(draw, subject, device) if number else rows), None
        given = subject.given(rows)
        dirty(device, number)
        got = [x.clone() for x in subject.run(*given)]
        want = want or got
        if not same(got, want):
            wrong += 1
            text = text or f"a repeated call of {len(rows)} rows differs"
    return Result(draws, wrong, text)


def dirty(device: torch.device, number: int) -> None:
    """Fill memory that the next call will be given: with NaN, zeros, ones, in turn."""
    for size in (1 << 12, 1 << 16, 1 << 20) if device.type == "cpu" else (1 << 14, 1 << 20, 1 << 24):
        torch.empty(size, dtype=torch.uint8, device=device).fill_((0xFF, 0, 0x3F)[number % 3])
    spoil((math.nan, 0.0, 1.0)[number % 3])


def prepared_or_plain(subject: Subject, seed: int, draws: int, device: torch.device) -> Result:
    """Compare calls as always with calls that may be prepared: seen once, recorded, then replayed three times."""
    draw = random.Random(f"{subject.name} prepared {seed}")
    wrong, text = 0, ""
    before = shortcuts.PREPARED
    try:
        for _ in range(max(1, draws // 5)):
            rows = some_rows(draw, subject, device)
            given = subject.given(rows)
            shortcuts.PREPARED = False
            want = [x.clone() for x in subject.run(*given)]
            shortcuts.PREPARED = True
            for _ in range(5):  # at other addresses each
                again = tuple(x.clone() for x in given)
                if not same(subject.run(*again), want):
                    wrong += 1
                    text = text or f"a prepared call of {len(rows)} rows differs"
    finally:
        shortcuts.PREPARED = before
        prepared.clear()
    return Result(5 * max(1, draws // 5), wrong, text)


def graph_or_eager(subject: Subject, seed: int, draws: int, device: torch.device) -> Result:
    """Compare replays of a CUDA graph, with other values in its inputs, with eager calls, or see a capture refused."""
    if not subject.captured:
        return refusal(subject, device)
    draw = random.Random(f"{subject.name} graph {seed}")
    wrong, text = 0, ""
    for _ in range(max(1, draws // 5)):
        rows = some_rows(draw, subject, device)
        held = tuple(x.clone() for x in subject.given(rows))
        subject.run(*held)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = subject.run(*held)
        for _ in range(5):
            other = torch.tensor([draw.randrange(subject.rows) for _ in rows], dtype=torch.int64, device=device)
            given = subject.given(other)
            for x, y in zip(held, given, strict=True):
                x.copy_(y)
            graph.replay()
            if not same(out, subject.run(*given)):
                wrong += 1
                text = text or f"a graph of {len(rows)} rows differs"
    return Result(5 * max(1, draws // 5), wrong, text)


def refusal(subject: Subject, device: torch.device) -> Result:
    """Capture a call that must be refused, then make it eagerly."""
    given = subject.given(all_rows(subject, device))
    want = [x.clone() for x in subject.run(*given)]
    said = ""
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            subject.run(*given)
    except RuntimeError as error:
        said = str(error)
    refused = "expected no CUDA graph to be captured" in said
    right = refused and same(subject.run(*given), want)
    return Result(1, int(not right), REFUSED if right else f"expected a refusal, got {said or 'none'}")


Check = Callable[[Subject, int, int, torch.device], Result]
CHECKS: dict[str, Check] = {
    "run to run": run_to_run, "other rows": other_rows, "prepared or plain": prepared_or_plain,
    "graph or eager": graph_or_eager,
}  # fmt: skip
ON_GPU_ONLY = ("prepared or plain", "graph or eager")

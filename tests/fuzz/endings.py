"""Random epilogues: programs of the language, as text that a user might write, each with its oracle."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

import envoi.epilogues.trace
import envoi.epilogues.vocabulary
from envoi.epilogues import epilogue
from tests.fuzz import formats, language
from tests.fuzz.approx import Approx, exact
from tests.fuzz.draw import Draw
from tests.fuzz.language import REDUCTIONS, Sums
from tests.fuzz.outputs import Left

KINDS = {"Row": "row", "Col": "col", "Tile": "tile", "Scalar": "scalar", "HalfCol": "halfcol", "HalfTile": "half"}
CONSTANTS = ("0.5", "-1.25", "3.0", "1.0")
CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8_e4m3": torch.float8_e4m3fn}
QUANTISED = {  # arguments of quantize -> the scheme
    '"fp8_e4m3", 128': "fp8_1x128", '"fp8_e4m3", 32': "mxfp8", '"fp8_e4m3", "row"': "fp8_row",
    '"fp4_e2m1", 32': "mxfp4", '"fp4_e2m1", 16': "nvfp4",
}  # fmt: skip
NAME = re.compile(r"[a-z]+\d*")
Known = dict[str, Approx]  # values by name


@dataclass(frozen=True)
class Line:
    """Line `name = text` of an epilogue, and what it computes. operation: of `language`, "" for a part of a value."""

    name: str
    text: str
    compute: Callable[[Known], Approx]
    operation: str = ""


@dataclass(frozen=True)
class Leaving:
    """Value that is returned: the text, and the oracle of a value and the rows' bounds."""

    text: str
    compute: Callable[[Known, list[int] | None], Left]
    columns: int = 1


class Program:
    """Epilogue under construction: its operands, lines and outputs.

    tiles: names of values with a row for each token, all of one width; the latest are used most.
    """

    def __init__(self, draw: Draw, grouped: bool):
        self.draw, self.grouped = draw, grouped
        self.operands: dict[str, str] = {}  # by name: Row, Col ..
        self.lines: list[Line] = []
        self.outputs: list[Leaving] = []
        self.tiles: list[str] = ["acc"]
        self.split = draw.one(("", "", "pairs", "halves"))
        if self.split == "halves" and draw.chance(0.5):  # before them a value of all columns may meet these operands
            self.tiles.append(self.binary("acc", self.operand(draw.one(("Row", "Col", "Scalar")))))
        if self.split:
            self.tiles = self.halved(self.tiles[-1])
        for _ in range(draw.random.randint(1, 5)):
            self.tiles.append(self.step())
        for _ in range(draw.one((1, 1, 1, 2, 2, 3))):
            self.outputs.append(self.leave())
        for _ in range(draw.one((0, 0, 1, 1, 2))):
            self.outputs.append(self.reduce())
        if draw.chance(0.06):
            self.outputs += self.best()
        self.prune()

    def prune(self) -> None:
        """Leave out lines and operands that take no part in what is returned: an operand that doesn't is refused."""
        used = {name for output in self.outputs for name in NAME.findall(output.text)}
        for line in self.lines[::-1]:
            if line.name in used:
                used.update(NAME.findall(line.text))
        self.lines = [line for line in self.lines if line.name in used]
        self.operands = {name: kind for name, kind in self.operands.items() if name in used}

    def line(self, text: str, compute: Callable[[Known], Approx], operation: str = "") -> str:
        """Add a line, and return its value's name."""
        self.lines.append(Line(f"v{len(self.lines)}", text, compute, operation))
        return self.lines[-1].name

    def operand(self, kind: str) -> str:
        """Return the name of a new operand."""
        name = f"{kind.lower()}{len(self.operands)}"
        self.operands[name] = kind
        return name

    def halved(self, name: str) -> list[str]:
        """Split a value into two."""
        places: tuple[Any, Any] = (slice(0, None, 2), slice(1, None, 2))
        found = []
        for number in range(2):

            def part(known: Known, number: int = number) -> Approx:
                x = known[name]
                middle = x.mid.shape[1] // 2
                whole = (slice(0, middle), slice(middle, None))
                return x[:, places[number] if self.split == "pairs" else whole[number]]

            found.append(self.line(f"{self.split}({name})[{number}]", part))
        return found

    def value(self) -> str:
        """Return the name of a value of the tile, the latest more often."""
        return self.draw.one([*self.tiles, *self.tiles[-2:]])

    def step(self) -> str:
        """Add an operation on a value of the tile."""
        draw, x = self.draw, self.value()
        if draw.chance(0.12):
            text = draw.one(tuple(language.OVER_ROWS))
            return self.line(text.format(x), lambda known: language.OVER_ROWS[text](known[x]), text)
        if draw.chance(0.45):
            text = draw.one(tuple(language.UNARY))
            return self.line(text.format(x), lambda known: language.UNARY[text](known[x]), text)
        others = ("HalfTile", "HalfCol") if self.split else ("Tile", "Col")
        kind = draw.one(("value", "value", "constant", "Row", "Scalar", *others, others[0]))
        if kind == "constant":
            return self.binary(x, draw.one(CONSTANTS))
        return self.binary(x, self.value() if kind == "value" else self.operand(kind))

    def binary(self, x: str, y: str) -> str:
        """Add an operation on a value and a value, an operand or a number."""
        text = self.draw.one(tuple(language.BINARY))

        def compute(known: Known) -> Approx:
            first, second = known[x], exact(float(y)) if y in CONSTANTS else known[y]
            return language.BINARY[text](*together(first, second))

        return self.line(text.format(x, f"({y})" if y.startswith("-") else y), compute, text)

    def leave(self) -> Leaving:
        """Return a value of the tile as it leaves: as it is, cast or quantised."""
        draw, name, width = self.draw, self.value(), 2 if self.split else 1
        if self.split == "pairs" and draw.chance(0.1):  # in all its columns, beside outputs of half of them
            return Leaving("acc", lambda known, _: Left(known["acc"]))
        how = draw.one(("plain", "plain", "plain", "cast", "quantised"))
        if how == "plain":
            return Leaving(name, lambda known, _: Left(known[name]), width)
        if how == "cast":
            text = draw.one(tuple(CASTS))
            return Leaving(f'cast({name}, "{text}")', lambda known, _: Left(known[name], CASTS[text]), width)
        text = draw.one(tuple(QUANTISED))
        scheme = QUANTISED[text]
        columns = width * (formats.SCHEMES[scheme].columns or 1)
        return Leaving(f"quantize({name}, {text})", lambda known, _: Left(known[name], scheme=scheme), columns)

    def reduce(self) -> Leaving:
        """Return a reduction of a value of the tile."""
        name, how = self.value(), self.draw.one(tuple(REDUCTIONS))
        over = self.draw.one(("row", "row", "col") if self.grouped else ("row", "row", "col", "total"))

        def compute(known: Known, bounds: list[int] | None) -> Left:
            x, reduced = known[name], REDUCTIONS[how]
            if over == "row":
                return Left(reduced(Sums(x, 1)), torch.float32, "row")
            if over == "total":
                flat = Approx(x.mid.reshape(-1), x.err.reshape(-1))
                return Left(reduced(Sums(flat, 0)), torch.float32, "less")
            if bounds is None:
                return Left(reduced(Sums(x, 0)), torch.float32, "less")
            parts = [reduced(Sums(x[first:last], 0)) for first, last in pairwise(bounds)]
            joined = Approx(torch.stack([p.mid for p in parts]), torch.stack([p.err for p in parts]))
            return Left(joined, torch.float32, "less")

        return Leaving(f"{over}_{how}({name})", compute, 2 if self.split else 1)

    def best(self) -> list[Leaving]:
        """Return the best values of each row of the tile, and their columns."""
        name, k, width = self.value(), self.draw.one((1, 2, 4, 8)), 2 if self.split else 1

        def values(known: Known, bounds: list[int] | None) -> Left:
            return Left(language.best(known[name], k), torch.float32, "row")

        def columns(known: Known, bounds: list[int] | None) -> Left:
            x = known[name]
            return Left(language.best(x, k), torch.int32, "row", chosen=language.candidates(x))

        return [Leaving(f"topk({name}, {k})[{part}]", f, width * k) for part, f in enumerate((values, columns))]

    def source(self) -> str:
        """Return the epilogue as a user would write it."""
        given = ", ".join(["acc", *(f"{name}: {kind}" for name, kind in self.operands.items())])
        lines = [f"    {line.name} = {line.text}\n" for line in self.lines]
        return f"def drawn({given}):\n{''.join(lines)}    return {', '.join(output.text for output in self.outputs)}\n"

    def compute(self, acc: Approx, operands: Known, bounds: list[int] | None) -> list[Left]:
        """Return the outputs. bounds: of the experts' rows, None without experts."""
        known: Known = {"acc": acc}
        for name, x in operands.items():
            known[name] = language.wide(x) if self.operands[name] == "Row" else x
        for line in self.lines:
            known[line.name] = line.compute(known)
        return [output.compute(known, bounds) for output in self.outputs]


def together(x: Approx, y: Approx) -> Sequence[Approx]:
    """Return both in one shape."""
    shape = torch.broadcast_shapes(x.mid.shape, y.mid.shape)
    return [Approx(value.mid.expand(shape), value.err.expand(shape)) for value in (x, y)]


def epilogue_of(source: str) -> Any:
    """Return the epilogue of a source text."""
    names: dict[str, Any] = {**vars(envoi.epilogues.vocabulary), **vars(envoi.epilogues.trace)}
    exec(compile(source, "<drawn epilogue>", "exec"), names)
    return epilogue(names["drawn"])

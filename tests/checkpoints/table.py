"""Table of docs/checkpoints.md, from loading each case: `python -m tests.checkpoints.table` writes it."""

import tempfile
from pathlib import Path

import torch

from envoi.experts import from_checkpoint, unpack
from envoi.types import ExpertWeights
from tests.checkpoints.files import CASES, Meaning
from tests.helpers.accuracy import relative_error

PAGE = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"
BEGIN, END = "<!-- table: python -m tests.checkpoints.table -->", "<!-- end of table -->"


def load(folder: Path, layer: int, **options) -> tuple[ExpertWeights, bool]:
    """Load a layer as it is, or where that is refused rounded again; return whether it was."""
    try:
        return from_checkpoint(folder, layer, **options), False
    except ValueError as error:
        if "requantize=True" not in str(error):
            raise
        return from_checkpoint(folder, layer, requantize=True, **options), True


def error_of(experts: ExpertWeights, meant: Meaning, ids=slice(None)) -> float:
    """Return the largest relative error of gate, up, down and the biases; 0.0 if all numbers are the file's."""
    gate_up, down, gate_up_bias, down_bias = unpack(experts, "concat", torch.float64)
    sides = [*zip(gate_up.chunk(2, dim=1), (meant.gate[ids], meant.up[ids]), strict=True), (down, meant.down[ids])]
    if meant.biases is not None:
        both = gate_up_bias.chunk(2, dim=1)
        sides += zip((*both, down_bias), (bias[ids] for bias in meant.biases), strict=True)
    else:
        assert gate_up_bias is None
    assert all(got.shape == want.shape for got, want in sides)
    return max(0.0 if torch.equal(got, want) else relative_error(got, want) for got, want in sides)


def row(name: str, folder: Path) -> str:
    """Load every layer of a case; return its row of the table."""
    case = CASES[name]
    files = case.make()
    files.write(folder)
    formats, exact = set(), True
    for layer, meant in files.layers.items():
        experts, rounded = load(folder, layer, progress=False)
        error = error_of(experts, meant)
        assert rounded == (error > 0), f"{name}: {error}"
        exact &= not rounded
        formats.add(experts.format)
    how = "yes" if exact else "no: refused, or rounded again with `requantize=True`"
    return f"| {case.published} | {case.stored} | {', '.join(sorted(formats))} | {how} |"


def table() -> str:
    """Return the table's text: a row for each case."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [row(name, Path(folder) / name) for name in CASES]
    head = "| checkpoint | experts stored as | loaded as | every number kept |\n|---|---|---|---|"
    return "\n".join([head, *rows])


def with_table(page: str) -> str:
    """Return the page with the table between its marks made anew."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))

"""Plain-text tables and lines for a terminal of 80 columns."""

import textwrap
from collections.abc import Container, Sequence

WIDTH = 80


def fold(text: str) -> str:
    """Fold a line into lines of at most 80 characters, all but the first indented."""
    return textwrap.fill(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def align(header: Sequence[str], rows: Sequence[Sequence[str]], left: Container[int] = (0,)) -> str:
    """Align a header and rows of as many cells, two spaces apart: columns of `left` flush left, others right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(_line(cells, widths, left) for cells in lines)


def _line(cells: Sequence[str], widths: Sequence[int], left: Container[int]) -> str:
    padded = (
        cell.ljust(width) if place in left else cell.rjust(width)
        for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join(padded).rstrip()


def number(value: float | None) -> str:
    """Format three significant digits without an exponent, whole numbers from 100 on; "-" for None."""
    if value is None:
        return "-"
    if value >= 99.95:
        return f"{value:.0f}"
    if value >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.0095 else f"{value:.2g}"

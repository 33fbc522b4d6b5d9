"""Outputs of an epilogue as the oracle has them, and what is wrong with those that came."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.fuzz import formats
from tests.fuzz.approx import Approx, between, requantised, wrong
from tests.fuzz.language import limited

E4M3_LARGEST = 448.0


@dataclass(frozen=True)
class Left:
    """Output that the oracle expects.

    dtype: None = the call's. over: "tile" or "row" if it has an element or more for each row, else "less". scheme: of
    `formats.SCHEMES` if it is quantised, "" if it isn't. chosen: columns of x are what is expected, by the values that
    they have in this.
    """

    x: Approx
    dtype: torch.dtype | None = None
    over: str = "tile"
    scheme: str = ""
    chosen: Approx | None = None


@dataclass(frozen=True)
class Ending:
    """Epilogue. text: describes it. operands: their kinds, by name. columns: a number that N is a multiple of.

    compute(accumulator, operands, where each expert's rows end or None) -> the outputs in order.
    """

    text: str
    epilogue: Any
    operands: dict[str, str]
    compute: Callable[[Approx, dict[str, Approx], list[int] | None], list[Left]]
    columns: int = 1


def judge_outputs(outputs: Any, want: Sequence[Left], dtype: torch.dtype, rows: int | None = None) -> str:
    """Return what is wrong with an epilogue's outputs; the first `rows` rows count."""
    outputs = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    if len(outputs) != len(want):
        return f"{len(outputs)} outputs, expected {len(want)}"
    found = (judge(got, right, dtype, rows, n) for n, (got, right) in enumerate(zip(outputs, want, strict=True)))
    return "; ".join(filter(None, found))


def judge(got: Any, want: Left, dtype: torch.dtype, rows: int | None, number: int) -> str:
    """Return what is wrong with one output."""
    first: Any = ... if want.over == "less" else slice(rows)
    name = f"output {number}"
    if want.scheme:
        scheme = formats.SCHEMES[want.scheme]
        found = formats.decode(got.values.cpu(), got.sf.cpu(), scheme.group(want.x.mid.shape))
        return wrong(found[first], requantised(want.x, scheme)[first], torch.float64, "quantised output")
    expected = want.dtype or dtype
    if got.dtype != expected:
        return f"{name} has {got.dtype}, expected {expected}"
    if expected == torch.float8_e4m3fn:
        x = limited(want.x, -E4M3_LARGEST, E4M3_LARGEST)
        ends = (formats.nearest(end, formats.E4M3) for end in x.ends())
        right = between(*ends).freed(want.x.err.isinf())
        return wrong(formats.decode_e4m3(got.cpu())[first], right[first], torch.float64, name)
    if want.chosen is not None:
        return wrong_columns(got.cpu()[first].long(), want.x[first], want.chosen[first], name)
    return wrong(got[first], want.x[first], name=name)


def wrong_columns(got: torch.Tensor, best: Approx, chosen: Approx, name: str) -> str:
    """Return what is wrong with the columns of each row's best values. best: these values; chosen: the row's."""
    (low, high), columns = best.ends(), chosen.mid.shape[1]
    none, free = (low == -torch.inf) & (high == -torch.inf), best.err.isinf()
    if bool((((got < 0) | (got >= columns)) & ~none & ~free).any()) or bool(((got != -1) & none & ~free).any()):
        return f"{name}: a column that there isn't, or none where there is one"
    if not columns:
        return ""
    values = [end.gather(1, got.clamp(0, columns - 1)) for end in chosen.ends()]
    if bool((((values[1] < low) | (values[0] > high)) & ~none & ~free).any()):
        return f"{name}: a column whose value isn't among the best"
    ordered = got.masked_fill(none | free, columns).sort(1).values
    if bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] < columns)).any()):
        return f"{name}: a column twice"
    known = (chosen.err == 0).all(1, keepdim=True) & ~none & ~free
    first = chosen.mid.sort(dim=1, descending=True, stable=True).indices[:, : got.shape[1]]
    first = torch.nn.functional.pad(first, (0, got.shape[1] - first.shape[1]), value=-1)
    if bool(((got != first) & known).any()):
        return f"{name}: of equal values a later column"
    return ""

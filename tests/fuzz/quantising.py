"""Cases of `envoi.quant.quantize` and `dequantize`, and of the kernel that quantises rows: equal bits."""

from typing import Any

import torch

from envoi.ops.moe.choose import has_kernels
from envoi.ops.moe.permute import quantize_rows
from envoi.quant import cast, scheme_named
from tests.fuzz import formats
from tests.fuzz.draw import KINDS, Case, Draw
from tests.fuzz.formats import Scheme, round_to

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
ROWS = ("fp8_row", "fp8_1x128", "mxfp8")  # schemes of the experts' activations


def quantise(draw: Draw) -> Case:
    """Draw a case: a matrix, perhaps with leading dimensions, in a scheme; where there are kernels often by rows."""
    form = draw.form
    by_rows = has_kernels(draw.device) and form.chance(0.6)
    name = form.one(ROWS if by_rows else tuple(formats.SCHEMES))
    scheme = formats.SCHEMES[name]
    step = 8 if by_rows and not scheme.columns else scheme.columns or 1
    rows = draw.rows(1, draw.most(12, 140, 300), 0.05)
    columns = form.size(step, max(step, draw.most(256, 640, 3000)), step)
    lead = () if by_rows or scheme.rows == 0 else draw.one(((), (), (1,), (3,)))
    kind = draw.one((*KINDS, "halves", "limits"))
    x = values(draw, kind, (*lead, rows, columns), scheme)
    if draw.chance(0.3):
        x = draw.poisoned(x)
    dtype = torch.bfloat16 if by_rows else form.one(DTYPES)
    x = x.to(dtype)
    given = draw.placed(x, "plain" if by_rows else None)
    used = draw.random.randint(0, rows) if by_rows else rows
    offsets = torch.tensor([0, used // 2, used], dtype=torch.int32, device=draw.device)
    text = f"{name}, {list(x.shape)} {dtype}, {kind}" + (f", {used} rows by the kernel" if by_rows else "")

    def call() -> Any:
        q = quantize_rows(given, offsets, scheme_named(name)) if by_rows else cast.quantize(given, name)
        return q.values.view(torch.uint8).cpu(), q.sf.cpu(), None if by_rows else cast.dequantize(q, torch.float64)

    return Case(text, call, lambda got: judge(got, round_to(x.double(), torch.float32), scheme, used))


def values(draw: Draw, kind: str, shape: tuple[int, ...], scheme: Scheme) -> torch.Tensor:
    """Draw values; "halves" are between two numbers of the scheme, "limits" powers of two of any size."""
    if kind == "halves":
        table = scheme.table[~scheme.table.isnan()]
        middles = (table[1:] + table[:-1]) / 2
        picked = torch.cat((middles, table))[draw.ints(0, 2 * len(table) - 2, *shape)]
        return (picked * draw.ints(-1, 1, *shape)).float()
    if kind == "limits":
        return torch.exp2(draw.ints(-149, 127, *shape).double()).float() * draw.ints(-1, 1, *shape)
    return draw.values(kind, *shape)


def judge(got: tuple, x: torch.Tensor, scheme: Scheme, rows: int) -> str:
    """Compare bytes of the elements and scale factors with the definition's; the first `rows` rows count.

    Elements of a group whose scale factor is NaN may have any bits.
    """
    bytes_, sf, wide = got
    if rows < x.shape[-2]:
        x, bytes_, sf = x[:rows], bytes_[:rows], sf[:rows]
    want = formats.quantise(x, scheme)
    group = scheme.group(x.shape)
    stored = formats.decode_sf(sf)
    same = (stored == want.sf) | (stored.isnan() & want.sf.isnan())
    if stored.shape != want.sf.shape or not bool(same.all()):
        return f"scale factors: {_first(same, stored, want.sf)}"
    codes = bytes_.long()
    if scheme.table is formats.E2M1:
        codes = torch.stack((codes % 16, codes // 16), -1).flatten(-2)
    same = (codes == want.codes) | formats.spread(want.sf, group, x.shape).isnan()
    if codes.shape != want.codes.shape or not bool(same.all()):
        return f"codes: {_first(same, codes, want.codes)}"
    if wide is None:
        return ""
    wide = wide.cpu()
    same = (wide == want.x) | (wide.isnan() & want.x.isnan())
    return "" if bool(same.all()) else f"dequantised: {_first(same, wide, want.x)}"


def _first(same: torch.Tensor, got: torch.Tensor, want: torch.Tensor) -> str:
    if got.shape != want.shape:
        return f"shape {list(got.shape)}, expected {list(want.shape)}"
    place = tuple(int(i) for i in (~same).nonzero()[0])
    off = "" if not got.is_floating_point() else f", off by {float(got[place] / want[place] - 1):.3g} of it"
    return f"{int((~same).sum())} of {same.numel()} wrong; at {list(place)} {got[place]}, expected {want[place]}{off}"

"""Cases of `envoi.gemm` and `envoi.grouped_gemm`: formats, views, endings, offsets."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import lcm
from typing import Any

import torch

import envoi
from envoi.epilogues import library
from envoi.types import QuantTensor
from tests.fuzz import approx, formats
from tests.fuzz.approx import Approx, Arithmetic, exact, gelu, silu
from tests.fuzz.draw import KINDS, Case, Draw, host
from tests.fuzz.endings import KINDS as KINDS_OF_OPERANDS
from tests.fuzz.endings import Program, epilogue_of
from tests.fuzz.outputs import Ending, Left, judge_outputs

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# Schemes of both sides; None = bf16.
PAIRS = (
    ("fp8_tensor", "fp8_tensor"), ("fp8_row", "fp8_row"), ("fp8_row", "fp8_tensor"), ("fp8_1x128", "fp8_128x128"),
    ("fp8_1x128", "fp8_1x128"), ("mxfp8", "mxfp8"), ("mxfp8", "mxfp4"), ("mxfp4", "mxfp4"), ("nvfp4", "nvfp4"),
    (None, "mxfp4"), (None, "mxfp8"), (None, "nvfp4"),
)  # fmt: skip
COARSE = ("fp8_tensor", "fp8_row", "fp8_1x128")  # formats whose elements a GPU may multiply on FP8 tensor cores

Choice = Callable[[Draw, bool], Ending]  # of an epilogue, for experts or not


@dataclass(frozen=True)
class Operand:
    """Matrix as Envoi takes it, and its numbers in float64."""

    given: Any
    x: torch.Tensor
    scheme: str | None = None


def _linear(acc: Approx, o: dict[str, Approx]) -> list:
    return [o["alpha"] * acc + o["beta"] * o["c"]]


def _pairs(acc: Approx) -> tuple[Approx, Approx]:
    return acc[..., 0::2], acc[..., 1::2]


def _swiglu(acc: Approx) -> Approx:
    gate, up = _pairs(acc)
    return silu(gate) * up


def _absmax(acc: Approx, o: dict[str, Approx]) -> list:
    size = acc.mid.abs()
    # Which NaN a maximum keeps isn't said: a row with one may have any.
    free = acc.mid.isnan().any(1) | acc.err.isinf().any(1)
    err = acc.err.amax(1).masked_fill(free, torch.inf)
    return [acc, Approx(size.amax(1).masked_fill(free, 0.0), err)]


ENDINGS: dict[str, tuple[Any, dict[str, str], Callable[[Approx, dict[str, Approx]], list], int]] = {
    "none": (None, {}, lambda acc, o: [acc], 1),
    "linear": (library.linear, {"c": "tile", "alpha": "scalar", "beta": "scalar"}, _linear, 1),
    "scale_bias_relu": (
        library.scale_bias_relu, {"alpha": "scalar", "bias": "col"},
        lambda acc, o: [(o["alpha"] * acc + o["bias"]).clamp(0.0, None)], 1,
    ),
    "gelu_residual": (
        library.gelu_residual, {"bias": "col", "residual": "tile"},
        lambda acc, o: [gelu(acc + o["bias"]) + o["residual"]], 1,
    ),
    "absmax": (library.absmax, {}, _absmax, 1),
    "swiglu": (library.swiglu, {}, lambda acc, o: [_swiglu(acc)], 2),
    "swiglu_residual": (
        library.swiglu_residual, {"residual": "half"}, lambda acc, o: [_swiglu(acc) + o["residual"]], 2
    ),
    "swiglu_fp8": (library.swiglu_fp8, {}, lambda acc, o: [Left(_swiglu(acc), scheme="fp8_1x128")], 256),
}  # fmt: skip


def of_library(draw: Draw, grouped: bool) -> Ending:
    """Draw an epilogue of the library, or none."""
    name = draw.one(("none", "none", *ENDINGS))
    epilogue, operands, simple, columns = ENDINGS[name]

    def compute(acc: Approx, given: dict[str, Approx], _: list[int] | None) -> list[Left]:
        first, *others = simple(acc, given)
        first = first if isinstance(first, Left) else Left(first)
        return [first, *(Left(x, torch.float32, "row") for x in others)]

    return Ending(name, epilogue, operands, compute, columns)


def written(draw: Draw, grouped: bool) -> Ending:
    """Draw an epilogue that a user might write."""
    program = Program(draw, grouped)
    source = program.source()
    columns = lcm(*(output.columns for output in program.outputs))
    operands = {name: KINDS_OF_OPERANDS[kind] for name, kind in program.operands.items()}
    return Ending(f"\n{source}   ", epilogue_of(source), operands, program.compute, columns)


def operand(draw: Draw, scheme: str | None, dtype: torch.dtype, kind: str, shape: tuple[int, ...]) -> Operand:
    """Draw a matrix [.., R, K] of a dtype, or the bytes of a scheme's."""
    if scheme is not None:
        return quantised_operand(draw, scheme, shape)
    x = draw.values(kind, *shape)
    x = draw.poisoned(x) if draw.chance(0.1) else x
    x = x.to(dtype)
    return Operand(draw.placed(x), host(x))


def quantised_operand(draw: Draw, name: str, shape: tuple[int, ...], how: str | None = None) -> Operand:
    """Draw the bytes of a matrix in a scheme: any code of the elements, scale factors of some width."""
    scheme = formats.SCHEMES[name]
    group = scheme.group(shape)
    packed = scheme.table is formats.E2M1
    stored = (*shape[:-1], shape[-1] // 2) if packed else shape
    values = draw.ints(0, 255, *stored).to(torch.uint8)
    has_nan = draw.chance(0.1)
    if not packed and not has_nan:
        values = torch.where(values % 128 == 127, values - 1, values)
    factors = (*shape[:-2], -(-shape[-2] // group[0]), -(-shape[-1] // group[1]))
    reach = draw.one((0, 3, 3, 30))
    # Scale factors above 2 take another path than those up to 2.
    top = draw.one((1, reach))
    exponents = draw.ints(min(-reach, top), top, *factors)
    if scheme.sf == "e8m0":
        sf = (exponents + 127).to(torch.uint8)
        if draw.chance(0.1) and sf.numel():
            sf.view(-1)[draw.random.randrange(sf.numel())] = 255
        sf = sf.view(torch.float8_e8m0fnu)
    elif scheme.sf == "e4m3":
        sf = draw.ints(0, 126, *factors).to(torch.uint8).view(torch.float8_e4m3fn)
    else:
        sf = torch.exp2(exponents.float()) * (0.5 + draw.uniform(*factors))
    if not packed:
        values = values.view(torch.float8_e4m3fn)
    x = formats.decode(values, sf, group)
    given = QuantTensor(draw.placed(values, how), sf.to(draw.device), group)
    return Operand(given, x, name)


def accumulated(a: Operand, b: Operand, gpu: bool) -> Approx:
    """Return the accumulator of a [M, K] and b [N, K]."""
    coarse = gpu and a.scheme in COARSE
    return approx.matmul(a.x, b.x, Arithmetic(gpu, coarse, 8 + 3 * (a.x.shape[1] // 128)))


def extra(draw: Draw, ending: Ending, M: int, N: int, num_experts: int | None) -> tuple[dict, dict[str, torch.Tensor]]:
    """Draw the operands of an epilogue: as given to Envoi, and in float64."""
    columns = (N,) if num_experts is None else (num_experts, N)
    shapes = {
        "tile": (M, N), "half": (M, N // 2), "row": (M,), "col": columns, "halfcol": (*columns[:-1], N // 2)
    }  # fmt: skip
    given, wide = {}, {}
    for name, kind in ending.operands.items():
        if kind == "scalar":
            given[name] = draw.one((0.0, 1.0, -0.5, 3.25))
            wide[name] = torch.tensor(given[name], dtype=torch.float64)
            continue
        x = draw.values(draw.one(KINDS[:6]), *shapes[kind]).to(draw.form.one(FLOATS))
        given[name], wide[name] = draw.placed(x), host(x)
    return given, wide


def drawn_formats(draw: Draw) -> tuple[str | None, str | None, torch.dtype]:
    """Draw the schemes of both sides, and the dtype of a side without one."""
    form = draw.form
    if form.chance(0.45):
        return None, None, form.one(FLOATS)
    of_a, of_b = form.one(PAIRS)
    return of_a, of_b, torch.bfloat16


def dimensions(draw: Draw, schemes: tuple[str | None, ...], ending: Ending) -> tuple[int, int]:
    """Draw N and K that the formats and the epilogue allow."""
    step = max([1, *(formats.SCHEMES[name].columns for name in schemes if name)])
    K = draw.form.size(step, max(step, draw.most(96, 520, 2048)), step)
    if step == 1 and draw.form.chance(0.03):
        K = 0
    return draw.form.size(ending.columns, max(ending.columns, draw.most(40, 200, 512)), ending.columns), K


def gemm(draw: Draw, choose: Choice = of_library) -> Case:
    """Draw a case of `envoi.gemm`."""
    a_scheme, b_scheme, dtype = drawn_formats(draw)
    ending = choose(draw.form, False)
    M = draw.rows(1, draw.most(20, 160, 600), 0.04)
    N, K = dimensions(draw, (a_scheme, b_scheme), ending)
    kind = draw.one(KINDS)
    a = operand(draw, a_scheme, dtype, kind, (M, K))
    b = operand(draw, b_scheme, dtype, kind if kind == "whole" else draw.one(KINDS[:4]), (N, K))
    given, wide = extra(draw, ending, M, N, None)
    out_dtype = draw.form.one((None, *FLOATS))
    default = torch.bfloat16 if a_scheme else dtype
    text = f"{a_scheme or dtype} x {b_scheme or dtype}, M {M} N {N} K {K}, {kind}, {ending.text}, out {out_dtype}"

    def judge(outputs: Any) -> str:
        acc = accumulated(a, b, draw.device.type == "cuda")
        operands = {key: exact(x) for key, x in wide.items()}
        return judge_outputs(outputs, ending.compute(acc, operands, None), out_dtype or default)

    return Case(text, lambda: envoi.gemm(a.given, b.given, ending.epilogue, out_dtype=out_dtype, **given), judge)


def drawn_offsets(draw: Draw, rows: int, num_experts: int) -> list[int]:
    """Draw exclusive offsets: even, random, with empty experts, all rows to one, some rows of no expert."""
    used = rows if draw.chance(0.6) else draw.random.randint(0, rows)
    style = draw.one(("random", "random", "one", "first", "last"))
    if style == "random":
        inner = sorted(draw.random.randint(0, used) for _ in range(num_experts - 1))
    else:
        place = {"one": draw.random.randrange(num_experts), "first": 0, "last": num_experts - 1}[style]
        inner = [0 if expert < place else used for expert in range(num_experts - 1)]
    return [0, *inner, used]


def grouped_gemm(draw: Draw, choose: Choice = of_library) -> Case:
    """Draw a case of `envoi.grouped_gemm`."""
    a_scheme, b_scheme, dtype = drawn_formats(draw)
    a_scheme = "fp8_row" if a_scheme == "fp8_tensor" else a_scheme
    ending = choose(draw.form, True)
    P = draw.rows(1, draw.most(24, 200, 800), 0.04)
    E = draw.form.size(1, draw.most(5, 12, 40))
    N, K = dimensions(draw, (a_scheme, b_scheme), ending)
    kind = draw.one(KINDS)
    rows = operand(draw, a_scheme, dtype, kind, (P, K))
    weights = operand(draw, b_scheme, dtype, kind if kind == "whole" else draw.one(KINDS[:4]), (E, N, K))
    given, wide = extra(draw, ending, P, N, E)
    bounds = drawn_offsets(draw, P, E)
    offsets = torch.tensor(bounds, dtype=torch.int32, device=draw.device)
    out_dtype = draw.form.one((None, *FLOATS))
    default = torch.bfloat16 if a_scheme else dtype
    by_expert = {"col", "halfcol"} & set(ending.operands.values())
    text = (
        f"{a_scheme or dtype} x {b_scheme or dtype}, P {P} N {N} K {K}, {kind}, {ending.text}, out {out_dtype}, "
        f"offsets {bounds}"
    )

    def judge(outputs: Any) -> str:
        parts = [
            accumulated(
                Operand(None, rows.x[first:last], rows.scheme), Operand(None, weights.x[e]), draw.device.type == "cuda"
            )
            for e, (first, last) in enumerate(pairwise(bounds))
        ]
        tail = exact(torch.zeros(P - bounds[-1], N))
        acc = Approx(torch.cat([p.mid for p in (*parts, tail)]), torch.cat([p.err for p in (*parts, tail)]))
        expert = torch.searchsorted(torch.tensor(bounds[1:]), torch.arange(P), right=True).clamp(max=E - 1)
        operands = {key: exact(x[expert] if "col" in ending.operands[key] else x) for key, x in wide.items()}
        want = ending.compute(acc, operands, bounds)
        # Which expert's Col the rows of no expert get isn't said.
        return judge_outputs(outputs, want, out_dtype or default, bounds[-1] if by_expert else None)

    return Case(
        text,
        lambda: envoi.grouped_gemm(rows.given, weights.given, offsets, ending.epilogue, out_dtype=out_dtype, **given),
        judge,
    )


def epilogue(draw: Draw) -> Case:
    """Draw a case of `envoi.gemm` or `envoi.grouped_gemm` with an epilogue that a user might write."""
    return draw.form.one((gemm, gemm, grouped_gemm))(draw, written)

"""GEMMs to measure: sizes, epilogues by name, random operands, and what the Hopper kernel makes of them."""

import random
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch.nn import functional

from envoi.epilogues import Epilogue, Tile, epilogue, exp, log, row_max, row_sum, tanh
from envoi.epilogues.library import absmax, gelu_residual, scale_bias_relu, store, swiglu, swiglu_fp8
from envoi.ops.gemm.hopper import host, tune
from envoi.ops.gemm.hopper.candidates import candidates
from envoi.ops.gemm.hopper.config import Config, Problem
from envoi.ops.gemm.hopper.time_model import predicted_cycles
from envoi.quant import format_named, quantize
from envoi.quant.bits import concatenate
from envoi.quant.formats import Scheme
from envoi.quant.pack import with_checked_scales
from envoi.types import Matrix, QuantTensor

META = torch.device("meta")
QUANTISE_AT_ONCE = 8  # experts; casts work in float32
CAP = 30.0


@epilogue
def capped_residual_max(acc, residual: Tile):
    """Return cap * tanh(acc / cap) + residual, and the largest value of each row."""
    x = CAP * tanh(acc / CAP) + residual
    return x, row_max(x)


@epilogue
def logsumexp(acc):
    """Return the accumulator and the logarithm of each row's sum of exponentials; values stay below 88."""
    return acc, log(row_sum(exp(acc)))


@epilogue
def logsumexp_of_max(acc):
    """Return what `logsumexp` does, for values of any size: each row's largest is subtracted before exp.

    It is known once the row is complete, so that a second kernel reads the product again.
    """
    largest = row_max(acc)
    return acc, log(row_sum(exp(acc - largest))) + largest


# None: the product as it is.
EPILOGUES: dict[str, Epilogue | None] = {
    "store": None, "swiglu": swiglu, "swiglu_fp8": swiglu_fp8, "scale_bias_relu": scale_bias_relu,
    "gelu_residual": gelu_residual, "absmax": absmax, "capped_residual_max": capped_residual_max,
    "logsumexp": logsumexp, "logsumexp_of_max": logsumexp_of_max,
}  # fmt: skip
# Kinds of operands by name: "Col" [N], "Tile" [M, N], or a number.
OPERANDS: dict[str, dict[str, str | float]] = {
    "scale_bias_relu": {"alpha": 0.5, "bias": "Col"},
    "gelu_residual": {"bias": "Col", "residual": "Tile"},
    "capped_residual_max": {"residual": "Tile"},
}


@dataclass(frozen=True)
class GemmShape:
    """Sizes of a GEMM: a [m, k], b [n, k]; format: of `envoi.quant.FORMATS`; epilogue: of `EPILOGUES`."""

    m: int
    n: int
    k: int
    format: str = "bf16"
    epilogue: str = "store"


@dataclass(frozen=True)
class GroupedShape:
    """Sizes of a grouped GEMM: num_rows[e] rows of expert e, [sum(num_rows), k] against weights [len(num_rows), n, k].

    Other fields: see GemmShape.
    """

    num_rows: tuple[int, ...]
    n: int
    k: int
    format: str
    epilogue: str = "store"


Shape = GemmShape | GroupedShape


def drawn_rows(total: int, num_experts: int) -> tuple[int, ...]:
    """Draw the rows per expert of random routing, with a fixed seed.

    >>> drawn_rows(100, 4)
    (23, 19, 32, 26)
    """
    drawn = random.Random(total).choices(range(num_experts), k=total)
    return tuple(drawn.count(expert) for expert in range(num_experts))


@dataclass(frozen=True)
class Inputs:
    """Operands a [M, K] and b [N, K] (or [E, N, K]) in the case's format and in bf16; with offsets [E + 1], by expert.

    operands: the epilogue's.
    """

    a: Matrix
    b: Matrix
    wide_a: torch.Tensor
    wide_b: torch.Tensor
    operands: dict[str, Any] = field(default_factory=dict)
    offsets: torch.Tensor | None = None

    @property
    def ends(self) -> torch.Tensor:
        """Ends of the experts' rows, [E], in torch's form."""
        return self.offsets[1:] if self.offsets is not None else torch.empty(0)


def make(shape: Shape, device: torch.device) -> Inputs:
    """Make random inputs that depend on the shape alone; on "meta", tensors without memory."""
    counts = shape.num_rows if isinstance(shape, GroupedShape) else ()
    num_rows = shape.m if isinstance(shape, GemmShape) else sum(counts)
    experts = (len(counts),) if isinstance(shape, GroupedShape) else ()
    source = None if device.type == "meta" else generator(device, num_rows, *experts, shape.n, shape.k)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=source, device=device, dtype=torch.bfloat16)

    scale = shape.k**-0.25  # for products of about 1
    weights = normal(*experts, shape.n, shape.k).mul_(scale)
    x = in_format(normal(num_rows, shape.k).mul_(scale), weights, shape.format)
    sizes = {"Col": (*experts, shape.n), "Tile": (num_rows, shape.n)}
    operands = {
        name: normal(*sizes[kind]) if isinstance(kind, str) else kind
        for name, kind in OPERANDS.get(shape.epilogue, {}).items()
    }
    ends = torch.tensor(counts, device=device, dtype=torch.int32).cumsum(0).to(torch.int32)
    return replace(x, operands=operands, offsets=functional.pad(ends, (1, 0)) if experts else None)


def in_format(a: torch.Tensor, b: torch.Tensor, name: str) -> Inputs:
    """Convert bf16 matrices to a format of `FORMATS`."""
    format = format_named(name)
    rows, weights = in_scheme(a, format.activations), in_scheme(b, format.weights)
    return Inputs(rows, with_checked_scales(weights) if isinstance(weights, QuantTensor) else weights, a, b)


def in_scheme(x: torch.Tensor, scheme: Scheme | None) -> Matrix:
    """Quantise a matrix, or matrices a few at a time; None leaves them as they are."""
    if scheme is None:
        return x
    if x.dim() == 2:
        return quantize(x, scheme)
    parts = [quantize(part, scheme) for part in x.split(QUANTISE_AT_ONCE)]
    return replace(parts[0], values=concatenate([q.values for q in parts]), sf=concatenate([q.sf for q in parts]))


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return |got - want| / |want| in float64, over all elements together; NaN counts as 1."""
    difference = (got.double() - want.double()).nan_to_num(nan=torch.inf)
    norm = float(want.double().norm())
    error = float(difference.norm()) / norm if norm else float(difference.norm())
    return error if error < 1.0 else 1.0


def generator(device: torch.device, *seeds: int) -> torch.Generator:
    """Return a generator seeded by the case alone."""
    return torch.Generator(device).manual_seed(sum(seed * 1_000_003**place for place, seed in enumerate(seeds)) % 2**63)


@dataclass(frozen=True)
class Planned:
    """Planned launch of one GEMM. default: the shipped config, or the one by `gemm.hopper.time_model`."""

    call: host.Call
    problem: Problem
    default: Config

    def chosen(self, num_sms: int) -> Config:
        """Return the config that runs on this machine."""
        return tune.choose(self.problem, self.call.code, num_sms) or self.default

    def key(self, num_sms: int) -> str:
        """Return the key of the measured config; several epilogues may share it."""
        return tune.key_of(self.problem, self.call.code, num_sms)

    def promising(self, num_sms: int, at_most: int) -> list[Config]:
        """Return the candidates worth measuring, most promising first, after the default and what is shipped."""
        found = candidates(self.problem, self.call.code, num_sms)
        found.sort(key=lambda config: predicted_cycles(self.problem, config, num_sms))
        measured = tune.best(self.problem, self.call.code, num_sms, shipped_only=True) or self.default
        return list(dict.fromkeys([self.default, measured, *found]))[:at_most]


def label(shape: Shape) -> str:
    """Return a table's label: "8192x4096x7168 bf16 swiglu", "32: 8192x4096x7168 .." for 32 experts.

    "<= 289" follows the sizes if the experts have different numbers of rows, 289 at most.
    """
    if not isinstance(shape, GroupedShape):
        return f"{shape.m}x{shape.n}x{shape.k} {shape.format} {shape.epilogue}"
    least, most = min(shape.num_rows), max(shape.num_rows)
    rows = f"{len(shape.num_rows)}: {sum(shape.num_rows)}x{shape.n}x{shape.k}"
    return f"{rows}{f' <= {most}' * (least < most)} {shape.format} {shape.epilogue}"


def refusal(shape: Shape, x: Inputs) -> str:
    """Return why the Hopper kernel can't run this; "" if it can."""
    return host.why_not_hopper(x.a, x.b, (EPILOGUES[shape.epilogue] or store).ir)


def planned(shape: Shape, num_sms: int, x: Inputs | None = None) -> Planned:
    """Plan a GEMM for inputs as `make` makes them; without any, tensors have no memory.

    Raises ValueError if the Hopper kernel can't run it.
    """
    x = x or make(shape, META)
    why = refusal(shape, x)
    if why:
        raise ValueError(f"{label(shape)}: not on the Hopper kernel: {why}")
    ir = (EPILOGUES[shape.epilogue] or store).ir
    call, default = host.planned(x.a, x.b, x.offsets, ir, torch.bfloat16, x.operands, num_sms)
    return Planned(call, host.problem_of(call), default)


@dataclass(frozen=True)
class ConfigCall:
    """Launch of a GEMM with a config, on tensors without memory: what `runtime.planned_kernels` compiles."""

    shape: Shape
    config: Config
    num_sms: int

    def __call__(self, _: int) -> None:
        """Make the launch."""
        host.launch_gemm(_planned(self.shape, self.num_sms).call, self.config, self.num_sms)


_planned = cache(planned)

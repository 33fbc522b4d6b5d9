"""The GEMMs of the registry as the Hopper kernel sees them: the launch, the problem, the config that it would get."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from envoi.bench.shapes import Case, GemmShape, GroupedShape
from envoi.bench.suites.endings import ENDINGS
from envoi.bench.suites.inputs import Inputs, make
from envoi.epilogue.library import store
from envoi.gemm.hopper import host, tune
from envoi.gemm.hopper.config import Config, Problem, candidates, predicted_cycles

Shape = GemmShape | GroupedShape
META = torch.device("meta")
NUM_SMS = 132  # of an H100 or H200, where none is there to ask


@dataclass(frozen=True)
class Planned:
    """default: the config by the model of `gemm.config`, or shipped."""

    call: host.Call
    problem: Problem
    default: Config

    def chosen(self, num_sms: int) -> Config:
        """The config that runs on this machine."""
        return tune.best(self.problem, self.call.code, num_sms) or self.default

    def key(self, num_sms: int) -> str:
        """What its measured config is filed under; several epilogues may share it."""
        return tune.key_of(self.problem, self.call.code, num_sms)

    def promising(self, num_sms: int, at_most: int) -> list[Config]:
        """The candidates that are worth measuring, most promising first; the default is among them."""
        found = candidates(self.problem, self.call.code)
        found.sort(key=lambda config: predicted_cycles(self.problem, config, num_sms))
        return list(dict.fromkeys([self.default, *found]))[:at_most]


def shapes_of(cases: Iterable[Case]) -> list[Shape]:
    """The GEMMs that Envoi runs in these cases, each once; plain ones too where they are a baseline."""
    found: dict[Shape, None] = {}
    for case in cases:
        if isinstance(case.shape, (GemmShape, GroupedShape)):
            found |= {case.shape: None, replace(case.shape, epilogue="store"): None}
            if case.suite == "gemm_weights":
                found[replace(case.shape, format="bf16")] = None
    return list(found)


def label(shape: Shape) -> str:
    """For a table: "8192x4096x7168 bf16 swiglu", of experts "32: 8192x4096x7168 ..", of 289 rows at most "<= 289"."""
    if not isinstance(shape, GroupedShape):
        return f"{shape.m}x{shape.n}x{shape.k} {shape.format} {shape.epilogue}"
    least, most = min(shape.num_rows), max(shape.num_rows)
    rows = f"{len(shape.num_rows)}: {sum(shape.num_rows)}x{shape.n}x{shape.k}"
    return f"{rows}{f' <= {most}' * (least < most)} {shape.format} {shape.epilogue}"


def refusal(shape: Shape, x: Inputs) -> str:
    """Why the Hopper kernel can't run this; "" if it can."""
    return host.supports_hopper(x.a, x.b, (ENDINGS[shape.epilogue].fused or store).ir)


def planned(shape: Shape, num_sms: int, x: Inputs | None = None) -> Planned:
    """For inputs as `inputs.make` makes them; without any, tensors have no memory.

    Raises ValueError where the Hopper kernel can't run it.
    """
    x = x or make(shape, META)
    why = refusal(shape, x)
    if why:
        raise ValueError(f"{label(shape)}: not on the Hopper kernel: {why}")
    ir = (ENDINGS[shape.epilogue].fused or store).ir
    call, default = host.planned(x.a, x.b, x.offsets, ir, torch.bfloat16, x.operands, num_sms)
    return Planned(call, host.problem_of(call), default)

"""GEMMs to measure as the Hopper kernel sees them: the launch, the problem, the chosen config."""

from dataclasses import dataclass

import torch

from envoi.epilogues.library import store
from envoi.ops.gemm.hopper import host, tune
from envoi.ops.gemm.hopper.candidates import candidates
from envoi.ops.gemm.hopper.config import Config, Problem
from envoi.ops.gemm.hopper.time_model import predicted_cycles
from envoi.tune.epilogues import EPILOGUES
from envoi.tune.inputs import Inputs, make
from envoi.tune.shapes import GroupedShape, Shape

META = torch.device("meta")


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
        found = candidates(self.problem, self.call.code)
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
    """Estimate a GEMM for inputs as `inputs.make` makes them; without any, tensors have no memory.

    Raises ValueError if the Hopper kernel can't run it.
    """
    x = x or make(shape, META)
    why = refusal(shape, x)
    if why:
        raise ValueError(f"{label(shape)}: not on the Hopper kernel: {why}")
    ir = (EPILOGUES[shape.epilogue] or store).ir
    call, default = host.planned(x.a, x.b, x.offsets, ir, torch.bfloat16, x.operands, num_sms)
    return Planned(call, host.problem_of(call), default)

"""Public function `envoi.plan`: what a call will launch and how much memory it takes, before it is made."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from envoi.check import expect_arch
from envoi.runtime import program
from envoi.runtime.devices import SMS_WITHOUT_GPU, Target, limited
from envoi.runtime.program import RefusedError


class Launched(NamedTuple):
    """Launch of a planned call: the kernel's name, its grid, Triton's options."""

    kernel: str
    grid: tuple[int, ...]
    options: dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """Planned call of an operator, for tensors of the same shapes, strides and dtypes.

    launches: in order. outputs: of the form that the call returns, on "meta". workspace_bytes: of memory that the call
    uses between its launches, for `workspace=`; 0 if it needs none. Torch's own operators, if the call uses any, and
    counters that Envoi keeps for a stream (256 KiB, more where a GEMM splits K) aren't among them.
    """

    function: Callable
    launches: tuple[Launched, ...]
    outputs: Any
    workspace_bytes: int
    forms: tuple
    num_sms: int | None

    def run(self, *arguments: Any, out: Any = None, workspace: torch.Tensor | None = None, **named: Any) -> Any:
        """Make the call; arguments, out and workspace as the operator takes them.

        Raises ValueError for arguments of other shapes, dtypes or settings than the planned ones.
        """
        forms = _forms(self.function, arguments, named)
        if forms != self.forms:
            raise ValueError(f"plan of {self.function.__name__}: expected arguments like the planned ones, got others")
        return self.function(*arguments, out=out, workspace=workspace, num_sms=self.num_sms, **named)


def plan(
    function: Callable, *arguments: Any, arch: str | None = None, num_sms: int | None = None, **named: Any
) -> Plan:  # fmt: skip
    """Plan a call of `envoi.gemm`, `grouped_gemm`, `route`, `moe` or `indexer_topk`; nothing is compiled or launched.

    arguments, named: the operator's. Tensors may be on "meta", so that no GPU is needed; on a GPU the plan is for it.
    arch: "sm_90", "sm_100" .. for tensors on "meta"; default "sm_90".
    num_sms: multiprocessors that the call may take; default: all of the GPU, or an H200's.

    Example: `envoi.plan(envoi.moe, tokens, routing, experts).workspace_bytes`.
    Raises ValueError for another function, for arguments that the operator refuses, and for tensors on a CPU; TypeError
    for names that the operator doesn't have.
    """
    listed = getattr(function, "listed", None)
    if listed is None:
        raise ValueError(f"function: expected an operator such as envoi.gemm, got {function!r}")
    found = listed(*arguments, **named)
    if found is None or not all(x is None or isinstance(x, torch.Tensor) for x in found[1]):
        raise ValueError(f"{function.__name__}: expected arguments of the operator, got others")
    tensors = found[1]
    device = next(x for x in tensors if x is not None).device
    if device.type not in ("meta", "cuda") or (device.type == "cuda" and arch is not None):
        raise ValueError(f"arguments: expected tensors on meta, or on a GPU without arch, got {device} and arch {arch}")
    if arch is not None:
        expect_arch("arch", arch)
    with nullcontext() if num_sms is None else limited(num_sms):
        on_meta = Target(arch or "sm_90", num_sms or SMS_WITHOUT_GPU)
        target = Target.of(device) if device.type == "cuda" else on_meta
    try:
        made = program.plan(function.__wrapped__, arguments, named, tensors, target)
    except RefusedError as error:
        raise ValueError(f"{function.__name__}: expected tensors that can be planned, got {error}") from None
    launches = tuple(Launched(x.kernel.fn.__name__, x.grid, dict(x.options)) for x in made.launches)
    return Plan(
        function, launches, made.build(made.outputs), made.scratch_bytes, _forms(function, arguments, named), num_sms
    )


def _forms(function: Any, arguments: tuple, named: dict[str, Any]) -> tuple:
    constants, tensors = function.listed(*arguments, **named)
    return constants, tuple(None if x is None else (x.shape, x.stride(), x.dtype) for x in tensors)

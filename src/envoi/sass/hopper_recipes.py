"""Recipes of the Hopper GEMM: the kernel that a call would launch, taken from the host path itself, without a GPU.

case -> inputs (of tensors without memory) -> host.planned -> host.arguments -> recipe
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from envoi.epilogue import epilogue, library, softmax, topk
from envoi.epilogue.api import Epilogue
from envoi.epilogue.ir import Operand
from envoi.gemm.grouping import ALL_ROWS, Grouping
from envoi.gemm.hopper import host
from envoi.gemm.hopper.config import Config
from envoi.quant import quantize
from envoi.quant.formats import FORMATS
from envoi.sass.compile import Recipe, recipe_of_call
from envoi.sass.hopper_cases import Case
from envoi.types import Matrix

NUM_SMS = 132
NUM_CHOSEN = 4  # experts per token


@epilogue
def _softmax(acc):
    return softmax(acc)


@epilogue
def _topk(acc):
    values, ids = topk(acc, NUM_CHOSEN)
    return softmax(values), ids


EPILOGUES: dict[str, Epilogue] = {
    "softmax": _softmax, "topk": _topk,
    "expert_l1_mxfp8": library.expert_l1("swiglu_oai", 7.0, True, "mxfp8"),
    "expert_l1": library.expert_l1("swiglu", None, False, None),
    "expert_l1_oai": library.expert_l1("swiglu_oai", 7.0, True, None),
    "expert_l1_concat": library.expert_l1("swiglu", None, False, None, "concat"),
    "expert_l1_oai_concat": library.expert_l1("swiglu_oai", 7.0, True, None, "concat"),
    "expert_l2": library.expert_l2(False), "expert_l2_bias": library.expert_l2(True),
    "expert_l1_fp8": library.expert_l1("swiglu", None, False, "fp8_1x128"),
    **{
        name: getattr(library, name)
        for name in (
            "store", "linear", "scale_bias_relu", "gelu_residual", "absmax", "swiglu", "swiglu_residual", "swiglu_fp8",
        )
    },
}  # fmt: skip

Make = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


@dataclass(frozen=True)
class Inputs:
    """Arguments of one call."""

    a: Matrix
    b: Matrix
    offsets: torch.Tensor | None
    epilogue: Epilogue
    operands: dict[str, Any]
    grouping: Grouping = ALL_ROWS


def without_memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Make a meta tensor; the `make` argument of recipes."""
    return torch.empty(shape, dtype=dtype, device="meta")


def inputs(case: Case, make: Make = without_memory, offsets: torch.Tensor | None = None) -> Inputs:
    """Return the inputs of a case.

    make: function of shape and dtype that returns a tensor. offsets: if grouped, the experts' first rows.
    """
    half = torch.float16 if case.format == "fp16" else torch.bfloat16
    experts = (case.num_experts,) if case.num_experts else ()
    a, b = make((case.M, case.K), half), make((*experts, case.N, case.K), half)
    if case.format not in ("bf16", "fp16"):
        schemes = FORMATS[case.format]
        a = a if schemes.activations is None else quantize(a, schemes.activations)
        b = quantize(b, schemes.weights or "")
    if case.num_experts and offsets is None:
        offsets = make((case.num_experts + 1,), torch.int32)
    ep = EPILOGUES[case.epilogue]
    operands = {operand.name: _operand(operand, case, experts, half, make) for operand in ep.ir.operands}
    grouping = Grouping(case.write_tail, to=make((case.M,), torch.int64) if case.sent else None)
    return Inputs(a, b, offsets, ep, operands, grouping)


def _operand(operand: Operand, case: Case, experts: tuple[int, ...], half: torch.dtype, make: Make) -> Any:
    if operand.kind == "Scalar":
        return 0.5
    if operand.kind == "Row":
        return make((case.M,), torch.float32)
    rows = (case.M,) if operand.shape.rows == "M" else experts
    return make((*rows, operand.shape.num_columns(case.N)), half)


def planned(given: Inputs) -> tuple[host.Call, Config]:
    """Return the host path's first launch for these inputs on an H200. ValueError if another backend takes them."""
    refusal = host.supports_hopper(given.a, given.b, given.epilogue.ir)
    if refusal:
        raise ValueError(f"epilogue {given.epilogue.ir.name}: the Hopper kernel doesn't take it: {refusal}")
    out_dtype = given.a.dtype if isinstance(given.a, torch.Tensor) else torch.bfloat16
    return host.planned(
        given.a, given.b, given.offsets, given.epilogue.ir, out_dtype, given.operands, NUM_SMS, given.grouping
    )


def recipe(case: Case, arch: str = "sm_90") -> Recipe:
    """Return the recipe of a case."""
    return recipe_of(*planned(inputs(case)), arch)


def recipe_of(call: host.Call, config: Config, arch: str = "sm_90") -> Recipe:
    """Return the recipe of a launch."""
    from envoi.gemm.hopper.kernel import gemm_kernel

    _, arguments = host.arguments(call, config, NUM_SMS)
    return recipe_of_call(gemm_kernel, arguments, arch, num_warps=config.num_warps)

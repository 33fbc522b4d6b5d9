"""Practical calls of the Hopper GEMM, and the kernels that they launch.

    case -> inputs -> planned (by the host path) -> launch_of

Tensors have no memory, unless `inputs` is given another way to make them.
"""

import json
import re
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from envoi.epilogues import epilogue, library, softmax, topk
from envoi.epilogues.api import Epilogue
from envoi.ops.gemm.grouping import ALL_ROWS, Grouping
from envoi.ops.gemm.hopper import host, tune
from envoi.ops.gemm.hopper.config import Config
from envoi.quant import quantize
from envoi.quant.formats import FORMATS
from envoi.runtime.program import Launch, without_memory
from envoi.types import Matrix
from tools.kernel_cases import HOPPER, NUM_SMS, KernelCase, Make, kernel_key
from tools.kernel_cases.operands import operands_of

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
    "expert_l1_pairs": library.expert_l1("swiglu", None, False, "fp8_1x128", rounded=True),
    "expert_l1_pairs_concat": library.expert_l1("swiglu", None, False, "fp8_1x128", "concat", True),
    "expert_l1_pairs_oai": library.expert_l1("swiglu_oai", 7.0, True, "fp8_1x128", rounded=True),
    "expert_l2": library.expert_l2(False), "expert_l2_bias": library.expert_l2(True),
    "expert_l1_fp8": library.expert_l1("swiglu", None, False, "fp8_1x128"),
    **{
        name: getattr(library, name)
        for name in (
            "store", "linear", "scale_bias_relu", "gelu_residual", "absmax", "swiglu", "swiglu_residual", "swiglu_fp8",
        )
    },
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Call of `envoi.gemm`, or of `envoi.grouped_gemm` if there are experts: [M, K] @ [N, K].T.

    epilogue: a key of `EPILOGUES`. format: a key of `envoi.quant.FORMATS`, or fp16. M: sum over all experts.
    write_tail: see `Grouping`; `envoi.moe` has it off. sent: rows are written to given addresses. scales_at_most_2: see
    QuantTensor.
    """

    name: str
    epilogue: str
    M: int
    N: int
    K: int
    format: str = "bf16"
    num_experts: int = 0
    write_tail: bool = True
    sent: bool = False
    scales_at_most_2: bool = True

    @property
    def title(self) -> str:
        """Name of the kernel's case."""
        return f"gemm-mx-sm90-{self.name}" if "mx" in self.format else f"gemm-sm90-{self.name}"

    def __str__(self) -> str:
        kind = f"{self.format}{'' if self.scales_at_most_2 else ', not known to be scales_at_most_2'}"
        sizes = f"{self.epilogue} of [{self.M}, {self.K}] @ [{self.N}, {self.K}].T in {kind}"
        return f"{sizes}, {self.num_experts} experts" if self.num_experts else sizes


CASES = (
    Case("store", "store", 4096, 4096, 7168),
    Case("store-fp16", "store", 4096, 4096, 7168, "fp16"),
    Case("odd", "store", 129, 130, 72),
    Case("scale-bias-relu", "scale_bias_relu", 4096, 4096, 2048),
    Case("gelu-residual", "gelu_residual", 4096, 4096, 2048),
    Case("absmax", "absmax", 4096, 4096, 2048),
    Case("absmax-few", "absmax", 30, 24576, 1536),
    Case("absmax-fp8-block128", "absmax", 129, 16384, 2048, "fp8_block128"),
    Case("narrowed", "store", 385, 12288, 4096),
    Case("narrowed-pair", "store", 901, 2624, 6144),
    Case("narrowed-in-turns", "scale_bias_relu", 155, 32768, 512),
    Case("narrowed-alone", "store", 150, 7168, 8192),
    Case("narrowed-fp8-row", "store", 1591, 2048, 4096, "fp8_row"),
    Case("narrowed-residual", "gelu_residual", 520, 4096, 2048),
    Case("narrowed-features", "store", 256, 5120, 5120),
    Case("narrowed-features-alone", "scale_bias_relu", 126, 11264, 2048),
    Case("rows-192", "swiglu", 151, 14336, 6144),
    Case("two-widths", "swiglu", 862, 2880, 4096),
    Case("two-widths-in-turns", "swiglu", 150, 7168, 8192),
    Case("two-widths-fp8-row", "swiglu", 731, 6144, 2048, "fp8_row"),
    Case("two-widths-residual", "swiglu_residual", 520, 4096, 14336),
    Case("two-widths-maximum", "absmax", 412, 2880, 4096),
    Case("two-widths-halves", "swiglu", 412, 2880, 4096),
    Case("two-widths-bias", "scale_bias_relu", 1000, 2880, 4096),
    Case("swiglu", "swiglu", 4096, 4096, 7168),
    Case("swiglu-residual", "swiglu_residual", 4096, 4096, 2048),
    Case("swiglu-fp8", "swiglu_fp8", 4096, 4096, 7168),
    Case("softmax-64", "softmax", 4096, 64, 2880),
    Case("softmax-128", "softmax", 4096, 128, 2880),
    Case("topk-64", "topk", 4096, 64, 2880),
    Case("topk-128", "topk", 4096, 128, 2880),
    Case("few", "store", 16, 7168, 2048),
    Case("few-swiglu", "swiglu", 32, 4096, 2048),
    Case("few-narrowed", "store", 42, 5120, 2880),
    Case("few-narrowed-pair", "store", 44, 12288, 4096),
    Case("few-narrowed-swiglu", "swiglu", 40, 8192, 4096),
    Case("few-narrowed-maximum", "absmax", 20, 8192, 4096),
    Case("few-narrowed-fp8-row", "scale_bias_relu", 21, 6144, 16384, "fp8_row"),
    Case("split", "store", 8192, 4096, 7168),
    Case("split-linear", "linear", 8192, 8192, 8192),
    Case("split-narrow", "store", 256, 256, 7168),
    Case("fp8-row", "store", 4096, 4096, 7168, "fp8_row"),
    Case("fp8-row-few", "store", 16, 4096, 7168, "fp8_row"),
    Case("fp8-row-swiglu-fp8", "swiglu_fp8", 4096, 4096, 7168, "fp8_row"),
    Case("fp8-block128", "store", 4096, 4096, 7168, "fp8_block128"),
    Case("fp8-block128-few", "store", 16, 4096, 7168, "fp8_block128"),
    Case("fp8-block128-swiglu", "swiglu", 4096, 4096, 7168, "fp8_block128"),
    Case("grouped", "store", 8192, 2880, 2880, num_experts=32),
    Case("grouped-few", "store", 512, 2880, 2880, num_experts=32),
    Case("grouped-l1-mxfp8", "expert_l1_mxfp8", 8192, 5760, 2880, num_experts=32),
    Case("grouped-fp8-row", "expert_l1_fp8", 8192, 4096, 7168, "fp8_row", num_experts=32),
    Case("grouped-fp8-block128", "expert_l1_mxfp8", 8192, 4096, 7168, "fp8_block128", num_experts=32),
    Case("experts-l1", "expert_l1", 12288, 4096, 4096, num_experts=32, write_tail=False),
    Case("experts-l1-few", "expert_l1", 384, 4096, 4096, num_experts=32, write_tail=False),
    Case("experts-l1-oai", "expert_l1_oai", 8192, 5760, 2880, num_experts=32, write_tail=False),
    Case("experts-l1-fp8-row", "expert_l1", 12288, 4096, 4096, "fp8_row", num_experts=32, write_tail=False),
    Case("experts-l1-fp8-block128", "expert_l1", 12288, 4096, 4096, "fp8_block128", num_experts=32, write_tail=False),
    Case("experts-l1-concat", "expert_l1_concat", 12288, 4096, 4096, num_experts=32, write_tail=False),
    Case("experts-l1-concat-few", "expert_l1_concat", 384, 4096, 4096, num_experts=32, write_tail=False),
    Case("experts-l1-concat-oai", "expert_l1_oai_concat", 8192, 5760, 2880, num_experts=32, write_tail=False),
    Case("experts-l1-concat-fp8-row", "expert_l1_concat", 12288, 4096, 4096, "fp8_row", 32, write_tail=False),
    Case("experts-l1-concat-fp8-block128", "expert_l1_concat", 12288, 4096, 4096, "fp8_block128", 32, write_tail=False),
    Case("experts-l1-concat-fp8-block128-few", "expert_l1_concat", 384, 4096, 4096, "fp8_block128", 32, False),
    Case("experts-l1-pairs", "expert_l1_pairs", 12288, 4096, 4096, "fp8_block128", 32, write_tail=False),
    Case("experts-l1-pairs-few", "expert_l1_pairs", 1536, 4096, 4096, "fp8_block128", 32, write_tail=False),
    Case("experts-l1-pairs-square", "expert_l1_pairs", 49152, 4096, 4096, "fp8_block128", 32, write_tail=False),
    Case("experts-l1-pairs-concat", "expert_l1_pairs_concat", 12288, 4096, 4096, "fp8_block128", 32, write_tail=False),
    Case("experts-l1-pairs-oai", "expert_l1_pairs_oai", 12288, 4096, 4096, "fp8_block128", 32),
    Case("experts-l2", "expert_l2", 12288, 4096, 2048, num_experts=32, write_tail=False),
    Case("experts-l2-few", "expert_l2", 384, 4096, 2048, num_experts=32, write_tail=False),
    Case("experts-l2-sent", "expert_l2", 12288, 4096, 2048, num_experts=64, write_tail=False, sent=True),
    Case("experts-l2-sent-fp8-block128", "expert_l2", 12288, 4096, 2048, "fp8_block128", 64, False, True),
    Case("experts-l2-sent-fp8-row", "expert_l2", 12288, 4096, 2048, "fp8_row", 64, write_tail=False, sent=True),
    Case("experts-l2-sent-few", "expert_l2", 384, 4096, 2048, "fp8_block128", 64, write_tail=False, sent=True),
    Case("experts-l2-bias", "expert_l2_bias", 8192, 2880, 2880, num_experts=32, write_tail=False),
    Case("experts-l2-fp8-row", "expert_l2", 12288, 4096, 2048, "fp8_row", num_experts=32, write_tail=False),
    Case("experts-l2-fp8-block128", "expert_l2", 12288, 4096, 2048, "fp8_block128", num_experts=32, write_tail=False),
)


@dataclass(frozen=True)
class Inputs:
    """Arguments of one call."""

    a: Matrix
    b: Matrix
    offsets: torch.Tensor | None
    epilogue: Epilogue
    operands: dict[str, Any]
    grouping: Grouping = ALL_ROWS


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
        b = replace(b, scales_at_most_2=case.scales_at_most_2) if "mx" in case.format else b
    if case.num_experts and offsets is None:
        offsets = make((case.num_experts + 1,), torch.int32)
    ep = EPILOGUES[case.epilogue]
    operands = operands_of(
        ep.ir, case.M, case.N, experts, lambda operand: torch.float32 if operand.kind == "Row" else half, make
    )
    grouping = Grouping(case.write_tail, to=make((case.M,), torch.int64) if case.sent else None)
    return Inputs(a, b, offsets, ep, operands, grouping)


def planned(given: Inputs) -> tuple[host.Call, Config]:
    """Return the host path's first launch for these inputs on an H200. ValueError if another backend takes them."""
    refusal = host.why_not_hopper(given.a, given.b, given.epilogue.ir)
    if refusal:
        raise ValueError(f"epilogue {given.epilogue.ir.name}: the Hopper kernel doesn't take it: {refusal}")
    out_dtype = given.a.dtype if isinstance(given.a, torch.Tensor) else torch.bfloat16
    return host.planned(
        given.a, given.b, given.offsets, given.epilogue.ir, out_dtype, given.operands, NUM_SMS, given.grouping
    )


def launch_of(case: Case) -> Launch:
    """Return the launch of a case on an H200."""
    return host.launch_of(*planned(inputs(case)), NUM_SMS)


def launch_with(call: host.Call, config: Config, num_sms: int = NUM_SMS) -> Launch:
    """Return the launch of a call with a config, on an H200."""
    return host.launch_of(call, config, num_sms)


def kernel_case(case: Case) -> KernelCase:
    """Return the kernel of a case under its name."""
    return KernelCase(case.title, f"GEMM on Hopper: {case}", HOPPER, partial(launch_of, case))


KERNELS = tuple(map(kernel_case, CASES))


# Cases of tuned.json

KEY = re.compile(r"(\d+)sm (\d+)x(\d+)x(\d+) (\d)B(.*)")
# An epilogue of each kind that a key can name.
EXAMPLES = {
    "": "store", "tma": "store", "rows": "absmax", "tma rows": "absmax", "tma side": "gelu_residual",
    "tma piece256": "swiglu_fp8", "whole": "topk", "whole tma": "softmax",
    "piece128 pairs": "expert_l1_pairs",
}  # fmt: skip


def tuned_cases() -> tuple[Case, ...]:
    """Return a case for every key of `tuned.json`. Raises ValueError for one that no case has."""
    return tuple(map(case_of_key, json.loads(tune.SHIPPED.read_text())))


def case_of_key(key: str) -> Case:
    """Return a case whose config is filed under this key."""
    found = KEY.fullmatch(key)
    if found is None or int(found[1]) != NUM_SMS:
        raise ValueError(f"tuned.json: expected a key like '{NUM_SMS}sm 4096x4096x7168 2B tma', got {key!r}")
    M, N, K, num_bytes = map(int, found.groups()[1:5])
    kinds = {kind: int(number or 1) for kind, number in re.findall(r"(groups|scaled|sent)(\d*)", found[6])}
    example = re.sub(r" (groups|scaled|sent)\d*", "", found[6]).strip()
    if example not in EXAMPLES:
        raise ValueError(f"tuned.json: {key}: no example has an epilogue of this kind, so no test launches its kernel")
    format = "bf16" if num_bytes == 2 else "fp8_block128" if "scaled" in kinds else "fp8_row"
    return Case(
        f"tuned-{key.replace(' ', '-')}", EXAMPLES[example], M, N, K, format, kinds.get("groups", 0),
        sent="sent" in kinds,
    )  # fmt: skip


@cache
def measured_cases() -> tuple[Case, ...]:
    """Return the cases of `tuned.json` whose kernels aren't those of `CASES`, one for each kernel."""
    kernels: dict[str, Case] = {}
    for case in (*CASES, *tuned_cases()):
        kernels.setdefault(kernel_key(*launch_of(case)), case)
    return tuple(case for case in kernels.values() if case not in CASES)

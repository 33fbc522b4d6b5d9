"""Launches of the Hopper kernel for few tokens, on the layer of Qwen3-30B-A3B: 2048/768, 128 experts, top-8."""

from dataclasses import dataclass
from functools import partial

from envoi.runtime.program import Launch
from envoi.types import ExpertWeights
from tools.kernel_cases import HOPPER, KernelCase
from tools.kernel_cases.planning import Layer, launch_of_call

HIDDEN, INTERMEDIATE, NUM_EXPERTS, NUM_TOPK = 2048, 768, 128, 8
KERNELS_OF = {"l1": ("few_kernel", 0), "l2": ("few_kernel", 1), "sum": ("combine_kernel", 0)}


@dataclass(frozen=True)
class Case:
    """One launch of the layer. kind: "l1", "l2" or "sum". format: "bf16" or "fp8_block128"."""

    name: str
    kind: str
    format: str
    num_tokens: int
    layout: str = "concat"
    has_bias: bool = False

    @property
    def title(self) -> str:
        """Name of the kernel's case."""
        return f"few-{self.name}"

    @property
    def layer(self) -> Layer:
        """Layer that launches it."""
        sizes = HIDDEN, INTERMEDIATE, NUM_EXPERTS, NUM_TOPK
        return Layer(self.format, self.num_tokens, *sizes, has_bias=self.has_bias, layout=self.layout)


CASES = (
    Case("l1", "l1", "bf16", 1),
    Case("l2", "l2", "bf16", 1),
    Case("l1-64", "l1", "bf16", 64),
    Case("l1-interleaved-bias", "l1", "bf16", 16, "interleaved", True),
    Case("l2-bias", "l2", "bf16", 16, "interleaved", True),
    Case("l1-fp8-block128", "l1", "fp8_block128", 16),
    Case("l2-fp8-block128", "l2", "fp8_block128", 16),
    Case("sum", "sum", "bf16", 16),
)


def launch_of(case: Case) -> Launch:
    """Return the launch of a case on an H200."""
    return launch_of_call(case.layer, *KERNELS_OF[case.kind])


def experts_of(case: Case) -> ExpertWeights:
    """Return the case's experts, without memory."""
    return case.layer.experts


ABOUT = "few tokens on Hopper"
KERNELS = tuple(
    KernelCase(
        case.title, f"{ABOUT}: {case.kind} of {case.format} for {case.num_tokens} tokens", HOPPER,
        partial(launch_of, case),
    )
    for case in CASES
)  # fmt: skip

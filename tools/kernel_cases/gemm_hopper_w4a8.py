"""Launches of the Hopper kernel for MXFP4 weights and FP8 tokens, on a layer of gpt-oss-20b's sizes.

2880/2880, 32 experts, top-4, biases.
"""

from dataclasses import dataclass, replace
from functools import partial

from envoi.epilogues.api import Epilogue
from envoi.epilogues.library import expert_l1, expert_l2
from envoi.runtime.program import Launch
from tools.kernel_cases import HOPPER, KernelCase
from tools.kernel_cases.planning import Layer, LayerOfRanks, launch_of_call

HIDDEN, INTERMEDIATE, NUM_EXPERTS, NUM_TOPK = 2880, 2880, 32, 4
NUM_RANKS = 2  # of a layer whose rows are sent
ACTIVATION, LIMIT = "swiglu_oai", 7.0


@dataclass(frozen=True)
class Case:
    """One launch of the layer for so many tokens.

    kind: "l1", "l2", or "sent", which is L2 whose rows go to other places. looks_up: shifts are far
    apart.
    """

    name: str
    kind: str
    num_tokens: int
    looks_up: bool = False
    num_experts: int = NUM_EXPERTS

    @property
    def title(self) -> str:
        """Name of the kernel's case."""
        return f"w4a8-{self.name}"

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows and columns of the weights, N and K."""
        return (2 * INTERMEDIATE, HIDDEN) if self.kind == "l1" else (HIDDEN, INTERMEDIATE)

    @property
    def epilogue(self) -> Epilogue:
        """Epilogue of the GEMM."""
        if self.kind == "l1":
            return expert_l1(ACTIVATION, LIMIT, True, None, has_scale=True)
        return expert_l2(True, True)


CASES = (
    Case("l1-16", "l1", 16),
    Case("l1-64", "l1", 320),
    Case("l1-128", "l1", 512),
    Case("l2-128", "l2", 512),
    Case("l1", "l1", 4096),
    Case("l2", "l2", 4096),
    Case("sent", "sent", 4096),
    Case("l1-512-experts", "l1", 65536, num_experts=512),
    Case("l1-tables", "l1", 4096, looks_up=True),
)


def launch_of(case: Case) -> Launch:
    """Return the launch of a case on an H200."""
    sizes = HIDDEN, INTERMEDIATE, case.num_experts, NUM_TOPK
    layer = Layer("mxfp4_fp8", case.num_tokens, *sizes, ACTIVATION, has_bias=True, bounded=not case.looks_up)
    layer = replace(layer, batch_invariant=True)  # never the kernels for few tokens
    call = LayerOfRanks(layer, NUM_RANKS) if case.kind == "sent" else layer
    return launch_of_call(call, "w4a8_kernel", 0 if case.kind == "l1" or case.looks_up else 1)


ABOUT = "MXFP4 weights, FP8 tokens on Hopper"
KERNELS = tuple(
    KernelCase(case.title, f"{ABOUT}: {case.kind} for {case.num_tokens} tokens", HOPPER, partial(launch_of, case))
    for case in CASES
)

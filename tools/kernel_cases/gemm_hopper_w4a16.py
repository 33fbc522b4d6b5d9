"""Launches of the Hopper kernels for 4-bit weights and bf16 tokens, and for few FP8 tokens.

On a layer of gpt-oss-20b's sizes: 2880/2880, 32 experts, top-4, biases; the kernels for few tokens also on 4096/1536.
"""

from dataclasses import dataclass
from functools import partial

from envoi.runtime.kernel_case import HOPPER, KernelCase
from envoi.runtime.program import Launch
from tools.kernel_cases.planning import Layer, LayerOfRanks, launch_of_call

HIDDEN, INTERMEDIATE, NUM_EXPERTS, NUM_TOPK = 2880, 2880, 32, 4
OTHER_SIZES = 4096, 1536  # in tiles of 16 tokens weights are requested in another way
LARGE_SIZES = 7168, 2048  # an SM has one CTA of 16 warps
NUM_RANKS = 2  # of a layer whose rows are sent
KERNELS_OF = {
    "permute": ("permute_kernel", 0), "l1": ("few_kernel", 0), "l2": ("few_kernel", 1), "sum": ("sum_kernel", 0),
    "many-l1": ("w4a8_kernel", 0), "many-l2": ("w4a8_kernel", 1), "many-sent": ("w4a8_kernel", 1),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One launch of the layer for so many tokens.

    kind: "permute", "l1", "l2" or "sum" of the kernels for few tokens; or "many-l1", "many-l2", "many-sent", which is
    L2 whose rows go to other places. nvfp4: of the weights; else they are MXFP4. sizes: hidden, intermediate.
    fp8: of the tokens, of the kernels for few of them; else they are bf16. looks_up: shifts of their weights are far
    apart.
    """

    name: str
    kind: str
    num_tokens: int
    nvfp4: bool = False
    sizes: tuple[int, int] = HIDDEN, INTERMEDIATE
    fp8: bool = False
    looks_up: bool = False

    @property
    def title(self) -> str:
        """Name of the kernel's case."""
        return f"w4a8-{self.name}" if self.fp8 else f"w4a16-{self.name}"


CASES = (
    Case("permute", "permute", 16),
    Case("few-l1-ids", "l1", 1),
    Case("few-l1", "l1", 16),
    Case("few-l2", "l2", 16),
    Case("few-l1-wide", "l1", 64),
    Case("few-l2-wide", "l2", 64),
    Case("few-l1-wide-4096", "l1", 64, sizes=OTHER_SIZES),
    Case("few-l2-wide-1536", "l2", 64, sizes=OTHER_SIZES),
    Case("sum", "sum", 16),
    Case("many-l1-64", "many-l1", 256),
    Case("many-l1-128", "many-l1", 512),
    Case("many-l1", "many-l1", 4096),
    Case("many-l2", "many-l2", 4096),
    Case("many-sent", "many-sent", 4096),
    Case("nvfp4-l1-16", "many-l1", 16, True),
    Case("nvfp4-l1-64", "many-l1", 256, True),
    Case("nvfp4-l1-128", "many-l1", 512, True),
    Case("nvfp4-l1", "many-l1", 4096, True),
    Case("nvfp4-l2", "many-l2", 4096, True),
    Case("permute", "permute", 16, fp8=True),
    Case("few-l1-ids", "l1", 1, fp8=True),
    Case("few-l2-ids", "l2", 1, fp8=True),
    Case("few-l1", "l1", 16, fp8=True),
    Case("few-l2", "l2", 16, fp8=True),
    Case("few-l1-16", "l1", 48, fp8=True),
    Case("few-l2-16", "l2", 48, fp8=True),
    Case("few-l1-16-7168", "l1", 48, sizes=LARGE_SIZES, fp8=True),
    Case("few-l2-16-2048", "l2", 48, sizes=LARGE_SIZES, fp8=True),
    Case("few-l1-tables", "l1", 16, fp8=True, looks_up=True),
)


def launch_of(case: Case) -> Launch:
    """Return the launch of a case on an H200."""
    format = "nvfp4" if case.nvfp4 else "mxfp4_fp8" if case.fp8 else "mxfp4"
    sizes = *case.sizes, NUM_EXPERTS, NUM_TOPK
    layer = Layer(format, case.num_tokens, *sizes, "swiglu_oai", has_bias=True, bounded=not case.looks_up)
    call = LayerOfRanks(layer, NUM_RANKS) if case.kind == "many-sent" else layer
    return launch_of_call(call, *KERNELS_OF[case.kind])


ABOUT = "4-bit weights, bf16 or FP8 tokens on Hopper"
KERNELS = tuple(
    KernelCase(case.title, f"{ABOUT}: {case.kind} for {case.num_tokens} tokens", HOPPER, partial(launch_of, case))
    for case in CASES
)

"""Launches of the Hopper kernels for 4-bit weights, also INT4, and bf16 tokens, and for few FP8 tokens.

On a layer of gpt-oss-20b's sizes: 2880/2880, 32 experts, top-4, biases; the kernels for few tokens also on 4096/1536.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch

from envoi.runtime.program import Launch, without_memory
from envoi.types import ExpertWeights, QuantTensor
from tools.kernel_cases import HOPPER, KernelCase
from tools.kernel_cases.planning import Layer, LayerOfRanks, launch_of_call

HIDDEN, INTERMEDIATE, NUM_EXPERTS, NUM_TOPK = 2880, 2880, 32, 4
OTHER_SIZES = 4096, 1536  # in tiles of 16 tokens weights are requested in another way
LARGE_SIZES = 7168, 2048  # an SM has one CTA of 16 warps
SMALL_SIZES = 2048, 768  # a kernel that an assembler got wrong, for more than 128 slots: `machine_code.operands`
NUM_RANKS = 2  # of a layer whose rows are sent
OF_RANKS = "many-sent", "widen"
KERNELS_OF = {
    "permute": ("permute_kernel", 0), "l1": ("few_kernel", 0), "l2": ("few_kernel", 1), "sum": ("combine_kernel", 0),
    "many-l1": ("w4a8_kernel", 0), "many-l2": ("w4a8_kernel", 1), "many-sent": ("w4a8_kernel", 1),
    "gather": ("gather_kernel", 0), "widen": ("widen_kernel", 0),
}  # fmt: skip


@dataclass(frozen=True)
class Int4:
    """Form of INT4 weights: columns that share a factor, the factors' dtype, and whether there are zero points."""

    columns: int = 32
    dtype: torch.dtype = torch.bfloat16
    zeros: bool = False

    def of(self, x: QuantTensor) -> QuantTensor:
        """Return weights of these sizes in this form, without memory, in the order of fragments."""
        shape = *x.shape[:-1], x.shape[-1] // self.columns
        zeros = without_memory(shape, torch.uint8) if self.zeros else None
        return QuantTensor(x.values, without_memory(shape, self.dtype), (1, self.columns), order=x.order, zeros=zeros)


@dataclass(frozen=True)
class Int4Layer(Layer):
    """Layer of experts in INT4."""

    form: Int4 = Int4()

    @property
    def experts(self) -> ExpertWeights:
        """Experts without memory."""
        packed = super().experts
        gate_up, down = (self.form.of(cast(QuantTensor, weight)) for weight in (packed.gate_up, packed.down))
        return replace(packed, gate_up=gate_up, down=down)


@dataclass(frozen=True)
class Case:
    """One launch of the layer for so many tokens.

    kind: "permute", "l1", "l2" or "sum" of the kernels for few tokens; or "gather", "many-l1", "many-l2", "many-sent",
    which is L2 whose rows go to other places, and "widen", which makes other ranks' rows bf16. nvfp4: of the weights;
    else they are MXFP4. sizes: hidden, intermediate. fp8: of the tokens, of the kernels for few of them; else they are
    bf16, or MXFP8's numbers with mxfp8. looks_up: shifts of FP8's weights are far apart. int4: the form of INT4
    weights. num_experts: up to 256 and up to 512 leave a thread other registers.
    """

    name: str
    kind: str
    num_tokens: int
    nvfp4: bool = False
    sizes: tuple[int, int] = HIDDEN, INTERMEDIATE
    fp8: bool = False
    looks_up: bool = False
    int4: Int4 | None = None
    mxfp8: bool = False
    num_experts: int = NUM_EXPERTS

    @property
    def title(self) -> str:
        """Name of the kernel's case."""
        return f"w4a8-{self.name}" if self.fp8 else f"w4a16-{self.name}"


# Factors of 32 weights in bf16 and no zero points, as Kimi-K2 has them; of 128 as GPTQ and AWQ do; and what else is
# read in another way.
INT4_FORMS = {
    "": Int4(), "-128": Int4(64), "-gptq": Int4(64, torch.float16), "-awq": Int4(64, torch.float16, True),
    "-zeros": Int4(32, torch.bfloat16, True),
}  # fmt: skip
INT4_CASES = (
    ("l1", 1, (HIDDEN, INTERMEDIATE)), ("l1", 16, (HIDDEN, INTERMEDIATE)), ("l2", 16, (HIDDEN, INTERMEDIATE)),
    ("l1", 64, (HIDDEN, INTERMEDIATE)), ("l2", 64, (HIDDEN, INTERMEDIATE)), ("l1", 32, LARGE_SIZES),
    ("l2", 32, LARGE_SIZES), ("many-l1", 256, (HIDDEN, INTERMEDIATE)), ("many-l1", 512, (HIDDEN, INTERMEDIATE)),
    ("many-l1", 4096, (HIDDEN, INTERMEDIATE)), ("many-l2", 4096, (HIDDEN, INTERMEDIATE)),
)  # fmt: skip
# MXFP4 weights, tokens in bf16.
OF_BF16 = (
    Case("permute", "permute", 16),
    Case("permute-2048", "permute", 64, sizes=SMALL_SIZES),
    Case("few-l1-ids", "l1", 1),
    Case("few-l1", "l1", 16),
    Case("few-l2", "l2", 16),
    Case("few-l1-wide", "l1", 64),
    Case("few-l2-wide", "l2", 64),
    Case("few-l1-wide-4096", "l1", 64, sizes=OTHER_SIZES),
    Case("few-l2-wide-1536", "l2", 64, sizes=OTHER_SIZES),
    Case("few-l1-7168", "l1", 16, sizes=LARGE_SIZES),
    Case("few-l2-2048", "l2", 16, sizes=LARGE_SIZES),
    Case("few-l1-wide-7168", "l1", 64, sizes=LARGE_SIZES),
    Case("few-l2-wide-2048", "l2", 64, sizes=LARGE_SIZES),
    Case("sum", "sum", 16),
    Case("many-l1-64", "many-l1", 256),
    Case("many-l1-128", "many-l1", 512),
    Case("many-l1", "many-l1", 4096),
    Case("many-l2", "many-l2", 4096),
    Case("many-sent", "many-sent", 4096),
    Case("many-l1-256-experts", "many-l1", 16384, sizes=SMALL_SIZES, num_experts=256),
    Case("many-l1-512-experts", "many-l1", 32768, sizes=SMALL_SIZES, num_experts=512),
)
# Those of them that are counted with MXFP8's numbers as tokens too.
IN_MXFP8 = (
    "permute", "permute-2048", "few-l1-ids", "few-l1", "few-l2", "few-l1-wide",
    "few-l2-wide", "few-l1-wide-4096", "few-l1-7168", "many-l1-64", "many-l1-128", "many-l1",
)  # fmt: skip
CASES = (
    *OF_BF16,
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
    *(replace(case, name=f"mxfp8-{case.name}", mxfp8=True) for case in OF_BF16 if case.name in IN_MXFP8),
    Case("mxfp8-gather", "gather", 512, mxfp8=True),
    Case("mxfp8-widen", "widen", 512, mxfp8=True),
    Case("int4-awq-permute", "permute", 16, int4=INT4_FORMS["-awq"]),
    *(
        Case(f"int4{name}-{kind}-{num_tokens}", kind, num_tokens, sizes=sizes, int4=form)
        for name, form in INT4_FORMS.items()
        for kind, num_tokens, sizes in INT4_CASES
        if not name or num_tokens in (16, 512) or (name in ("-gptq", "-awq") and num_tokens == 64)
    ),
)


def launch_of(case: Case) -> Launch:
    """Return the launch of a case on an H200."""
    sizes = *case.sizes, case.num_experts, NUM_TOPK
    if case.int4 is not None:
        layer = Int4Layer("int4", case.num_tokens, *sizes, "swiglu_oai", has_bias=True, form=case.int4)
        return launch_of_call(layer, *KERNELS_OF[case.kind])
    format = "nvfp4" if case.nvfp4 else "mxfp4_fp8" if case.fp8 else "mxfp4_mxfp8" if case.mxfp8 else "mxfp4"
    layer = Layer(format, case.num_tokens, *sizes, "swiglu_oai", has_bias=True, bounded=not case.looks_up)
    call = LayerOfRanks(layer, NUM_RANKS) if case.kind in OF_RANKS else layer
    return launch_of_call(call, *KERNELS_OF[case.kind])


ABOUT = "4-bit weights, bf16 or FP8 tokens on Hopper"
KERNELS = tuple(
    KernelCase(case.title, f"{ABOUT}: {case.kind} for {case.num_tokens} tokens", HOPPER, partial(launch_of, case))
    for case in CASES
)

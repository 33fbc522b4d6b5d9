"""Practical calls of the router, and the kernels that they launch.

    case -> inputs -> `envoi.route`, planned

Tensors have no memory, unless `inputs` is given another way to make them.
"""

from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch

import envoi
from envoi.ops.moe.router import host, tiling_blackwell
from envoi.ops.moe.router.presets import preset
from envoi.ops.moe.router.spec import Rule
from envoi.runtime.program import Launch, without_memory
from tools.kernel_cases import BLACKWELL, EVERY_ARCH, HOPPER, KernelCase, Make
from tools.kernel_cases.planning import launch_of_call

VOCABULARY = 1024
PLANNED_FOR = {"sm90": HOPPER[0], "sm100": BLACKWELL[0], "triton": BLACKWELL[0]}
COMPILED_FOR = {
    "sm90": ("on Hopper", HOPPER), "sm100": ("on Blackwell", BLACKWELL), "triton": ("in plain Triton", EVERY_ARCH),
}  # fmt: skip
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Case:
    """Call of `envoi.route`: tokens [M, hidden], gate [N, hidden].

    rule: a model's name, "softmax" or "identity". kernel: "sm90", "sm100" or "triton". hashed: experts are looked up.
    everything: return all extra outputs. weights: dtype of the weights. kernel_name: which of the call's launches.
    batch_invariant: as in `envoi.route`.
    """

    name: str
    M: int
    N: int
    hidden: int
    k: int
    rule: str
    dtype: str = "bf16"
    kernel: str = "sm90"
    hashed: bool = False
    everything: bool = False
    weights: str = "fp32"
    kernel_name: str = "router_kernel"
    batch_invariant: bool = True

    @property
    def title(self) -> str:
        """Name of the kernel's case."""
        return f"router-{self.kernel}-{self.name}" if self.name else f"router-{self.kernel}"

    def __str__(self) -> str:
        rest = ", looked up" * self.hashed + ", all outputs" * self.everything
        rest += f", {self.weights} weights" * (self.weights != "fp32")
        rest += ", not batch-invariant" * (not self.batch_invariant)
        return f"top {self.k} of {self.N} experts by {self.rule}, [{self.M}, {self.hidden}] in {self.dtype}{rest}"


CASES = (
    Case("few-experts", 512, 8, 128, 4, "softmax", "fp16"),
    Case("one-token", 1, 256, 7168, 8, "deepseek-v3"),
    Case("decode", 128, 256, 7168, 8, "deepseek-v3"),
    Case("decode-ungrouped", 16, 384, 7168, 8, "kimi-k2"),
    Case("two-roles", 4096, 128, 2048, 4, "softmax", "fp16"),
    Case("prefill", 8448, 256, 7168, 8, "deepseek-v3"),
    Case("many-experts", 2048, 512, 4096, 10, "softmax"),
    Case("products", 12000, 288, 4096, 8, "glm-5.3-flash"),
    Case("choice", 2048, 512, 4096, 10, "softmax", kernel_name="choice_kernel"),
    Case("choice-most", 8192, 896, 7168, 16, "kimi-k3", kernel_name="choice_kernel"),
    Case("choice-sets", 11501, 160, 5120, 6, "deepseek-v2", kernel_name="choice_kernel"),
    Case("choice-many-rows", 13856, 512, 2048, 10, "qwen3-next", kernel_name="choice_kernel"),
    Case("choice-sigmoids", 9000, 512, 4096, 22, "nemotron-super-v3", kernel_name="choice_kernel"),
    Case("choice-few-sigmoids", 12000, 288, 4096, 8, "glm-5.3-flash", kernel_name="choice_kernel"),
    Case("one-sum", 12360, 256, 7168, 8, "deepseek-v3", batch_invariant=False),
    Case("choice-groups", 1794, 160, 5120, 6, "deepseek-v2", everything=True, kernel_name="choice_kernel"),
    Case("choice-hashed", 2400, 256, 4096, 6, "deepseek-v4-flash", hashed=True, kernel_name="choice_kernel"),
    Case("tall", 16384, 128, 4096, 8, "qwen3-moe"),
    Case("turns", 8448, 512, 2048, 10, "qwen3-next"),
    Case("two-widths", 8448, 160, 6144, 8, "qwen3-coder-480b", "fp16"),
    Case("products-of-few", 3256, 160, 6144, 8, "qwen3-coder-480b"),
    Case("two-widths-whole-softmax", 16384, 160, 5120, 6, "deepseek-v2"),
    Case("two-widths-most", 8448, 288, 4096, 8, "glm-5.3-flash"),
    Case("everything", 4096, 256, 7168, 8, "deepseek-v3", everything=True),
    Case("hashed", 64, 256, 4096, 6, "deepseek-v4-flash", hashed=True),
    Case("logits-as-weights", 4096, 128, 2048, 4, "identity", "fp16", weights="fp16"),
    Case("", 4096, 256, 7168, 8, "deepseek-v3", kernel="triton"),
    Case("fp32", 4096, 256, 7168, 8, "deepseek-v3", "fp32", kernel="triton"),
    Case("few-experts", 512, 8, 128, 4, "softmax", "fp16", kernel="triton"),
)  # fmt: skip

ON_BLACKWELL = (
    Case("", 4096, 128, 2048, 8, "qwen3-moe", kernel="sm100"),
    Case("few-experts", 512, 8, 128, 4, "softmax", "fp16", kernel="sm100"),
    Case("groups", 16384, 256, 7168, 8, "deepseek-v3", kernel="sm100", everything=True),
    Case("groups-by-max", 9000, 160, 5120, 6, "deepseek-v2", kernel="sm100"),
    Case("two-ctas", 4096, 64, 2048, 4, "glm-4.7-flash", kernel="sm100", weights="bf16"),
    Case("three-tiles", 8192, 384, 7168, 8, "kimi-k2", kernel="sm100", everything=True),
    Case("root", 4096, 256, 4096, 6, "deepseek-v4-flash", kernel="sm100"),
    Case("many-slots", 2048, 512, 4096, 22, "nemotron-super-v3", kernel="sm100"),
)  # fmt: skip


@dataclass(frozen=True)
class Inputs:
    """Tensors of one call of `envoi.route`."""

    tokens: torch.Tensor
    gate: torch.Tensor
    expert_bias: torch.Tensor | None
    token_ids: torch.Tensor | None
    hash_table: torch.Tensor | None


def inputs(case: Case, make: Make = without_memory) -> Inputs:
    """Return the inputs of a case.

    make: function of shape and dtype that returns a tensor; for an integer dtype, of ids of experts or tokens.
    """
    tokens, gate = (make((rows, case.hidden), DTYPES[case.dtype]) for rows in (case.M, case.N))
    if case.hashed:
        return Inputs(tokens, gate, None, make((case.M,), torch.int64), make((VOCABULARY, case.k), torch.int64))
    _, (has_bias, _) = rule_of(case.rule)
    return Inputs(tokens, gate, make((case.N,), torch.float32) if has_bias else None, None, None)


def call_of(case: Case, make: Make = without_memory) -> host.Call:
    """Return the call that `envoi.route` makes to the kernels for a case."""
    given, (rule, _) = inputs(case, make), rule_of(case.rule)
    wanted = (case.everything,) * 3
    spec = host.spec_of(case.N, case.k, rule, None, given.expert_bias, case.hashed, wanted)
    return host.Call(
        given.tokens, given.gate, spec, 1.0, rule.routed_scale, None, given.expert_bias, given.token_ids,
        given.hash_table, DTYPES[case.weights], case.batch_invariant,
    )  # fmt: skip


def rule_of(name: str) -> tuple[Rule, tuple[bool, bool]]:
    """Return a model's rule, and whether it has an expert_bias and a logit_bias; "softmax" is the default rule."""
    if name in ("softmax", "identity"):
        return Rule(name, renormalize=name == "softmax"), (False, False)
    chosen = preset(name)
    return chosen.rule, (chosen.has_expert_bias, chosen.has_logit_bias)


def launch_of(case: Case) -> Launch:
    """Return the launch of a case on an H200, a Blackwell, or a GPU without kernels of its own."""
    given, wanted = inputs(case), case.everything
    rule = rule_of(case.rule)[0]
    arch = PLANNED_FOR[case.kernel]
    call = partial(
        envoi.route, given.tokens, given.gate, case.k, rule=rule, expert_bias=given.expert_bias,
        token_ids=given.token_ids, hash_table=given.hash_table, return_logits=wanted,
        return_dense=wanted, return_counts=wanted, weights_dtype=DTYPES[case.weights],
        batch_invariant=case.batch_invariant,
    )  # fmt: skip
    with mock.patch.object(tiling_blackwell, "IS_USED", case.kernel == "sm100"):
        return launch_of_call(call, case.kernel_name, arch=arch)


def kernel_case(case: Case) -> KernelCase:
    """Return the kernel of a case under its name."""
    where, arches = COMPILED_FOR[case.kernel]
    return KernelCase(case.title, f"router {where}: {case}", arches, partial(launch_of, case))


KERNELS = tuple(map(kernel_case, (*CASES, *ON_BLACKWELL)))

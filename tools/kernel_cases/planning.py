"""Launches of kernels as calls plan them: what a call on tensors without memory would launch is what is compiled.

Case -> a call of the product -> its launches, planned for a GPU -> the one that the case is named after
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any

import torch

import envoi
from envoi.ops.moe.parallel.nvlink import SharedLayout
from envoi.ops.moe.parallel.warm_up import ParallelCall
from envoi.ops.moe.support import experts_without_memory
from envoi.quant.formats import SCHEMES
from envoi.runtime.devices import Target, standing_for
from envoi.runtime.program import Launch, building, without_memory
from envoi.types import ExpertWeights, QuantTensor, Routing
from tools.kernel_cases import HOPPER, NUM_SMS, KernelCase

TIMEOUT_S = 10.0


def launch_of_call(call: Callable[[], Any], kernel: str, which: int = 0, arch: str = HOPPER[0]) -> Launch:
    """Return a call's launch number `which` of the kernel of this name, as planned for an architecture.

    Raises ValueError if it has none.
    """
    planned = launches_of(call, arch)
    found = [launch for launch in planned if launch.kernel.fn.__name__ == kernel]
    if which >= len(found):
        names = [launch.kernel.fn.__name__ for launch in planned]
        raise ValueError(f"{kernel}: expected launch {which} of it among those of the call, got {names}")
    return found[which]


@lru_cache(maxsize=512)
def launches_of(call: Callable[[], Any], arch: str) -> list[Launch]:
    """Plan a call on 132 multiprocessors of an architecture; return its launches."""
    with building(Target(arch, NUM_SMS)) as builder:
        call()
    return builder.launches


def case_of(
    name: str, about: str, arches: tuple[str, ...], call: Callable[[], Any], kernel: str, which: int = 0,
    arch: str = HOPPER[0],
) -> KernelCase:  # fmt: skip
    """Return the case of a kernel that a call launches. arch: planned for; arches: compiled for."""
    return KernelCase(name, about, arches, partial(launch_of_call, call, kernel, which, arch))


def matrix(scheme: str, *shape: int) -> torch.Tensor | QuantTensor:
    """Return a matrix without memory in a scheme of `envoi.quant.SCHEMES`, "" for bf16."""
    if not scheme:
        return without_memory(shape, torch.bfloat16)
    *lead, rows, columns = shape
    kind = SCHEMES[scheme]
    group = kind.group_for(shape)
    width = columns // 2 if kind.values == torch.uint8 else columns
    sf = without_memory((*lead, -(-rows // group[0]), columns // group[1]), kind.sf)
    return QuantTensor(without_memory((*lead, rows, width), kind.values), sf, group)


@dataclass(frozen=True)
class Layer:
    """Layer of experts. format: of `envoi.quant.FORMATS`. layout: of gate_up. bounded: factors are known to be small.

    arch: for which it is packed. mapped: the ids go through a map. num_shared: of the experts, gated: by a gate.
    """

    format: str
    num_tokens: int
    hidden: int = 4096
    intermediate: int = 2048
    num_experts: int = 32
    num_topk: int = 6
    activation: str = "swiglu"
    has_bias: bool = False
    layout: str | None = None
    bounded: bool = True
    arch: str = HOPPER[0]
    batch_invariant: bool = False
    mapped: bool = False
    num_shared: int = 0
    gated: bool = False

    def __call__(self) -> None:
        """Call `envoi.moe`."""
        slots = self.num_tokens, self.num_topk
        weights, ids = without_memory(slots, torch.float32), without_memory(slots, torch.int32)
        tokens = without_memory((self.num_tokens, self.hidden), torch.bfloat16)
        routing = Routing(weights, ids, self.num_experts - self.num_shared)
        expert_map = without_memory((routing.num_experts,), torch.int32) if self.mapped else None
        envoi.moe(tokens, routing, self.experts, batch_invariant=self.batch_invariant, expert_map=expert_map)

    @property
    def experts(self) -> ExpertWeights:
        """Experts without memory."""
        packed = _packed(
            self.hidden, self.intermediate, self.num_experts, self.format, self.activation, self.has_bias, self.arch
        )
        if not self.bounded:
            gate_up, down = (
                x if isinstance(x, torch.Tensor) else replace(x, scales_at_most_2=False)
                for x in (packed.gate_up, packed.down)
            )
            packed = ExpertWeights.arrange(replace(packed, gate_up=gate_up, down=down))
        if self.num_shared:
            gate = without_memory((self.hidden,), torch.float32) if self.gated else None
            packed = replace(packed, num_shared=self.num_shared, shared_gate=gate)
        return packed if self.layout is None else replace(packed, gate_up_layout=self.layout)


@cache
def _packed(
    hidden: int, intermediate: int, num_experts: int, format: str, activation: str, has_bias: bool, arch: str
) -> ExpertWeights:
    with standing_for(Target(arch, NUM_SMS)):
        return experts_without_memory(hidden, intermediate, num_experts, format, activation, has_bias)


@dataclass(frozen=True)
class LayerOfRanks:
    """Rank 1's call of a layer whose experts are spread over ranks.

    experts: the rank's. way: "memory", or "hosts", of num_ranks / num_hosts ranks each. num_routed: experts of a
    routing with a placement, else None.
    """

    experts: Layer
    num_ranks: int
    way: str = "memory"
    presum: bool = False
    num_hosts: int = 1
    num_routed: int | None = None
    results: str | None = None

    def __call__(self) -> None:
        """Call `ExpertParallel.moe`, as far as it launches."""
        layer, num_experts = self.experts, self.experts.num_experts * self.num_ranks
        layout = SharedLayout(
            self.num_ranks, num_experts, layer.num_tokens, layer.num_topk, layer.hidden, layer.format, self.presum,
            self.results,
        )  # fmt: skip
        ends = tuple(range(0, num_experts + 1, layer.num_experts))
        hosts = tuple(str(rank * self.num_hosts // self.num_ranks) for rank in range(self.num_ranks))
        call = ParallelCall(
            layout, layer.num_topk, 1, ends, TIMEOUT_S, layer.experts, hosts if self.way == "hosts" else (),
            self.num_routed,
        )  # fmt: skip
        call(layer.num_tokens)

"""Warm-up across ranks: each rank compiles what it needs, unless another of its host has, and loads it."""

import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional

from envoi.ops.moe.experts import run_experts
from envoi.ops.moe.parallel import gathered_device, hosts_device, memory
from envoi.ops.moe.parallel.collectives import Channel, gather_texts
from envoi.ops.moe.parallel.hosts import Grid
from envoi.ops.moe.parallel.symmetric_memory import Domain, SharedLayout, allocate
from envoi.ops.moe.permute import combine_rows, empty_rows
from envoi.ops.moe.warm_up import compile_calls
from envoi.quant.formats import format_named
from envoi.runtime.devices import Target
from envoi.runtime.planned_kernels import Site, launches_of, load, load_at
from envoi.runtime.program import without_memory
from envoi.runtime.workers import num_cpus
from envoi.types import ExpertWeights

STEP, FIRST = "warm-up", "first call"
ALIGNMENT = 16  # for an address or a stride that isn't a multiple Triton compiles another kernel
PATIENCE_S = 1800.0  # for peers that compile


@dataclass(frozen=True)
class ParallelCall:
    """Call of `ExpertParallel.moe` on one rank by kernels. layout: of the memory; experts: without memory.

    num_topk: slots of a token. gathers: by NCCL, else over NVLink. hosts: of each rank, if they are grouped by host.
    With 0 tokens the rank also refuses a call.
    """

    layout: SharedLayout
    num_topk: int
    rank: int
    expert_offsets: tuple[int, ...]
    timeout_s: float
    experts: ExpertWeights
    gathers: bool = False
    hosts: tuple[str, ...] = ()

    @property
    def most(self) -> int:
        """Most tokens of a call."""
        return self.layout.max_tokens

    def __call__(self, num_tokens: int) -> None:
        """Make the call."""
        sizes = self.layout, self.rank, self.expert_offsets, self.timeout_s
        slots = num_tokens, self.num_topk
        tokens = without_memory((num_tokens, self.layout.hidden), torch.bfloat16)
        given = tokens, without_memory(slots, torch.float32), without_memory(slots, torch.int32), self.experts
        if self.hosts:
            owner = _host_buffers(self.hosts, *sizes)
        else:
            owner = _buffers(*sizes) if self.gathers else _domain(*sizes)
        memory.run_layer(owner, *given)
        if num_tokens == 0:
            memory.refuse(owner)


@dataclass(frozen=True)
class CountedCall:
    """Kernels of a call whose rows are counted, for a number of rows on a rank; their number isn't that of its tokens.

    most: rows. num_topk: slots of a token. experts: without memory.
    """

    most: int
    num_topk: int
    experts: ExpertWeights

    def __call__(self, num_rows: int) -> None:
        """Run the experts on so many rows, and sum the rows of a token."""
        experts, device = self.experts, torch.device("meta")
        rows = empty_rows(num_rows, experts.hidden, format_named(experts.format).activations, device)
        weights = without_memory((num_rows,), torch.float32)
        run_experts(rows, weights, without_memory((experts.num_local_experts + 1,), torch.int32), experts)
        back = without_memory((num_rows, experts.hidden), torch.bfloat16)
        combine_rows(back, without_memory((1, self.num_topk), torch.int32))


@lru_cache(maxsize=8)
def _host_buffers(
    hosts: tuple[str, ...], layout: SharedLayout, rank: int, expert_offsets: tuple[int, ...], timeout_s: float
) -> hosts_device.Buffers:
    grid = Grid.of(hosts)
    sizes = hosts_device.HostsLayout(layout, grid.num_hosts), grid, rank, expert_offsets, timeout_s
    return hosts_device.open_buffers(*sizes, torch.device("meta"), shared=False)


@lru_cache(maxsize=8)
def _domain(layout: SharedLayout, rank: int, expert_offsets: tuple[int, ...], timeout_s: float) -> Domain:
    return allocate(layout, rank, list(expert_offsets), timeout_s, torch.device("meta"), shared=False)


@lru_cache(maxsize=8)
def _buffers(
    layout: SharedLayout, rank: int, expert_offsets: tuple[int, ...], timeout_s: float
) -> gathered_device.Buffers:
    return gathered_device.open_buffers(layout, rank, list(expert_offsets), timeout_s, torch.device("meta"))


@contextmanager
def patient(channel: Channel) -> Iterator[None]:
    """Bound the waits for peers within the context by PATIENCE_S in all, not by timeout_s each."""
    control: Any = channel.control
    control._set_default_timeout(timedelta(seconds=PATIENCE_S))
    channel.watch.deadline = time.monotonic() + PATIENCE_S
    try:
        yield
    finally:
        channel.watch.deadline = None
        control._set_default_timeout(timedelta(seconds=channel.watch.timeout_s))


def unbounded(max_tokens: int | None, num_topk: int | None) -> str:
    """Return why not all kernels that calls can need are known, or ""."""
    if max_tokens is None or num_topk is None:
        return "warm_up: expected max_tokens and num_topk, got None: without them any number of rows may come"
    return ""


def compile_together(
    channel: Channel, call: ParallelCall | CountedCall, target: Target, jobs: int | None, progress: bool,
    step: str = STEP,
) -> list[Site]:  # fmt: skip
    """Compile and load what calls with 0 to call.most tokens, or rows, launch on this rank. Collective.

    The ranks of a host begin at different kernels, and find in Triton's disk cache what the others have compiled. Peers
    have timeout_s to come, and may compile for longer. Returns a site for each kernel. Raises RuntimeError on every
    rank if one fails.
    """
    hosts = gather_texts(channel, platform.node(), step)
    here = [rank for rank, host in enumerate(hosts) if host == platform.node()]
    start, sites = here.index(channel.rank) / len(here), list[Site]()

    def make() -> None:
        count, numbers = jobs or max(1, num_cpus() // len(here)), range(call.most + 1)
        sites.extend(compile_calls([call], target, numbers, count, progress, for_launch=True, start=start))
        for site in sites:
            load_at([call], target, site)

    with patient(channel):
        _raise_first(gather_texts(channel, _error_of(make), step), step)
    return sites


def load_together(channel: Channel, call: ParallelCall, target: Target, num_tokens: int, step: str) -> None:
    """Load the kernels of one call before any rank begins it, so that none waits for another's compiler. Collective.

    num_tokens: of this rank. Peers have timeout_s to come, and may compile for longer. Raises RuntimeError on every
    rank if a kernel can't be compiled.
    """
    gather_texts(channel, "", step)
    with patient(channel):
        failed = _error_of(lambda: load_all(call, target, num_tokens))
        _raise_first(gather_texts(channel, failed, step), step)


def load_all(call: ParallelCall, target: Target, num_tokens: int) -> None:
    """Load all kernels of a call on the current GPU."""
    for launch in launches_of(call, num_tokens, target):
        load(*launch)


def compiled_form(
    tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, num_topk: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a call's arguments in the form for which `compile_together` has compiled: num_topk slots, on 16 bytes.

    Slots that are added are masked ones. Rows of tokens may be apart by a multiple of 16.
    """
    more = num_topk - topk_ids.shape[1]
    if more:
        topk_weights = functional.pad(topk_weights, (0, more))
        topk_ids = functional.pad(topk_ids, (0, more), value=-1)
    return _aligned(tokens), _aligned(topk_weights.contiguous()), _aligned(topk_ids.contiguous())


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a contiguous copy if Triton would compile another kernel for its address or for its rows' stride."""
    rows_fit = x.stride(1) == 1 and (x.stride(0) % ALIGNMENT == 0 or x.stride(0) == x.shape[1])
    return x if rows_fit and x.data_ptr() % ALIGNMENT == 0 else x.clone(memory_format=torch.contiguous_format)


def _error_of(step: Callable[[], None]) -> str:
    try:
        step()
    except Exception as error:  # whatever it is, the peers have to hear of it
        return f"{type(error).__name__}: {error}"
    return ""


def _raise_first(texts: list[str], step: str) -> None:
    for rank, text in enumerate(texts):
        if text:
            raise RuntimeError(f"{step}: rank {rank} of the group failed: {text}")

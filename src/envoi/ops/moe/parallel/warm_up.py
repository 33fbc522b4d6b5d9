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

from envoi.ops.moe.experts import run_experts
from envoi.ops.moe.parallel import exchange, nvlink
from envoi.ops.moe.parallel.collectives import Channel, gather_texts
from envoi.ops.moe.parallel.exchange import Owner
from envoi.ops.moe.parallel.opening import Grid
from envoi.ops.moe.parallel.rail import HostsLayout, open_rail
from envoi.ops.moe.parallel.symmetric_memory import SharedLayout, allocate
from envoi.ops.moe.permute import combine_rows, empty_rows
from envoi.quant.formats import format_named
from envoi.runtime.devices import Target
from envoi.runtime.planned_kernels import Site, compile_calls, launches_of, load, load_at
from envoi.runtime.program import without_memory
from envoi.runtime.workers import num_cpus
from envoi.types import ExpertWeights

STEP, FIRST = "warm-up", "first call"
PATIENCE_S = 1800.0  # for peers that compile


@dataclass(frozen=True)
class ParallelCall:
    """Call of `ExpertParallel.moe` on one rank by kernels. layout: of the memory; experts: without memory.

    num_topk: slots of a token. hosts: of each rank, for an exchange with a rail. The rank also sends rows of other
    experts back, and with 0 tokens it refuses a call.
    """

    layout: SharedLayout
    num_topk: int
    rank: int
    expert_offsets: tuple[int, ...]
    timeout_s: float
    experts: ExpertWeights
    hosts: tuple[str, ...] = ()

    @property
    def most(self) -> int:
        """Most tokens of a call."""
        return self.layout.max_tokens

    def __call__(self, num_tokens: int) -> None:
        """Make the call."""
        slots = num_tokens, self.num_topk
        tokens = without_memory((num_tokens, self.layout.hidden), torch.bfloat16)
        given = tokens, without_memory(slots, torch.float32), without_memory(slots, torch.int32), self.experts
        owner = _owner(self.hosts, self.layout, self.rank, self.expert_offsets, self.timeout_s)
        exchange.run_layer(owner, *given)
        domain = exchange.domain_of(owner)
        if not domain.layout.presum:
            nvlink.send_rows(domain, without_memory(tuple(domain.rows.shape), torch.bfloat16))
        if num_tokens == 0:
            exchange.refuse(owner)


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
def _owner(
    hosts: tuple[str, ...], layout: SharedLayout, rank: int, expert_offsets: tuple[int, ...], timeout_s: float
) -> Owner:
    meta = torch.device("meta")
    if not hosts:
        return allocate(layout, rank, list(expert_offsets), timeout_s, meta, shared=False)
    grid = Grid.of(hosts)
    sizes = HostsLayout(layout, grid.num_hosts), grid, rank, expert_offsets, timeout_s
    return open_rail(*sizes, meta, shared=False)


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

"""Warm-up across ranks: each rank compiles what it needs, unless another of its host has, and loads it."""

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch

from envoi.ops.moe.experts import run_experts
from envoi.ops.moe.parallel import nvlink
from envoi.ops.moe.parallel.collectives import Channel, gather_texts
from envoi.ops.moe.parallel.exchange import OnDevice, Owner
from envoi.ops.moe.parallel.nvlink import SharedLayout
from envoi.ops.moe.parallel.placement import Placed, place, table_size
from envoi.ops.moe.parallel.rail import Grid, HostsLayout, open_rail
from envoi.ops.moe.permute import combine_rows, empty_rows
from envoi.quant.formats import format_named
from envoi.runtime.devices import Target
from envoi.runtime.planned_kernels import Site, compile_calls, load_at
from envoi.runtime.program import without_memory
from envoi.runtime.workers import num_cpus
from envoi.types import ExpertWeights

STEP, FIRST = "warm-up", "first call"
PATIENCE_S = 1800.0  # for peers that compile


@dataclass(frozen=True)
class ParallelCall:
    """Call of `ExpertParallel.moe` on one rank by kernels. layout: of the memory; experts: without memory.

    num_topk: slots of a token in a routing. hosts: of each rank, for an exchange with a rail. num_experts: of
    routings, with a placement or shared experts, else None. The rank also sends rows of other experts back, and with 0
    tokens it refuses a call.
    """

    layout: SharedLayout
    num_topk: int
    rank: int
    expert_offsets: tuple[int, ...]
    timeout_s: float
    experts: ExpertWeights
    hosts: tuple[str, ...] = ()
    num_experts: int | None = None

    @property
    def most(self) -> int:
        """Most tokens of a call."""
        return self.layout.max_tokens

    def __call__(self, num_tokens: int) -> None:
        """Make the call."""
        slots = num_tokens, self.num_topk
        tokens = without_memory((num_tokens, self.layout.hidden), torch.bfloat16)
        given = tokens, without_memory(slots, torch.float32), without_memory(slots, torch.int32), self.experts
        exchange = OnDevice(_owner(self.hosts, self.layout, self.rank, self.expert_offsets, self.timeout_s))
        sizes = self.num_experts, self.expert_offsets[-1], self.rank
        exchange.run_layer(*given, placed_without_memory(*sizes, self.experts))
        domain = exchange.domain
        if not domain.layout.presum:
            nvlink.send_rows(domain, without_memory(tuple(domain.rows.shape), torch.bfloat16))
        if num_tokens == 0:
            exchange.refuse()


@dataclass(frozen=True)
class CountedCall:
    """Kernels of a call whose rows are counted, for a number of rows on a rank; their number isn't that of its tokens.

    most: rows. num_topk: slots of a token in a routing. experts: without memory. num_experts: of routings, with a
    placement or shared experts, else None; then num_physical: over all ranks.
    """

    most: int
    num_topk: int
    experts: ExpertWeights
    num_experts: int | None = None
    num_physical: int = 0

    def __call__(self, num_rows: int) -> None:
        """Run the experts on so many rows, and sum the rows of a token."""
        experts, device = self.experts, torch.device("meta")
        rows = empty_rows(num_rows, experts.hidden, format_named(experts.format).activations, device)
        weights = without_memory((num_rows,), torch.float32)
        run_experts(rows, weights, without_memory((experts.num_local_experts + 1,), torch.int32), experts)
        back = without_memory((num_rows, experts.hidden), torch.bfloat16)
        combine_rows(back, without_memory((1, self.num_topk + experts.num_shared), torch.int32))
        if (placed := placed_without_memory(self.num_experts, self.num_physical, 0, experts)) is not None:
            slots, tokens = (1, self.num_topk), without_memory((1, experts.hidden), torch.bfloat16)
            place(placed, without_memory(slots, torch.float32), without_memory(slots, torch.int32), tokens)


def placed_without_memory(
    num_experts: int | None, num_physical: int, rank: int, experts: ExpertWeights
) -> Placed | None:
    """Return a placement whose table has no memory; None without num_experts. experts: this rank's."""
    if num_experts is None:
        return None
    table = without_memory((table_size(num_experts, num_physical),), torch.int32)
    return Placed(table, num_experts, rank, 0, experts.num_shared, experts.shared_gate)


@lru_cache(maxsize=8)
def _owner(hosts: tuple[str, ...], layout: SharedLayout, rank: int, ends: tuple[int, ...], timeout_s: float) -> Owner:
    sizes = rank, list(ends), timeout_s, torch.device("meta"), False
    if not hosts:
        return nvlink.allocate(layout, *sizes)
    return open_rail(HostsLayout(layout, len(set(hosts))), Grid.of(hosts), *sizes)


def do_together(channel: Channel, do: Callable[[], None], step: str) -> None:
    """Do what may take long on all ranks, for which peers wait PATIENCE_S instead of timeout_s. Collective.

    Raises RuntimeError on every rank if one fails.
    """
    control: Any = channel.control
    control._set_default_timeout(timedelta(seconds=PATIENCE_S))
    channel.watch.deadline, text = time.monotonic() + PATIENCE_S, ""
    try:
        try:
            do()
        except Exception as error:  # whatever it is, the peers have to hear of it
            text = f"{type(error).__name__}: {error}"
        texts = gather_texts(channel, text, step)
    finally:
        channel.watch.deadline = None
        control._set_default_timeout(timedelta(seconds=channel.watch.timeout_s))
    for rank, said in enumerate(texts):
        if said:
            raise RuntimeError(f"{step}: rank {rank} of the group failed: {said}")


def compile_together(
    channel: Channel, call: ParallelCall | CountedCall, target: Target, jobs: int | None, progress: bool,
    step: str = STEP,
) -> list[Site]:  # fmt: skip
    """Compile and load what calls with 0 to call.most tokens, or rows, launch on this rank: a site for each kernel.

    Collective. The ranks of a host begin at different kernels, and find in Triton's disk cache what the others have
    compiled. Peers have timeout_s to come, and may compile for longer. Raises RuntimeError on every rank if one fails.
    """
    hosts = gather_texts(channel, platform.node(), step)
    here = [rank for rank, host in enumerate(hosts) if host == platform.node()]
    start, sites = here.index(channel.rank) / len(here), list[Site]()

    def make() -> None:
        count, numbers = jobs or max(1, num_cpus() // len(here)), range(call.most + 1)
        sites.extend(compile_calls([call], target, numbers, count, progress, for_launch=True, start=start))
        for site in sites:
            load_at([call], target, site)

    do_together(channel, make, step)
    return sites

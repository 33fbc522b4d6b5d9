"""Several ranks in one process: their memory is the process's own, and they take their steps in turn."""

from functools import partial

import torch

from envoi.ops.moe.parallel import ExpertParallel, nvlink, rail
from envoi.ops.moe.parallel.exchange import OnDevice, Owner
from envoi.ops.moe.parallel.nvlink import (
    MAX_CHUNKS,
    Domain,
    SharedLayout,
    allocate,
    combine_barrier,
    num_chunks,
    send_partial_sums,
    set_peers,
    sum_rows,
)
from envoi.ops.moe.parallel.rail import Grid
from envoi.types import ExpertWeights, Routing
from tests.moe.layers import Layer


def open_all(layout: SharedLayout, expert_offsets: list[int], device: str = "cpu") -> list[Domain]:
    """Open a domain for each rank."""
    opened = [
        allocate(layout, rank, expert_offsets, 1.0, torch.device(device), shared=False)
        for rank in range(layout.num_ranks)
    ]
    for domain in opened:
        set_peers(domain, [peer.memory.data_ptr() for peer in opened])
    return opened


def hosts_alone(layout: SharedLayout) -> rail.Rail:
    """Open the buffers of one host with one rank, connected: what is sent comes back."""
    sizes = rail.HostsLayout(layout, 1), Grid.of(["a"]), 0, [0, layout.num_experts], 1.0, torch.device("cpu")
    buffers = rail.open_rail(*sizes, shared=False)
    set_peers(buffers.domain, [buffers.domain.memory.data_ptr()])
    buffers.exchanging = partial(buffers.received.copy_, buffers.sent)
    return buffers


def use(parallel: ExpertParallel, owner: Owner) -> None:
    """Let an object take the path of this memory, as one over NVLink or NCCL does."""
    parallel.exchange = "memory" if isinstance(owner, Domain) else "hosts"
    parallel._exchange = exchange = OnDevice(owner, parallel.exchange)
    exchange.domain.watch, parallel._lock = parallel.channel.watch, exchange.lock


def flags(domain: Domain) -> torch.Tensor:
    """Return a view of the rank's flags [2, num_ranks] int32: dispatch, combine."""
    size = 2 * domain.layout.num_ranks
    return domain.memory[: 4 * size].view(torch.int32).view(2, -1)


def error_codes(domain: Domain) -> torch.Tensor:
    """Return a view of the bytes of the rank's error codes, one of each peer."""
    regions = domain.layout.regions
    return domain.memory[regions.error_codes : regions.sizes]


def moe(
    domains: list[Domain], parts: list[tuple[torch.Tensor, Routing]], experts: list[ExpertWeights] | None,
    num_slots: int = 10,
) -> list[torch.Tensor]:  # fmt: skip
    """Run `nvlink.run_layer` on every rank: all take a step before any takes the next, so that none has to wait.

    experts: None skips both GEMMs: sums the old contents of the slots; with presum the tokens themselves, in bf16.
    num_slots: of a rank, as an estimate; only the choice of configs depends on it.
    """
    exchange_routing(domains, parts)
    for domain in domains:
        nvlink.pull_rows(domain)
    for number, domain in enumerate(domains):
        rows = domain.rows if experts is None else nvlink.run_local_experts(domain, experts[number], num_slots)
        if domain.layout.presum:
            send_partial_sums(domain, rows)
    outs = []
    for domain, (_, routing) in zip(domains, parts, strict=True):
        flags(domain)[1] = 1
        combine_barrier(domain)
        outs.append(sum_rows(domain, routing.topk_ids))
    return outs


def exchange_routing(domains: list[Domain], parts: list[tuple[torch.Tensor, Routing]]) -> None:
    """Run dispatch on every rank up to the order of its rows."""
    ranked = []
    for domain, (tokens, routing) in zip(domains, parts, strict=True):
        ranked.append(nvlink.stage_tokens(domain, tokens, routing.topk_ids))
    for turn in range(2):  # first only to send routing: a rank has everyone's only in the second turn
        for domain, (_, routing), mine in zip(domains, parts, ranked, strict=True):
            flags(domain)[0] = num_chunks(domain.layout) if turn else 100 * MAX_CHUNKS
            nvlink.send_routing(domain, routing.topk_ids, routing.topk_weights, mine)


def split(layer: Layer, token_ends: list[int]) -> list[tuple[torch.Tensor, Routing]]:
    """Split the layer's tokens and routing by rank."""
    r, parts, first = layer.routing, [], 0
    for last in token_ends:
        part = slice(first, last)
        parts.append((layer.tokens[part], Routing(r.topk_weights[part], r.topk_ids[part], r.num_experts)))
        first = last
    return parts

"""Stages of one MoE layer: on one rank, and over several processes that must give the same bits."""

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from envoi.check import expect_int
from envoi.ops.moe import reference
from envoi.ops.moe.choose import has_kernels
from envoi.ops.moe.experts import run_experts
from envoi.ops.moe.op import flatten, unflatten
from envoi.ops.moe.parallel import Dispatched, ExpertParallel
from envoi.ops.moe.parallel.load import Load
from envoi.ops.moe.permute import RowMap, combine_rows, gather_rows, sort_slots
from envoi.ops.moe.router import route
from envoi.quant.formats import format_named
from envoi.types import ExpertRows, ExpertWeights, Matrix, QuantTensor, Routing

REPEATS = 5


@dataclass(frozen=True)
class Layer:
    """Input and weights of a layer: tokens [M, H] bf16, gate [N, H], k, experts."""

    tokens: torch.Tensor
    gate: torch.Tensor
    k: int
    experts: ExpertWeights


def one_rank(layer: Layer) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the layer's output and the median milliseconds of each stage."""
    times: dict[str, list[float]] = {}
    outs = [_one_rank_once(layer, _Stages(layer.tokens.device, times)) for _ in range(REPEATS)]
    return outs[-1], _medians(times)


def _one_rank_once(layer: Layer, stage: "_Stages") -> torch.Tensor:
    routing = stage("route", lambda: route(layer.tokens, layer.gate, layer.k))
    if has_kernels(layer.tokens.device):
        return _by_kernels(layer, routing, stage)
    rows = stage("permute", lambda: _permute(layer, routing))
    rows_out = stage("experts", lambda: reference.expert_mlp(rows, layer.experts))
    return stage("combine", lambda: reference.combine(rows_out, rows.pos_to_slot, len(layer.tokens), layer.k))


def _by_kernels(layer: Layer, routing: Routing, stage: "_Stages") -> torch.Tensor:
    scheme = format_named(layer.experts.format).activations

    def permuted() -> tuple[RowMap, Matrix, torch.Tensor]:
        row_map = sort_slots(routing.topk_ids, routing.num_experts)
        return row_map, *gather_rows(layer.tokens, routing.topk_weights, row_map, scheme)

    row_map, rows, weights = stage("permute", permuted)
    rows_out = stage("experts", lambda: run_experts(rows, weights, row_map.offsets, layer.experts))
    return stage("combine", lambda: combine_rows(rows_out, row_map.slot_to_pos))


def _permute(layer: Layer, routing: Routing):
    tokens = reference.quantize_tokens(layer.tokens, layer.experts.format)
    return reference.permute(tokens, routing.topk_weights, routing.topk_ids, routing.num_experts)


def many_ranks(
    layer: Layer, num_ranks: int, advance: Callable[[], Any] = lambda: None, timeout_s: float = 60.0
) -> tuple[torch.Tensor, dict[str, float], Load]:
    """Run the layer over num_ranks processes, each with its share of tokens (uneven on purpose) and of experts.

    Returns the concatenated outputs, the slowest rank's median milliseconds of each stage, and the load. One GPU per
    rank if there are enough of them, over NVLink if that connects them and else NCCL; else CPUs over gloo. advance is
    called for each rank that is done.
    Raises RuntimeError if a rank fails.
    """
    num_experts = layer.gate.shape[0]
    expect_int("--ranks", num_ranks, 1, num_experts, "at least one expert a rank")
    context = multiprocessing.get_context("forkserver")  # its server imports torch once for all ranks, and no CUDA
    context.set_forkserver_preload([__name__])
    with tempfile.TemporaryDirectory() as folder:
        torch.save((layer.tokens, layer.gate, layer.k, flatten(layer.experts)), Path(folder) / "layer.pt")
        workers = [
            context.Process(target=_work, args=(rank, num_ranks, folder), daemon=True) for rank in range(num_ranks)
        ]
        for worker in workers:
            worker.start()
        end = time.monotonic() + timeout_s
        for worker in workers:
            worker.join(max(0.0, end - time.monotonic()))
            advance()
        failed = [rank for rank, worker in enumerate(workers) if worker.exitcode != 0]
        for worker in workers:
            worker.kill()
        if failed:
            raise RuntimeError(f"ranks {failed} of {num_ranks} failed or took more than {timeout_s:g} s")
        results = [torch.load(Path(folder) / f"out{rank}.pt") for rank in range(num_ranks)]
    stages = {name: max(result[1][name] for result in results) for name in results[0][1]}
    return torch.cat([result[0] for result in results]), stages, Load(*results[0][2:])


def rank_device(num_ranks: int, rank: int) -> torch.device:
    """Return a GPU of its own for each rank if there are enough, else the CPU for all."""
    return torch.device("cuda", rank) if torch.cuda.device_count() >= num_ranks else torch.device("cpu")


def to_device(layer: Layer, device: torch.device) -> Layer:
    """Return the layer on another device."""
    return Layer(layer.tokens.to(device), layer.gate.to(device), layer.k, layer.experts.to(device))


def token_shares(num_tokens: int, num_ranks: int) -> list[int]:
    """Return the first token of each rank, and the total: rank r gets a share proportional to r + 1."""
    weights = [rank + 1 for rank in range(num_ranks)]
    return [num_tokens * sum(weights[:rank]) // sum(weights) for rank in range(num_ranks + 1)]


def _work(rank: int, num_ranks: int, folder: str) -> None:
    device = rank_device(num_ranks, rank)
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", init_method=f"file://{folder}/store",
        rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60),
        device_id=device if device.type == "cuda" else None,
    )  # fmt: skip
    tokens, gate, k, flat = torch.load(Path(folder) / "layer.pt", map_location=device)
    experts = unflatten(*flat)
    cuts = [experts.num_local_experts * r // num_ranks for r in range(num_ranks + 1)]
    shares = token_shares(len(tokens), num_ranks)
    mine = Layer(
        tokens[shares[rank] : shares[rank + 1]].contiguous(), gate, k, part(experts, cuts[rank], cuts[rank + 1])
    )
    out, stages, load = _run_rank(mine, max(last - first for first, last in pairwise(shares)))
    counts, ends = load.num_tokens_per_expert.cpu(), load.expert_offsets
    torch.save((out.cpu(), stages, counts, ends), Path(folder) / f"out{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _run_rank(layer: Layer, max_tokens: int) -> tuple[torch.Tensor, dict[str, float], Load]:
    # Without sums: only then the bits are those of one rank.
    parallel = ExpertParallel(layer.experts, timeout_s=30, max_tokens=max_tokens, num_topk=layer.k, exchange="rows")
    times: dict[str, list[float]] = {}
    for _ in range(REPEATS):
        _run_stages(layer, parallel, _Stages(layer.tokens.device, times))
    out = parallel.moe(layer.tokens, route(layer.tokens, layer.gate, layer.k))
    return out, _medians(times), parallel.load()


def _run_stages(layer: Layer, parallel: ExpertParallel, stage: "_Stages") -> None:
    routing = stage("route", lambda: route(layer.tokens, layer.gate, layer.k))
    sent = stage("dispatch", lambda: parallel.dispatch(layer.tokens, routing.topk_ids, routing.topk_weights))
    rows = stage("experts", lambda: _run_experts(sent, layer.experts))
    stage("combine", lambda: parallel.combine(rows, sent))


def _run_experts(sent: Dispatched, experts: ExpertWeights) -> torch.Tensor:
    if has_kernels(sent.offsets.device):
        return run_experts(sent.rows, sent.topk_weights, sent.offsets, experts)
    slots = torch.arange(len(sent.topk_weights), dtype=torch.int32)
    return reference.expert_mlp(ExpertRows(sent.rows, sent.offsets, slots, sent.topk_weights), experts)


def _medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {name: sorted(values)[len(values) // 2] for name, values in times.items()}


def part(experts: ExpertWeights, first: int, last: int) -> ExpertWeights:
    """Return experts first : last of a pack."""

    def cut(weight: Any) -> Any:
        if isinstance(weight, QuantTensor):
            return replace(weight, values=cut(weight.values), sf=cut(weight.sf), scale=cut(weight.scale))
        return None if weight is None else weight[first:last].clone()

    gate_up: Matrix = cut(experts.gate_up)
    return replace(
        experts, gate_up=gate_up, down=cut(experts.down),
        gate_up_bias=cut(experts.gate_up_bias), down_bias=cut(experts.down_bias),
    )  # fmt: skip


class _Stages:
    """Stage runner that records milliseconds."""

    def __init__(self, device: torch.device, times: dict[str, list[float]]):
        self.device, self.times = device, times

    def __call__(self, name: str, stage: Callable[[], Any]) -> Any:
        self._settle()
        start = time.perf_counter()
        result = stage()
        self._settle()
        self.times.setdefault(name, []).append((time.perf_counter() - start) * 1e3)
        return result

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

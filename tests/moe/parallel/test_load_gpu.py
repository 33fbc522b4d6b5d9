"""Load on GPUs: eager, prepared and compiled calls and replays of a graph count, and nothing waits for the device."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from envoi.runtime import shortcuts
from envoi.types import Routing
from tests.helpers.ranks import gpu_ranks, run_ranks
from tests.moe.layers import make
from tests.moe.parallel.test_nvlink_gpu import LAYER, inputs_of, open_here, shares, ways

EXPERTS = 8


def run_every_way(rank: int, num_ranks: int, way: str) -> list[list[int]]:
    """Run a call each way with a routing of its own; return the load's last rows, in the order of the calls."""
    options = {} if way == "memory" else {"exchange": way}
    ends = shares(num_ranks, EXPERTS)
    token_ends = shares(num_ranks, 60)
    first = make(**LAYER)
    parallel = open_here(first, "bf16", rank, ends, **options)
    assert parallel.exchange == way
    layers = [replace(make(**LAYER, seed=seed), gate_up=first.gate_up, down=first.down) for seed in range(7)]
    given = [inputs_of(layer, rank, token_ends) for layer in layers]
    for call in range(4):  # as always, recorded, then replayed
        parallel.moe(*given[call])
    torch.cuda.synchronize()
    strict = "default" if way == "counted" else "error"  # counting waits for the device, and says so
    torch.cuda.set_sync_debug_mode(strict)
    parallel.moe(*given[4])
    parallel.load()
    torch.cuda.set_sync_debug_mode("default")
    if way != "counted":
        _graph(parallel, given[0], given[5])
    else:
        parallel.moe(*given[5])
    shortcuts.PREPARED = False
    torch.compile(parallel.moe)(*given[6])
    load = parallel.load()
    parallel.check()
    found = load.num_tokens_per_expert[-7:].tolist()
    dist.barrier()
    return found


def _graph(parallel, first: tuple, then: tuple) -> None:
    """Capture a call, which doesn't count, and replay it with other tokens, which does."""
    (tokens, routing), (x, other) = first, then
    tokens, ids, weights = tokens.clone(), routing.topk_ids.clone(), routing.topk_weights.clone()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        parallel.moe(tokens, Routing(weights, ids, routing.num_experts))
    tokens.copy_(x), ids.copy_(other.topk_ids), weights.copy_(other.topk_weights)
    graph.replay()
    torch.cuda.synchronize()


@pytest.mark.parametrize("way", ways("gathered", "counted"))
def test_calls_of_every_kind_count(way):
    num_ranks = gpu_ranks()
    outcomes = run_ranks(num_ranks, run_every_way, way, backend="nccl", timeout_s=300)
    assert [outcome.text for outcome in outcomes] == [""] * num_ranks
    want = [
        torch.bincount(ids[ids >= 0], minlength=EXPERTS).tolist()
        for ids in (make(**LAYER, seed=seed).routing.topk_ids.flatten() for seed in range(7))
    ]
    for rank, outcome in enumerate(outcomes):
        bounds = (EXPERTS * r // num_ranks for r in (rank, rank + 1))
        first, last = bounds if way == "gathered" else (0, EXPERTS)
        mine = [[n if first <= e < last else 0 for e, n in enumerate(call)] for call in want]
        assert outcome.value == mine, "gathered, a rank counts its own experts"

"""Prepared calls of ExpertParallel over NVLink: the bits of calls as always, eagerly and from a graph."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from envoi.quant import FORMATS
from envoi.runtime import shortcuts
from envoi.runtime.prepared import replay
from tests.helpers.ranks import run_ranks
from tests.moe.layers import make
from tests.moe.parallel.test_nvlink_gpu import LAYER, inputs_of, open_here


def run_prepared(rank: int, num_ranks: int, format: str, presum: bool) -> dict[str, bool]:
    """Run calls with other tokens and routings at other addresses, each prepared and as always; then a graph."""
    torch.cuda.set_device(rank)
    ends = [8 * (r + 1) // num_ranks for r in range(num_ranks)]
    token_ends = [60 * (r + 1) // num_ranks for r in range(num_ranks)]
    first = make(**LAYER)
    parallel = open_here(first, format, rank, ends, presum=presum)
    layers = [replace(make(**LAYER, seed=seed), gate_up=first.gate_up, down=first.down) for seed in range(4)]
    given = [inputs_of(layer, rank, token_ends) for layer in layers]
    same = True
    want = []
    for seed in range(12):
        shortcuts.PREPARED = True
        out = parallel.moe(*given[seed % 4])
        shortcuts.PREPARED = False
        want.append(parallel.moe(*given[seed % 4]))
        same &= torch.equal(out, want[-1])
    shortcuts.PREPARED = True
    known = list(parallel.domain.calls.known.values())
    tokens, routing = given[0]
    tokens, ids, weights = tokens.clone(), routing.topk_ids.clone(), routing.topk_weights.clone()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = parallel.moe(tokens, replace(routing, topk_ids=ids, topk_weights=weights))
    parallel.moe(*given[3])
    for seed in (1, 2):
        x, other = given[seed]
        tokens.copy_(x), ids.copy_(other.topk_ids), weights.copy_(other.topk_weights)
        graph.replay()
        torch.cuda.synchronize()
        same &= torch.equal(out, want[seed])
    parallel.check()
    return {"same": same, "replayed": len(known) == 1 and isinstance(known[0], replay.Prepared)}


@pytest.mark.gpu(2)
@pytest.mark.parametrize("presum", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_bits(format, presum):
    num_ranks = min(4, torch.cuda.device_count())
    outcomes = run_ranks(num_ranks, run_prepared, format, presum, backend="nccl", timeout_s=200)
    assert [outcome.text for outcome in outcomes] == [""] * num_ranks
    assert [outcome.value for outcome in outcomes] == [{"same": True, "replayed": True}] * num_ranks

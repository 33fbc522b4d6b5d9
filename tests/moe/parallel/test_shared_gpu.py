"""Shared experts over ranks on GPUs: the bits of one rank, eager, prepared and in graphs, by each exchange."""

import pytest
import torch
import torch.distributed as dist

from envoi.experts import with_shared
from envoi.ops.moe import moe
from envoi.ops.moe.parallel import ExpertParallel
from envoi.types import ExpertWeights
from tests.helpers.accuracy import assert_same_bits
from tests.helpers.ranks import gpu_ranks, own_device, run_ranks
from tests.moe.layers import make
from tests.moe.parallel import cases
from tests.moe.parallel.test_nvlink_gpu import LAYER, inputs_of, on_gpu, shares, ways
from tests.moe.test_shared import gate_of, shared_layer

TRIED = [("bf16", True), ("fp8_block128", False), ("mxfp4_mxfp8", True)]


def packed_on(device, format: str, gated: bool, first: int = 0, last: int | None = None) -> ExpertWeights:
    layer = cases.to(make(**LAYER), device)
    hidden = layer.tokens.shape[1]
    shared = cases.to(shared_layer(2 * layer.down.shape[2], hidden=hidden), device).pack(format)
    return with_shared(layer.pack(format, first, last), shared, gate_of(hidden).to(device) if gated else None)


def run_all(rank: int, num_ranks: int, way: str) -> list[list[torch.Tensor]]:
    outs, layer = [], make(**LAYER)
    ends = shares(num_ranks, layer.routing.num_experts)
    sizes = {"max_tokens": LAYER["tokens"], "num_topk": LAYER["k"], "exchange": "rows" if way == "memory" else way}
    if way == "hosts":
        sizes["hosts"] = [str(2 * r // num_ranks) for r in range(num_ranks)]
    for format, gated in TRIED:
        experts = packed_on(own_device(), format, gated, [0, *ends][rank], ends[rank])
        parallel = ExpertParallel(experts, **sizes)
        assert parallel.exchange == way, parallel.why
        inputs = inputs_of(layer, rank, shares(num_ranks, len(layer.tokens)))
        outs.append([parallel.moe(*inputs).cpu() for _ in range(3)])
        if way != "counted":
            graph = torch.cuda.CUDAGraph()
            dist.barrier()
            with torch.cuda.graph(graph):
                out = parallel.moe(*inputs)
            dist.barrier()
            out.zero_()
            graph.replay()
            outs[-1].append(out.cpu())
        parallel.check()
        dist.barrier()
        parallel.close()
    return outs


@pytest.mark.parametrize("way", ways("gathered", "hosts", "counted"))
def test_the_bits_of_one_rank(way):
    num_ranks = gpu_ranks()
    outcomes = run_ranks(num_ranks, run_all, way, backend="nccl", timeout_s=200)
    assert [outcome.text for outcome in outcomes] == [""] * num_ranks
    layer, routing = on_gpu(make(**LAYER))
    for number, (format, gated) in enumerate(TRIED):
        want = moe(layer.tokens, routing, packed_on("cuda", format, gated)).cpu()
        for call in range(len(outcomes[0].value[number])):
            assert_same_bits(torch.cat([outcome.value[number][call] for outcome in outcomes]), want)

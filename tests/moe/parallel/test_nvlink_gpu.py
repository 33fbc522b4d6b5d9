"""ExpertParallel over NVLink: the bits of one rank, whatever the shares; many calls; graphs; faults in words."""

import contextlib
import time
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

from envoi.ops.moe import moe
from envoi.ops.moe.parallel import ExpertParallel, nvlink
from envoi.ops.moe.parallel.nvlink import SharedLayout
from envoi.quant import FORMATS
from envoi.types import Routing
from tests.helpers.accuracy import assert_same_bits
from tests.helpers.kernel_hold import hold_kernel
from tests.helpers.launches import assert_same_code, watched
from tests.helpers.ranks import gpu_ranks, own_device, run_ranks
from tests.moe.layers import make
from tests.moe.parallel import cases, domains
from tests.moe.parallel.cases import Case
from tests.moe.parallel.test_ranks import all_cases
from tools.kernel_cases import moe_parallel as kernels

LAYER = {"tokens": 60, "experts": 8, "k": 3, "hidden": 256, "intermediate": 128}
BIG = {"tokens": 600, "experts": 8, "k": 3, "hidden": 2880, "intermediate": 256}


def ways(*over_nccl: str) -> list:
    """Return the ways of exchange as parameters: by "memory", for which one GPU suffices, and those of two GPUs."""
    over_two = [pytest.param(way, marks=pytest.mark.gpu(2)) for way in over_nccl]
    return [pytest.param("memory", marks=pytest.mark.gpu), *over_two]


def shares(num_ranks: int, total: int) -> list[int]:
    """Return where each rank's share ends."""
    return [total * (r + 1) // num_ranks for r in range(num_ranks)]


def on_gpu(layer, routing=None):
    layer = cases.to(layer, "cuda")
    r = routing or layer.routing
    return layer, Routing(r.topk_weights.cuda(), r.topk_ids.cuda(), r.num_experts)


def on_one_rank(case: Case) -> torch.Tensor:
    layer, routing = on_gpu(case.build())
    return moe(layer.tokens, routing, layer.pack(case.format)).cpu()


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("sizes", [LAYER, BIG], ids=["small", "hidden 2880"])
def test_several_ranks_in_one_process(format, sizes):
    if sizes is BIG and format == "fp8_block128":
        sizes = BIG | {"hidden": 2816}
    layer, routing = on_gpu(make(**sizes))
    layer.routing = routing
    tokens, ends = len(layer.tokens), [1, 5, 8]
    opened = domains.open_all(SharedLayout(3, 8, tokens, 4, layer.tokens.shape[1], format), [0, *ends], "cuda")
    packed = [layer.pack(format, first, last) for first, last in pairwise([0, *ends])]
    parts = domains.split(layer, [tokens // 3, tokens // 3, tokens])
    want = moe(layer.tokens, routing, layer.pack(format))
    for _ in range(2):
        assert_same_bits(torch.cat(domains.moe(opened, parts, packed)), want)


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["bf16", "fp8_block128"])
def test_rows_that_meet_on_a_rank_are_summed_there(format):
    layer, routing = on_gpu(make(**(LAYER | {"masked": 0.3})))
    layer.routing = routing
    tokens, ends = len(layer.tokens), [0, 1, 5, 8]
    opened = domains.open_all(SharedLayout(3, 8, tokens, 4, layer.tokens.shape[1], format, True), ends, "cuda")
    packed = [layer.pack(format, first, last) for first, last in pairwise(ends)]
    parts = domains.split(layer, [tokens // 3, tokens // 3, tokens])
    want = summed_by_rank(layer, format, ends)
    for _ in range(2):
        assert_same_bits(torch.cat(domains.moe(opened, parts, packed)), want)


def summed_by_rank(layer, format: str, ends: list[int]) -> torch.Tensor:
    """Compute each rank's partial sum of every token, rounded, and sum these."""
    ids, total = layer.routing.topk_ids, torch.zeros_like(layer.tokens, dtype=torch.float32)
    for first, last in pairwise(ends):
        mine = torch.where((ids >= first) & (ids < last), ids - first, -1)
        routing = Routing(layer.routing.topk_weights, mine, last - first)
        total += moe(layer.tokens, routing, layer.pack(format, first, last)).float()
    return total.bfloat16()


@cache
def launched() -> dict[str, str]:
    """Launch the kernels between ranks on the registry's sizes, in all formats: {hash: PTX}."""
    found: dict[str, str] = {}
    layer, _ = on_gpu(make(tokens=kernels.M, experts=16, k=kernels.NUM_TOPK, hidden=kernels.HIDDEN))
    E, num_ranks = kernels.NUM_EXPERTS, kernels.NUM_RANKS
    ids = layer.routing.topk_ids.cuda()
    ids = torch.where(ids < 0, ids, ids * (E // 16))
    routing = Routing(layer.routing.topk_weights.cuda(), ids, E)
    with watched(lambda sha256, kernel: found.setdefault(sha256, kernel.asm["ptx"])):
        for format in FORMATS:
            layout = SharedLayout(num_ranks, E, kernels.M, kernels.NUM_TOPK, kernels.HIDDEN, format)
            ends = list(range(0, E + 1, E // num_ranks))
            opened = domains.open_all(layout, ends, "cuda")
            domains.moe(opened, [(layer.tokens, routing)] * num_ranks, None)
            if format == "bf16":
                for domain in opened:
                    nvlink.send_rows(domain, torch.zeros(domain.rows.shape, dtype=torch.bfloat16, device="cuda"))
            pulled = [int(domain.offsets[-1]) for domain in opened]
            assert sum(pulled) == num_ranks * int((ids >= 0).sum())
        summing = domains.open_all(replace(layout, format="bf16", presum=True), ends, "cuda")
        domains.moe(summing, [(layer.tokens, routing)] * num_ranks, None)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("case", kernels.NVLINK, ids=lambda case: case.name)
def test_registered(case):
    assert_same_code(case.name, case.launch(), launched())


def open_here(layer, format: str, rank: int, ends: list[int], **options) -> ExpertParallel:
    sizes = {"max_tokens": max(1, len(layer.tokens)), "num_topk": layer.routing.topk_ids.shape[1]}
    return cases.open_parallel(layer, format, rank, ends, own_device(), **(sizes | options))


def inputs_of(layer, rank: int, ends: list[int]) -> tuple[torch.Tensor, Routing]:
    tokens, r = cases.part_of(layer, rank, ends)
    device = own_device()
    return tokens.to(device), Routing(r.topk_weights.to(device), r.topk_ids.to(device), r.num_experts)


def run_all(rank: int, num_ranks: int, tried: list[Case]) -> list[tuple[torch.Tensor, str]]:
    outs = []
    for case in tried:
        layer, (token_ends, expert_ends) = case.build(), case.cuts(num_ranks)
        parallel = open_here(layer, case.format, rank, expert_ends)
        out = parallel.moe(*inputs_of(layer, rank, token_ends)).cpu()
        parallel.check()
        dist.barrier()
        parallel.close()
        outs.append((out, parallel.transport))
    return outs


@pytest.mark.gpu
def test_the_bits_of_one_rank():
    num_ranks = gpu_ranks()
    tried = [
        *all_cases(num_ranks, 8),
        Case("fp8_row", hot=(0,)),
        Case("fp8_row", {"tokens": 700, "limit": 0.5, "k": 8}),
        Case("fp8_block128", {"tokens": 3000, "hidden": 1024, "intermediate": 512}),
    ]
    outcomes = run_ranks(num_ranks, run_all, tried, backend="nccl", timeout_s=400)  # each compiles, in 5 to 10 s
    assert [outcome.text for outcome in outcomes] == [""] * num_ranks
    for number, case in enumerate(tried):
        assert all(outcome.value[number][1] == "nvlink" for outcome in outcomes)
        assert_same_bits(torch.cat([outcome.value[number][0] for outcome in outcomes]), on_one_rank(case))


def _same_from_a_graph(parallel, inputs, want) -> bool:
    tokens, routing = inputs[0].clone(), Routing(inputs[1].topk_weights, inputs[1].topk_ids.clone(), 8)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        parallel.moe(tokens, routing)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = parallel.moe(tokens, routing)
    routing.topk_ids.fill_(-1)
    graph.replay()
    nothing = bool((out == 0).all())
    routing.topk_ids.copy_(inputs[1].topk_ids)
    for _ in range(50):
        graph.replay()
    torch.cuda.synchronize()
    parallel.check()
    return nothing and torch.equal(out, want)


def assert_rank_1_is_named(kind: str, outcomes, timeout_s: float) -> None:
    """Judge what `fault` returned on each rank: errors in time and NaN, or neither if rank 1 was a little late."""
    num_ranks = len(outcomes)
    if kind == "is a little late":
        assert [outcome.value[0] for outcome in outcomes] == [""] * num_ranks
        assert not any(outcome.value[3] for outcome in outcomes)
        return
    for rank in {0, 2, 3} & set(range(num_ranks)):
        assert outcomes[rank].text == ""
        error, text, seconds, all_nan = outcomes[rank].value
        assert error == "PeerTimeout"
        assert "rank 1 is lost or did not answer" in text
        assert seconds < timeout_s + 1.0
        assert all_nan
    if kind == "is late":
        assert outcomes[1].value[0] == "PeerTimeout"


MISTAKES = {
    "id": "routing.topk_ids: expected ids from 0 to 7, or -1 for a masked slot",
    "dtype": "tokens: expected bfloat16 or float16 [num_tokens, 256], got float32",
    "many": "tokens: expected at most 60 of them (max_tokens), got 61",
    "k": "routing.topk_ids: expected at most 3 slots a token (num_topk), got 4",
    "gradient": "tokens: expected a tensor without gradients",
    "meta": "tokens: expected a tensor on cuda:",
    "routing": "routing: expected an envoi.Routing, got tuple",
}


def each_mistake(parallel, inputs, rank: int) -> list[tuple[str, bool]]:
    """Let rank 1 make each mistake; return the error here, and whether the right call after it is right."""
    want, found = parallel.moe(*inputs).clone(), []
    for kind in MISTAKES:
        text = ""
        try:
            parallel.moe(*(wrong(kind, *inputs) if rank == 1 else inputs))
            torch.cuda.synchronize()
            parallel.check()
        except ValueError as error:
            text = str(error)
        torch.cuda.synchronize()
        _forget(parallel)
        dist.barrier()
        found.append((text, torch.equal(parallel.moe(*inputs), want)))
    parallel.check()
    return found


def _forget(parallel) -> None:
    """Clear the report of an error: the rank that raised at once has also reported to itself."""
    with contextlib.suppress(ValueError):
        parallel.check()


def wrong(kind: str, tokens: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, Any]:
    weights, ids = routing.topk_weights, routing.topk_ids.clone()
    if kind == "id":
        ids[3, 1] = 99
    if kind == "dtype":
        tokens = tokens.float()
    if kind == "many":
        tokens, ids, weights = (x[:1].expand(61, -1).contiguous() for x in (tokens, ids, weights))
    if kind == "k":
        ids, weights = (torch.cat((x, x[:, :1]), 1) for x in (ids, weights))
    if kind == "gradient":
        tokens = tokens.clone().requires_grad_()
    if kind == "meta":
        tokens = tokens.to("meta")
    if kind == "routing":
        return tokens, (weights, ids)
    return tokens, Routing(weights, ids, routing.num_experts)


def hurried(rank: int, num_ranks: int) -> tuple[int, bool]:
    """Pass a wrong id on rank 1 in the second of six calls, without a wait for the device in between."""
    layer, ends = make(**LAYER), shares(num_ranks, 8)
    parallel = open_here(layer, "bf16", rank, ends)
    inputs = inputs_of(layer, rank, shares(num_ranks, 60))
    want, num_errors = parallel.moe(*inputs).clone(), 0
    bad = wrong("id", *inputs)
    for call in range(6):
        try:
            parallel.moe(*(bad if rank == 1 and call == 1 else inputs))
        except ValueError:
            num_errors += 1
    torch.cuda.synchronize()
    try:
        parallel.check()
    except ValueError:
        num_errors += 1
    return num_errors, torch.equal(parallel.moe(*inputs), want)


@pytest.mark.gpu
def test_a_refusal_is_told_once_and_keeps_the_ranks_in_step():
    num_ranks = gpu_ranks()
    outcomes = run_ranks(num_ranks, hurried, backend="nccl", timeout_s=100)
    assert [outcome.value for outcome in outcomes] == [(1, True)] * num_ranks


def beside_another_stream(rank: int, num_ranks: int, holding: list[int]) -> dict[str, bool]:
    """Make a call and replay a graph while a stream of some ranks holds all multiprocessors but a few for 2 s."""
    layer, ends = make(**(LAYER | {"tokens": 900})), shares(num_ranks, 8)
    parallel = open_here(layer, "fp8_block128", rank, ends, timeout_s=8.0)
    inputs = inputs_of(layer, rank, shares(num_ranks, 900))
    want, graph = parallel.moe(*inputs).clone(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        replayed = parallel.moe(*inputs)
    held = torch.cuda.get_device_properties(own_device()).multi_processor_count - 20
    side, done = torch.cuda.Stream(), torch.zeros(2, dtype=torch.int32, device=own_device())
    hold_kernel[(1,)](torch.zeros_like(done), 0, num_warps=32)  # compiled now: the peers wait later
    right = {}
    for number, name in enumerate(("call", "graph")):
        dist.barrier()
        torch.cuda.synchronize()
        if rank in holding:
            with torch.cuda.stream(side):
                hold_kernel[(held,)](done[number:], 2_000_000_000, num_warps=32)
            time.sleep(0.2)
        if name == "graph":
            graph.replay()
        out = replayed if name == "graph" else parallel.moe(*inputs)
        right[f"{name} was queued meanwhile"] = rank not in holding or not side.query()
        torch.cuda.synchronize()
        parallel.check()
        right[name] = torch.equal(out, want)
        right[f"{name}: the other stream"] = int(done[number]) == held * (rank in holding)
    return right


@pytest.mark.gpu(2)
@pytest.mark.parametrize("holding", [[0], [0, 1, 2, 3]], ids=["one rank's", "all ranks'"])
def test_another_stream_that_holds_multiprocessors_neither_hangs_it_nor_starves(holding):
    num_ranks = gpu_ranks()
    outcomes = run_ranks(num_ranks, beside_another_stream, holding, backend="nccl", timeout_s=100)
    for outcome in outcomes:
        assert outcome.text == ""
        assert all(outcome.value.values()), outcome.value

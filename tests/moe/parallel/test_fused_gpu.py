"""Experts in one launch, on GPUs: the bits of the staged path and of one rank; graphs; other streams; lost ranks."""

import time
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from envoi.gemm.grouping import Grouping
from envoi.moe import moe
from envoi.moe.parallel import PeerTimeout, fused
from envoi.moe.parallel import cases as kernels
from envoi.moe.parallel.load import load_of
from envoi.moe.parallel.symmetric_memory import SharedLayout
from envoi.types import ExpertWeights, QuantTensor, Routing
from tests.helpers.accuracy import assert_same_bits
from tests.helpers.kernel_hold import hold_kernel
from tests.helpers.launches import assert_same_code, watched
from tests.helpers.ranks import calls_of_a_loop, gpu_ranks, own_device, run_ranks
from tests.moe.layers import make
from tests.moe.parallel import domains
from tests.moe.parallel.cases import Case
from tests.moe.parallel.test_nvlink_gpu import (
    LAYER,
    assert_rank_1_is_named,
    each_mistake,
    fault,
    inputs_of,
    on_gpu,
    on_one_rank,
    open_here,
    summed_by_rank,
)

FORMAT = "fp8_block128"
SLOTS = {"few rows": 10, "many rows": 8000}  # of a rank, as the choice of a tiling expects them
FREE = 20  # multiprocessors that another stream leaves
LAYERS = {
    "small": {},
    "hidden 2816": {"tokens": 600, "hidden": 2816, "intermediate": 256},
    "many": {"tokens": 3000, "hidden": 1024, "intermediate": 512},
    "few": {"tokens": 5},
    "top-8": {"tokens": 700, "k": 8},
    "top-1": {"tokens": 300, "k": 1},
    "hidden 384": {"tokens": 900, "hidden": 384, "intermediate": 256},
    "masked": {"masked": 0.7},
    "all masked": {"masked": 1.0},
    "bias": {"bias": True, "activation": "swiglu_oai"},
    "concat": {"packed_layout": "concat"},
}


def in_one_process(layer, token_ends, ends, presum=False):
    """Open ranks of the fused path in this process; return them, their experts and inputs."""
    sizes = len(layer.routing.topk_ids), 8, layer.tokens.shape[1], FORMAT, presum
    opened = domains.open_all(
        SharedLayout(len(ends), layer.routing.num_experts, *sizes, fused=True), [0, *ends], "cuda"
    )
    packed = [layer.pack(FORMAT, first, last) for first, last in pairwise([0, *ends])]
    return opened, packed, domains.split(layer, token_ends)


@pytest.mark.gpu
@pytest.mark.parametrize("num_slots", SLOTS.values(), ids=SLOTS)
@pytest.mark.parametrize("changes", LAYERS.values(), ids=LAYERS)
def test_several_ranks_in_one_process(changes, num_slots):
    layer, layer.routing = on_gpu(make(**(LAYER | changes)))
    tokens, want = len(layer.tokens), moe(layer.tokens, layer.routing, layer.pack(FORMAT))
    opened, packed, parts = in_one_process(layer, [tokens // 3, tokens // 3, tokens], [1, 5, 8])
    for _ in range(3):
        assert_same_bits(torch.cat(domains.moe(opened, parts, packed, num_slots)), want)
    assert not torch.stack([domain.report for domain in opened]).any()


@pytest.mark.gpu
@pytest.mark.parametrize("num_slots", SLOTS.values(), ids=SLOTS)
@pytest.mark.parametrize("tokens", [60, 3000])
@pytest.mark.parametrize("expert", [0, 4, 7])
def test_all_to_one_expert_with_duplicates(tokens, expert, num_slots):
    layer, layer.routing = on_gpu(make(**(LAYER | {"tokens": tokens})))
    layer.routing.topk_ids.fill_(expert)
    opened, packed, parts = in_one_process(layer, [tokens // 2, tokens], [4, 8])
    want = moe(layer.tokens, layer.routing, layer.pack(FORMAT))
    for _ in range(2):
        assert_same_bits(torch.cat(domains.moe(opened, parts, packed, num_slots)), want)


@pytest.mark.gpu
@pytest.mark.parametrize("num_slots", SLOTS.values(), ids=SLOTS)
def test_rows_that_meet_on_a_rank_are_summed_there(num_slots):
    layer, layer.routing = on_gpu(make(**(LAYER | {"masked": 0.3})))
    opened, packed, parts = in_one_process(layer, [20, 20, 60], [1, 5, 8], presum=True)
    got = torch.cat(domains.moe(opened, parts, packed, num_slots))
    assert_same_bits(got, summed_by_rank(layer, FORMAT, [0, 1, 5, 8]))


@pytest.mark.gpu
def test_counters_are_0_after_a_call_and_its_load_is_noted_once():
    layer, layer.routing = on_gpu(make(**(LAYER | {"tokens": 900})))
    opened, packed, parts = in_one_process(layer, [450, 900], [4, 8])
    for calls in (1, 2):
        domains.moe(opened, parts, packed)
        counts = [int((layer.routing.topk_ids == e).sum()) for e in range(8)]
        for domain in opened:
            assert not domain.progress.any()
            found = load_of(domain.history, [0, 4, 8]).num_tokens_per_expert
            assert found[-1].tolist() == counts
            assert int((found.sum(1) > 0).sum()) == calls


@cache
def launched() -> dict[str, str]:
    """Launch the kernels of the fused path on the registry's sizes, a rank's experts with random bytes: {hash: PTX}."""
    found: dict[str, str] = {}
    layer, _ = on_gpu(make(tokens=kernels.M, experts=16, k=kernels.NUM_TOPK, hidden=kernels.HIDDEN, intermediate=128))
    E, R, slots = kernels.NUM_EXPERTS, kernels.NUM_RANKS, kernels.M * kernels.NUM_TOPK
    ids = layer.routing.topk_ids.cuda()
    routing = Routing(layer.routing.topk_weights.cuda(), torch.where(ids < 0, ids, ids * (E // 16)), E)
    layout = SharedLayout(R, E, kernels.M, kernels.NUM_TOPK, kernels.HIDDEN, FORMAT, fused=True)
    opened = domains.open_all(layout, list(range(0, E + 1, E // R)), "cuda")
    domain, experts = opened[1], random_experts(kernels.NUM_LOCAL, kernels.INTERMEDIATE, kernels.HIDDEN)
    domains.exchange_routing(opened, [(layer.tokens, routing)] * R)
    with watched(lambda sha256, kernel: found.setdefault(sha256, kernel.asm["ptx"])):
        for num_slots, to in ((slots, domain.row_destinations), (slots, None), (slots // 4, domain.row_destinations)):
            fused.run_fused(domain, experts, Grouping(write_tail=False, expected=num_slots, to=to))
        torch.cuda.synchronize()
    assert not domain.report.any()
    return found


def random_experts(count: int, intermediate: int, hidden: int) -> ExpertWeights:
    def matrix(rows: int, columns: int) -> QuantTensor:
        values = torch.randint(0, 120, (count, rows, columns), dtype=torch.uint8, device="cuda")
        sf = torch.rand(count, rows // 128, columns // 128, device="cuda")
        return QuantTensor(values.view(torch.float8_e4m3fn), sf, (128, 128))

    return ExpertWeights(matrix(2 * intermediate, hidden), matrix(hidden, intermediate), FORMAT)


@pytest.mark.gpu
@pytest.mark.parametrize("case", kernels.FUSED, ids=lambda case: case.name)
def test_registered(case):
    assert_same_code(case.name, case.launch(), launched())


def run_both(rank: int, num_ranks: int, tried: list[Case]) -> list[tuple[torch.Tensor, torch.Tensor, str, bool]]:
    """Run each case fused and staged: the outputs, why, and whether only the first is fused."""
    found = []
    for case in tried:
        layer, (token_ends, expert_ends) = case.build(), case.cuts(num_ranks)
        opened = [open_here(layer, FORMAT, rank, expert_ends, fused=fused) for fused in (True, None)]
        outs = []
        for parallel in opened:
            outs.append(parallel.moe(*inputs_of(layer, rank, token_ends)).cpu())
            parallel.check()
        dist.barrier()
        found.append((*outs, opened[0].why, (opened[0].fused, opened[1].fused) == (True, False)))
        for parallel in opened:
            parallel.close()
    return found


@pytest.mark.gpu
def test_the_bits_of_the_staged_path():
    num_ranks = gpu_ranks()
    tried = [Case(FORMAT, changes) for changes in LAYERS.values()]
    tried += [
        Case(FORMAT, token_ends=[0] * (num_ranks - 1) + [60]),
        Case(FORMAT, {"tokens": 3000}, token_ends=[0] * (num_ranks - 1) + [3000]),
        Case(FORMAT, {"tokens": 0}, [0] * num_ranks),
        Case(FORMAT, expert_ends=[1] * (num_ranks - 1) + [8]),
        Case(FORMAT, {"tokens": 2000}, one_expert=5),
        Case(FORMAT, one_expert=0),
    ]
    outcomes = run_ranks(num_ranks, run_both, tried, backend="nccl", timeout_s=200)
    assert [outcome.text for outcome in outcomes] == [""] * num_ranks
    for number, case in enumerate(tried):
        want = on_one_rank(case)
        assert all("one launch" in outcome.value[number][2] for outcome in outcomes)
        assert all(outcome.value[number][3] for outcome in outcomes)
        for path in (0, 1):
            assert_same_bits(torch.cat([outcome.value[number][path] for outcome in outcomes]), want)


def run_often(rank: int, num_ranks: int, num_calls: int) -> dict[str, bool]:
    """Run calls with two routings in turn, then a graph whose routing changes between replays."""
    sizes = LAYER | {"tokens": 900}
    layers = [make(**(sizes | {"seed": seed})) for seed in (0, 1)]
    layers[1].gate_up, layers[1].down = layers[0].gate_up, layers[0].down
    ends = [900 * (r + 1) // num_ranks for r in range(num_ranks)]
    parallel = open_here(layers[0], FORMAT, rank, [8 * (r + 1) // num_ranks for r in range(num_ranks)], fused=True)
    given = [inputs_of(layer, rank, ends) for layer in layers]
    first = [parallel.moe(*inputs).clone() for inputs in given]
    different = torch.zeros((), dtype=torch.bool, device=own_device())
    for call in range(num_calls):
        different |= (parallel.moe(*given[call % 2]) != first[call % 2]).any()
    tokens, routing = given[0][0].clone(), replace(given[0][1], topk_ids=given[0][1].topk_ids.clone())
    routing = replace(routing, topk_weights=routing.topk_weights.clone())
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = parallel.moe(tokens, routing)
    from_graph = torch.zeros_like(different)
    for call in range(num_calls // 2):
        tokens.copy_(given[call % 2][0])
        routing.topk_ids.copy_(given[call % 2][1].topk_ids)
        routing.topk_weights.copy_(given[call % 2][1].topk_weights)
        graph.replay()
        from_graph |= (out != first[call % 2]).any()
    torch.cuda.synchronize()
    parallel.check()
    return {"calls": not bool(different), "graph": not bool(from_graph)}


@pytest.mark.gpu
def test_a_thousand_calls_and_a_graph():
    num_ranks = gpu_ranks()
    num_calls = calls_of_a_loop(1000, num_ranks)
    outcomes = run_ranks(num_ranks, run_often, num_calls, backend="nccl", timeout_s=200)
    assert [outcome.value for outcome in outcomes] == [{"calls": True, "graph": True}] * num_ranks


def beside_another_stream(rank: int, num_ranks: int, fused: bool, holding: list[int]) -> dict[str, bool]:
    """Make a call and replay a graph while a stream of some ranks holds all multiprocessors but a few for 2 s."""
    layer, ends = make(**(LAYER | {"tokens": 900})), [8 * (r + 1) // num_ranks for r in range(num_ranks)]
    parallel = open_here(layer, FORMAT, rank, ends, fused=fused, timeout_s=8.0)
    inputs = inputs_of(layer, rank, [900 * (r + 1) // num_ranks for r in range(num_ranks)])
    want, graph = parallel.moe(*inputs).clone(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        replayed = parallel.moe(*inputs)
    held = torch.cuda.get_device_properties(own_device()).multi_processor_count - FREE
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
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "staged"])
def test_another_stream_that_holds_multiprocessors_neither_hangs_it_nor_starves(fused, holding):
    num_ranks = gpu_ranks()
    outcomes = run_ranks(num_ranks, beside_another_stream, fused, holding, backend="nccl", timeout_s=100)
    for outcome in outcomes:
        assert outcome.text == ""
        assert all(outcome.value.values()), outcome.value


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["dies", "is late", "is a little late"])
def test_a_lost_rank_is_named_on_every_other(kind):
    num_ranks, timeout_s = gpu_ranks(), 6.0
    outcomes = run_ranks(num_ranks, fault, kind, timeout_s, FORMAT, True, backend="nccl", timeout_s=100)
    assert_rank_1_is_named(kind, outcomes, timeout_s)


def mistakes(rank: int, num_ranks: int) -> list[tuple[str, bool]]:
    """Let rank 1 make one mistake after the other, each followed by a right call."""
    layer, ends = make(**LAYER), [8 * (r + 1) // num_ranks for r in range(num_ranks)]
    parallel = open_here(layer, FORMAT, rank, ends, fused=True)
    return each_mistake(parallel, inputs_of(layer, rank, [60 * (r + 1) // num_ranks for r in range(num_ranks)]), rank)


@pytest.mark.gpu
def test_the_call_after_a_mistake_is_right():
    num_ranks = gpu_ranks()
    outcomes = run_ranks(num_ranks, mistakes, backend="nccl", timeout_s=100)
    assert all(text and again for outcome in outcomes for text, again in outcome.value)


def refused(rank: int, num_ranks: int) -> str:
    try:
        open_here(make(**LAYER), "bf16", rank, [8 * (r + 1) // num_ranks for r in range(num_ranks)], fused=True)
    except (ValueError, PeerTimeout) as error:
        return str(error)
    return ""


@pytest.mark.gpu
def test_other_formats_are_refused_in_words():
    for outcome in run_ranks(2, refused, backend="nccl", timeout_s=100):
        assert "fused: expected gated experts in fp8_block128" in outcome.value
        assert "got experts in bf16" in outcome.value

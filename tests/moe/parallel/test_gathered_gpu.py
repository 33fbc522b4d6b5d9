"""ExpertParallel by two NCCL collectives of constant size: the bits of one rank; many calls; a graph; faults in words.

Ranks share NVLink here, so shared memory is turned off in the objects under test.
"""

import os
import time
from functools import cache
from itertools import product

import pytest
import torch
import torch.distributed as dist

from envoi.epilogue.activation import written
from envoi.moe.parallel import PeerTimeout, api, gathered_device
from envoi.moe.parallel import cases as kernels
from envoi.moe.parallel.symmetric_memory import SharedLayout
from envoi.quant import FORMATS
from tests.helpers.accuracy import assert_same_bits
from tests.helpers.launches import assert_same_code, watched
from tests.helpers.ranks import run_ranks
from tests.moe.layers import make
from tests.moe.own import quick_gelu, reglu
from tests.moe.parallel import cases
from tests.moe.parallel.cases import Case
from tests.moe.parallel.test_nvlink_gpu import (
    LAYER,
    MISTAKES,
    _same_from_a_graph,
    assert_rank_1_is_named,
    each_mistake,
    inputs_of,
    on_gpu,
    on_one_rank,
    one_rank_as_many,
    summed_by_rank,
)
from tests.moe.parallel.test_ranks import random_cases

__all__ = ["one_rank_as_many"]


def num_ranks_here() -> int:
    return min(4, torch.cuda.device_count())


def open_here(layer, format: str, rank: int, ends: list[int], gather: bool = True, **options):
    """Open an object over NCCL, as on ranks that can't reach each other's memory."""
    torch.cuda.set_device(rank)
    api.ExpertParallel._open_domain = lambda *_: (None, "turned off by a test")
    api.gathering_pays = lambda *_: gather
    sizes = {"max_tokens": max(1, len(layer.tokens)), "num_topk": layer.routing.topk_ids.shape[1]}
    parallel = cases.open_parallel(layer, format, rank, ends, f"cuda:{rank}", **(sizes | options))
    assert (parallel.transport, parallel.exchange) == ("nccl", "gathered" if gather else "counted")
    return parallel


def shares(num_ranks: int, total: int) -> list[int]:
    return [total * (r + 1) // num_ranks for r in range(num_ranks)]


def run_all(rank: int, num_ranks: int, tried: list[Case], gather: bool) -> list[torch.Tensor]:
    outs = []
    for case in tried:
        layer, (token_ends, expert_ends) = case.build(), case.cuts(num_ranks)
        parallel = open_here(layer, case.format, rank, expert_ends, gather)
        outs.append(parallel.moe(*inputs_of(layer, rank, token_ends)).cpu())
        parallel.check()
        dist.barrier()
        parallel.close()
    return outs


@pytest.mark.gpu(2)
@pytest.mark.parametrize("gather", [True, False], ids=["gathered", "counted"])
def test_the_bits_of_one_rank(gather):
    num_ranks = num_ranks_here()
    tried = [Case(format) for format in FORMATS]
    tried += [
        Case("fp8_block128", token_ends=[0] * (num_ranks - 1) + [60]),
        Case("bf16", {"tokens": 0}, [0] * num_ranks),
        Case("mxfp4", {"masked": 1.0}),
        Case("bf16", one_expert=5),
        Case("bf16", {"bias": True, "activation": "swiglu_oai"}),
        Case("mxfp8", {"bias": True, "activation": written(reglu)}),
        Case("bf16", {"activation": written(quick_gelu)}),
        Case("fp8_row", {"tokens": 700, "limit": 0.5, "k": 8}),
        Case("fp8_block128", {"tokens": 3000, "hidden": 1024, "intermediate": 512}),
        *random_cases(num_ranks, 12, seed=num_ranks),
    ]
    outcomes = run_ranks(num_ranks, run_all, tried, gather, backend="nccl", timeout_s=300)
    assert [outcome.text for outcome in outcomes] == [""] * num_ranks
    for number, case in enumerate(tried):
        assert_same_bits(torch.cat([outcome.value[number] for outcome in outcomes]), on_one_rank(case))


def presummed(rank: int, num_ranks: int, format: str) -> tuple[torch.Tensor, bool, bool]:
    """Return the output, whether forty more calls give equal bits, and whether rows were summed on the ranks."""
    layer = make(**LAYER)
    parallel = open_here(layer, format, rank, shares(num_ranks, 8), presum=True)
    inputs = inputs_of(layer, rank, shares(num_ranks, 60))
    out = parallel.moe(*inputs)
    again = [torch.equal(parallel.moe(*inputs), out) for _ in range(40)]
    parallel.check()
    return out.cpu(), all(again), parallel.presum


@pytest.mark.gpu(2)
@pytest.mark.parametrize("format", ["bf16", "fp8_row"])
def test_presum(format):
    num_ranks = num_ranks_here()
    outcomes = run_ranks(num_ranks, presummed, format, backend="nccl", timeout_s=100)
    assert [outcome.value[1:] for outcome in outcomes] == [(True, True)] * num_ranks
    layer, routing = on_gpu(make(**LAYER))
    layer.routing = routing
    want = summed_by_rank(layer, format, [0, *shares(num_ranks, 8)])
    assert_same_bits(torch.cat([outcome.value[0] for outcome in outcomes]), want.cpu())


def run_often(rank: int, num_ranks: int, num_calls: int) -> dict[str, bool]:
    """Run consecutive calls with two inputs in turn, then again from a graph whose inputs change."""
    layers = [make(**(LAYER | {"seed": seed})) for seed in (0, 1)]
    layers[1].gate_up, layers[1].down = layers[0].gate_up, layers[0].down
    ends = [shares(num_ranks, 60), [60] * num_ranks]
    parallel = open_here(layers[0], "fp8_row", rank, shares(num_ranks, 8))
    given = [inputs_of(layer, rank, ends) for layer, ends in zip(layers, ends, strict=True)]
    first = [parallel.moe(*inputs).clone() for inputs in given]
    different = torch.zeros((), dtype=torch.bool, device=f"cuda:{rank}")
    for call in range(num_calls):
        out = parallel.moe(*given[call % 2])
        different |= (out != first[call % 2]).any() if out.numel() else False
    torch.cuda.synchronize()
    parallel.check()
    return {"same": not bool(different), "graph": _same_from_a_graph(parallel, given[0], first[0])}


@pytest.mark.gpu(2)
def test_two_thousand_calls_and_a_graph():
    num_ranks = num_ranks_here()
    outcomes = run_ranks(num_ranks, run_often, 2000, backend="nccl", timeout_s=200)
    assert [outcome.value for outcome in outcomes] == [{"same": True, "graph": True}] * num_ranks


def waits(rank: int, num_ranks: int) -> bool:
    """Return whether a call returns while the device is still busy with what was queued before it."""
    layer = make(**LAYER)
    parallel = open_here(layer, "bf16", rank, shares(num_ranks, 8))
    inputs = inputs_of(layer, rank, shares(num_ranks, 60))
    parallel.moe(*inputs)
    torch.cuda.synchronize()
    torch.cuda._sleep(int(2e9))  # about a second
    busy = torch.cuda.Event()
    busy.record()
    parallel.moe(*inputs)
    early = not busy.query()
    torch.cuda.synchronize()
    parallel.check()
    return not early


@pytest.mark.gpu(2)
def test_the_host_never_waits_for_the_device():
    num_ranks = num_ranks_here()
    outcomes = run_ranks(num_ranks, waits, backend="nccl", timeout_s=100)
    assert [(outcome.value, outcome.text) for outcome in outcomes] == [(False, "")] * num_ranks


def fault(rank: int, num_ranks: int, kind: str, timeout_s: float) -> tuple[str, str, float, bool]:
    """Make rank 1 fail; return the others' errors, their seconds, and whether the failed call's output is all NaN."""
    layer = make(**LAYER)
    parallel = open_here(layer, "bf16", rank, shares(num_ranks, 8), timeout_s=timeout_s)
    inputs = inputs_of(layer, rank, shares(num_ranks, 60))
    parallel.moe(*inputs)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 1 and kind == "dies":
        os._exit(3)
    if rank == 1:
        time.sleep(timeout_s + 2 if kind == "is late" else timeout_s / 2)
    start, out = time.monotonic(), None
    try:
        out = parallel.moe(*inputs)
        torch.cuda.synchronize()
        seconds = time.monotonic() - start
        parallel.check()
    except PeerTimeout as error:
        if out is None:  # the call itself raised, and has no output
            return type(error).__name__, str(error), time.monotonic() - start, True
        all_nan = bool(out.isnan().all())
        with pytest.raises(PeerTimeout):
            parallel.moe(*inputs)
        return type(error).__name__, str(error), seconds, all_nan
    return "", "", seconds, bool(out.isnan().any())


@pytest.mark.gpu(2)
@pytest.mark.parametrize("kind", ["dies", "is late", "is a little late"])
def test_a_lost_rank_is_named_on_every_other(kind):
    num_ranks, timeout_s = num_ranks_here(), 6.0
    outcomes = run_ranks(num_ranks, fault, kind, timeout_s, backend="nccl", timeout_s=100)
    assert_rank_1_is_named(kind, outcomes, timeout_s)
    if kind == "is late":  # rows of a call that the others gave up are in its buffers
        assert outcomes[1].value[3]


def mistakes(rank: int, num_ranks: int) -> list[tuple[str, bool]]:
    """Let rank 1 make one mistake after the other, each followed by a right call."""
    layer = make(**LAYER)
    parallel = open_here(layer, "bf16", rank, shares(num_ranks, 8))
    inputs = inputs_of(layer, rank, shares(num_ranks, 60))
    return each_mistake(parallel, inputs, rank)


@pytest.mark.gpu(2)
def test_one_ranks_mistake_is_an_error_on_all_and_the_next_call_is_right():
    num_ranks = num_ranks_here()
    outcomes = run_ranks(num_ranks, mistakes, backend="nccl", timeout_s=100)
    for rank, outcome in enumerate(outcomes):
        assert outcome.text == ""
        for (text, right_again), message in zip(outcome.value, MISTAKES.values(), strict=True):
            assert message in text
            assert right_again
            if rank != 1:
                assert text.startswith("rank 1 of the group refused its arguments")


def by_host(rank: int, num_ranks: int) -> str:
    try:
        open_here(make(**LAYER), "bf16", rank, shares(num_ranks, 8), hosts=[str(r) for r in range(num_ranks)])
    except ValueError as error:
        return str(error)
    return "opened"


@pytest.mark.gpu(2)
def test_ranks_over_nccl_are_not_grouped_by_host():
    for outcome in run_ranks(num_ranks_here(), by_host, backend="nccl", timeout_s=100):
        assert "hosts: expected None over NCCL" in outcome.value


def layers_in_turn(rank: int, num_ranks: int) -> tuple[bool, bool]:
    """Call two layers of equal sizes in turn; return whether they share buffers, and whether they are right."""
    layers = [make(**(LAYER | {"seed": seed})) for seed in (0, 1)]
    opened = [open_here(layer, "fp8_row", rank, shares(num_ranks, 8)) for layer in layers]
    given = [inputs_of(layer, rank, shares(num_ranks, 60)) for layer in layers]
    first = [parallel.moe(*inputs).clone() for parallel, inputs in zip(opened, given, strict=True)]
    again = [torch.equal(opened[i % 2].moe(*given[i % 2]), first[i % 2]) for i in range(40)]
    return opened[0].buffers is opened[1].buffers, all(again) and not torch.equal(*first)


@pytest.mark.gpu(2)
def test_layers_share_buffers():
    num_ranks = num_ranks_here()
    outcomes = run_ranks(num_ranks, layers_in_turn, backend="nccl", timeout_s=100)
    assert [outcome.value for outcome in outcomes] == [(True, True)] * num_ranks


@cache
def launched() -> dict[str, str]:
    """Launch the kernels around the collectives, on the registry's sizes, ranks in one process: {hash: PTX}."""
    found: dict[str, str] = {}
    layer, routing = on_gpu(make(tokens=kernels.M, experts=16, k=kernels.NUM_TOPK, hidden=kernels.HIDDEN))
    E, num_ranks = kernels.NUM_EXPERTS, kernels.NUM_RANKS
    ids = torch.where(routing.topk_ids < 0, routing.topk_ids, routing.topk_ids * (E // 16))
    sizes, ends = (num_ranks, E, kernels.M, kernels.NUM_TOPK, kernels.HIDDEN, "bf16"), list(range(0, E + 1, 64))
    assert len(ends) == num_ranks + 1
    with watched(lambda sha256, kernel: found.setdefault(sha256, kernel.asm["ptx"])):
        for presum in (False, True):
            layout, device = SharedLayout(*sizes, presum), torch.device("cuda")
            opened = [gathered_device.open_buffers(layout, r, ends, 10.0, device) for r in range(num_ranks)]
            for buffers in opened:
                buffers.sent.zero_()
                gathered_device.publish(buffers, layer.tokens, routing.topk_weights, ids)
            for source, dest in product(opened, opened):
                dest.segments[source.domain.rank].copy_(source.segments[source.domain.rank])
            rows = torch.zeros(num_ranks * ids.numel(), kernels.HIDDEN, dtype=torch.bfloat16, device=device)
            for buffers in opened:
                gathered_device.place_rows(buffers)
                gathered_device.fill_parts(buffers, rows)
            for source, dest in product(opened, opened):
                dest.received[source.domain.rank].copy_(source.sent[dest.domain.rank])
            for buffers in opened:
                assert not gathered_device.sum_received(buffers, ids).any()  # NaN isn't 0
                torch.cuda.synchronize()
                assert not buffers.domain.report.any()
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("case", kernels.GATHERED, ids=lambda case: case.name)
def test_registered(case):
    assert_same_code(case.name, case.launch(), launched())

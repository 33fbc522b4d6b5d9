"""ExpertParallel by two NCCL collectives of constant size, over all ranks or between hosts, and what is asked of these
and of NVLink alike: the bits of one rank; many calls; prepared ones; a graph; faults in words.

Ranks share NVLink here, so objects are opened with the exchange that they are to have; by host, both halves of the
ranks are given as two hosts, and share memory among themselves.
"""

import os
import time
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist

from envoi.ops.moe.experts import run_experts
from envoi.ops.moe.parallel import (
    PeerTimeout,
    collectives,
    counted,
    nvlink,
    rail,
)
from envoi.ops.moe.parallel.nvlink import SharedLayout
from envoi.ops.moe.parallel.rail import Grid
from envoi.quant import FORMATS
from envoi.runtime import shortcuts
from envoi.runtime.prepared.replay import Prepared
from tests.helpers.accuracy import assert_same_bits
from tests.helpers.launches import assert_same_code, watched
from tests.helpers.ranks import calls_of_a_loop, gpu_ranks, own_device, run_ranks
from tests.moe.layers import make
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
    shares,
    summed_by_rank,
    ways,
)
from tests.moe.parallel.test_nvlink_gpu import open_here as open_nvlink
from tests.moe.parallel.test_ranks import all_cases
from tools.kernel_cases import moe_parallel as kernels

WAYS = ("gathered", "hosts")


def open_here(layer, format: str, rank: int, ends: list[int], **options):
    """Open an object over NCCL."""
    torch.cuda.set_device(rank)
    sizes = {"max_tokens": max(1, len(layer.tokens)), "num_topk": layer.routing.topk_ids.shape[1]}
    parallel = cases.open_parallel(layer, format, rank, ends, f"cuda:{rank}", **(sizes | options))
    assert (parallel.transport, parallel.exchange) == ("nccl", options["exchange"].split("+")[0]), parallel.why
    return parallel


def halves(num_ranks: int) -> list[str]:
    return ["a" if rank < num_ranks // 2 else "b" for rank in range(num_ranks)]


def by(way: str, num_ranks: int, presum: bool = False) -> dict:
    """Return the options of an object: "hosts" groups the ranks by host, in halves."""
    options = {"exchange": f"{way}+sums" if presum else way}
    return options | {"hosts": halves(num_ranks)} if way == "hosts" else options


def open_by(way: str, layer, format: str, rank: int, num_ranks: int, presum: bool = False, **options):
    """Open an object of eight experts by a way, or by the ranks' "memory" over NVLink."""
    if way == "memory":
        return open_nvlink(layer, format, rank, shares(num_ranks, 8), exchange="sums" if presum else "rows", **options)
    return open_here(layer, format, rank, shares(num_ranks, 8), **by(way, num_ranks, presum), **options)


def run_all(rank: int, num_ranks: int, tried: list[Case], way: str) -> list[torch.Tensor]:
    outs = []
    mixed = {"exchange": "hosts", "hosts": list("abba")} if way == "hosts" and num_ranks == 4 else by(way, num_ranks)
    for number, case in enumerate(tried):
        layer, (token_ends, expert_ends) = case.build(), case.cuts(num_ranks)
        options = by(way, num_ranks) if number % 4 else mixed
        parallel = open_here(layer, case.format, rank, expert_ends, **options)
        outs.append(parallel.moe(*inputs_of(layer, rank, token_ends)).cpu())
        parallel.check()
        dist.barrier()
        parallel.close()
    return outs


@pytest.mark.gpu(2)
@pytest.mark.parametrize("way", ["gathered", "counted", "hosts"])
def test_the_bits_of_one_rank(way):
    num_ranks = gpu_ranks()
    tried = [
        *all_cases(num_ranks, 4),
        Case("fp8_row", {"tokens": 700, "limit": 0.5, "k": 8}),
        Case("fp8_block128", {"tokens": 3000, "hidden": 1024, "intermediate": 512}),
    ]
    outcomes = run_ranks(num_ranks, run_all, tried, way, backend="nccl", timeout_s=400)
    assert [outcome.text for outcome in outcomes] == [""] * num_ranks
    for number, case in enumerate(tried):
        assert_same_bits(torch.cat([outcome.value[number] for outcome in outcomes]), on_one_rank(case))


def two_on_a_gpu(rank: int, num_ranks: int, tried: list[Case], presum: bool) -> list[tuple[torch.Tensor, bool]]:
    """Return outputs of four ranks on two hosts, a GPU for each host, and whether those of a graph are equal."""
    place = rank // 2
    torch.cuda.set_device(place)
    gloo, outs = dist.new_group(backend="gloo"), []  # NCCL connects no two ranks on one GPU; rails are on both
    for case in tried:
        layer, (token_ends, expert_ends) = case.build(), case.cuts(num_ranks)
        sizes = {"max_tokens": len(layer.tokens), "num_topk": layer.routing.topk_ids.shape[1]}
        sizes["exchange"] = "hosts+sums" if presum else "hosts"
        parallel = cases.open_parallel(
            layer, case.format, rank, expert_ends, f"cuda:{place}", hosts=list("aabb"), timeout_s=60.0, **sizes
        )
        assert (parallel.transport, parallel.exchange) == ("nccl", "hosts"), parallel.why
        tokens, r = cases.part_of(layer, rank, token_ends)
        inputs = tokens.cuda(), replace(r, topk_weights=r.topk_weights.cuda(), topk_ids=r.topk_ids.cuda())
        out, graph = parallel.moe(*inputs), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        dist.barrier(gloo)
        with torch.cuda.graph(graph):
            again = parallel.moe(*inputs)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        parallel.check()
        outs.append((out.cpu(), torch.equal(out, again)))
        dist.barrier(gloo)
        parallel.close()
    return outs


@pytest.mark.gpu(2)
@pytest.mark.parametrize("presum", [False, True])
def test_two_hosts_of_two_ranks(monkeypatch, presum):
    """Ranks of a host share its memory, and a rail connects the hosts: here two ranks of a host have one GPU."""
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    tried = [
        Case("bf16"), Case("fp8_block128", token_ends=[0, 7, 7, 60]), Case("mxfp8", {"masked": 0.5}),
        Case("fp8_row", hot=(5,)), Case("bf16", {"bias": True, "activation": "swiglu_oai"}),
        Case("fp8_row", {"tokens": 600, "hidden": 2048}),  # graphs of much: NCCL reads and writes in place, if it may
    ]  # fmt: skip
    outcomes = run_ranks(4, two_on_a_gpu, tried, presum, backend="nccl", timeout_s=150)
    assert [outcome.text for outcome in outcomes] == [""] * 4
    for number, case in enumerate(tried):
        assert all(outcome.value[number][1] for outcome in outcomes)
        out, want = torch.cat([outcome.value[number][0] for outcome in outcomes]), on_one_rank(case)
        if presum:  # sums of each host's experts are rounded once more
            assert torch.allclose(out.float(), want.float(), rtol=2e-2, atol=2e-2 * float(want.float().abs().max()))
        else:
            assert_same_bits(out, want)


def presummed(rank: int, num_ranks: int, format: str, way: str) -> tuple[torch.Tensor, bool, bool]:
    """Return the output, whether forty more calls give equal bits, and whether rows were summed on the ranks."""
    layer = make(**LAYER)
    parallel = open_by(way, layer, format, rank, num_ranks, presum=True)
    inputs = inputs_of(layer, rank, shares(num_ranks, 60))
    out = parallel.moe(*inputs)
    again = [torch.equal(parallel.moe(*inputs), out) for _ in range(40)]
    parallel.check()
    return out.cpu(), all(again), parallel.presum


def closed_before_its_graph(rank: int, num_ranks: int, way: str) -> dict[str, bool]:
    """Close an object while a graph of its calls lives, and open another; return whether both gave the right answer."""
    layer = make(**LAYER)
    inputs = inputs_of(layer, rank, shares(num_ranks, 60))
    first = open_here(layer, "bf16", rank, shares(num_ranks, 8), **by(way, num_ranks))
    want, graph = first.moe(*inputs), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = first.moe(*inputs)
    graph.replay()
    torch.cuda.synchronize()
    first.check()
    same = torch.equal(out, want)
    dist.barrier()
    first.close()
    del first
    second = open_here(layer, "bf16", rank, shares(num_ranks, 8), **by(way, num_ranks))
    again = second.moe(*inputs)
    torch.cuda.synchronize()
    second.check()
    return {"graph": same, "next": torch.equal(again, want)}


@pytest.mark.gpu(2)
@pytest.mark.parametrize("way", WAYS)
def test_a_graph_outlives_its_object(way):
    num_ranks = gpu_ranks()
    outcomes = run_ranks(num_ranks, closed_before_its_graph, way, backend="nccl", timeout_s=100)
    assert [outcome.text for outcome in outcomes] == [""] * num_ranks
    assert [outcome.value for outcome in outcomes] == [{"graph": True, "next": True}] * num_ranks


@pytest.mark.parametrize("format", ["bf16", "fp8_row"])
@pytest.mark.parametrize("way", ways(*WAYS))
def test_presum(way, format):
    num_ranks = gpu_ranks()
    outcomes = run_ranks(num_ranks, presummed, format, way, backend="nccl", timeout_s=100)
    assert [outcome.text for outcome in outcomes] == [""] * num_ranks
    assert [outcome.value[1:] for outcome in outcomes] == [(True, True)] * num_ranks
    layer, routing = on_gpu(make(**LAYER))
    layer.routing = routing
    # Sums of a host that holds experts 0 to 3 are those of a rank that holds them.
    want = summed_by_rank(layer, format, [0, 4, 8] if way == "hosts" else [0, *shares(num_ranks, 8)])
    assert_same_bits(torch.cat([outcome.value[0] for outcome in outcomes]), want.cpu())


def run_often(rank: int, num_ranks: int, num_calls: int, format: str, way: str) -> dict[str, bool]:
    """Run consecutive calls with two inputs in turn, then again from a graph whose inputs change."""
    layers = [make(**(LAYER | {"seed": seed})) for seed in (0, 1)]
    layers[1].gate_up, layers[1].down = layers[0].gate_up, layers[0].down
    ends = [shares(num_ranks, 60), [60] * num_ranks]
    parallel = open_by(way, layers[0], format, rank, num_ranks)
    given = [inputs_of(layer, rank, ends) for layer, ends in zip(layers, ends, strict=True)]
    first = [parallel.moe(*inputs).clone() for inputs in given]
    different = torch.zeros((), dtype=torch.bool, device=own_device())
    for call in range(num_calls):
        out = parallel.moe(*given[call % 2])
        different |= (out != first[call % 2]).any() if out.numel() else False
    torch.cuda.synchronize()
    parallel.check()
    calls = parallel._calls
    is_prepared = any(isinstance(call, Prepared) for call in calls.known.values())
    return {
        "same": not bool(different), "prepared": is_prepared and not (way == "memory" and calls.refusals()),
        "graph": _same_from_a_graph(parallel, given[0], first[0]),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("format", "way"),
    [
        *(pytest.param(format, "memory", marks=pytest.mark.gpu) for format in ("fp8_row", "fp8_block128")),
        *(pytest.param("fp8_row", way, marks=pytest.mark.gpu(2)) for way in WAYS),
    ],
)
def test_two_thousand_calls_and_a_graph(format, way):
    num_ranks = gpu_ranks()
    num_calls = calls_of_a_loop(2000, num_ranks)
    outcomes = run_ranks(num_ranks, run_often, num_calls, format, way, backend="nccl", timeout_s=200)
    assert [outcome.text for outcome in outcomes] == [""] * num_ranks
    want = {"same": True, "prepared": shortcuts.PREPARED, "graph": True}
    assert [outcome.value for outcome in outcomes] == [want] * num_ranks


def prepared_bits(rank: int, num_ranks: int, format: str, way: str, presum: bool = False) -> dict[str, bool]:
    """Run calls with other tokens and routings at other addresses, each prepared and as always; then graphs of one."""
    first = make(**LAYER)
    parallel = open_by(way, first, format, rank, num_ranks, presum)
    layers = [replace(make(**LAYER, seed=seed), gate_up=first.gate_up, down=first.down) for seed in range(4)]
    given = [inputs_of(layer, rank, shares(num_ranks, 60)) for layer in layers]
    shortcuts.ENABLED = True
    same, want = True, []
    for call in range(12):
        shortcuts.PREPARED = True
        out = parallel.moe(*given[call % 4])
        shortcuts.PREPARED = False
        want.append(parallel.moe(*given[call % 4]))
        same &= torch.equal(out, want[-1])
    shortcuts.PREPARED = True
    known = list(parallel._calls.known.values())
    return {
        "same": same, "replayed": len(known) == 1 and isinstance(known[0], Prepared),
        "graph": _same_from_a_graph(parallel, given[0], want[0]), "other tokens": other_tokens(parallel, given, want),
    }  # fmt: skip


def other_tokens(parallel, given, want) -> bool:
    """Return whether a graph of one call, its inputs overwritten by another's, gives that one's bits."""
    tokens, routing = given[0]
    tokens, ids, weights = tokens.clone(), routing.topk_ids.clone(), routing.topk_weights.clone()
    dist.barrier()
    graph, same = torch.cuda.CUDAGraph(), True
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
    return same


PREPARED = [(format, "memory", presum) for format in FORMATS for presum in (False, True)]
PREPARED += [(format, way, False) for format in ("bf16", "fp8_block128", "mxfp4") for way in WAYS]


@pytest.mark.gpu(2)
@pytest.mark.parametrize(("format", "way", "presum"), PREPARED)
def test_prepared_calls(format, way, presum):
    num_ranks = gpu_ranks()
    outcomes = run_ranks(num_ranks, prepared_bits, format, way, presum, backend="nccl", timeout_s=200)
    assert [outcome.text for outcome in outcomes] == [""] * num_ranks
    assert all(all(outcome.value.values()) for outcome in outcomes), outcomes


def waits(rank: int, num_ranks: int, way: str) -> bool:
    """Return whether a call returns while the device is still busy with what was queued before it."""
    layer = make(**LAYER)
    parallel = open_here(layer, "bf16", rank, shares(num_ranks, 8), **by(way, num_ranks))
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
@pytest.mark.parametrize("way", WAYS)
def test_the_host_never_waits_for_the_device(way):
    num_ranks = gpu_ranks()
    outcomes = run_ranks(num_ranks, waits, way, backend="nccl", timeout_s=100)
    assert [(outcome.value, outcome.text) for outcome in outcomes] == [(False, "")] * num_ranks


def fault(rank: int, num_ranks: int, kind: str, timeout_s: float, way: str) -> tuple[str, str, float, bool]:
    """Make rank 1 fail; return the others' errors, their seconds, and whether the failed call's output is all NaN."""
    layer, shortcuts.PREPARED = make(**LAYER), kind != "dies within"  # a prepared call has no steps
    dist.barrier()  # on a busy machine one rank may start seconds after another
    parallel = open_by(way, layer, "bf16", rank, num_ranks, timeout_s=timeout_s)
    inputs = inputs_of(layer, rank, shares(num_ranks, 60))
    parallel.moe(*inputs)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 1 and kind == "dies":
        os._exit(3)
    if rank == 1 and kind == "dies within":
        collectives.exchange_rows = nvlink.run_local_experts = lambda *_: os._exit(3)
    elif kind == "dies within":
        run = counted.run_local_experts  # behind the exchange that is never done: the host is held by the device
        counted.run_local_experts = lambda *given: (torch.cuda.synchronize(), run(*given))[1]
    elif rank == 1:
        time.sleep(timeout_s + 2 if kind == "is late" else timeout_s / 2)
    start, out = time.monotonic(), None
    try:
        out = parallel.moe(*inputs)
        torch.cuda.synchronize()
        seconds = time.monotonic() - start
        parallel.check()
    except PeerTimeout as error:
        if out is None:  # the call itself raised, and has no output
            seconds = time.monotonic() - start
            torch.cuda.synchronize()  # which has an end: nothing waits for the lost rank any more
            return type(error).__name__, str(error), seconds, True
        all_nan = bool(out.isnan().all())
        with pytest.raises(PeerTimeout):
            parallel.moe(*inputs)
        return type(error).__name__, str(error), seconds, all_nan
    return "", "", seconds, bool(out.isnan().any())


KINDS = "dies", "is late", "is a little late"


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        *(pytest.param(kind, "memory", marks=pytest.mark.gpu) for kind in KINDS),
        *(pytest.param(kind, way, marks=pytest.mark.gpu(2))
          for kind in (*KINDS, "dies within") for way in (*WAYS, "counted")),
    ],
)  # fmt: skip
def test_a_lost_rank_is_named_on_every_other(kind, way):
    num_ranks, timeout_s = gpu_ranks(), 8.0
    outcomes = run_ranks(num_ranks, fault, kind, timeout_s, way, backend="nccl", timeout_s=100)
    assert_rank_1_is_named(kind, outcomes, timeout_s)
    if kind == "is late":  # rows of a call that the others gave up are in its buffers; counted, it has no output
        assert outcomes[1].value[3]


def mistakes(rank: int, num_ranks: int, way: str) -> list[tuple[str, bool]]:
    """Let rank 1 make one mistake after the other, each followed by a right call."""
    layer = make(**LAYER)
    parallel = open_by(way, layer, "bf16", rank, num_ranks)
    inputs = inputs_of(layer, rank, shares(num_ranks, 60))
    return each_mistake(parallel, inputs, rank)


@pytest.mark.parametrize("way", ways(*WAYS))
def test_one_ranks_mistake_is_an_error_on_all_and_the_next_call_is_right(way):
    num_ranks = gpu_ranks()
    outcomes = run_ranks(num_ranks, mistakes, way, backend="nccl", timeout_s=100)
    for rank, outcome in enumerate(outcomes):
        assert outcome.text == ""
        for (text, right_again), message in zip(outcome.value, MISTAKES.values(), strict=True):
            assert message in text
            assert right_again
            if rank != 1:
                assert text.startswith("rank 1 of the group refused its arguments")


def bytes_sent(rank: int, num_ranks: int, presum: bool) -> tuple[list[int], tuple[int, int], int]:
    """Run a call by host; return the bytes that each collective sends to other hosts, those that the layout has, and
    those that a flat exchange of the same sizes sends to other hosts."""
    seen: list[int] = []

    def counting(collective):
        def counted(backend, out, sent):
            run = collective(backend, out, sent)
            num_bytes = sent.nbytes * (backend.size() - 1) if out.nbytes > sent.nbytes else sent[1:].nbytes
            return lambda: (seen.append(num_bytes), run())

        return counted

    rail.queued_gather = counting(rail.queued_gather)
    rail.queued_exchange = counting(rail.queued_exchange)
    layer = make(**(LAYER | {"k": 6}))
    parallel = open_here(layer, "fp8_row", rank, shares(num_ranks, 8), **by("hosts", num_ranks, presum))
    parallel.moe(*inputs_of(layer, rank, shares(num_ranks, 60)))
    parallel.check()
    layout = parallel._exchange.rail.layout
    flat = rail.HostsLayout(layout.whole, num_ranks)
    return seen, layout.bytes_between_hosts, num_ranks // 2 * (flat.parcel.end + 2 * flat.part_columns)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("presum", [False, True])
def test_bytes_between_hosts(presum):
    num_ranks = gpu_ranks()
    outcomes = run_ranks(num_ranks, bytes_sent, presum, backend="nccl", timeout_s=100)
    for outcome in outcomes:
        assert outcome.text == ""
        seen, (dispatch, combine), flat = outcome.value
        assert seen == [dispatch, combine]
        if num_ranks == 4:  # a rank has one peer on the other host, not two
            assert dispatch + combine <= 0.52 * flat


def without_shared_memory(rank: int, num_ranks: int) -> tuple[str, str]:
    """Open by host where ranks of a host can't map each other's memory; return how tokens are exchanged, and why."""

    def fail(*_):
        raise RuntimeError("no way there")

    torch.cuda.set_device(rank)
    nvlink.connect_part = nvlink.set_peers = fail
    given = make(**LAYER), "bf16", rank, shares(num_ranks, 8), f"cuda:{rank}"
    parallel = cases.open_parallel(*given, max_tokens=60, num_topk=3, exchange="hosts", hosts=halves(num_ranks))
    return parallel.exchange, parallel.why


@pytest.mark.gpu(2)
def test_ranks_of_a_host_that_share_no_memory_are_not_grouped():
    for outcome in run_ranks(gpu_ranks(), without_shared_memory, backend="nccl", timeout_s=100):
        assert outcome.value[0] in ("gathered", "counted")
        assert outcome.value[1] == "rank 0: no way there"


def layers_in_turn(rank: int, num_ranks: int, way: str) -> tuple[bool, bool]:
    """Call two layers of equal sizes in turn; return whether they share buffers, and whether they are right."""
    layers = [make(**(LAYER | {"seed": seed})) for seed in (0, 1)]
    opened = [open_by(way, layer, "fp8_row", rank, num_ranks) for layer in layers]
    given = [inputs_of(layer, rank, shares(num_ranks, 60)) for layer in layers]
    first = [parallel.moe(*inputs).clone() for parallel, inputs in zip(opened, given, strict=True)]
    again = [torch.equal(opened[i % 2].moe(*given[i % 2]), first[i % 2]) for i in range(40)]
    return opened[0]._exchange is opened[1]._exchange, all(again) and not torch.equal(*first)


@pytest.mark.parametrize("way", ways(*WAYS))
def test_layers_share_buffers(way):
    num_ranks = gpu_ranks()
    outcomes = run_ranks(num_ranks, layers_in_turn, way, backend="nccl", timeout_s=100)
    assert [outcome.value for outcome in outcomes] == [(True, True)] * num_ranks


def launch_between_hosts(found: dict[str, str]) -> None:
    """Launch the kernels between hosts, on the registry's sizes, alone: a rank's own parcel comes from all hosts."""
    layer, routing = on_gpu(make(tokens=kernels.M, experts=16, k=kernels.NUM_TOPK, hidden=kernels.HIDDEN))
    ids = torch.where(routing.topk_ids < 0, routing.topk_ids, routing.topk_ids * (kernels.NUM_EXPERTS // 16))
    with watched(lambda sha256, kernel: found.setdefault(sha256, kernel.asm["ptx"])):
        num_ranks, E = kernels.NUM_HOSTS * kernels.NUM_RANKS, kernels.NUM_EXPERTS
        grid = Grid.of([str(rank // kernels.NUM_RANKS) for rank in range(num_ranks)])
        for format, presum in [("bf16", True), *((format, False) for format in FORMATS)]:
            whole = SharedLayout(num_ranks, E, kernels.M, kernels.NUM_TOPK, kernels.HIDDEN, format, presum)
            layout = rail.HostsLayout(whole, kernels.NUM_HOSTS)
            sizes = layout, grid, 1, range(0, E + 1, 32), 10.0, torch.device("cuda")
            buffers = rail.open_rail(*sizes, shared=False)
            address = buffers.domain.memory.data_ptr()
            nvlink.set_peers(buffers.domain, [address] * buffers.domain.layout.num_ranks)
            rail.pack_parcel(buffers, layer.tokens, routing.topk_weights, ids)
            for parcel in buffers.parcels:
                parcel.copy_(buffers.own_parcel)
            rail.unpack(buffers)
            torch.cuda.synchronize()
            kept = buffers.topk_ids.view(kernels.NUM_HOSTS, -1, kernels.NUM_TOPK)[:, :-1]
            assert torch.equal(kept, torch.where(ids < kernels.NUM_EXPERTS // 2, ids, -1).expand_as(kept))
            rail.seal_parts(buffers)
            buffers.received.zero_()
            for part in buffers.received:
                part[-8:].view(torch.int32)[0] = 1
            assert not rail.sum_received(buffers, ids).any()  # NaN isn't 0
            torch.cuda.synchronize()
            assert not buffers.late.any()


def in_parts(rank: int, num_ranks: int, format: str, options: dict) -> dict[str, bool]:
    """Run dispatch, this rank's experts and combine, called and from a graph; return whether it has the bits of moe."""
    layer = make(**LAYER)
    opened = open_nvlink if options["exchange"] in ("rows", "sums") else open_here
    parallel = opened(layer, format, rank, shares(num_ranks, 8), **options)
    tokens, r = inputs_of(layer, rank, shares(num_ranks, 60))
    want = parallel.moe(tokens, r)

    def run() -> torch.Tensor:
        sent = parallel.dispatch(tokens, r.topk_ids, r.topk_weights)
        rows = run_experts(sent.rows, sent.topk_weights, sent.offsets, parallel.experts)
        return parallel.combine(rows, sent)

    found = {
        "called": all(torch.equal(run(), want) for _ in range(20)),
        "after": torch.equal(parallel.moe(tokens, r), want),
    }
    torch.cuda.synchronize()
    if options["exchange"] != "counted":
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        for _ in range(3):
            out.fill_(float("nan"))
            graph.replay()
        found["graph"] = torch.equal(out, want)
    sent = parallel.dispatch(tokens, r.topk_ids, r.topk_weights)
    rows = run_experts(sent.rows, sent.topk_weights, sent.offsets, parallel.experts)
    parallel.combine(rows, sent)
    if options["exchange"] != "counted":
        with pytest.raises(ValueError, match="handle: expected that of the last call"):
            parallel.combine(rows, sent)
    parallel.check()
    return found


@pytest.mark.gpu(2)
@pytest.mark.parametrize("way", ["rows", "sums", "gathered", "gathered+sums", "hosts", "counted"])
@pytest.mark.parametrize("format", ["bf16", "fp8_block128"])
def test_dispatch_and_combine(format, way):
    num_ranks = gpu_ranks()
    options = (
        by(*way.split("+")[:1], num_ranks, way.endswith("+sums")) if way not in ("rows", "sums") else {"exchange": way}
    )
    for outcome in run_ranks(num_ranks, in_parts, format, options, backend="nccl", timeout_s=150):
        assert outcome.text == ""
        assert all(outcome.value.values()), outcome.value


def on_few_sms(rank: int, num_ranks: int, options: dict) -> tuple[bool, int, int]:
    """Return whether calls with few multiprocessors have the bits of those with all; calls and kinds of kernels."""
    layer = make(**LAYER)
    opened = open_nvlink if options["exchange"] == "rows" else open_here
    all_sms = opened(layer, "bf16", rank, shares(num_ranks, 8), **options)
    few_sms = opened(layer, "bf16", rank, shares(num_ranks, 8), num_sms=16, **options)
    inputs = inputs_of(layer, rank, shares(num_ranks, 60))
    want = all_sms.moe(*inputs)
    same = all(torch.equal(few_sms.moe(*inputs), want) and torch.equal(all_sms.moe(*inputs), want) for _ in range(6))
    few_sms.check()
    return same, len(few_sms._calls.known), len(few_sms._exchange.domain.has_kernels)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("way", ["rows", "gathered"])
def test_num_sms(way):
    num_ranks = gpu_ranks()
    options = {"exchange": way}
    outcomes = run_ranks(num_ranks, on_few_sms, options, backend="nccl", timeout_s=150)
    assert [(outcome.value, outcome.text) for outcome in outcomes] == [((True, 2, 2), "")] * num_ranks


@cache
def launched_between_hosts() -> dict[str, str]:
    found: dict[str, str] = {}
    launch_between_hosts(found)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("case", kernels.HOSTS, ids=lambda case: case.name)
def test_registered_between_hosts(case):
    assert_same_code(case.name, case.launch(), launched_between_hosts())

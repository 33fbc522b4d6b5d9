"""Placement on GPUs: bits, prepared calls and graphs that go on with another placement, a workspace, lost ranks."""

from functools import cache
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from envoi.ops.moe import moe
from envoi.ops.moe.parallel import ExpertParallel
from envoi.ops.moe.parallel.nvlink import SharedLayout
from envoi.ops.moe.parallel.placement import Placed, place, place_by_torch
from envoi.quant import FORMATS
from envoi.runtime import shortcuts
from envoi.runtime.prepared.replay import Prepared
from envoi.types import ExpertWeights, Routing
from tests.helpers.accuracy import assert_same_bits
from tests.helpers.launches import assert_same_code, watched
from tests.helpers.ranks import gpu_ranks, own_device, run_ranks
from tests.moe.layers import make
from tests.moe.parallel import cases, domains
from tests.moe.parallel.cases import Case
from tests.moe.parallel.test_nvlink_gpu import LAYER, inputs_of, on_gpu, on_one_rank, shares, ways
from tests.moe.parallel.test_placement import pack_placed
from tools.kernel_cases import moe_parallel as kernels

NUM_EXPERTS = 8
WAYS = ways("gathered", "hosts", "counted")


def placement_of(num_ranks: int, shift: int = 0) -> tuple[list[int], list[int]]:
    """Return a placement with a replica on each rank, and where ranks' experts end; shift: another one as large."""
    found, ends = [], []
    for rank in range(num_ranks):
        first, last = (NUM_EXPERTS * r // num_ranks for r in (rank, rank + 1))
        found += [*range(first, last), (3 * rank + 5) % NUM_EXPERTS]
        ends.append(len(found))
    return [(e + shift) % NUM_EXPERTS for e in found], ends


def packed_here(layer, format: str, rank: int, num_ranks: int, shift: int = 0) -> ExpertWeights:
    placement, ends = placement_of(num_ranks, shift)
    first, last = list(pairwise([0, *ends]))[rank]
    return pack_placed(cases.to(layer, own_device()), format, placement[first:last])


def open_placed(layer, format: str, rank: int, num_ranks: int, way: str, **options) -> ExpertParallel:
    # Of all tests alike, so that they share kernels: to compile them takes longest.
    sizes = {"max_tokens": LAYER["tokens"], "num_topk": LAYER["k"]}
    sizes["exchange"] = "rows" if way == "memory" else way
    if way == "hosts":
        sizes["hosts"] = [str(2 * r // num_ranks) for r in range(num_ranks)]
    placement = placement_of(num_ranks)[0]
    packed = packed_here(layer, format, rank, num_ranks)
    parallel = ExpertParallel(packed, placement=placement, **(sizes | options))
    assert parallel.exchange == way, parallel.why
    return parallel


def run_all(rank: int, num_ranks: int, way: str, tried: list[Case]) -> list[torch.Tensor]:
    outs = []
    for case in tried:
        layer = case.build()
        parallel = open_placed(layer, case.format, rank, num_ranks, way)
        given = inputs_of(layer, rank, shares(num_ranks, len(layer.tokens)))
        outs.append(parallel.moe(*given).cpu())
        parallel.check()
        dist.barrier()
        parallel.close()
    return outs


TRIED = [
    Case("bf16"), Case("bf16", {"tokens": 0}), Case("bf16", hot=(5,)), Case("mxfp4_mxfp8", {"k": 2}),
    Case("fp8_block128", {"masked": 0.3}), Case("fp8_block128", {"tokens": 5}),
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_the_bits_of_one_rank(way):
    num_ranks = gpu_ranks()
    outcomes = run_ranks(num_ranks, run_all, way, TRIED, backend="nccl", timeout_s=200)
    assert [outcome.text for outcome in outcomes] == [""] * num_ranks
    for number, case in enumerate(TRIED):
        assert_same_bits(torch.cat([outcome.value[number] for outcome in outcomes]), on_one_rank(case))


def moved(rank: int, num_ranks: int, way: str) -> dict[str, bool]:
    """Call, capture, move experts, call and replay: compare outputs with the first, the load with the routing."""
    layer = make(**LAYER)
    parallel = open_placed(layer, "bf16", rank, num_ranks, way)
    inputs = inputs_of(layer, rank, shares(num_ranks, 60))
    want, found = parallel.moe(*inputs).clone(), {}
    found["again"] = all(torch.equal(parallel.moe(*inputs), want) for _ in range(5))
    graph, out = torch.cuda.CUDAGraph(), None
    if way != "counted":
        dist.barrier()
        with torch.cuda.graph(graph):
            out = parallel.moe(*inputs)
    dist.barrier()
    for shift in (3, 0, 5):
        other = packed_here(layer, "bf16", rank, num_ranks, shift)
        parallel.experts.gate_up.copy_(other.gate_up)
        parallel.experts.down.copy_(other.down)
        parallel.update_placement(placement_of(num_ranks, shift)[0])
        found[f"moved {shift}"] = all(torch.equal(parallel.moe(*inputs), want) for _ in range(3))
        if out is not None:
            out.zero_()
            graph.replay()
            found[f"replayed {shift}"] = torch.equal(out, want)
        if way in ("memory", "counted"):
            ids = layer.routing.topk_ids
            counts = parallel.load().num_tokens_per_expert[-1].tolist()
            found[f"load {shift}"] = counts == [int((ids == e).sum()) for e in range(NUM_EXPERTS)]
    torch.cuda.synchronize()
    parallel.check()
    if way != "counted":
        known = parallel._calls.known.values()
        found["prepared"] = not shortcuts.PREPARED or any(isinstance(call, Prepared) for call in known)
    dist.barrier()
    return found


@pytest.mark.parametrize("way", WAYS)
def test_calls_and_graphs_go_on_with_another_placement(way):
    num_ranks = gpu_ranks()
    outcomes = run_ranks(num_ranks, moved, way, backend="nccl", timeout_s=150)
    assert [outcome.text for outcome in outcomes] == [""] * num_ranks
    for outcome in outcomes:
        assert all(outcome.value.values()), outcome.value


def with_workspace(rank: int, num_ranks: int, way: str) -> dict[str, bool]:
    """Call with a workspace, and on rank 1 with one that is too small."""
    layer = make(**LAYER)
    parallel = open_placed(layer, "fp8_block128", rank, num_ranks, way)
    inputs = inputs_of(layer, rank, shares(num_ranks, 60))
    want, num_bytes = parallel.moe(*inputs).clone(), parallel.workspace_bytes(*inputs)
    memory = torch.empty(num_bytes, dtype=torch.uint8, device=own_device())
    found = {
        "size": num_bytes > 0,
        "same": all(torch.equal(parallel.moe(*inputs, workspace=memory), want) for _ in range(4)),
    }
    texts = []
    for given in (memory[:-16] if rank == 1 else memory, memory):
        try:
            out = parallel.moe(*inputs, workspace=given)
            torch.cuda.synchronize()
            parallel.check()
        except ValueError as error:
            texts.append(str(error))
        torch.cuda.synchronize()
        dist.barrier()
        try:
            parallel.check()  # the rank that raised at once has also reported to itself
        except ValueError as error:
            texts.append(str(error))
    return found | {"told": any("workspace: expected" in text for text in texts), "right": torch.equal(out, want)}


@pytest.mark.parametrize("way", ways("gathered"))
def test_workspace(way):
    num_ranks = gpu_ranks()
    outcomes = run_ranks(num_ranks, with_workspace, way, backend="nccl", timeout_s=100)
    assert [outcome.text for outcome in outcomes] == [""] * num_ranks
    for outcome in outcomes:
        assert all(outcome.value.values()), outcome.value


def lose_a_rank(rank: int, num_ranks: int, way: str) -> tuple | None:
    """Go on without rank 1; return which tokens need an expert that it alone had, the output and the right one."""
    layer = make(**LAYER)
    parallel = open_placed(layer, "fp8_block128", rank, num_ranks, way)
    inputs = inputs_of(layer, rank, shares(num_ranks, 60))
    want = parallel.moe(*inputs).clone()
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 1:
        cases.hear([r for r in range(num_ranks) if r != 1], "done")
        return None
    options = {"exchange": "gathered", "hosts": None} if way == "hosts" and num_ranks % 2 == 0 else {}
    left = parallel.without([1], **options)
    needs = torch.isin(inputs[1].topk_ids, torch.tensor(left.missing_experts, device=own_device())).any(1)
    outs = [left.moe(*inputs).clone() for _ in range(3)]
    torch.cuda.synchronize()
    left.check()
    assert all(torch.equal(out.nan_to_num(7), outs[0].nan_to_num(7)) for out in outs)
    cases.say(rank, "done")
    return needs.cpu(), outs[0].cpu(), want.cpu(), left.missing_experts


@pytest.mark.parametrize("way", WAYS)
def test_calls_go_on_without_a_rank(way):
    num_ranks = gpu_ranks()
    outcomes = run_ranks(num_ranks, lose_a_rank, way, backend="nccl", timeout_s=150)
    assert [outcome.text for outcome in outcomes] == [""] * num_ranks
    placement, ends = placement_of(num_ranks)
    left = placement[: ends[0]] + placement[ends[1] :]
    for rank, outcome in enumerate(outcomes):
        if rank != 1:
            needs, out, want, missing = outcome.value
            assert missing == tuple(sorted(set(range(NUM_EXPERTS)) - set(left)))
            assert 0 < needs.sum() < len(needs)
            assert out[needs].isnan().all()
            assert_same_bits(out[~needs], want[~needs])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [12, 600])
@pytest.mark.parametrize("format", FORMATS)
def test_a_missing_expert_spoils_its_tokens_alone(format, tokens):
    """A weight that is NaN is NaN in the sum, whatever quantises the activations, and in no other token's."""
    layer, routing = on_gpu(make(**(LAYER | {"tokens": tokens})))
    placement, ends, cut = [5, 0, 4, 1, 7, 6, 5, 0], [3, 8], [tokens // 3, tokens]
    opened = domains.open_all(SharedLayout(2, 8, tokens, 3, 256, format), [0, *ends], "cuda")
    packed = [pack_placed(layer, format, placement[a:b]) for a, b in pairwise([0, *ends])]
    layer.routing, parts = routing, []
    for rank, (x, r) in enumerate(domains.split(layer, cut)):
        weights, ids = place(Placed.on(x.device, placement, 8, rank), r.topk_weights, r.topk_ids)
        parts.append((x, Routing(weights, ids, 8)))
    needs = torch.isin(routing.topk_ids, torch.tensor([2, 3], device="cuda")).any(1)
    assert 0 < needs.sum() < tokens
    got, want = torch.cat(domains.moe(opened, parts, packed)), moe(layer.tokens, routing, layer.pack(format))
    assert got[needs].isnan().all()
    assert_same_bits(got[~needs], want[~needs])


@cache
def launched() -> dict[str, str]:
    """Launch the kernel on the registry's sizes: {hash: PTX}; its result is torch's."""
    found: dict[str, str] = {}
    device, count = torch.device("cuda"), kernels.NUM_EXPERTS
    placed = Placed.on(device, [p % kernels.NUM_ROUTED for p in range(count)], kernels.NUM_ROUTED, 1)
    sizes = {"size": (kernels.M, kernels.NUM_TOPK), "device": device}
    ids, weights = torch.randint(-3, kernels.NUM_ROUTED + 3, **sizes, dtype=torch.int32), torch.rand(**sizes)
    with watched(lambda sha256, kernel: found.setdefault(sha256, kernel.asm["ptx"])):
        got = place(placed, weights, ids)
    for x, y in zip(got, place_by_torch(placed, weights, ids), strict=True):
        assert torch.equal(x, y)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("case", kernels.PLACEMENT, ids=lambda case: case.name)
def test_registered(case):
    assert_same_code(case.name, case.launch(), launched())

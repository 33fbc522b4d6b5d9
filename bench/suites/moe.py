"""Experts on one rank compared with torch's grouped matmul, over ranks with the same between two all-to-alls.

Over ranks a call is replayed from a CUDA graph, as servers do, unless rows are counted; torch's, which copies sizes to
the host, can't be. "over nccl" in a case: shared memory is left unused; "by host": both halves of the ranks stand for
a host each, and share memory among themselves; "launched" is the same call without a graph, "counted"
with rows in counted numbers between all ranks alike. "fp8_results" sends rows back in FP8; its error is in `details`.
Routing is uniform and random, but with skew or zipf: then "as_busy" is an even call over ranks of which each has as
many rows as the busiest one has here. Error: sampled tokens against float64 on the packed weights.
The baseline of fp8 on one GPU is torch's grouped matmul in FP8 with row scales; otherwise torch's time and error are
those of bf16. Other libraries' layers are measured beside them where they are installed (`moe_peers.py`). With a shared
expert (`moe_shared.py`) Envoi's call adds its slots itself; "separate" is the MLP as two GEMMs, and a sum.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist

from bench import libraries, machine
from bench.predicted import PREDICTED, predicted_us
from bench.roof import kind_of
from bench.shapes import Case, MoeShape
from bench.suites import moe_peers, moe_shared
from bench.suites.inputs import num_bytes as num_bytes_of
from bench.suites.peers import deep_gemm_moe
from bench.suites.torch_moe import Layer, eager_moe, grouped_moe, grouped_moe_fp8, parallel_moe
from bench.timing import Run, Timing
from bench.trial import Bench, Trial, sample_rows, time_baselines, time_rounds
from envoi.estimates.exchange import WITHIN_A_HOST, gathering_pays
from envoi.ops.moe import moe, pack
from envoi.ops.moe.packing import READ_AS_STORED
from envoi.ops.moe.parallel import ExpertParallel
from envoi.ops.moe.parallel.nvlink import SharedLayout
from envoi.quant.bits import concatenate
from envoi.quant.formats import format_named
from envoi.tune.problems import generator, relative_error
from envoi.types import ExpertWeights, Matrix, QuantTensor, Routing
from tools.oracles.moe import moe_oracle

PACK_AT_ONCE = 16  # experts; packing works in float32


def measure(case: Case, bench: Bench) -> Trial:
    """Measure one layer; over bench.num_ranks ranks if there are several, each with all of shape.num_tokens tokens."""
    shape = cast(MoeShape, case.shape)
    layer = make_layer(shape, bench.device, bench.rank, bench.num_ranks)
    return _measure_alone(shape, layer, bench) if bench.num_ranks == 1 else _measure_ranks(shape, layer, bench)


def rehearse(case: Case, device: torch.device) -> None:
    """Make Envoi's calls on one rank once."""
    shape = cast(MoeShape, case.shape)
    layer = make_layer(shape, device)
    if not shape.shared:
        moe(layer.tokens, layer.routing, layer.packed)
        return
    shared = moe_shared.draw(shape, device)
    moe(layer.tokens, layer.routing, moe_shared.join(layer, shared)[0])
    moe_shared.separate(layer, shared)()


def _measure_alone(shape: MoeShape, layer: Layer, bench: Bench) -> Trial:
    if shape.shared:
        shared = moe_shared.draw(shape, bench.device)
        experts, whole = moe_shared.join(layer, shared)
        own = {"separate": lambda: moe_shared.separate(layer, shared)}
        return _trial(shape, whole, lambda: moe(layer.tokens, layer.routing, experts), own, bench)
    own: dict[str, Callable[[], Run]] = {}
    if shape.format in ("mxfp4", "int4"):  # only there another kernel may run
        own["batch_invariant"] = lambda: lambda: _invariant(layer)
    if shape.format in READ_AS_STORED:
        own["interleaved"] = lambda: _interleaved(layer)
    return _trial(shape, layer, lambda: moe(layer.tokens, layer.routing, layer.packed), own, bench)


def _trial(
    shape: MoeShape, layer: Layer, ours: Callable[[], torch.Tensor], own: dict[str, Callable[[], Run]], bench: Bench
) -> Trial:
    """Measure Envoi's call on one rank beside torch's, the peers' and `own`, its other forms. layer: what they take."""
    fp8 = bench.on_gpu and shape.format.startswith("fp8")
    candidates: dict[str, Callable[[], Run]] = {
        "eager": lambda: lambda: eager_moe(layer),
        "torch_grouped": lambda: grouped_moe_fp8(layer) if fp8 else lambda: grouped_moe(layer),
    }
    if bench.on_gpu:
        candidates |= moe_peers.candidates(shape, layer, _oracle)
    timing, baselines, missing = time_rounds(bench.clock, ours, candidates | own)
    error = errors(layer, ours(), eager_moe(layer))
    details = libraries.versions(baselines, bench.peer_versions)
    return Trial(timing, baselines, error, *ideal_work(shape, layer), missing, details)


def _invariant(layer: Layer) -> torch.Tensor:
    return moe(layer.tokens, layer.routing, layer.packed, batch_invariant=True)


def _interleaved(layer: Layer) -> Run:
    packed = _pack(layer.gate_up, layer.down, layer.packed.format, "interleaved")
    return lambda: moe(layer.tokens, layer.routing, packed)


def _measure_ranks(shape: MoeShape, layer: Layer, bench: Bench) -> Trial:
    parallel = open_parallel(shape, layer, bench.num_ranks)
    beside = []  # Envoi's other objects

    def ours() -> torch.Tensor:
        return parallel.moe(layer.tokens, layer.routing)

    candidates: dict[str, Callable[[], Timing]] = {
        "torch_ep": lambda: bench.clock.ranks(lambda: parallel_moe(layer, bench.num_ranks))
    }
    if bench.on_gpu and shape.format == "fp8_block128" and not shape.transport:  # it needs NVLink
        candidates["sgl_deep_gemm"] = lambda: _time_deep_gemm(bench, shape, layer)
    if not shape.is_even:
        even_shape, even = as_busy(shape, layer, bench.num_ranks)
        busy = open_parallel(even_shape, even, bench.num_ranks)
        beside.append(busy)
        candidates["as_busy"] = lambda: _time_ranks(bench, busy, lambda: busy.moe(even.tokens, even.routing))
    narrow = None
    if bench.on_gpu and shape.format == "fp8_block128" and parallel.exchange == "memory":
        narrow = open_parallel(shape, layer, bench.num_ranks, results="fp8_1x128")
        beside.append(narrow)
        candidates["fp8_results"] = lambda: _time_ranks(bench, narrow, lambda: narrow.moe(layer.tokens, layer.routing))
    if shape.transport and parallel.exchange != "counted":
        candidates["launched"] = lambda: bench.clock.ranks(ours)
        counted = ExpertParallel(layer.packed, timeout_s=60, exchange="counted")
        candidates["counted"] = lambda: bench.clock.ranks(lambda: counted.moe(layer.tokens, layer.routing))
    baselines, missing = time_baselines(candidates)
    timing = _time_ranks(bench, parallel, ours)
    error = errors(layer, ours(), parallel_moe(layer, bench.num_ranks))
    parallel.check()
    dist.barrier()
    details = libraries.versions(baselines, bench.peer_versions) | how_tokens_travel(shape, parallel)
    predicted = predicted_us(shape, bench.num_ranks, machine.device_name(bench.device.type))
    if predicted is not None:
        details[PREDICTED] = round(predicted, 1)
    if narrow is not None:
        got = narrow.moe(layer.tokens, layer.routing)
        rows = sample_rows(len(layer.tokens), layer.tokens.device)
        details["fp8_results_error"] = round(relative_error(got[rows], _oracle(layer, rows)), 4)
    for opened in (parallel, *beside):
        opened.close()
    return Trial(timing, baselines, error, *ideal_work(shape, layer), missing, details)


def _time_deep_gemm(bench: Bench, shape: MoeShape, layer: Layer) -> Timing:
    run, close, _ = deep_gemm_moe(shape, layer.tokens, layer.routing, layer.gate_up, layer.down)
    timing = bench.clock.ranks(bench.clock.graph(run))
    close()
    return timing


def _time_ranks(bench: Bench, parallel: ExpertParallel, run: Run) -> Timing:
    """Time calls of an object, from a CUDA graph unless rows are counted."""
    return bench.clock.ranks(run if parallel.exchange == "counted" else bench.clock.graph(run))


def open_parallel(shape: MoeShape, layer: Layer, num_ranks: int, results: str = "bf16") -> ExpertParallel:
    """Open the case's object. Raises ValueError for two hosts of an odd number of ranks. Collective."""
    sizes: dict[str, Any] = {
        "timeout_s": 60, "max_tokens": shape.num_tokens, "num_topk": shape.num_topk, "results": results,
    }  # fmt: skip
    if not shape.transport:
        return ExpertParallel(layer.packed, **sizes)
    if shape.transport == "over nccl":
        return ExpertParallel(layer.packed, **sizes, exchange=_over_nccl(shape, layer, num_ranks))
    if num_ranks % 2:
        raise ValueError(f"--nproc-per-node: expected an even number for two hosts, got {num_ranks}")
    hosts = [str(2 * rank // num_ranks) for rank in range(num_ranks)]
    return ExpertParallel(layer.packed, **sizes, exchange="hosts+sums" if shape.presum else "hosts", hosts=hosts)


def _over_nccl(shape: MoeShape, layer: Layer, num_ranks: int) -> str:
    """Return the exchange that ranks which can't reach each other's memory would choose."""
    packed, k, most = layer.packed, shape.num_topk, shape.num_tokens
    layout = SharedLayout(num_ranks, packed.num_local_experts * num_ranks, most, k, packed.hidden, packed.format)
    if not gathering_pays(WITHIN_A_HOST, num_ranks, most, k, packed.hidden, layout.token_bytes, bool(shape.presum)):
        return "counted"
    return "gathered+sums" if shape.presum else "gathered"


def how_tokens_travel(shape: MoeShape, parallel: ExpertParallel) -> dict[str, str | float]:
    """Return the details of a case with a transport: the exchange, and a rank's bytes to other hosts in a call."""
    if not shape.transport:
        return {}
    details: dict[str, str | float] = {"exchange": parallel.exchange, "transport": parallel.transport}
    rail = getattr(parallel._exchange, "rail", None)
    if parallel.exchange == "hosts" and rail is not None:
        details["sent_to_other_hosts_bytes"] = sum(rail.layout.bytes_between_hosts)
    return details


def ideal_work(shape: MoeShape, layer: Layer) -> tuple[float, float, str]:
    """Return a rank's num_bytes, flops and kind: its tokens' products, weights of used experts, tokens in and out.

    An expert is used if any rank has a token for it. Collective.
    """
    last = layer.first + layer.packed.num_local_experts
    ids = layer.routing.topk_ids
    used = (ids if layer.packed.num_local_experts == layer.num_experts else _gather(ids)).unique()
    num_used = int(((used >= layer.first) & (used < last)).sum())
    a_expert = (num_bytes_of(layer.packed.gate_up) + num_bytes_of(layer.packed.down)) / layer.packed.num_local_experts
    num_bytes = num_used * a_expert + 2 * layer.tokens.numel() * layer.tokens.element_size()
    flops = 6.0 * ids.numel() * shape.hidden * shape.intermediate
    return num_bytes, flops, kind_of(shape.format)


def make_layer(shape: MoeShape, device: torch.device, rank: int = 0, num_ranks: int = 1) -> Layer:
    """Make a rank's share of a layer, with tokens of its own. Raises ValueError if ranks don't divide the experts."""
    tokens, routing, gate_up, down = draw(shape, device, rank, num_ranks)
    return Layer(tokens, routing, gate_up, down, _pack(gate_up, down, shape.format), rank * len(gate_up))


def draw(
    shape: MoeShape, device: torch.device, rank: int, num_ranks: int
) -> tuple[torch.Tensor, Routing, torch.Tensor, torch.Tensor]:
    """Draw a rank's tokens, routing and bf16 weights: gate_up [E, 2I, H], gate, then up; down [E, H, I].

    Raises ValueError if ranks don't divide the experts.
    """
    if shape.num_experts % num_ranks:
        raise ValueError(f"--nproc-per-node: expected a divisor of {shape.num_experts} experts, got {num_ranks}")
    num_local = shape.num_experts // num_ranks
    source = generator(device, rank, shape.hidden, shape.num_experts, shape.num_tokens)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=source, device=device, dtype=torch.bfloat16)

    gate_up = normal(num_local, 2 * shape.intermediate, shape.hidden).mul_(shape.hidden**-0.5)
    down = normal(num_local, shape.hidden, shape.intermediate).mul_(shape.intermediate**-0.5)
    routing = make_routing(shape, source)
    return normal(shape.num_tokens, shape.hidden), routing, gate_up, down


def make_routing(shape: MoeShape, source: torch.Generator) -> Routing:
    """Draw a rank's routing: each token's experts by their shares, weights that add up to 1."""
    device = source.device
    uniform = torch.rand(shape.num_tokens, shape.num_experts, generator=source, device=device)
    if shape.zipf:
        place = torch.randperm(shape.num_experts, generator=torch.Generator().manual_seed(0)).to(device)
        uniform = -(-uniform.log()).log() - shape.zipf * (place + 1.0).log()  # the largest are drawn by their shares
    if shape.skew != 1.0:
        hit = torch.rand(shape.num_tokens, generator=source, device=device)
        uniform[:, 0] = (hit < shape.skew * shape.num_topk / shape.num_experts) * 4.0 - 2.0
    ids = uniform.topk(shape.num_topk).indices.to(torch.int32)
    weights = torch.rand(ids.shape, generator=source, device=device)
    return Routing(weights / weights.sum(1, keepdim=True), ids, shape.num_experts)


def as_busy(shape: MoeShape, layer: Layer, num_ranks: int) -> tuple[MoeShape, Layer]:
    """Return an even layer whose ranks each have as many rows as this one's busiest rank. Collective."""
    owners = _gather(layer.routing.topk_ids).flatten() // layer.packed.num_local_experts
    busiest = int(torch.bincount(owners, minlength=num_ranks).max())
    even = replace(shape, skew=1.0, zipf=0.0, num_tokens=-(-busiest // shape.num_topk))
    source = generator(layer.tokens.device, dist.get_rank(), shape.hidden, shape.num_experts, even.num_tokens)
    tokens = torch.randn(
        even.num_tokens, shape.hidden, generator=source, device=layer.tokens.device, dtype=layer.tokens.dtype
    )
    return even, replace(layer, tokens=tokens, routing=make_routing(even, source))


def _pack(gate_up: torch.Tensor, down: torch.Tensor, format: str, layout: str | None = None) -> ExpertWeights:
    weights = zip(gate_up.split(PACK_AT_ONCE), down.split(PACK_AT_ONCE), strict=True)
    parts = [pack(*part, format, packed_layout=layout) for part in weights]
    whole = replace(
        parts[0], gate_up=_concat([part.gate_up for part in parts]), down=_concat([part.down for part in parts])
    )
    return ExpertWeights.arrange(whole)


def _concat(weights: list[Matrix]) -> Matrix:
    first = weights[0]
    if isinstance(first, torch.Tensor):
        return torch.cat([weight for weight in weights if isinstance(weight, torch.Tensor)])
    quantised = [weight for weight in weights if isinstance(weight, QuantTensor)]
    values, sf = concatenate([q.values for q in quantised]), concatenate([q.sf for q in quantised])
    scales = [q.scale for q in quantised if q.scale is not None]
    return replace(
        first, values=values, sf=sf, scale=torch.cat(scales) if scales else None,
        scales_at_most_2=all(q.scales_at_most_2 for q in quantised),
    )  # fmt: skip


def errors(layer: Layer, ours: torch.Tensor, theirs: torch.Tensor) -> dict[str, float]:
    """Return the errors of Envoi's outputs and of torch's, each against float64 on its own weights. Collective."""
    rows = sample_rows(len(layer.tokens), layer.tokens.device)
    wide = layer if format_named(layer.packed.format).weights is None else replace(layer, packed=_as_bf16(layer))
    return {
        "ours": relative_error(ours[rows], _oracle(layer, rows)),
        "torch": relative_error(theirs[rows], _oracle(wide, rows)),
    }


def _as_bf16(layer: Layer) -> ExpertWeights:
    return pack(layer.gate_up, layer.down, "bf16")


def _oracle(layer: Layer, rows: torch.Tensor) -> torch.Tensor:
    """Return float64 outputs of this rank's tokens at `rows`; each rank adds its experts' part to all ranks' tokens."""
    inputs = (layer.tokens[rows], layer.routing.topk_weights[rows], layer.routing.topk_ids[rows])
    if layer.packed.num_local_experts == layer.num_experts:
        return _oracle_part(layer, *inputs)
    everyone = [_gather(x) for x in inputs]
    total = _oracle_part(layer, *everyone)
    dist.all_reduce(total)
    return total[len(rows) * dist.get_rank() :][: len(rows)]


def _gather(x: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def _oracle_part(layer: Layer, tokens: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Compute expert by expert, since all of them in float64 don't fit in the remaining memory."""
    total = torch.zeros(tokens.shape, dtype=torch.float64, device=tokens.device)
    for local in range(layer.packed.num_local_experts):
        chosen = ids == layer.first + local
        if bool(chosen.any()):
            one = replace(layer.packed, gate_up=_cut(layer.packed.gate_up, local), down=_cut(layer.packed.down, local))
            total += moe_oracle(tokens, weights, chosen.to(torch.int32) - 1, one)
    return total


def _cut(weight: Matrix, expert: int) -> Matrix:
    if isinstance(weight, torch.Tensor):
        return weight[expert : expert + 1]
    scale = None if weight.scale is None else weight.scale[expert : expert + 1]
    return replace(weight, values=weight.values[expert : expert + 1], sf=weight.sf[expert : expert + 1], scale=scale)

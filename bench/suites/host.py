"""Host time of public operators: what Python and the launches of a call cost, which a CUDA graph would hide.

    host       time until a call returns, the device idle before it, contenders in turn. Baseline: torch.mm of the
               case's tokens (in bf16) and a weight, whose host time says how fast the machine is.
    host_loop  wall time of a call in a loop of 100 of them (a few on CPUs), until the device is done. Baseline: a
               replay of the call from a CUDA graph in such a loop.

Of "first calls" each has another number of tokens, as in a server's prefill, so that its launches are planned anew; the
other calls repeat what was planned.

Calls over ranks begin after a barrier, and the slowest rank counts. Error: that of the operator's own suite.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist

from bench import torch_gemm
from bench.roof import kind_of
from bench.shapes import (
    TRANSPORTS,
    Case,
    GemmShape,
    GroupedShape,
    HostShape,
    IndexerShape,
    MoeShape,
    RouterShape,
    moe_name,
)
from bench.suites import indexer, inputs, moe, router
from bench.suites.endings import ENDINGS
from bench.suites.torch_moe import Layer, eager_moe, parallel_moe
from bench.timing import NUM_WARMUPS, Run, Timing, summarize
from bench.trial import OURS, Bench, Trial, those_that_run
from envoi.ops.gemm import gemm, grouped_gemm
from envoi.ops.moe import moe as run_moe
from envoi.tune.problems import make
from tools.kernel_cases.router import rule_of
from tools.oracles.indexer_workloads import one

LOOP = {"cuda": 100, "cpu": 3}
FIRST = "first calls"  # mode of an operator whose every call has a number of tokens of its own
SHARED, QWEN3_30B = (4096, 2048, 256, 6), (2048, 768, 128, 8)
OPERATORS = ("gemm", "grouped_gemm", "route", "moe", "ExpertParallel.moe", "indexer_topk")
FEW, MANY = (1, 64), (64,)
MOE_TOKENS = {
    "bf16": FEW, "fp8_block128": FEW, "mxfp4": FEW, "fp8_row": MANY, "mxfp8": MANY, "mxfp4_mxfp8": MANY, "nvfp4": MANY,
    "mxfp4_fp8": MANY,
}  # fmt: skip


@dataclass(frozen=True)
class Operation:
    """Call of an operator on inputs of its own.

    run: the call. mm: tokens [M, K] and a weight [N, K] in bf16 for torch.mm. error: {"ours", "torch"} against float64.
    num_bytes, flops, kind: its ideal work, see `trial.Trial`.
    """

    run: Run
    mm: tuple[torch.Tensor, torch.Tensor]
    error: Callable[[], dict[str, float]]
    num_bytes: float
    flops: float
    kind: str


# Cases


def cases(suite: str) -> list[Case]:
    """Return the cases of host or host_loop."""
    on_gpu, on_cpu = ([s for s in shapes if suite == "host" or s.mode != FIRST] for shapes in (_on_gpu(), _on_cpu()))
    found = [Case(suite, _name(shape), shape) for shape in on_gpu]
    over_ranks = [MoeShape(*SHARED, tokens, "fp8_block128") for tokens in (64, 512)]
    over_ranks += [MoeShape(*SHARED, 64, "fp8_block128", transport=transport) for transport in TRANSPORTS]
    for sizes in over_ranks:
        shape = HostShape("ExpertParallel.moe", sizes)
        found.append(Case(suite, _name(shape), shape, over_ranks=True, alone=False))
    for shape in on_cpu:
        shared = shape.operator == "ExpertParallel.moe"
        found.append(Case(suite, _name(shape), shape, False, True, over_ranks=shared, alone=not shared))
    return found


def _on_gpu() -> list[HostShape]:
    found = [HostShape("gemm", GemmShape(64, 4096, 7168, format)) for format in ("bf16", "fp8_row", "fp8_block128")]
    found.append(HostShape("gemm", GemmShape(64, 4096, 7168, "bf16", "swiglu")))
    found += [
        HostShape("grouped_gemm", GroupedShape((16,) * 32, 4096, 4096, format))
        for format in ("bf16", "fp8_row", "fp8_block128", "mxfp8", "mxfp4", "mxfp4_mxfp8")
    ]
    found.append(HostShape("route", RouterShape(64, 256, 7168, 8, "deepseek-v3", "bf16")))
    found.append(HostShape("route", RouterShape(64, 128, 2048, 8, "qwen3-moe", "bf16")))
    found += [
        HostShape("moe", MoeShape(*QWEN3_30B, tokens, format))
        for format, numbers in MOE_TOKENS.items()
        for tokens in numbers
    ]
    found += [HostShape("moe", MoeShape(*QWEN3_30B, 4096, format), FIRST) for format in ("bf16", "fp8_block128")]
    workload = IndexerShape((one((4096,) * 32),))
    return found + [HostShape("indexer_topk", workload, mode) for mode in ("fast", "exact")]


def _on_cpu() -> list[HostShape]:
    return [
        HostShape("gemm", GemmShape(16, 128, 256)),
        HostShape("grouped_gemm", GroupedShape((4, 8), 128, 256, "bf16")),
        HostShape("route", RouterShape(16, 128, 256, 8, "qwen3-moe", "bf16")),
        HostShape("moe", MoeShape(256, 128, 8, 2, 16, "bf16")),
        HostShape("moe", MoeShape(256, 128, 8, 2, 256, "bf16"), FIRST),
        HostShape("ExpertParallel.moe", MoeShape(256, 128, 8, 2, 16, "bf16")),
        HostShape("indexer_topk", IndexerShape((one((100, 200)),)), "fast"),
    ]


def _name(shape: HostShape) -> str:
    """Return a case's name: the operator, the sizes, the format."""
    s = shape.sizes
    if isinstance(s, GemmShape):
        sizes = f"{s.m}x{s.n}x{s.k} {s.format}{f' {s.epilogue}' * (s.epilogue != 'store')}"
    elif isinstance(s, GroupedShape):
        sizes = f"{len(s.num_rows)} experts, {sum(s.num_rows)} rows, {s.k} -> {s.n} {s.format}"
    elif isinstance(s, RouterShape):
        sizes = f"{s.m}x{s.n}x{s.k} {s.rule} {s.dtype}"
    elif isinstance(s, MoeShape):
        sizes = moe_name(s) + f" {shape.mode}" * bool(shape.mode)
    else:
        lengths = s.workloads[0].lengths
        sizes = f"{len(lengths)} requests, {sum(lengths)} tokens {shape.mode}"
    return f"{shape.operator} {sizes}"


# Measurement


def measure(case: Case, bench: Bench) -> Trial:
    """Measure one case of host or host_loop; over ranks if there are several. Collective then."""
    with ExitStack() as stack:
        operation = stack.enter_context(_operation(cast(HostShape, case.shape), bench))
        if case.suite == "host":
            left, right = operation.mm[0], operation.mm[1].T
            runs: dict[str, Run] = {OURS: operation.run, "torch_mm": lambda: torch.mm(left, right)}
            timings, missing = _call_times(runs, bench), {}
        else:
            runs, missing = those_that_run({"graph": lambda: bench.clock.graph(operation.run)})
            timings = _loop_times({OURS: operation.run, **runs}, bench)
        work = (0.0, 0.0) if case.suite == "host" else (operation.num_bytes, operation.flops)
        return Trial(timings.pop(OURS), timings, operation.error(), *work, operation.kind, missing)


def rehearse(case: Case, device: torch.device) -> None:
    """Make the case's call once, if one process can."""
    shape = cast(HostShape, case.shape)
    if case.alone:
        MAKERS[shape.operator](shape, device).run()


def _operation(shape: HostShape, bench: Bench) -> AbstractContextManager[Operation]:
    if shape.operator == "ExpertParallel.moe":
        return _Shared(cast(MoeShape, shape.sizes), bench)
    return nullcontext(MAKERS[shape.operator](shape, bench.device))


def _call_times(runs: Mapping[str, Run], bench: Bench) -> dict[str, Timing]:
    """Time each call until it returns, the device idle before it."""
    return _times(runs, bench, 1, wait=False)


def _loop_times(runs: Mapping[str, Run], bench: Bench) -> dict[str, Timing]:
    """Time loops of calls until the device is done; the time of one call."""
    return _times(runs, bench, LOOP[bench.device.type], wait=True)


def _times(runs: Mapping[str, Run], bench: Bench, num_calls: int, wait: bool) -> dict[str, Timing]:
    """Time each contender once a round. wait: until the device is done, else until the last call has returned."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        for _ in range(NUM_WARMUPS):
            run()
    for _ in range(bench.clock.repeat):
        for name, run in runs.items():
            _settle(bench)
            start = time.perf_counter()
            for _ in range(num_calls):
                run()
            if wait:
                _synchronize(bench)
            times[name].append((time.perf_counter() - start) * 1e6 / num_calls)
    _settle(bench)
    return {name: _slowest(summarize(found), bench) for name, found in times.items()}


def _settle(bench: Bench) -> None:
    """Wait until every rank is here and its device is idle."""
    if bench.num_ranks > 1:
        dist.barrier()
    _synchronize(bench)


def _synchronize(bench: Bench) -> None:
    if bench.on_gpu:
        torch.cuda.synchronize(bench.device)


def _slowest(timing: Timing, bench: Bench) -> Timing:
    if bench.num_ranks == 1:
        return timing
    found = torch.tensor([timing.p50_us, timing.p10_us, timing.p90_us], device=bench.device, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    p50_us, p10_us, p90_us = found.tolist()
    return Timing(p50_us, p10_us, p90_us, timing.n)


# Operators


def _gemm(shape: HostShape, device: torch.device) -> Operation:
    sizes = cast(GemmShape, shape.sizes)
    x, ending = make(sizes, device), ENDINGS[sizes.epilogue]
    theirs = inputs.for_torch(x, sizes)

    def run() -> Any:
        return gemm(x.a, x.b, ending.fused, **x.operands)

    def error() -> dict[str, float]:
        wide = theirs.wide_a, theirs.wide_b
        product = ending.eager(torch.mm(wide[0], wide[1].T), **x.operands)
        return {
            "ours": inputs.gemm_error(sizes, x.a, x.b, x.operands, run(), halves=False),
            "torch": inputs.gemm_error(sizes, *wide, x.operands, product, halves=True),
        }

    num_bytes = inputs.num_bytes(x.a) + inputs.num_bytes(x.b) + sizes.m * sizes.n * ending.out_bytes
    kind = kind_of(sizes.format)
    return Operation(run, (x.wide_a, x.wide_b), error, num_bytes, 2.0 * sizes.m * sizes.n * sizes.k, kind)


def _grouped_gemm(shape: HostShape, device: torch.device) -> Operation:
    sizes = cast(GroupedShape, shape.sizes)
    x = make(sizes, device)
    offsets = cast(torch.Tensor, x.offsets)

    def run() -> torch.Tensor:
        return grouped_gemm(x.a, x.b, offsets)

    def error() -> dict[str, float]:
        theirs = torch_gemm.grouped_product(x.wide_a, x.wide_b, x.ends)()
        return {
            "ours": inputs.grouped_error(sizes, x.a, x.b, run()),
            "torch": inputs.grouped_error(sizes, x.wide_a, x.wide_b, theirs),
        }

    rows = sum(sizes.num_rows)
    num_bytes = inputs.num_bytes(x.a) + inputs.num_bytes(x.b) + 2.0 * rows * sizes.n
    kind = kind_of(sizes.format)
    return Operation(run, (x.wide_a, x.wide_b[0]), error, num_bytes, 2.0 * rows * sizes.n * sizes.k, kind)


def _route(shape: HostShape, device: torch.device) -> Operation:
    sizes = cast(RouterShape, shape.sizes)
    rule, biases = rule_of(sizes.rule)
    x, step = router.make_inputs(sizes, biases, device, 0), router.routed(sizes, rule)
    num_bytes = router.moved_bytes(sizes)
    return Operation(
        lambda: step(x), (x.tokens, x.gate), lambda: router.errors(x, sizes, rule), num_bytes,
        2.0 * sizes.m * sizes.n * sizes.k, "bf16",
    )  # fmt: skip


def _moe(shape: HostShape, device: torch.device) -> Operation:
    sizes = cast(MoeShape, shape.sizes)
    layer = moe.make_layer(sizes, device)

    def run() -> torch.Tensor:
        return run_moe(layer.tokens, layer.routing, layer.packed)

    found = _of_layer(sizes, layer, run, lambda: eager_moe(layer))
    return replace(found, run=_first_calls(layer)) if shape.mode == FIRST else found


def _first_calls(layer: Layer) -> Run:
    """Return a function whose every call has another number of tokens, one less each time: a plan of its own."""
    numbers, routing = iter(range(len(layer.tokens), 0, -1)), layer.routing

    def run() -> torch.Tensor:
        count = next(numbers)
        part = replace(routing, topk_weights=routing.topk_weights[:count], topk_ids=routing.topk_ids[:count])
        return run_moe(layer.tokens[:count], part, layer.packed)

    return run


def _of_layer(
    sizes: MoeShape, layer: Layer, run: Callable[[], torch.Tensor], theirs: Callable[[], torch.Tensor]
) -> Operation:
    mm = layer.tokens, layer.gate_up[0]
    return Operation(run, mm, lambda: moe.errors(layer, run(), theirs()), *moe.ideal_work(sizes, layer))


class _Shared(AbstractContextManager):
    """Operation of an ExpertParallel, which is closed at the end. Collective."""

    def __init__(self, sizes: MoeShape, bench: Bench):
        layer = moe.make_layer(sizes, bench.device, bench.rank, bench.num_ranks)
        self.parallel = moe.open_parallel(sizes, layer, bench.num_ranks)
        self.operation = _of_layer(
            sizes, layer, lambda: self.parallel.moe(layer.tokens, layer.routing),
            lambda: parallel_moe(layer, bench.num_ranks),
        )  # fmt: skip

    def __enter__(self) -> Operation:
        return self.operation

    def __exit__(self, *error) -> None:
        if error[0] is None:
            self.parallel.check()
            dist.barrier()
        self.parallel.close()


def _indexer_topk(shape: HostShape, device: torch.device) -> Operation:
    workload = cast(IndexerShape, shape.sizes).workloads[0]
    x = indexer.make_inputs(workload, device)
    num_bytes, flops = indexer.ideal_work((workload,))
    queries = x.q.flatten(0, 1).to(torch.bfloat16)

    def run() -> torch.Tensor:
        return indexer.slots_of(x, shape.mode)

    def error() -> dict[str, float]:
        return {"ours": indexer.missed(x, run()), "torch": indexer.missed(x, indexer.definition(x))}

    kind = "fp8" if shape.mode == "fast" else "fp32"
    return Operation(run, (queries, queries[:128]), error, num_bytes, flops, kind)


MAKERS: dict[str, Callable[[HostShape, torch.device], Operation]] = {
    "gemm": _gemm,
    "grouped_gemm": _grouped_gemm,
    "route": _route,
    "moe": _moe,
    "indexer_topk": _indexer_topk,
}

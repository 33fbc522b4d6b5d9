"""Times of the Hopper router's tilings, to which `ops.moe.router.choose_tiling.Costs` are held and can be fitted."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.shapes import Options, RouterShape
from bench.suites import cases
from bench.suites import router as suite
from bench.timing import Clock, Run
from envoi.ops.moe.router import host
from envoi.ops.moe.router.choose_tiling import COSTS, Costs, apart_candidates, candidates, predicted_cycles, tiled_rows
from envoi.ops.moe.router.spec import Spec
from envoi.ops.moe.router.tiling import RouterTiling
from envoi.runtime.devices import H200, Target, num_sms
from envoi.runtime.launch import launch
from envoi.runtime.planned_kernels import compile_by_workers
from envoi.runtime.program import Launch, without_memory
from tools.kernel_cases.router import rule_of
from tools.time_models.fit import Measured, Model, keep, line_of, lines_of, parse

WITHIN = 2.0  # tilings at random are predicted to take at most so many times as long as the best
MODEL = Model(COSTS, absolute=0.1)  # launches of different sizes are added up


@dataclass(frozen=True)
class RouterTimes(Measured):
    """Times of a shape's tilings. label: its sizes, rule and dtype."""

    times_us: tuple[tuple[RouterTiling, float], ...]
    shape: RouterShape

    def predicted_us(self, config: RouterTiling, costs: Costs) -> float:
        """Return the time that the model predicts with these constants."""
        rows, hidden, spec = tiled_rows(self.shape.m), self.shape.k, _spec_of(self.shape)
        return predicted_cycles(rows, hidden, spec, config, self.num_sms, costs) / H200.clock_mhz


def label_of(shape: RouterShape) -> str:
    """Return the name of a shape: tokens x experts x hidden, the model whose rule it has, and the dtype."""
    return f"{shape.m}x{shape.n}x{shape.k} {shape.rule} {shape.dtype}"


def to_line(measured: RouterTimes, gpu: str) -> str:
    """Return one line of JSON, without the newline, without fields that have their default."""
    return line_of(measured, gpu, shape=asdict(measured.shape))


def from_line(line: str) -> RouterTimes:
    """Parse a line of `to_line`. Raises ValueError for anything else."""
    return parse(line, RouterTimes, RouterTiling, lambda entries: {"shape": RouterShape(**entries["shape"])})


def read(paths: Sequence[Path]) -> list[RouterTimes]:
    """Return all lines of these files."""
    return [from_line(line) for line in lines_of(paths)]


def _call_of(shape: RouterShape, given: suite.Inputs | None = None) -> host.Call:
    """Return the call of a shape, by default without memory."""
    rule, (has_expert_bias, has_logit_bias) = rule_of(shape.rule)
    if given is None:
        dtype = suite.DTYPES[shape.dtype]
        given = suite.Inputs(
            without_memory((shape.m, shape.k), dtype),
            without_memory((shape.n, shape.k), dtype),
            without_memory((shape.n,), torch.float32) if has_expert_bias else None,
            without_memory((shape.n,), dtype) if has_logit_bias else None,
        )
    biases = given.logit_bias, given.expert_bias
    spec = host.spec_of(shape.n, shape.num_topk, rule, *biases, False, (False,) * 3)
    return host.Call(given.tokens, given.gate, spec, 1.0, rule.routed_scale, *biases, None, None)


def _spec_of(shape: RouterShape) -> Spec:
    return replace(_call_of(shape).spec, gluon=True)


def tilings_of(shape: RouterShape, sms: int, count: int, seed: int) -> list[RouterTiling]:
    """Return two thirds of `count` by the model, most promising first, the rest at random of those not far behind."""
    rows, spec = tiled_rows(shape.m), _spec_of(shape)
    cycles = {
        tiling: predicted_cycles(rows, shape.k, spec, tiling, sms)
        for find in (candidates, apart_candidates)
        for tiling in find(rows, shape.k, spec, sms)
    }
    ranked = sorted(cycles, key=lambda tiling: cycles[tiling])
    by_model = ranked[: count - count // 3]
    others = [tiling for tiling in ranked[len(by_model) :] if cycles[tiling] < WITHIN * cycles[ranked[0]]]
    source = random.Random(f"{seed} {label_of(shape)}")
    return by_model + source.sample(others, min(len(others), count - len(by_model)))


def _launches_of(call: host.Call, outputs: dict[str, Any], tiling: RouterTiling, sms: int) -> list[Launch]:
    return [Launch(*given) for given in host.hopper_launches(call, outputs, sms, tiling)]


@dataclass(frozen=True)
class TilingCall:
    """Call of a router with a tiling, on tensors without memory: what `runtime.planned_kernels` compiles."""

    shape: RouterShape
    tiling: RouterTiling

    def __call__(self, _: int) -> None:
        """Make the call."""
        _run(_call_of(self.shape), self.tiling)


def _run(call: host.Call, tiling: RouterTiling) -> dict[str, Any]:
    outputs = host.empty_outputs(call)
    for given in _launches_of(call, outputs, tiling, num_sms(call.tokens.device)):
        launch(*given)
    return outputs


def measure(path: Path, seed: int, count: int, num_configs: int, repeat: int, jobs: int | None) -> int:
    """Measure num_configs tilings of the shapes that the suite draws, append them, return how many shapes there were.

    Raises RuntimeError if two tilings of a shape don't have the same bits.
    """
    device = torch.device("cuda", 0)
    target = Target.of(device)
    sms = target.num_sms
    drawn = (case.shape for case in cases("router_drawn", Options(seed, count)) if case.on_cuda)
    shapes = [shape for shape in drawn if isinstance(shape, RouterShape)]
    todo = [(shape, tilings_of(shape, sms, num_configs, seed)) for shape in shapes]
    calls = [TilingCall(shape, tiling) for shape, found in todo for tiling in found]
    compile_by_workers(calls, target, jobs=jobs)
    for shape, found in todo:
        times = _times_of(shape, found, Clock(device, repeat))
        measured = RouterTimes(label_of(shape), sms, tuple(times.items()), shape)
        keep(path, to_line(measured, torch.cuda.get_device_name(device)), measured, COSTS)
    return len(todo)


def _times_of(shape: RouterShape, tilings: Sequence[RouterTiling], clock: Clock) -> Mapping[RouterTiling, float]:
    """Return the time of a call in a graph of 20 for each tiling."""
    _, biases = rule_of(shape.rule)
    count = clock.num_inputs(suite.moved_bytes(shape))
    calls = [_call_of(shape, suite.make_inputs(shape, biases, clock.device, seed)) for seed in range(count)]
    runs: dict[RouterTiling, Run] = {}
    first = None
    for tiling in tilings:
        outputs = _run(calls[0], tiling)
        first = first or outputs
        if not all(torch.equal(outputs[name], first[name]) for name in ("weights", "ids")):
            raise RuntimeError(f"{label_of(shape)}: {tiling} and {tilings[0]} don't have the same bits")
        runs[tiling] = clock.captured([partial(_run, call, tiling) for call in calls])
    return {tiling: round(timing.p50_us, 4) for tiling, timing in clock.replays(runs).items()}

"""Router compared with plain torch: a matmul, then a score, a selection and weights, operator by operator.

    router        every contender in a CUDA graph of 20 calls
    router_call   one call at a time, the L2 cache emptied before it
    router_dense  like router, compared with Envoi itself with the dense form of the weights

Error: the dense weights [M, N] against float64, so an expert that is chosen wrongly counts with its whole weight.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch.nn import functional

from envoi.bench.shapes import Case, RouterShape
from envoi.bench.timing import Run, Timing
from envoi.bench.trial import (
    Bench,
    Trial,
    compiled,
    generator,
    relative_error,
    sample_rows,
    time_replays,
    time_rounds,
)
from envoi.moe.router import Rule, reference, route
from envoi.moe.router.cases import rule_of

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Inputs:
    """Tensors tokens [M, K], gate [N, K], expert_bias [N] float32 or None."""

    tokens: torch.Tensor
    gate: torch.Tensor
    expert_bias: torch.Tensor | None


Step = Callable[[Inputs], object]


def measure(case: Case, bench: Bench) -> Trial:
    """Measure one shape and rule."""
    shape = cast(RouterShape, case.shape)
    rule, has_bias = rule_of(shape.rule)
    num_bytes = _num_bytes(shape)
    one_call = case.suite == "router_call"
    count = bench.clock.num_inputs(num_bytes) if bench.on_gpu and not one_call else 1
    inputs = [_inputs(shape, has_bias, bench.device, seed) for seed in range(count)]
    ours = _ours(shape, rule, dense=False)
    if case.suite == "router_dense":
        others: dict[str, Callable[[], Step]] = {"dense": lambda: _ours(shape, rule, dense=True)}
    else:
        others = _baselines(shape, rule, bench)
    if one_call:
        timing, baselines, missing = time_rounds(
            bench.clock, partial(ours, inputs[0]), {name: _first(make, inputs) for name, make in others.items()}
        )
    else:
        timing, baselines, missing = time_replays(
            bench.clock, _each(ours, inputs), {name: _all(make, inputs) for name, make in others.items()}
        )
    tokens_us = 2 * shape.m * shape.k / bench.roof.gb_per_s / 1e3
    baselines["tokens"] = Timing(tokens_us, tokens_us, tokens_us, timing.n)
    error = _errors(inputs[0], shape, rule)
    return Trial(timing, baselines, error, num_bytes, 2.0 * shape.m * shape.n * shape.k, "bf16", missing)


def _ours(shape: RouterShape, rule: Rule, dense: bool) -> Step:
    return lambda x: route(x.tokens, x.gate, shape.num_topk, rule=rule, expert_bias=x.expert_bias, return_dense=dense)


def _baselines(shape: RouterShape, rule: Rule, bench: Bench) -> dict[str, Callable[[], Step]]:
    def eager(tokens: torch.Tensor, gate: torch.Tensor, expert_bias: torch.Tensor | None) -> object:
        return eager_route(functional.linear(tokens, gate), shape.num_topk, rule, expert_bias)

    def of(function: Callable[..., object]) -> Step:
        return lambda x: function(x.tokens, x.gate, x.expert_bias)

    found: dict[str, Callable[[], Step]] = {"eager": lambda: of(eager)}
    if bench.on_gpu:
        nothing = torch.zeros(1, device=bench.device)
        found |= {
            "compile": lambda: of(compiled(eager)),
            "cublas": lambda: lambda x: functional.linear(x.tokens, x.gate),
            "empty": lambda: lambda x: nothing.neg_(),
        }
    return found


def _each(step: Step, inputs: list[Inputs]) -> list[Run]:
    return [partial(step, x) for x in inputs]


def _all(make: Callable[[], Step], inputs: list[Inputs]) -> Callable[[], list[Run]]:
    return lambda: _each(make(), inputs)


def _first(make: Callable[[], Step], inputs: list[Inputs]) -> Callable[[], Run]:
    return lambda: partial(make(), inputs[0])


def eager_route(
    logits: torch.Tensor, k: int, rule: Rule, expert_bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route like torch code of models after the matmul: weights [M, k], ids [M, k] int64. Only this suite's rules."""
    if rule.score == "softmax":  # over the k best logits: equal to renormalising the k best of all, with fewer launches
        best, ids = logits.topk(k, dim=-1)
        return best.softmax(-1, dtype=torch.float32), ids
    score = logits.float().sigmoid()
    key = score if expert_bias is None else score + expert_bias
    if rule.num_groups > 1:
        groups = key.unflatten(1, (rule.num_groups, -1))
        best = groups.topk(2, dim=-1).values.sum(-1).topk(rule.num_topk_groups, dim=-1).indices
        kept = torch.zeros(groups.shape[:2], dtype=torch.bool, device=key.device).scatter_(1, best, True)
        key = groups.masked_fill(~kept.unsqueeze(-1), 0.0).flatten(1)
    ids = key.topk(k, dim=-1).indices
    weights = score.gather(1, ids)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * rule.routed_scale, ids


def _inputs(shape: RouterShape, has_bias: bool, device: torch.device, seed: int) -> Inputs:
    source = generator(device, seed, shape.m, shape.n, shape.k)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=source, device=device)

    dtype = DTYPES[shape.dtype]
    tokens, gate = normal(shape.m, shape.k), normal(shape.n, shape.k) / shape.k**0.5
    return Inputs(tokens.to(dtype), gate.to(dtype), normal(shape.n) * 0.02 if has_bias else None)


def _num_bytes(shape: RouterShape) -> int:
    return 2 * (shape.m + shape.n) * shape.k + 8 * shape.m * shape.num_topk


def _errors(x: Inputs, shape: RouterShape, rule: Rule) -> dict[str, float]:
    rows = sample_rows(shape.m, x.tokens.device)
    logits = x.tokens[rows].double() @ x.gate.double().T
    want = reference.to_dense(*reference.select(logits, shape.num_topk, rule, x.expert_bias), shape.n)
    got = route(x.tokens, x.gate, shape.num_topk, rule=rule, expert_bias=x.expert_bias)
    weights, ids = eager_route(functional.linear(x.tokens, x.gate), shape.num_topk, rule, x.expert_bias)
    results = {"ours": (got.topk_weights, got.topk_ids), "torch": (weights, ids)}
    return {
        name: relative_error(reference.to_dense(weights[rows], ids[rows], shape.n), want)
        for name, (weights, ids) in results.items()
    }

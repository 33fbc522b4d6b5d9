"""The router beside plain torch: a matmul, then a score, a selection and weights, operator by operator.

Error: the dense weights [M, N] against float64, so an expert that is chosen wrongly counts with its whole weight.
Eager and compile are timed one call at a time; Envoi, eager_graph and cublas_gemm_graph in a graph of 20.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch.nn import functional

from envoi.bench.shapes import Case, RouterShape
from envoi.bench.timing import Run
from envoi.bench.trial import Bench, Trial, compiled, copies, generator, relative_error, sample_rows, time_baselines
from envoi.router import Rule, preset, reference, route
from envoi.types import Routing

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Inputs:
    """tokens [M, K], gate [N, K], expert_bias [N] float32 or None."""

    tokens: torch.Tensor
    gate: torch.Tensor
    expert_bias: torch.Tensor | None


def measure(case: Case, bench: Bench) -> Trial:
    """One shape and rule."""
    shape = cast(RouterShape, case.shape)
    rule, has_bias = _rule(shape.rule)
    first = _inputs(shape, has_bias, bench.device, 0)

    def ours(x: Inputs) -> Routing:
        return route(x.tokens, x.gate, shape.num_topk, rule=rule, expert_bias=x.expert_bias)

    def eager(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        return eager_route(functional.linear(x.tokens, x.gate), shape.num_topk, rule, x.expert_bias)

    num_bytes = _num_bytes(shape)

    def runs(step: Callable[[Inputs], object]) -> list[Run]:
        def make(seed: int) -> Run:
            inputs = _inputs(shape, has_bias, bench.device, seed)
            return lambda: step(inputs)

        return copies(make, bench.clock, num_bytes)

    candidates = {"eager": lambda: bench.clock.calls(lambda: eager(first))}
    if bench.on_gpu:
        fast = compiled(eager)
        candidates |= {
            "compile": lambda: bench.clock.calls(lambda: fast(first)),
            "eager_graph": lambda: bench.clock.graph(runs(eager)),
            "cublas_gemm_graph": lambda: bench.clock.graph(runs(lambda x: functional.linear(x.tokens, x.gate))),
        }
    baselines, missing = time_baselines(candidates)
    timing = bench.clock.graph(runs(ours))
    got, theirs = ours(first), eager(first)
    error = _errors(first, shape, rule, {"ours": (got.topk_weights, got.topk_ids), "torch": theirs})
    return Trial(timing, baselines, error, num_bytes, 2.0 * shape.m * shape.n * shape.k, "bf16", missing)


def eager_route(
    logits: torch.Tensor, k: int, rule: Rule, expert_bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What models write in torch after the matmul: weights [M, k], ids [M, k] int64. Only the rules of this suite."""
    if rule.score == "softmax":  # of the k best logits: equal to renormalising the k best of all, with fewer launches
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


def _rule(name: str) -> tuple[Rule, bool]:
    if name == "softmax":
        return Rule(), False
    chosen = preset(name)
    return chosen.rule, chosen.has_expert_bias


def _inputs(shape: RouterShape, has_bias: bool, device: torch.device, seed: int) -> Inputs:
    source = generator(device, seed, shape.m, shape.n, shape.k)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=source, device=device)

    dtype = DTYPES[shape.dtype]
    tokens, gate = normal(shape.m, shape.k), normal(shape.n, shape.k) / shape.k**0.5
    return Inputs(tokens.to(dtype), gate.to(dtype), normal(shape.n) * 0.02 if has_bias else None)


def _num_bytes(shape: RouterShape) -> int:
    return 2 * (shape.m + shape.n) * shape.k + 8 * shape.m * shape.num_topk


def _errors(
    x: Inputs, shape: RouterShape, rule: Rule, results: dict[str, tuple[torch.Tensor, torch.Tensor]]
) -> dict[str, float]:
    rows = sample_rows(shape.m, x.tokens.device)
    logits = x.tokens[rows].double() @ x.gate.double().T
    want = reference.to_dense(*reference.select(logits, shape.num_topk, rule, x.expert_bias), shape.n)
    return {
        name: relative_error(reference.to_dense(weights[rows], ids[rows], shape.n), want)
        for name, (weights, ids) in results.items()
    }

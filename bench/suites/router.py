"""Router compared with plain torch: a matmul, then a score, a selection and weights, operator by operator.

    router        every contender in a CUDA graph of 20 calls
    router_call   one call at a time, the L2 cache emptied before it
    router_dense  like router, compared with Envoi itself with the dense form of the weights
    router_drawn  like router, for the routers of published models

Other libraries' operators are measured beside them where they are installed (`peers.py`). On bf16 logits they may
choose other experts, which counts as an error; one whose weights are wrong isn't timed.

Error: the dense weights [M, N] against float64, so an expert that is chosen wrongly counts with its whole weight.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch.nn import functional

from bench import libraries
from bench.shapes import Case, RouterShape
from bench.suites import peers
from bench.suites.eager_router import eager_route
from bench.timing import Run, Timing
from bench.trial import (
    Bench,
    Trial,
    compiled,
    sample_rows,
    time_replays,
    time_rounds,
)
from envoi.ops.moe.router import Rule, reference, route
from envoi.ops.moe.router.choose_tiling import is_many
from envoi.tune.problems import generator, relative_error
from tools.kernel_cases.router import rule_of

MAX_PEER_ERROR = 0.2
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Inputs:
    """Tensors tokens [M, K], gate [N, K]; expert_bias [N] float32 and logit_bias [N], None if the model has none."""

    tokens: torch.Tensor
    gate: torch.Tensor
    expert_bias: torch.Tensor | None
    logit_bias: torch.Tensor | None


Step = Callable[[Inputs], object]


def measure(case: Case, bench: Bench) -> Trial:
    """Measure one shape and rule."""
    shape = cast(RouterShape, case.shape)
    rule, biases = rule_of(shape.rule)
    num_bytes = moved_bytes(shape)
    one_call = case.suite == "router_call"
    count = bench.clock.num_inputs(num_bytes) if bench.on_gpu and not one_call else 1
    inputs = [make_inputs(shape, biases, bench.device, seed) for seed in range(count)]
    ours = routed(shape, rule, dense=False)
    if case.suite == "router_dense":
        others: dict[str, Callable[[], Step]] = {"dense": lambda: routed(shape, rule, dense=True)}
    else:
        others = _baselines(shape, rule, bench)
        if bench.on_gpu:
            others |= _peers(shape, rule, inputs[0])
            if is_many(shape.m, shape.n):
                others["not_batch_invariant"] = lambda: routed(shape, rule, batch_invariant=False)
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
    error = errors(inputs[0], shape, rule)
    flops, details = 2.0 * shape.m * shape.n * shape.k, libraries.versions(baselines, bench.peer_versions)
    return Trial(timing, baselines, error, num_bytes, flops, "bf16", missing, details)


def rehearse(case: Case, device: torch.device) -> None:
    """Make the case's calls once."""
    shape = cast(RouterShape, case.shape)
    rule, biases = rule_of(shape.rule)
    for batch_invariant in (True, False) if is_many(shape.m, shape.n) else (True,):
        routed(shape, rule, batch_invariant=batch_invariant)(make_inputs(shape, biases, device, 0))


def rehearse_compiled(case: Case, device: torch.device) -> None:
    """Make the call of torch.compile's once on a GPU."""
    shape = cast(RouterShape, case.shape)
    rule, biases = rule_of(shape.rule)
    if device.type == "cuda":
        _step(compiled(_eager(shape, rule)))(make_inputs(shape, biases, device, 0))


def routed(shape: RouterShape, rule: Rule, dense: bool = False, batch_invariant: bool = True) -> Step:
    """Return Envoi's call."""
    return lambda x: route(
        x.tokens, x.gate, shape.num_topk, rule=rule, logit_bias=x.logit_bias, expert_bias=x.expert_bias,
        return_dense=dense, batch_invariant=batch_invariant,
    )  # fmt: skip


def _baselines(shape: RouterShape, rule: Rule, bench: Bench) -> dict[str, Callable[[], Step]]:
    eager = _eager(shape, rule)
    found: dict[str, Callable[[], Step]] = {"eager": lambda: _step(eager)}
    if bench.on_gpu:
        nothing = torch.zeros(1, device=bench.device)
        if not bench.compiler.left_out:
            found["compile"] = lambda: _step(compiled(eager))
        found |= {
            "cublas": lambda: lambda x: functional.linear(x.tokens, x.gate),
            "empty": lambda: lambda x: nothing.neg_(),
        }
    return found


def _peers(shape: RouterShape, rule: Rule, x: Inputs) -> dict[str, Callable[[], Step]]:
    """Return other libraries' routers. Raises, when made, if one isn't installed or gives wrong weights."""

    def checked(make: Callable[..., Callable[..., tuple[torch.Tensor, torch.Tensor]]]) -> Step:
        call = make(rule, shape.num_topk)
        rows = sample_rows(shape.m, x.tokens.device)
        weights, ids = call(x.tokens, x.gate, x.expert_bias)
        got = reference.to_dense(weights[rows], ids[rows].int(), shape.n)
        if not (error := relative_error(got, exact(x, shape, rule, rows))) <= MAX_PEER_ERROR:
            raise RuntimeError(f"its result differs from float64's by {error:.1e}")
        return lambda x: call(x.tokens, x.gate, x.expert_bias)

    if x.logit_bias is not None:
        return {}
    found = {"vllm_router": peers.vllm_route, "flashinfer_router": peers.flashinfer_route}
    return {name: partial(checked, make) for name, make in found.items()}


def _eager(shape: RouterShape, rule: Rule) -> Callable[..., object]:
    def eager(
        tokens: torch.Tensor, gate: torch.Tensor, expert_bias: torch.Tensor | None, logit_bias: torch.Tensor | None
    ) -> object:
        return eager_route(functional.linear(tokens, gate, logit_bias), shape.num_topk, rule, expert_bias)

    return eager


def _step(function: Callable[..., object]) -> Step:
    return lambda x: function(x.tokens, x.gate, x.expert_bias, x.logit_bias)


def _each(step: Step, inputs: list[Inputs]) -> list[Run]:
    return [partial(step, x) for x in inputs]


def _all(make: Callable[[], Step], inputs: list[Inputs]) -> Callable[[], list[Run]]:
    return lambda: _each(make(), inputs)


def _first(make: Callable[[], Step], inputs: list[Inputs]) -> Callable[[], Run]:
    return lambda: partial(make(), inputs[0])


def make_inputs(shape: RouterShape, biases: tuple[bool, bool], device: torch.device, seed: int) -> Inputs:
    """Make random inputs. biases: whether there is an expert_bias, and a logit_bias."""
    source = generator(device, seed, shape.m, shape.n, shape.k)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=source, device=device)

    dtype = DTYPES[shape.dtype]
    tokens, gate = normal(shape.m, shape.k), normal(shape.n, shape.k) / shape.k**0.5
    expert_bias, logit_bias = (normal(shape.n) * 0.02 if has else None for has in biases)
    return Inputs(tokens.to(dtype), gate.to(dtype), expert_bias, None if logit_bias is None else logit_bias.to(dtype))


def moved_bytes(shape: RouterShape) -> int:
    """Return the bytes read and written at least: tokens, gate, and weights and ids of the slots."""
    return 2 * (shape.m + shape.n) * shape.k + 8 * shape.m * shape.num_topk


def errors(x: Inputs, shape: RouterShape, rule: Rule) -> dict[str, float]:
    """Return the errors of Envoi's weights and of torch's in the dense form, of sampled rows."""
    rows = sample_rows(shape.m, x.tokens.device)
    want = exact(x, shape, rule, rows)
    got = route(x.tokens, x.gate, shape.num_topk, rule=rule, logit_bias=x.logit_bias, expert_bias=x.expert_bias)
    weights, ids = eager_route(functional.linear(x.tokens, x.gate, x.logit_bias), shape.num_topk, rule, x.expert_bias)
    results = {"ours": (got.topk_weights, got.topk_ids), "torch": (weights, ids)}
    return {
        name: relative_error(reference.to_dense(weights[rows], ids[rows], shape.n), want)
        for name, (weights, ids) in results.items()
    }


def exact(x: Inputs, shape: RouterShape, rule: Rule, rows: torch.Tensor) -> torch.Tensor:
    """Return the dense weights [len(rows), N] of these tokens from float64 logits."""
    logits = x.tokens[rows].double() @ x.gate.double().T
    if x.logit_bias is not None:
        logits = logits + x.logit_bias.double()
    return reference.to_dense(*reference.select(logits, shape.num_topk, rule, x.expert_bias), shape.n)

"""A server's engine, its experts by its own default kernels and by Envoi's plug-in: wall time of prefill and of decode.

    prefill 16x2048     one new token for each of 16 prompts of 2048 tokens, in chunks of 8192
    decode 64           a step of 64 sequences that have 32 tokens or more, the engine's own CUDA graphs

SGLang captures none for prefill here, whose steps are longer than its graphs; its attention is by its Triton kernels.

The engines of a model are in memory at once and run rounds in turns, in both orders (`engine_turns.py`). Random
weights, the same for all; no tokens per second depend on them but by the routing. Error: one layer of the model's sizes
in its format on 64 tokens, as suite moe has it. Details: seconds until the engine took requests, all caches empty and
the others starting too; the ratio to the default in rounds that began with it, and in those that ended with it.

vLLM is also timed with experts' kernels that it doesn't choose itself, which `--moe-backend` names. Dense layers in FP8
run on DeepGEMM in all of its engines, as it chooses.
"""

from functools import cache
from itertools import product
from statistics import median
from typing import cast

import torch

from bench.served import baseline_named
from bench.shapes import Case, EngineShape, MoeShape, Options
from bench.suites import moe
from bench.suites.engine_process import BACKENDS, ENGINES, SERVED
from bench.suites.engine_turns import Found, in_turns, python
from bench.suites.models import MODELS
from bench.suites.torch_moe import eager_moe
from bench.timing import Timing, summarize
from bench.trial import Bench, Trial
from envoi.ops.moe import moe as envoi_moe

PREFILL = (16, 2048)
DECODE = (1, 16, 64, 256)
ERROR_TOKENS = 64
# Models that hand their gates to the layer, and of how many layers another engine fits beside, with Envoi's gate too.
ROUTED = {("vllm", "Qwen3-30B-A3B", "fp8_block128"): 24}


def cases(options: Options) -> list[Case]:
    """Return the cases: each model in each format, prefill and decode."""
    found = []
    for engine, (name, served) in product(ENGINES, SERVED.items()):
        layers = options.layers or served.num_layers
        for format, step in product(served.formats_in(engine), (PREFILL, *((batch, 1) for batch in DECODE))):
            shape = EngineShape(engine, name, layers, format, *step)
            found.append(Case("engine", _name(shape), shape))
    return found


def _name(shape: EngineShape) -> str:
    return f"{shape.engine}, {shape.model} {shape.format} x{shape.num_layers}, {_step(shape)}"


def _step(shape: EngineShape) -> str:
    if shape.num_tokens > 1:
        return f"prefill {shape.num_sequences}x{shape.num_tokens}"
    return f"decode {shape.num_sequences}"


def measure(case: Case, bench: Bench) -> Trial:
    """Return the case's times of what the model's engines measured; the first case of a model runs them."""
    shape = cast(EngineShape, case.shape)
    found, error = engines(shape.engine, shape.model, shape.num_layers, shape.format, bench.clock.repeat, bench.device)
    if isinstance(error, Exception):
        raise error
    for name in ("default", "envoi"):
        if not found[name].rounds:
            raise RuntimeError(f"{name}: {found[name].why}")
    step = _step(shape)
    ours, base = found["envoi"], found["default"]
    baselines = {baseline_named(shape.engine): _timing(base, step)}
    missing = {}
    for backend in [name for name in found if name not in ("default", "envoi")]:
        name = backend if backend in BACKENDS else baseline_named(shape.engine, backend)
        if found[backend].rounds:
            baselines[name] = _timing(found[backend], step)
        else:
            missing[name] = found[backend].why
    return Trial(
        _timing(ours, step), baselines, error, 0.0, details=_details(shape.engine, found, step), missing=missing
    )


def _timing(found: Found, step: str) -> Timing:
    return summarize([times[step] for times in found.rounds])


def _details(engine: str, found: dict[str, Found], step: str) -> dict[str, str | float]:
    ours, base = found["envoi"], found["default"]
    details: dict[str, str | float] = {engine: base.ready["version"]}
    for name, key in {"ready s": "ready_s", "memory GiB": "memory_gib"}.items():
        if key in base.ready:  # SGLang's processes don't say their memory
            details[name] = f"{ours.ready[key]} (default {base.ready[key]})"
    details["tokens repeat"] = str(ours.warm["same_again"])
    for name, began in {"default first": base.firsts, "default last": [not first for first in base.firsts]}.items():
        both = zip(base.rounds, ours.rounds, began, strict=False)
        ratios = [theirs[step] / mine[step] for theirs, mine, counts in both if counts]
        if ratios:
            details[name] = round(median(ratios), 3)
    return details


@cache
def engines(
    engine: str, model: str, num_layers: int, format: str, rounds: int, device: torch.device
) -> tuple[dict[str, Found], dict[str, float] | Exception]:
    """Return what the engines of a model answered, by backend, and the error of a layer, which they start beside.

    What goes wrong is returned too, and so kept: the model's other cases needn't wait for it again.
    """
    backends = ["default", "envoi", *SERVED[model].named_in(engine, format)]
    if num_layers <= ROUTED.get((engine, model, format), 0):
        backends.append("routed")
    commands = {
        backend: python(
            "bench.suites.engine_process", "--engine", engine, "--model", model, "--format", format, "--backend",
            backend, "--layers", str(num_layers), "--prefill", "x".join(map(str, PREFILL)), "--decode",
            ",".join(map(str, DECODE)),
        )
        for backend in backends
    }  # fmt: skip
    errors: list[dict[str, float] | Exception] = []

    def of_a_layer() -> None:
        try:
            errors.append(_error(model, format, device))
        except Exception as problem:
            errors.append(problem)

    return in_turns(commands, rounds, f"{engine}_{model}_{format}", of_a_layer), errors[0]


def _error(model: str, format: str, device: torch.device) -> dict[str, float]:
    sizes = next(one for one in MODELS if one.name == model)
    shape = MoeShape(sizes.hidden, sizes.expert_intermediate, sizes.num_experts, sizes.num_topk, ERROR_TOKENS, format)
    layer = moe.make_layer(shape, device)
    error = moe.errors(layer, envoi_moe(layer.tokens, layer.routing, layer.packed), eager_moe(layer))
    del layer
    torch.cuda.empty_cache()  # the engines ask for most of the memory
    return error

"""A server's engine, its experts by its own default kernels and by Envoi's plug-in: wall time of prefill and of decode.

    prefill 16x2048     one new token for each of 16 prompts of 2048 tokens, in chunks of 8192
    decode 64           a step of 64 sequences that have 32 tokens or more, the engine's own CUDA graphs

Each backend runs in processes of its own (`engine_process.py`), in the order default, Envoi, Envoi, default, since the
later ones find what torch.compile cached; all rounds of a backend count together. Random weights, the same for both; no
tokens per second depend on them but by the routing. Error: one layer of the model's sizes in its format on 64 tokens,
as suite moe has it. Details: seconds until the engine took requests, in the first process of each backend.
"""

import json
import subprocess
import sys
from functools import cache
from typing import Any, cast

import torch

from bench.shapes import Case, EngineShape, MoeShape, Options
from bench.suites import moe
from bench.suites.engine_process import SERVED
from bench.suites.models import MODELS
from bench.suites.torch_moe import eager_moe
from bench.timing import summarize
from bench.trial import Bench, Trial
from envoi.ops.moe import moe as envoi_moe

PREFILL = (16, 2048)
DECODE = (1, 16, 64, 256)
ORDER = ("default", "envoi", "envoi", "default")
LIMIT_S = 400
ERROR_TOKENS = 64
NAME = {"vllm": "vllm_engine"}  # baselines, by engine

Runs = dict[str, list[dict[str, Any]]]  # results of processes by backend


def cases(options: Options) -> list[Case]:
    """Return the cases: each model in each format, prefill and decode."""
    found = []
    for name, served in SERVED.items():
        layers = options.layers or served.num_layers
        for format in served.formats:
            for step in (PREFILL, *((batch, 1) for batch in DECODE)):
                shape = EngineShape("vllm", name, layers, format, *step)
                found.append(Case("engine", _name(shape), shape))
    return found


def _name(shape: EngineShape) -> str:
    count = f"{shape.num_sequences}x{shape.num_tokens}" if shape.num_tokens > 1 else str(shape.num_sequences)
    phase = "prefill" if shape.num_tokens > 1 else "decode"
    return f"{shape.engine}, {shape.model} sizes x{shape.num_layers}, {phase} {count} {shape.format}"


def measure(case: Case, bench: Bench) -> Trial:
    """Return the case's times of what the model's processes measured; the first case of a model runs them."""
    shape = cast(EngineShape, case.shape)
    runs = processes(shape.engine, shape.model, shape.num_layers, shape.format, max(1, bench.clock.repeat // 2))
    if isinstance(runs, RuntimeError):
        raise runs
    times = {backend: summarize([t for run in found for t in _times(run, shape)]) for backend, found in runs.items()}
    details: dict[str, str | float] = {
        shape.engine: runs["default"][0]["version"], "order": ", ".join(ORDER),
        "ready s": f"{runs['envoi'][0]['ready_s']} (default {runs['default'][0]['ready_s']})",
        "tokens repeat": str(all(run["same_again"] for run in runs["envoi"])),
        "weights GiB": f"{runs['envoi'][0]['weights_gib']} (default {runs['default'][0]['weights_gib']})",
    }  # fmt: skip
    error = _error(shape.model, shape.format, bench.device)
    return Trial(times["envoi"], {NAME[shape.engine]: times["default"]}, error, 0.0, details=details)


def _times(run: dict[str, Any], shape: EngineShape) -> list[float]:
    return run["prefill_us"] if shape.num_tokens > 1 else run["decode_us"][str(shape.num_sequences)]


@cache
def processes(engine: str, model: str, num_layers: int, format: str, rounds: int) -> Runs | RuntimeError:
    """Run the engine once for each entry of `ORDER`; return the results by backend, or the error of the first to fail.

    An error is returned, so that it is kept as well: the model's other cases needn't wait for it again.
    """
    found: Runs = {"default": [], "envoi": []}
    for backend in ORDER:
        command = [
            sys.executable, "-m", "bench.suites.engine_process", "--engine", engine, "--model", model, "--format",
            format, "--backend", backend, "--layers", str(num_layers), "--rounds", str(rounds),
            "--prefill", "x".join(map(str, PREFILL)), "--decode", ",".join(map(str, DECODE)),
        ]  # fmt: skip
        try:
            found[backend].append(result_of(command))
        except RuntimeError as error:
            return error
    return found


def result_of(command: list[str]) -> dict[str, Any]:
    """Run a program and return what it prints as RESULT. Raises RuntimeError if there is none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{' '.join(command[2:])}: not done within {LIMIT_S} s") from None
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    last = " ".join((done.stdout + done.stderr).splitlines()[-8:])
    raise RuntimeError(f"{' '.join(command[2:])}: exit status {done.returncode}: {last}")


@cache
def _error(model: str, format: str, device: torch.device) -> dict[str, float]:
    sizes = next(one for one in MODELS if one.name == model)
    shape = MoeShape(sizes.hidden, sizes.expert_intermediate, sizes.num_experts, sizes.num_topk, ERROR_TOKENS, format)
    layer = moe.make_layer(shape, device)
    error = moe.errors(layer, envoi_moe(layer.tokens, layer.routing, layer.packed), eager_moe(layer))
    del layer
    torch.cuda.empty_cache()  # the next model's engine asks for most of the memory
    return error

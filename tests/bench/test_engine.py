"""Suite engine: what its processes are asked, what becomes of their results and of their failures."""

import json
import sys

import pytest
import torch

from bench import runner
from bench.roof import Roof
from bench.suites import cases, engine, measure
from bench.suites.engine_process import SERVED, config_of
from bench.timing import Clock
from bench.trial import Bench

CPU = torch.device("cpu")
ROOF = Roof(30.0, {"bf16": 0.1, "fp32": 0.1})
MODELS = [(name, format) for name, served in SERVED.items() for format in served.formats]


@pytest.mark.parametrize("name, format", MODELS)
def test_config_is_what_transformers_reads_of_that_class(name, format):
    from transformers import AutoConfig

    given = config_of(name, format, 3)
    read = AutoConfig.for_model(**given)
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_experts_per_tok", "vocab_size"):
        assert getattr(read, key) == given[key]
    experts = "n_routed_experts" if name == "DeepSeek-V3" else "num_local_experts" if "gpt" in name else "num_experts"
    assert getattr(read, experts) == given["num_experts"]
    assert ("quantization_config" in given) == (format != "bf16")


def test_unknown_models_and_formats_are_refused():
    with pytest.raises(ValueError, match="got gpt-oss-20b bf16"):
        config_of("gpt-oss-20b", "bf16")


def results(backend: str, first: float) -> dict:
    return {
        "version": "1.2", "ready_s": first, "same_again": True, "weights_gib": 5.0,
        "prefill_us": [10 * first, 30 * first], "decode_us": {str(n): [first, first + 1] for n in engine.DECODE},
    }  # fmt: skip


def test_all_rounds_of_both_processes_count(monkeypatch):
    asked = []

    def answer(command):
        asked.append(command[command.index("--backend") + 1])
        return results(asked[-1], {"default": 8.0, "envoi": 4.0}[asked[-1]] + 2 * (len(asked) > 2))

    monkeypatch.setattr(engine, "result_of", answer)
    monkeypatch.setattr(engine, "_error", lambda *_: {"ours": 1e-3, "torch": 1e-3})
    engine.processes.cache_clear()
    chosen = [case for case in cases("engine") if "gpt-oss" in case.name]
    bench = Bench(Clock(CPU, 4), ROOF)
    trials = {case.name: measure(case, bench) for case in chosen}
    assert asked == ["default", "envoi", "envoi", "default"]  # once for all cases of a model
    trial = trials["vllm, gpt-oss-20b sizes x24, decode 16 mxfp4"]
    assert (trial.ours.p10_us, trial.ours.p90_us, trial.ours.n) == (4.0, 7.0, 4)
    assert trial.baselines["vllm_engine"].p90_us == 11.0
    measured = runner.to_measurement(chosen[0], trials[chosen[0].name], ROOF, runner.Ranks(0, 1, CPU), "0123456789ab")
    assert measured.ours_us == 60.0 or measured.ours_us == 120.0
    assert measured.details["ready s"] == "4.0 (default 8.0)"
    engine.processes.cache_clear()


def test_a_process_that_fails_is_asked_once(monkeypatch):
    calls = []

    def fail(command):
        calls.append(command)
        raise RuntimeError("no such engine")

    monkeypatch.setattr(engine, "result_of", fail)
    engine.processes.cache_clear()
    for case in cases("engine")[:3]:
        with pytest.raises(RuntimeError, match="no such engine"):
            measure(case, Bench(Clock(CPU, 4), ROOF))
    assert len(calls) == 1
    engine.processes.cache_clear()


def test_the_result_of_a_program_and_the_end_of_one_without():
    said = {"prefill_us": [1.5]}
    assert engine.result_of([sys.executable, "-c", f"print('x'); print('RESULT ' + {json.dumps(said)!r})"]) == said
    with pytest.raises(RuntimeError, match="exit status 3: .*broken"):
        engine.result_of([sys.executable, "-c", "print('broken'); raise SystemExit(3)"])

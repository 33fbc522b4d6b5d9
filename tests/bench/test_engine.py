"""Suite engine: what its processes are asked, what becomes of their results and of their failures."""

import re
import sys
from pathlib import Path

import pytest
import torch

from bench import runner
from bench.roof import Roof
from bench.suites import cases, engine, engine_turns, measure
from bench.suites.engine_process import SERVED, config_of
from bench.suites.engine_turns import Found
from bench.summary import best_baseline
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


def answers(first_us: float) -> Found:
    ready = {"version": "1.2", "gpu": "H", "ready_s": first_us, "memory_gib": 5.0}
    rounds = [
        {"prefill 16x2048": 10 * us, **{f"decode {n}": us + n for n in engine.DECODE}}
        for us in (first_us, first_us + 1, first_us, first_us + 1)
    ]
    return Found(ready, {"same_again": True}, rounds, [first_us > 5, first_us < 5] * 2)


def measured(
    monkeypatch, found: dict[str, Found], error: Exception | None = None, chosen: str = "gpt-oss"
) -> tuple[list, Bench, list]:
    """Return the cases whose name contains chosen, a function that measures one, and the commands that were started."""
    asked = []

    def run(commands, rounds, logs, meanwhile):
        asked.append(commands)
        meanwhile()
        return found

    def error_of(*given):
        if error is not None:
            raise error
        return {"ours": 1e-3, "torch": 1e-3}

    monkeypatch.setattr(engine, "in_turns", run)
    monkeypatch.setattr(engine, "_error", error_of)
    engine.engines.cache_clear()
    return [case for case in cases("engine") if chosen in case.name], Bench(Clock(CPU, 4), ROOF), asked


def test_engines_run_once_for_all_cases_of_a_model(monkeypatch):
    found = {"default": answers(8.0), "envoi": answers(4.0), "marlin": answers(6.0)}
    chosen, bench, asked = measured(monkeypatch, found)
    trials = {case.name: measure(case, bench) for case in chosen}
    (commands,) = asked
    assert [command[command.index("--backend") + 1] for command in commands.values()] == list(found)
    assert all(command[command.index("--model") + 1] == "gpt-oss-20b" for command in commands.values())
    trial = trials["vllm, gpt-oss-20b mxfp4 x24, decode 16"]
    assert (trial.ours.p10_us, trial.ours.p90_us, trial.ours.n) == (20.0, 21.0, 4)
    assert trial.baselines["vllm_engine"].p90_us == 25.0
    assert trial.baselines["vllm_engine_marlin"].p90_us == 23.0
    row = runner.to_measurement(chosen[0], trials[chosen[0].name], ROOF, runner.Ranks(0, 1, CPU), "0123456789ab")
    assert row.details == {
        "vllm": "1.2", "ready s": "4.0 (default 8.0)", "memory GiB": "5.0 (default 5.0)", "tokens repeat": "True",
        "default first": 2.0, "default last": 1.8,
    }  # fmt: skip


def test_sglang_is_asked_as_vllm_is_and_says_no_memory(monkeypatch):
    found = {"default": answers(8.0), "envoi": answers(4.0)}
    for one in found.values():
        del one.ready["memory_gib"]
    chosen, bench, asked = measured(monkeypatch, found, chosen="sglang, ")
    trial = measure(chosen[0], bench)
    (commands,) = asked
    assert list(commands) == ["default", "envoi"]
    assert all(command[command.index("--engine") + 1] == "sglang" for command in commands.values())
    assert trial.baselines["sglang_engine"].p10_us == 80.0
    assert trial.details == {
        "sglang": "1.2", "ready s": "4.0 (default 8.0)", "tokens repeat": "True", "default first": 2.0,
        "default last": 1.8,
    }  # fmt: skip


def test_a_third_engine_is_a_form_of_envois_own_and_may_fail(monkeypatch):
    found = {"default": answers(8.0), "envoi": answers(4.0), "routed": answers(3.0)}
    chosen, bench, _ = measured(monkeypatch, found)
    trial = measure(chosen[0], bench)
    assert trial.baselines["routed"].p10_us == 30.0
    row = runner.to_measurement(chosen[0], trial, ROOF, runner.Ranks(0, 1, CPU), "0123456789ab")
    assert best_baseline(row) == ("vllm_engine", 90.0)
    chosen, bench, _ = measured(monkeypatch, found | {"routed": Found(why="ready: exit status 1")})
    trial = measure(chosen[0], bench)
    assert trial.missing == {"routed": "ready: exit status 1"}
    assert "routed" not in trial.baselines


@pytest.mark.parametrize("failing", ["default", "envoi"])
def test_engines_that_fail_are_asked_once(monkeypatch, failing):
    found = {"default": answers(8.0), "envoi": answers(4.0), failing: Found(why="warm: no such engine")}
    chosen, bench, asked = measured(monkeypatch, found)
    for case in chosen:
        with pytest.raises(RuntimeError, match=f"{failing}: warm: no such engine"):
            measure(case, bench)
    assert len(asked) == 1


def test_a_layer_that_fails_beside_the_engines_is_asked_once(monkeypatch):
    found = {"default": answers(8.0), "envoi": answers(4.0)}
    chosen, bench, asked = measured(monkeypatch, found, error=ValueError("no such layer"))
    for case in chosen:
        with pytest.raises(ValueError, match="no such layer"):
            measure(case, bench)
    assert len(asked) == 1


PROGRAM = """
import json, os, sys, time
kind, shared, fd = sys.argv[1], sys.argv[2], int(sys.argv[-1])
print(os.environ["HOME"])
if kind == "dies":
    raise SystemExit("no such model")
with os.fdopen(fd, "w", buffering=1) as answers:
    print(json.dumps({"home": os.environ["HOME"]}), file=answers)
    for line in sys.stdin:
        with open(shared, "a") as file:
            file.write(f"{kind} {line}")
        if kind == "ends" and line.strip() == "round":
            os.system("sleep 5 &")  # a child that holds the file open
            raise SystemExit("out of memory")
        if kind == "hangs":
            time.sleep(30)
        print(json.dumps({"step": 1.5}), file=answers)
"""


def turns(tmp_path, kinds: list[str], rounds: int = 3) -> tuple[dict[str, Found], list[str]]:
    """Return what processes of these kinds answered, and what they were asked, in order."""
    shared = tmp_path / "asked"
    shared.touch()
    commands = {kind: [sys.executable, "-c", PROGRAM, kind, str(shared)] for kind in kinds}
    return engine_turns.in_turns(commands, rounds, "test_turns"), shared.read_text().splitlines()


def test_rounds_come_in_both_orders_in_homes_of_their_own(tmp_path):
    found, asked = turns(tmp_path, ["a", "b"])
    assert asked == ["a warm", "b warm", "a round", "b round", "b round", "a round", "a round", "b round"]
    assert found["b"].rounds == [{"step": 1.5}] * 3
    assert (found["a"].firsts, found["b"].firsts) == ([True, False, True], [False, True, False])
    homes = {run.ready["home"] for run in found.values()}
    assert len(homes) == 2 and not any(Path(home).exists() for home in homes)


@pytest.mark.parametrize(
    "kind, word, why",
    [
        ("dies", "ready", "exit status 1: .*no such model; the log is .*test_turns_dies.log"),
        ("ends", "round", "exit status 1: .*out of memory"),
        ("hangs", "warm", "no answer within 0.5 s"),
    ],
)
def test_one_that_fails_leaves_the_others_running(monkeypatch, tmp_path, kind, word, why):
    monkeypatch.setattr(engine_turns, "WARM_S", 0.5 if kind == "hangs" else 60)
    monkeypatch.setattr(engine_turns, "LOOK_S", 0.2)
    found, _ = turns(tmp_path, [kind, "other"])
    assert re.fullmatch(f"{word}: {why}.*", found[kind].why)
    assert (len(found[kind].rounds), len(found["other"].rounds), found["other"].why) == (0, 3, "")


def test_an_error_meanwhile_ends_the_processes(tmp_path):
    commands = {"a": [sys.executable, "-c", PROGRAM, "a", str(tmp_path / "asked")]}

    def fail():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine_turns.in_turns(commands, 1, "test_turns", fail)
    assert not (tmp_path / "asked").exists()

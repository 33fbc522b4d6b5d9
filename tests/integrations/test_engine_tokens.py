"""What holds an engine's greedy tokens to float32: it accepts those of a reference, and no others."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import pytest

from tools.engines import sglang_tokens, tokens
from tools.engines.checks import run_ranks

MODEL = Path(__file__).resolve().parents[2] / "examples/tiny_moe/model"
NEW = 4


@pytest.fixture(scope="module")
def args() -> argparse.Namespace:
    """Return options of a short run."""
    options = ["--model", str(MODEL), "--new", str(NEW), "--prompt-bytes", "24"]
    return tokens.parser(None, "triton").parse_args(options)


@pytest.fixture(scope="module")
def served(args: argparse.Namespace, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Return the greedy tokens of the checkpoint that SGLang is given, whose output's embeddings are a tensor."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("untied")
    sglang_tokens.untie(MODEL, folder)
    assert not json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, experts_implementation="eager")
    prompts = torch.tensor(tokens.prompts_of(args))
    found = model.generate(prompts, max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    return found[:, prompts.shape[1] :].tolist()


def test_greedy_tokens_pass(args, served, capsys):
    assert tokens.compare(args, tokens.prompts_of(args), served, again=True) == 0
    assert f"ok: envoi bf16: {len(served) * NEW} tokens" in capsys.readouterr().out


def test_a_wrong_token_fails(args, served, capsys):
    wrong = [list(x) for x in served]
    wrong[3][-1] ^= 64
    assert tokens.compare(args, tokens.prompts_of(args), wrong, again=True) == 1
    assert "FAILED" in capsys.readouterr().out


def test_another_second_run_fails(args, served, capsys):
    assert tokens.compare(args, tokens.prompts_of(args), served, again=False) == 1
    assert "OTHER TOKENS" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("backend", "said", "good"),
    [
        ("envoi", ["Envoi runs the MoE layers in bf16"], True),
        ("envoi", ["SGLang's kernels run the MoE layers: LoRA is on"], False),
        ("envoi", ["Envoi runs the MoE layers in bf16", "vLLM's kernels run the fp8 MoE layers: LoRA is on"], False),
        ("envoi", [], False),
        ("triton", [], True),
        ("triton", ["Envoi runs the MoE layers in bf16"], False),
    ],
)
def test_what_ran(backend, said, good):
    assert tokens.runs_as_asked(said, backend, 1.0) == good


def test_what_was_said_in_a_log():
    log = """[2026-11-29 00:04:43] Load weight end.
[2026-11-29 00:04:44] Envoi runs the MoE layers in bf16, 16 experts of 256 x 128, top 4, swiglu
[2026-11-29 00:04:45] Envoi runs the MoE layers in bf16, 16 experts of 256 x 128, top 4, swiglu
[2026-11-29 00:04:46] SGLang's kernels run the MoE layers: LoRA is on, which Envoi's kernels don't apply
"""
    assert sglang_tokens.said_in(log) == [
        "Envoi runs the MoE layers in bf16, 16 experts of 256 x 128, top 4, swiglu",
        "SGLang's kernels run the MoE layers: LoRA is on, which Envoi's kernels don't apply",
    ]


def test_a_rank_that_fails_ends_the_others(tmp_path, monkeypatch):
    text = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(3)\ntime.sleep(float(sys.argv[1]))"
    (tmp_path / "of_rank.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["program", "50"])
    begun = time.monotonic()
    assert run_ranks("of_rank", 2, "RANK", "PORT") == 1
    assert time.monotonic() - begun < 40
    monkeypatch.setattr("sys.argv", ["program", "0"])
    assert run_ranks("of_rank", 1, "RANK", "PORT") == 0

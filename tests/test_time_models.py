"""The command `python -m tools.time_models`, for every model: what it refuses, and that a GPU measures."""

from pathlib import Path

import pytest

from tools.time_models.__main__ import MODELS, main

BENCH = Path(__file__).resolve().parents[1] / "bench"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("line", ["{}", "[]", "no json", '{"times_us": [{}]}'])
def test_a_line_that_is_none_is_refused(model, line, tmp_path, capsys):
    path = tmp_path / "times.jsonl"
    path.write_text(line + "\n")
    assert main([model, "fit", str(path)]) == 2
    assert "expected a line that `measure` wrote" in capsys.readouterr().err


@pytest.mark.parametrize(("model", "other"), [("gemm", "router"), ("router", "gemm")])
def test_lines_of_another_model_are_refused(model, other, capsys):
    assert main([model, "fit", str(BENCH / f"{other}_times.jsonl")]) == 2
    assert "expected a line that `measure` wrote" in capsys.readouterr().err


@pytest.mark.parametrize("model", MODELS)
def test_nothing_measured_and_no_gpu_are_said(model, tmp_path, capsys, monkeypatch):
    (tmp_path / "empty.jsonl").touch()
    assert main([model, "fit", str(tmp_path / "empty.jsonl")]) == 2
    assert "expected at least one measured shape, got none" in capsys.readouterr().err
    assert main([model, "fit", str(tmp_path / "none.jsonl")]) == 2
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([model, "measure", str(tmp_path / "times.jsonl")]) == 2
    assert "measure: expected a Hopper GPU" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
def test_a_gpu_measures(model, tmp_path):
    path = tmp_path / "times.jsonl"
    assert main([model, "measure", str(path), "--count", "4", "--configs", "4", "--repeat", "3"]) == 0
    data = MODELS[model].read([path])
    assert len(data) == 4
    assert all(1 < len(each.times_us) <= 4 for each in data)

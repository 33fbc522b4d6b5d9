"""Pages, charts and the README's numbers: made from the results, and those of the repository agree with its results."""

from pathlib import Path

import pytest

from bench import evidence, pairs
from bench.command import guides
from bench.evidence import Measurement
from bench.pages import pages, render

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
DOCS = ROOT / "docs" / "benchmarks"
REMEDY = "python -m bench --docs docs/benchmarks"


def test_the_pages_agree_with_the_results():
    wanted = pages(RESULTS)
    assert {path.name for path in DOCS.glob("*.md")} == set(wanted), REMEDY
    for name, text in wanted.items():
        assert (DOCS / name).read_text(encoding="utf-8") == text, REMEDY


def test_the_readme_agrees_with_the_results():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("<!-- bench:") > 6
    assert render(text, RESULTS) == text, REMEDY


def test_the_guides_agree_with_the_results():
    found = guides(ROOT / "docs")
    assert "vllm.md" in {path.name for path in found}
    for path in found:
        text = path.read_text(encoding="utf-8")
        assert render(text, RESULTS) == text, REMEDY


def test_predictions_stand_beside_the_times(tmp_path):
    sizes = None, None, None, {"ours": 0.1, "torch": 0.1}, "NVIDIA H200"
    rows = [
        Measurement("moe", name, us, {"torch_ep": 400.0}, *sizes, ranks, "2.11", "3.6", "c", "2026-01-02", 4, details)
        for name, us, ranks, details in (
            ("a tokens=1", 100.0, 4, {"predicted us": 80.0}), ("a tokens=1", 200.0, 2, {"predicted us": 250.0}),
            ("b tokens=1", 50.0, 4, {}),
        )
    ]  # fmt: skip
    evidence.append(tmp_path, rows)
    lines = pages(tmp_path)["moe.md"].splitlines()
    first = lines.index("### Predicted")
    assert [line for line in lines[first:] if line.startswith(("| a", "| b"))] == [
        "| a tokens=1, 4 GPUs | 80.0 | 100 | 1.25x |", "| a tokens=1, 2 GPUs | 250 | 200 | 0.80x |",
    ]  # fmt: skip
    evidence.append(tmp_path / "none", [rows[2]])
    assert "### Predicted" not in pages(tmp_path / "none")["moe.md"]


def test_pairs_are_compared_case_by_case(tmp_path):
    def row(case: str, us: float, torch: str, cublas: float) -> Measurement:
        found = case, us, {"cublas": cublas, "plain": 1.0}, None, None, None, {"ours": 0.1, "torch": 0.1}
        return Measurement("gemm", *found, "NVIDIA H200", 1, torch, "3", "c", "2026-01-02", 4)

    rows = [
        row("a", 50.0, "2.14.1+cu130", 10.0), row("b", 100.0, "2.14.1+cu130", 10.0), row("a", 40.0, "2.9.0", 5.0),
        row("b", 225.0, "2.9.0", 20.0), row("only here", 1.0, "2.9.0", 1.0),
    ]  # fmt: skip
    evidence.append(tmp_path / pairs.FOLDER, rows)
    lines = pairs.page(tmp_path).splitlines()
    assert "| gemm | 2 | 1.34x [0.80x] | 1.00x [0.50x] |" in lines
    assert [line for line in lines if line.startswith("| gemm ")][1:] == ["| gemm a | 40.0 | 50.0 | 0.80x |"]
    evidence.append(tmp_path / pairs.FOLDER, [row("a", 1.0, "2.15.0", 1.0)])
    with pytest.raises(ValueError, match=r"two torches.* got 2\.14\.1\+cu130, 2\.15\.0, 2\.9\.0"):
        pairs.page(tmp_path)
    assert pairs.page(tmp_path / "none") == ""


def served(
    step: str, ours_us: float, theirs_us: float, model: str = "M bf16", engine: str = "vllm", **more: float
) -> Measurement:
    return Measurement(
        "engine", f"{engine}, {model} x4, {step}", ours_us, {f"{engine}_engine": theirs_us, **more}, None, None, None,
        {"ours": 0.1, "torch": 0.1}, "NVIDIA H200", 1, "2.11", "3.6", "c", "2026-01-02", 4,
        {engine: "0.26.0", "ready s": "3.0 (default 2.0)"},
    )  # fmt: skip


def test_served_models_are_a_table_and_a_line_of_the_rows(tmp_path):
    rows = [
        served("prefill 2x500", 1e6, 2e6, routed=0.5e6), served("decode 4", 100.0, 125.0),
        served("decode 4", 100.0, 90.0, "N mxfp4", vllm_engine_marlin=95.0),
        served("prefill 2x500", 1e5, 1.5e5, "N mxfp4", vllm_engine_marlin=1e5),
        served("decode 4", 100.0, 150.0, engine="sglang"),
    ]  # fmt: skip
    evidence.append(tmp_path, rows)
    text = render("<!-- bench:engine:h200:table -->x<!-- /bench -->", tmp_path)
    assert [line.strip("| ") for line in text.splitlines() if line.startswith("|")] == [
        "sizes of | prefill 2x500 | decode 4",
        "--- | ---: | ---:",
        "M, bf16, 4 layers, vLLM 0.26.0 | 500 to 1,000 (2.00x) | 32,000 to 40,000 (1.25x)",
        "M, bf16, 4 layers, vLLM 0.26.0, `ENVOI_VLLM_ROUTE=1` | 500 to 2,000 (4.00x) | -",
        "N, mxfp4, 4 layers, vLLM 0.26.0 | 10,000 to 10,000 (1.00x, marlin) | 44,444 to 40,000 (0.90x)",
    ]
    assert "M, bf16, 4 layers, vLLM 0.26.0: 3.0 (default 2.0)" in text
    line = render("<!-- bench:engine:h200:line -->x<!-- /bench -->", tmp_path)
    assert "-->1.00 to 2.00 times the tokens/s in prefill and 0.90 to 1.25 times the tokens/s in decode (" in line
    text = render("<!-- bench:engine:h200:table:sglang -->x<!-- /bench -->", tmp_path)
    assert "| M, bf16, 4 layers, SGLang 0.26.0 | 26,667 to 40,000 (1.50x) |" in text
    assert "Tokens/s, SGLang's own kernels to Envoi's" in text
    assert render("<!-- bench:engine:h100:line -->x<!-- /bench -->", tmp_path).count("not measured") == 1
    with pytest.raises(ValueError, match="expected engine:GPU:table"):
        render("<!-- bench:engine:h200 -->x<!-- /bench -->", tmp_path)
    with pytest.raises(ValueError, match="then :sglang or nothing"):
        render("<!-- bench:engine:h200:line:tgi -->x<!-- /bench -->", tmp_path)

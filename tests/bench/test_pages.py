"""Pages, charts and the README's numbers: made from the results, and those of the repository agree with its results."""

from pathlib import Path

import pytest

from bench.__main__ import main
from bench.evidence import append
from bench.pages import PICTURE, pages, render
from bench.summary import best_baseline, compared

from .samples import sample

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


def test_the_best_baseline_does_the_same_work():
    bare = {"cublas": 5.0, "plain": 1.0, "copy": 1.0, "eager": 9.0, "compile": 8.0}
    assert best_baseline(sample(suite="gemm_swiglu", baselines=bare)) == ("compile", 8.0)
    assert best_baseline(sample(suite="gemm", baselines=bare)) == ("cublas", 5.0)
    assert best_baseline(sample(suite="gemm_fp8", baselines=bare)) == ("cublas", 5.0)
    own = sample(suite="router_dense", baselines={"dense": 5.0, "tokens": 1.0})
    assert best_baseline(own) is None
    assert [(name, us) for _, name, us in compared([own])] == [("dense", 5.0)]
    assert [name for _, name, _ in compared([own, sample(suite="router_dense", baselines={"eager": 2.0})])] == ["eager"]


def test_a_page_says_where_its_numbers_come_from(tmp_path):
    rows = [sample(ours_us=999.0), sample(), sample(case="64x4096x7168 bf16", baselines={"eager": 20.0}, n=20)]
    append(tmp_path, rows)
    text = pages(tmp_path)["gemm.md"]
    assert "| 8192x4096x7168 bf16 | 670 | cublas: 665 | 0.99x | 95 % | 1.7e-03 (0.0e+00) |" in text
    assert "| 64x4096x7168 bf16 | 670 | eager: 20.0 | 0.03x |" in text
    assert "NVIDIA H200, torch 2.11.0+cu130, triton 3.6.0, commit 0123456789ab, 2026-11-21, n = 100, 20." in text
    assert "- best baseline: 0.17x [0.03x] over 2 cases\n- bf16: cublas 0.99x [0.99x] over 1\n" in text
    assert "- cublas: torch's matmul of the same operands alone" in text
    assert pages(tmp_path)["moe.md"].endswith("Not measured yet.\n")


def test_numbers_of_gpus_are_apart(tmp_path):
    moe = {"suite": "moe", "case": "a", "ours_us": 10.0}
    ours = [sample(**moe, num_gpus=4, baselines={"torch_ep": 20.0}), sample(**moe, baselines={"eager": 30.0})]
    append(tmp_path, ours)
    found = pages(tmp_path)
    assert "| a, 4 GPUs | 10.0 | torch_ep: 20.0 |" in found["moe.md"]
    mean = "3.00x [3.00x] over 1 case on 1 GPU, 2.00x [2.00x] over 1 case on 4 GPUs"
    assert mean in found["moe.md"]
    assert mean in found["index.md"]


def test_what_is_measured_without_tuned_configs_is_apart(tmp_path):
    untuned = sample(case="untuned 8192x4096x7168 bf16", ours_us=1330.0, details={"configs": "by the model"})
    append(tmp_path, [sample(), untuned])
    text = pages(tmp_path)["gemm.md"]
    tuned, _, without = text.partition("(`--untuned`):")
    assert "untuned 8192" not in tuned
    assert "| untuned 8192x4096x7168 bf16 | 1330 | cublas: 665 | 0.50x |" in without
    assert "- best baseline: 0.50x [0.50x] over 1 case\n" in without
    assert "h200: 0.99x [0.99x] over 1 case\n" in pages(tmp_path)["index.md"]


def test_markers_are_served(tmp_path):
    found = [
        sample(suite="moe", case=f"4096/2048/256/6 fp8_block128 tokens={tokens}", num_gpus=4, ours_us=10.0,
               baselines={"sgl_deep_gemm": 10.0 + tokens, "torch_ep": 50.0}, details={"sgl-deep-gemm": "0.2.5"})
        for tokens in (64, 512, 2048, 8192)
    ]  # fmt: skip
    append(tmp_path, [*found, sample()])
    text = "a <!-- bench:h200:gemm:1 -->old<!-- /bench --> b <!-- bench:h200:gemm:1:eager --><!-- /bench -->"
    assert render(text, tmp_path) == (
        "a <!-- bench:h200:gemm:1 -->0.99x [0.99x] over 1 case<!-- /bench --> b "
        "<!-- bench:h200:gemm:1:eager -->1.04x [1.04x] over 1 case<!-- /bench -->"
    )
    assert "7.40x to 820x sgl-deep-gemm's one launch" in render("<!-- bench:picture --><!-- /bench -->", tmp_path)
    assert render("nothing here\n", tmp_path) == "nothing here\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<!-- bench:h200:gems:1 --><!-- /bench -->", "bench:h200:gems:1: expected GPU:SUITE:NUM_GPUS"),
        ("<!-- bench:h200:gemm:two --><!-- /bench -->", "expected GPU:SUITE:NUM_GPUS"),
        ("<!-- bench:h200:gemm:1:plane --><!-- /bench -->", "expected GPU:SUITE:NUM_GPUS"),
        ("<!-- bench:h200 --><!-- /bench -->", "expected GPU:SUITE:NUM_GPUS"),
        ("<!-- bench:h200:gemm:1 -->", "expected <!-- /bench --> after each"),
    ],
)
def test_markers_that_cannot_be_served_are_refused(text, problem, tmp_path):
    append(tmp_path, [sample()])
    with pytest.raises(ValueError, match=problem):
        render(text, tmp_path)


def test_the_command_wants_a_repository(tmp_path, capsys):
    assert main(["--docs", str(tmp_path / "none" / "benchmarks"), "--out", str(RESULTS)]) == 2
    assert "--docs: expected docs/benchmarks of a repository" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_one_command_writes_pages_picture_and_readme(tmp_path, capsys):
    found = [
        sample(suite="moe", case=f"4096/2048/256/6 fp8_block128 tokens={tokens}", num_gpus=4, ours_us=10.0,
               baselines={"sgl_deep_gemm": 10.0 + tokens, "torch_ep": 50.0}, details={"sgl-deep-gemm": "0.2.5"})
        for tokens in (64, 512, 2048, 8192)
    ]  # fmt: skip
    results, picture = tmp_path / "results", tmp_path / "docs" / "assets" / PICTURE
    append(results, found)
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("<!-- bench:picture -->\n<!-- /bench -->\n")
    assert main(["--docs", str(tmp_path / "docs" / "benchmarks"), "--out", str(results)]) == 0
    assert "sgl-deep-gemm's one launch 0.2.5" in picture.read_text()
    assert PICTURE in (tmp_path / "README.md").read_text()
    assert "| 4096/2048/256/6 fp8_block128 tokens=64, 4 GPUs |" in (tmp_path / "docs/benchmarks/moe.md").read_text()

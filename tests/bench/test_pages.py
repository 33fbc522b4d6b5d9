"""Pages, charts and the README's numbers: made from the results, and those of the repository agree with its results."""

from pathlib import Path

import pytest

from bench import charts
from bench.__main__ import main
from bench.evidence import SUITES, append, load
from bench.pages import PICTURE, chart_name, of_suite, pages, picture_cases, render
from bench.published import PUBLISHED
from bench.suites import cases
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


def test_every_suite_has_a_chart_of_its_rows_and_the_readme_its_picture():
    results = load(RESULTS)
    cases_shown, picture = picture_cases(results), ROOT / "docs" / "assets" / PICTURE
    assert picture.is_file() == bool(cases_shown), REMEDY
    wanted = {picture: charts.picture_rows(cases_shown)} if cases_shown else {}
    for suite in SUITES:
        for gpu, found in of_suite(results, suite).items():
            wanted[DOCS / chart_name(suite, gpu)] = charts.ratio_rows(found)
    assert {path for path in wanted if path.parent == DOCS} == set(DOCS.glob("*.svg")), REMEDY
    for path, rows in wanted.items():
        assert charts.digest(rows) in path.read_text(encoding="utf-8"), f"{path.name}: {REMEDY}"


def test_the_machine_with_most_cases_comes_first():
    few, many = [sample(gpu="NVIDIA H100")], [sample(case=case) for case in ("64x64x64 bf16", "128x64x64 bf16")]
    assert list(of_suite({"h100": few, "h200": many, "b200": []}, "gemm")) == ["h200", "h100"]


def test_no_table_is_wider_than_six_columns():
    for name, text in pages(RESULTS).items():
        for line in text.splitlines():
            assert not line.startswith("|") or line.count("|") <= 7, f"{name}: {line}"


def test_a_chart_is_the_same_bytes_for_the_same_rows_and_says_which(tmp_path):
    found = [sample(), sample(case="64x4096x7168 bf16", ours_us=20.0)]
    for name in ("a.svg", "b.svg"):
        charts.draw_ratios(tmp_path / name, "gemm", found)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    text = (tmp_path / "a.svg").read_text()
    assert charts.digest(charts.ratio_rows(found)) in text
    assert charts.digest(charts.ratio_rows(found[:1])) not in text
    assert "64x4096x7168 bf16" in text
    assert "<dc:date>" not in text


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


def test_published_times_stand_beside_ours(tmp_path):
    ours = {"suite": "router_call", "ours_us": 10.0, "baselines": {"eager": 40.0}}
    append(tmp_path, [sample(**ours, case="512x8x128 top4 softmax fp16"), sample(**ours, case="1x256x7168 other")])
    text = pages(tmp_path)["router_call.md"]
    assert "| case | Envoi, NVIDIA H200 | eager | CUTLASS, Blackwell (sm_100) | quack, Blackwell (sm_100) |" in text
    assert "| 512x8x128 top4 softmax fp16 | 10.0 (4.00x) | 40.0 | 21.5 (6.29x) | 27.9 (4.85x) | 135 |" in text
    assert text.count("1x256x7168 other") == 1


def test_published_cases_are_cases():
    for suite, found in PUBLISHED.items():
        names = {case.name for case in cases(suite)}
        assert set(found.times_us) <= names
        assert all(len(times) == len(found.columns) for times in found.times_us.values())


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


def test_the_command_writes_all_of_it(tmp_path, capsys):
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("<!-- bench:picture -->\n<!-- /bench -->\n")
    assert main(["--docs", str(tmp_path / "docs" / "benchmarks"), "--out", str(RESULTS)]) == 0
    picture = ROOT / "docs" / "assets" / PICTURE
    for path in [*DOCS.glob("*.md"), *DOCS.glob("*.svg"), *[picture] * picture.is_file()]:
        assert (tmp_path / path.relative_to(ROOT)).is_file(), path
    assert (PICTURE in (tmp_path / "README.md").read_text()) == picture.is_file()


def test_a_picture_without_measurements_is_taken_away(tmp_path, capsys):
    append(tmp_path / "results", [sample()])
    picture = tmp_path / "docs" / "assets" / PICTURE
    picture.parent.mkdir(parents=True)
    picture.write_text("an old one")
    (tmp_path / "README.md").write_text("<!-- bench:picture -->old<!-- /bench -->")
    assert main(["--docs", f"{tmp_path}/docs/benchmarks", "--out", f"{tmp_path}/results"]) == 0
    assert not picture.exists()
    assert "old" not in (tmp_path / "README.md").read_text()


def test_the_command_wants_a_repository(tmp_path, capsys):
    assert main(["--docs", str(tmp_path / "none" / "benchmarks"), "--out", str(RESULTS)]) == 2
    assert "--docs: expected docs/benchmarks of a repository" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())

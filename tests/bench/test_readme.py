"""README tables: generated from the results, and the repository's README agrees with its results."""

from pathlib import Path

import pytest

from envoi.bench.evidence import append
from envoi.bench.published import PUBLISHED
from envoi.bench.readme import render, rewrite
from envoi.bench.shapes import cases

from .samples import sample

ROOT = Path(__file__).parents[2]
PAGE = """# Title
<!-- bench:gemm:h200 -->
old
<!-- /bench -->
between
<!-- bench:moe:h200 -->
<!-- /bench -->
end
"""


def test_the_readme_agrees_with_the_results():
    """Test the committed tables. To fix a failure: `envoi bench --readme README.md`."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert render(text, ROOT / "bench" / "results") == text


def test_tables_are_written_between_the_markers(tmp_path):
    append(tmp_path, [sample(ours_us=999.0), sample(), sample(case="64x4096x7168 bf16", baselines={"cublas": 20.0})])
    page = tmp_path / "README.md"
    page.write_text(PAGE)
    assert rewrite(page, tmp_path)
    text = page.read_text()
    assert "old" not in text
    assert (
        "| 8192x4096x7168 bf16 | 670 | 665 (0.99x) | 700 (1.04x) | 640 | 95 % | 717 | - | 1.7e-03 | 0.0e+00 |" in text
    )
    assert "| 64x4096x7168 bf16 | 670 | 20.0 (0.03x) | - |" in text
    assert "NVIDIA H200, torch 2.11.0+cu130, triton 3.6.0, commit 0123456789ab, 2026-11-21, n = 100" in text
    assert "Baselines: cublas: torch's matmul of the same operands alone" in text
    mean = "bf16: cublas 0.17x [0.03x] over 2; bf16: eager 1.04x [1.04x] over 1."
    assert f"Geometric means of the ratios, the least in brackets: {mean}\n" in text
    assert "`moe` hasn't been measured on `h200` yet." in text
    assert text.startswith("# Title\n<!-- bench:gemm:h200 -->\n")
    assert text.endswith("<!-- /bench -->\nend\n")
    assert not rewrite(page, tmp_path)


def test_mixed_provenance_and_gpu_counts_are_said(tmp_path):
    moe = {"suite": "moe", "baselines": {"torch_ep": 3000.0}}
    append(
        tmp_path,
        [
            sample(**moe, case="a", num_gpus=4, commit="aaa", date="2026-11-19"),
            sample(**moe, case="a", num_gpus=1, commit="bbb", n=20),
        ],
    )
    text = render("<!-- bench:moe:h200 -->\n<!-- /bench -->", tmp_path)
    assert "commit aaa, bbb, 2026-11-19 to 2026-11-21, n = 100, 20." in text
    assert "| case | GPUs | Envoi | torch_ep |" in text
    assert "| a | 4 |" in text
    assert "| a | 1 |" in text


def test_published_times_stand_beside_ours(tmp_path):
    ours = {"suite": "router_call", "ours_us": 10.0, "baselines": {"eager": 40.0}}
    append(tmp_path, [sample(**ours, case="512x8x128 top4 softmax fp16"), sample(**ours, case="1x256x7168 other")])
    text = render("<!-- bench:router_call:h200 -->\n<!-- /bench -->", tmp_path)
    header = "| case | Envoi, NVIDIA H200 | eager | CUTLASS, Blackwell (sm_100) | quack, Blackwell (sm_100) |"
    assert header in text
    row = "| 512x8x128 top4 softmax fp16 | 10.0 (4.00x) | 40.0 | 21.5 (6.29x) | 27.9 (4.85x) | 185 (0.73x) | 135 |"
    assert row in text
    assert text.count("1x256x7168 other") == 1


def test_published_cases_are_cases():
    for suite, found in PUBLISHED.items():
        names = {case.name for case in cases(suite)}
        assert set(found.times_us) <= names
        assert all(len(times) == len(found.columns) for times in found.times_us.values())


def test_a_text_without_markers_stays(tmp_path):
    assert render("nothing here\n", tmp_path) == "nothing here\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<!-- bench:gems:h200 -->\n<!-- /bench -->", "expected a suite of gemm"),
        ("<!-- bench:gemm:h200 -->\n", "expected <!-- /bench --> after it"),
        (
            "<!-- bench:gemm:h200 -->\n<!-- bench:moe:h200 -->\n<!-- /bench -->",
            "expected <!-- /bench --> before the next marker",
        ),
    ],
)
def test_markers_that_cannot_be_served_are_refused(text, problem, tmp_path):
    with pytest.raises(ValueError, match=problem):
        render(text, tmp_path)

"""Versions of other libraries: which count, what is said of the others, and where each stands."""

import sys
import types
from pathlib import Path

import pytest

from bench import libraries
from bench.evidence import append, load, read
from bench.libraries import OF_BASELINE, is_old, label, newest_only, outdated
from bench.pages import pages, picture_cases, render
from bench.summary import peers

from .samples import sample

RESULTS = Path(__file__).parents[2] / "bench" / "results"


def moe(version: str | None, baseline: str = "sgl_deep_gemm", **changes):
    details = {} if version is None else {OF_BASELINE[baseline]: version}
    return sample(**{"suite": "moe", "case": "a", "ours_us": 10.0, "baselines": {baseline: 9.0, "eager": 30.0},
                     "details": details, **changes})  # fmt: skip


@pytest.mark.parametrize(
    ("version", "old"),
    [("0.1.5.post1", True), ("0.2.4", True), ("0.2.5", False), ("0.2.5.post1", False), ("0.2.10", False),
     ("1.0", False), ("unknown", True), (None, True)],
)  # fmt: skip
def test_a_version_is_old_if_the_table_knows_a_newer_one(version, old):
    m = moe(version)
    assert is_old(m, "sgl_deep_gemm") is old
    assert not is_old(m, "eager")
    assert newest_only([m]) == ([] if old else [m])


def test_what_was_compared_with_an_old_version_does_not_count():
    """torch or a slower library remains, which is easier to beat: that ratio alone would claim too much."""
    assert newest_only([moe("0.1.5.post1", baselines={"sgl_deep_gemm": 9.0})]) == []
    assert newest_only([moe("0.1.5.post1", baselines={"sgl_deep_gemm": 9.0, "torch_ep": 50.0})]) == []
    slower = {"vllm_marlin": 9.0, "triton_kernels": 20.0, "eager": 30.0}
    assert (
        newest_only([moe("0.20.2", details={"vllm": "0.20.2", "triton_kernels": "vllm 0.20.2"}, baselines=slower)])
        == []
    )
    over_nccl = moe("0.1.5.post1", details={"sgl-deep-gemm": "0.1.5.post1", "transport": "nccl"})
    assert [[*m.baselines] for m in newest_only([over_nccl])] == [["eager"]], "what needs NVLink doesn't count there"


def test_every_stored_row_says_the_version_of_each_library():
    for path in RESULTS.glob("*.jsonl"):
        for m in read(path):
            for baseline in m.baselines:
                if baseline in OF_BASELINE:
                    assert m.details.get(OF_BASELINE[baseline], "unknown") != "unknown", (m.case, m.date, baseline)


def test_the_stored_results_have_old_versions_and_none_of_them_counts():
    """Fails if the filter is left out: hundreds of rows were measured with versions of which newer ones are known."""
    stored = [m for found in load(RESULTS).values() for m in found]
    assert "measured with sgl-deep-gemm 0.1.5.post1; 0.2.5 is known" in outdated(stored)["sgl-deep-gemm"]
    assert not any(is_old(m, name) for m in newest_only(stored) for name in peers(m))


def test_a_page_compares_with_the_newest_and_keeps_older_rows_apart(tmp_path):
    append(tmp_path, [moe("0.2.5"), moe("0.1.5.post1", case="b", baselines={"sgl_deep_gemm": 20.0, "eager": 30.0})])
    counted, _, apart = pages(tmp_path)["moe.md"].partition("### Measured with older versions")
    assert "| a | 10.0 | sgl_deep_gemm 0.2.5: 9.00 | 0.90x |" in counted
    assert "| b |" not in counted
    assert "pre-dispatch" in counted and "(sgl-deep-gemm 0.2.5)" in counted
    assert "0.1.5" not in counted
    assert "measured with sgl-deep-gemm 0.1.5.post1; 0.2.5 is known" in apart
    assert "| b | 10.0 | sgl_deep_gemm 0.1.5.post1: 20.0 | 2.00x | 2026-11-21 |" in apart
    assert "0.90x [0.90x] over 1 case" in pages(tmp_path)["index.md"]


def test_a_marker_names_the_version_and_claims_nothing_without_rows(tmp_path):
    append(tmp_path, [moe("0.2.5", num_gpus=2), moe("0.1.5.post1", num_gpus=4), moe("0.33.0", "vllm_triton", case="c")])

    def served(marker: str) -> str:
        return render(f"<!-- bench:{marker} --><!-- /bench -->", tmp_path).partition("-->")[2].rpartition("<!--")[0]

    assert served("h200:moe:2:sgl_deep_gemm") == "0.90x [0.90x] over 1 case (sgl-deep-gemm 0.2.5)"
    assert served("h200:moe:4:sgl_deep_gemm") == "not measured"
    assert served("h200:moe:1:libraries") == "0.90x [0.90x] over 1 case (vllm 0.33.0)"
    assert served("h200:router:1:libraries") == "not measured"
    assert served("h200:moe:1") == "0.90x [0.90x] over 1 case (vllm 0.33.0)"
    assert served("h200:moe:1::nothing") == "not measured"
    assert served("h200:moe:1::c") == served("h200:moe:1")
    assert served("h100,h200:moe:2:sgl_deep_gemm") == "0.90x [0.90x] over 1 case, on H200 (sgl-deep-gemm 0.2.5)"
    assert served("picture") == "\n"


def series(version: str, num_gpus: int, **changes):
    return [
        moe(version, num_gpus=num_gpus, case=f"4096/2048/256/6 fp8_block128 tokens={tokens}",
            baselines={"sgl_deep_gemm": 9.0, "torch_ep": 50.0}, **changes)
        for tokens in (64, 512, 2048, 8192)
    ]  # fmt: skip


def test_the_picture_is_of_the_newest_version_on_most_gpus(tmp_path):
    append(tmp_path, [*series("0.1.5.post1", 4), *series("0.2.5", 2)])
    assert [m.num_gpus for m in picture_cases(load(tmp_path))] == [2] * 4
    text = render("<!-- bench:picture --><!-- /bench -->", tmp_path)
    assert (
        "One MoE layer on 2 H200s" in text and "0.90x to 0.90x sgl-deep-gemm's one launch (sgl-deep-gemm 0.2.5)" in text
    )
    assert "![Time of one MoE layer on 2 H200s" in text
    append(tmp_path, series("0.2.5", 8, gpu="NVIDIA H100 80GB HBM3")[:3])
    assert [m.num_gpus for m in picture_cases(load(tmp_path))] == [2] * 4, "a series with a gap is none"


def test_versions_come_from_the_distribution_the_module_or_the_command(monkeypatch):
    installed = {"vllm": "0.33.0"}
    monkeypatch.setattr(libraries, "version_of", installed.get)
    for name, contents in (("humming", {"__version__": "0.1.19"}), ("triton_kernels", {}), ("deep_gemm", {})):
        module = types.ModuleType(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    found = libraries.versions(
        ["eager", "vllm_triton", "humming_w4a8", "triton_kernels", "sgl_deep_gemm"],
        {"triton_kernels": "3.6.0", "humming-kernels": "9"},
    )
    assert found == {
        "vllm": "0.33.0",
        "humming-kernels": "0.1.19",
        "triton_kernels": "3.6.0",
        "sgl-deep-gemm": "unknown",
    }
    assert libraries.versions(["eager", "torch_grouped"], {}) == {}
    assert label(moe("0.2.5").details, "sgl_deep_gemm") == "sgl_deep_gemm 0.2.5"

"""Page of promises: as its records say, every test it names is there; evidence that can't be read is refused."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.promises import evidence, page, sanitized
from tests.promises.evidence import Run
from tests.promises.same_bits import CHECKS
from tests.promises.sanitize import PLANTED

ROOT = Path(__file__).resolve().parents[2]
ON_GPU = Run("same bits/run to run/moe bf16", "H200", 1, "abc", "2026-01-02", 40, 0, 1.0)


def test_the_page_is_as_recorded():
    assert page.PAGE.read_text() == page.text(), f"{page.COMMAND} writes it anew"


def test_every_test_that_it_names_is_there():
    named = re.findall(r"`(tests/[\w/.]+)`", page.text())
    assert len(named) >= 7
    for path in named:
        assert (ROOT / path).exists(), path


def written(tmp_path: Path, *runs: Run) -> str:
    evidence.append(tmp_path / "some.jsonl", runs)
    return page.text(tmp_path)


def test_a_run_on_a_gpu_is_told_from_one_on_cpus(tmp_path):
    line = "| moe | bf16 | - | {} | not run | not run | not run | - |"
    assert line.format("not run") in page.text(tmp_path)
    assert line.format("not run") in written(tmp_path, replace(ON_GPU, num_gpus=0, machine="CPU"))
    assert line.format("40, 0 wrong") in written(tmp_path, ON_GPU)
    assert line.format("40, 0 wrong") in written(tmp_path, replace(ON_GPU, num_gpus=0, date="2026-02-02"))
    assert line.format("50, 2 wrong") in written(tmp_path, replace(ON_GPU, count=50, wrong=2))


def test_a_row_has_a_machine_once_all_of_it_has_run(tmp_path):
    runs = [replace(ON_GPU, promise=f"same bits/{check}/moe bf16") for check in CHECKS]
    assert "| moe | bf16 | - |" + " 40, 0 wrong |" * 4 + " 1 x H200, `abc`, 2026-01-02 |" in written(tmp_path, *runs)


def test_faults_are_summed_over_their_stages(tmp_path):
    runs = [replace(ON_GPU, promise=f"faults/late/memory/{stage}", count=4, num_gpus=4) for stage in ("call", "pull")]
    assert "| 8, 0 wrong in 2 stages | 4 x H200, `abc`, 2026-01-02 |" in written(tmp_path, *runs)
    sharing = [replace(run, num_gpus=1, num_ranks=4) for run in runs]
    assert "| 8, 0 wrong in 2 stages | 4 ranks on 1 x H200, `abc`, 2026-01-02 |" in written(tmp_path, *sharing)


def test_fuzz_has_the_runs_on_a_gpu(tmp_path):
    record = {
        "operator": "moe", "device": "cuda", "machine": "H200", "commit": "abc", "seed": 10, "count": 100, "wrong": 0,
        "sizes": "medium", "date": "2026-01-02", "family": 20, "seconds": 9.0,
    }  # fmt: skip
    lines = [record, record | {"device": "cpu", "count": 7}]
    (tmp_path / "fuzz.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = "| moe, every format | 100, 0 wrong | 10 to 109, medium, by 20 | H200, `abc`, 2026-01-02 |"
    assert said in page.text(tmp_path)
    mended = [record | {"seed": 110, "wrong": 3}, record | {"seed": 110, "count": 150, "commit": "def"}]
    (tmp_path / "fuzz.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (*lines, *mended)))
    both = "H200, `abc`, 2026-01-02; H200, `def`, 2026-01-02"
    assert f"| moe, every format | 250, 0 wrong | 10 to 259, medium, by 20 | {both} |" in page.text(tmp_path)


def test_programs_that_ran_again_stand_beside_the_run_of_all(tmp_path):
    whole = replace(ON_GPU, promise="sanitizers/memcheck", count=9, text="90 kernels of 7 names in 8 of 8 programs")
    programs = [
        replace(ON_GPU, promise=f"sanitizers/memcheck/{name}", commit="def", count=1, wrong=wrong, text=text)
        for name, wrong, text in (
            (PLANTED, 0, ""), ("moe bf16", 0, "3 kernels of envoi.a, envoi.b"), ("moe mxfp4", 1, "moe mxfp4: 2 errors"),
        )
    ]  # fmt: skip
    found = written(tmp_path, whole, *programs)
    told = f"{whole.text}; since then, 3 kernels, by program, of 2 names in 2 of {len(sanitized.programs())} programs"
    places = "1 x H200, `abc`, 2026-01-02; 1 x H200, `def`, 2026-01-02"
    assert f"| memcheck | 12, 1 wrong | {told}; moe mxfp4: 2 errors | {places} |" in found


@pytest.mark.parametrize(
    "line", ["{", '{"promise": "x"}', json.dumps(asdict(ON_GPU) | {"wrong": 41})[:-1] + ', "a": 1}']
)
def test_a_line_that_is_no_run_is_refused(tmp_path, line):
    (tmp_path / "some.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=r"some.jsonl, line 1: expected a run, got"):
        evidence.read(tmp_path)


def test_more_wrong_than_there_are_is_refused():
    with pytest.raises(ValueError, match="wrong: expected 0 to count = 40, got 41"):
        replace(ON_GPU, wrong=41)

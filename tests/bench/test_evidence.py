"""Evidence format: a round trip, history, and every refusal."""

import pytest

from bench.evidence import (
    append,
    from_line,
    latest,
    load,
    read,
    to_line,
)

from .samples import sample


def test_append_keeps_history_and_load_takes_the_latest(tmp_path):
    first, second = sample(ours_us=700.0, date="2026-11-20"), sample()
    other = sample(case="64x4096x7168 bf16")
    more_gpus = sample(num_gpus=4)
    cpu = sample(gpu="AMD EPYC (CPU)")
    folder = tmp_path / "bench" / "results"
    assert append(folder, [first, other, cpu]) == [folder / "h200.jsonl", folder / "cpu.jsonl"]
    append(folder, [second, more_gpus])
    assert read(folder / "h200.jsonl") == [first, other, second, more_gpus]
    assert load(folder) == {"h200": [second, other, more_gpus], "cpu": [cpu]}
    assert load(tmp_path / "nowhere") == {}
    assert latest([]) == []


def test_a_line_round_trips():
    for measurement in (sample(), sample(details={"seed": 3, "vllm": "0.33.0"}, floor_us=None)):
        assert from_line(to_line(measurement)) == measurement


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("670.5", "NaN", "expected finite times"),
        ("670.5", "0", "expected finite times"),
        ('"gemm"', '"gemms"', "expected a suite and baselines"),
        ("cublas", "cuBLAS", "expected a suite and baselines"),
        ('"suite"', '"suites"', "expected the keys"),
    ],
)
def test_a_wrong_line_is_refused_and_named_by_file_and_number(old, new, problem, tmp_path):
    path = tmp_path / "h200.jsonl"
    path.write_text(to_line(sample()) + "\n\n" + to_line(sample()).replace(old, new) + "\n")
    with pytest.raises(ValueError, match=rf"h200\.jsonl:3: .*{problem}"):
        read(path)

"""Evidence format: a round trip, history, and every refusal."""

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.evidence import (
    BASELINES,
    KEYS,
    SUITES,
    Measurement,
    append,
    from_line,
    latest,
    load,
    read,
    slug,
    to_line,
)

from .samples import sample


def test_the_keys_are_the_format():
    assert KEYS == (
        "suite", "case", "ours_us", "baselines", "floor_us", "tflops", "gb_per_s", "error", "gpu", "num_gpus",
        "torch", "triton", "commit", "date", "n",
    )  # fmt: skip
    assert tuple(json.loads(to_line(sample()))) == KEYS
    assert tuple(json.loads(to_line(sample(details={"seed": 3})))) == (*KEYS, "details")


positive = st.floats(1e-6, 1e12)
at_least_0 = st.floats(0, 1e6)
text = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1)
measurements = st.builds(
    Measurement,
    suite=st.sampled_from(list(SUITES)),
    case=text,
    ours_us=positive,
    baselines=st.dictionaries(st.sampled_from(list(BASELINES)), positive, min_size=1),
    floor_us=st.none() | positive,
    tflops=st.none() | positive,
    gb_per_s=st.none() | positive,
    error=st.fixed_dictionaries({"ours": at_least_0, "torch": at_least_0}),
    gpu=text,
    num_gpus=st.integers(1, 8),
    torch=text,
    triton=text,
    commit=text,
    date=st.dates().map(str),
    n=st.integers(1, 10**6),
    details=st.dictionaries(text, text | st.floats(-1e6, 1e6) | st.integers(-9, 9)),
)


@given(measurements)
def test_round_trip(measurement):
    assert from_line(to_line(measurement)) == measurement


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("suite", "gemms"),
        ("suite", 3),
        ("case", ""),
        ("case", "two\nlines"),
        ("ours_us", None),
        ("ours_us", 0),
        ("ours_us", -1.0),
        ("ours_us", math.nan),
        ("ours_us", math.inf),
        ("ours_us", "670"),
        ("ours_us", True),
        ("baselines", {}),
        ("baselines", [1.0]),
        ("baselines", {"cuBLAS": 1.0}),
        ("baselines", {"cublas": math.nan}),
        ("baselines", {"cublas": None}),
        ("floor_us", math.nan),
        ("floor_us", 0),
        ("tflops", "700"),
        ("gb_per_s", math.inf),
        ("error", {"ours": 1.0}),
        ("error", {"ours": 1.0, "torch": 1.0, "peer": 1.0}),
        ("error", {"ours": math.nan, "torch": 1.0}),
        ("error", {"ours": -1.0, "torch": 1.0}),
        ("error", None),
        ("gpu", " "),
        ("num_gpus", 0),
        ("num_gpus", 1.0),
        ("torch", None),
        ("triton", ""),
        ("commit", None),
        ("date", "21.11.2026"),
        ("date", "20261121"),
        ("date", None),
        ("n", 0),
        ("n", True),
        ("details", None),
        ("details", {"": 1}),
        ("details", {"seed": None}),
        ("details", {"seed": True}),
        ("details", {"seed": math.nan}),
        ("details", {"vllm": " "}),
    ],
)
def test_a_wrong_value_is_refused_by_its_key(key, value):
    with pytest.raises(ValueError, match=rf"^{key}[.:].*expected.*got"):
        sample(**{key: value})
    line = json.dumps({**dataclasses.asdict(sample()), key: value})
    with pytest.raises(ValueError, match=rf"^{key}[.:]"):
        from_line(line)


def test_unknown_and_missing_keys_and_no_json_are_refused():
    entries = dataclasses.asdict(sample())
    with pytest.raises(ValueError, match="'speedup': expected one of the keys"):
        from_line(json.dumps({**entries, "speedup": 1.2}))
    for key in KEYS:
        with pytest.raises(ValueError, match=f"^{key}: expected"):
            from_line(json.dumps({k: v for k, v in entries.items() if k != key}))
    for line in ("", "[]", "3", "{", "NaN"):
        with pytest.raises(ValueError, match="expected a JSON object"):
            from_line(line)


def test_only_three_keys_may_be_null():
    assert sample(floor_us=None, tflops=None, gb_per_s=None).floor_us is None


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


def test_a_bad_line_is_named_by_file_and_number(tmp_path):
    path = tmp_path / "h200.jsonl"
    path.write_text(to_line(sample()) + "\n\n" + to_line(sample()).replace("670.5", "NaN") + "\n")
    with pytest.raises(ValueError, match=r"h200\.jsonl:3: ours_us: expected a positive number, got nan"):
        read(path)


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GB300", "gb300"),
        ("AMD EPYC (CPU)", "cpu"),
        ("Intel(R) Xeon(R) Platinum 8480+ (CPU)", "cpu"),
        ("???", "gpu"),
    ],
)
def test_file_names(gpu, name):
    assert slug(gpu) == name

"""Timelines of all ranks: clocks, lanes, the files for Perfetto, refusals; no GPU needed."""

import gzip
import json
import random
from itertools import pairwise

import pytest
import torch

from envoi import cli
from envoi.ops.moe.parallel.trace import (
    COLUMNS,
    ROLES,
    Timeline,
    events,
    gathered,
    in_step,
    lanes_of,
    steps_of,
    steps_of_ranks,
)
from envoi.runtime.timeline import WORDS, Recorder, Strip
from tests.helpers.ranks import run_ranks
from tests.moe.layers import make
from tests.moe.parallel.cases import open_parallel, part_of

STAGED = ["stage_tokens_kernel", "send_routing_kernel", "pull_kernel", "gemm_kernel", "quantize_kernel", "gemm_kernel",
          "combine_barrier_kernel", "sum_kernel"]  # fmt: skip
ONE_LAUNCH = [*STAGED[:3], "fused_kernel", *STAGED[-2:]]
NAMES = ["stage tokens", "send routing", "pull", "L1", "quantise", "L2", "barrier", "sum"]
US = 1000


def drawn(num_ranks: int = 2, num_sms: int = 4, seed: int = 0, kernels: list[str] = STAGED) -> Timeline:
    """Draw a timeline: programs that overlap in every step, roles that don't, a clock of its own for each rank."""
    source, steps, rows = random.Random(seed), steps_of(kernels), []
    for rank in range(num_ranks):
        now = 10**18 + rank * 12345 * US
        for number, step in enumerate(steps):
            whole = step.roles[0].name == "program"
            for program in range(3 * num_sms if whole else num_sms):
                for role, (_, spans) in enumerate(step.roles):
                    at = now + source.randrange(US)
                    for label in range(1 if whole else 3):
                        for span in range(len(spans)):
                            end = at + 1 + source.randrange(US)
                            rows.append((rank, number, role, span, program, program % num_sms, label, at, end))
                            at = end
            now += 20 * US
    source.shuffle(rows)
    return Timeline(steps, in_step(torch.tensor(rows), steps), False, ())


def test_the_steps_have_the_names_of_the_path():
    assert [step.name for step in steps_of(STAGED)] == NAMES
    fused = ["fused_kernel", "send_partial_sums_kernel", "sum_ranks_kernel"]
    assert [step.name for step in steps_of(fused)] == ["experts", "send sums", "sum"]


def test_ranks_with_other_launches_have_the_same_steps():
    whole = [*STAGED[:4], *STAGED[5:]]  # L1 quantises
    steps, places = steps_of_ranks([whole, STAGED[:-1], STAGED])
    assert [step.name for step in steps] == NAMES
    assert places == [[0, 1, 2, 3, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6], list(range(8))]
    fused, _ = steps_of_ranks([["send_routing_kernel", "fused_kernel"], ["send_routing_kernel", "pull_kernel"]])
    assert [step.name for step in fused] == ["send routing", "pull", "experts"]


def gather(rank: int, num_ranks: int) -> tuple[list[str], list[list[int]]]:
    """Gather a timeline of launches that differ by rank, each with one event; return its steps and (rank, step)s."""
    kernels = ["pull_kernel", "gemm_kernel", "quantize_kernel", "gemm_kernel"] if rank else ["gemm_kernel"] * 2
    layer = make(tokens=8, experts=8, k=2, hidden=128, intermediate=128)
    parallel = open_parallel(layer, "bf16", rank, [4, 8])
    recorder = Recorder(ROLES, torch.device("cpu"))
    for kernel in kernels:
        records = torch.zeros(1, len(ROLES[kernel]), 1, WORDS, dtype=torch.int64)
        records[0, 0, 0, :3] = torch.tensor([1, 10, 20])
        recorder.strips.append(Strip(kernel, records))
    found = gathered(parallel.channel, recorder)
    return [step.name for step in found.steps], found.slices[:, :2].tolist()


def test_ranks_with_other_launches_are_gathered():
    for outcome in run_ranks(2, gather):
        assert outcome.value == (
            ["pull", "L1", "quantise", "L2"], [[0, 1], [0, 3], [1, 0], [1, 1], [1, 2], [1, 3]],
        ), outcome.text  # fmt: skip


def test_clocks_are_set_by_the_end_of_dispatchs_wait():
    timeline = drawn()
    routing = timeline.slices[(timeline.column("step") == 1) & (timeline.column("span") == 1)]
    ends = [routing[routing[:, 0] == rank, COLUMNS.index("end")].max() for rank in range(2)]
    assert ends[0] == ends[1]
    assert timeline.column("begin").min() == 0
    durations = timeline.column("end") - timeline.column("begin")
    assert (durations > 0).all()


def test_clocks_stay_as_they_are_without_a_meeting():
    steps = steps_of(["gemm_kernel"])
    rows = torch.tensor([[0, 0, 0, 0, 0, 0, 0, 105, 110], [1, 0, 0, 0, 0, 0, 0, 100, 120]])
    assert in_step(rows, steps)[:, -2:].tolist() == [[5, 10], [0, 20]]
    assert in_step(rows[:0], steps).shape == (0, 9)


@pytest.mark.parametrize("kernels", [STAGED, ONE_LAUNCH], ids=["two launches", "one launch"])
@pytest.mark.parametrize("seed", range(5))
def test_no_two_slices_of_a_lane_overlap(seed, kernels):
    timeline = drawn(seed=seed, kernels=kernels)
    lanes: dict[tuple, list] = {}
    for row, lane in zip(timeline.slices.tolist(), lanes_of(timeline), strict=True):
        lanes.setdefault((row[0], row[5], lane), []).append((row[-2], row[-1], row[1], row[2]))
    for slices in lanes.values():
        for (_, end, *_), (begin, *_) in pairwise(sorted(slices)):
            assert end <= begin
    by_lane = {key[-1]: {timeline.steps[step].roles[role].name for *_, step, role in its} for key, its in lanes.items()}
    assert all(len(names) == 1 for names in by_lane.values())


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_file_for_perfetto(tmp_path, name):
    timeline, path = drawn(), tmp_path / name
    timeline.save(path)
    raw = path.read_bytes()
    found = json.loads(gzip.decompress(raw) if name.endswith("gz") else raw)["traceEvents"]
    assert found == json.loads(json.dumps(list(events(timeline))))
    slices = [event for event in found if event["ph"] == "X"]
    assert len(slices) == len(timeline.slices)
    assert sum(event["dur"] for event in slices) * US == pytest.approx(
        int((timeline.column("end") - timeline.column("begin")).sum())
    )
    tracks = {(event["pid"], event["tid"]): event["args"]["name"] for event in found if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in slices} == set(tracks)
    assert tracks[1, 3 * 64] == "SM   3 consumer 0"
    assert {event["name"] for event in slices} >= {"L1 mainloop", "L2 epilogue", "pull pull", "barrier wait"}
    assert {event["args"]["name"] for event in found if event["name"] == "process_name"} == {"rank 0", "rank 1"}


def test_a_path_that_is_neither():
    with pytest.raises(ValueError, match=r"ends in .json or .json.gz, got trace.txt"):
        drawn().save("trace.txt")


def refused(rank: int, num_ranks: int) -> str:
    layer = make(tokens=8, experts=8, k=2, hidden=128, intermediate=128)
    parallel = open_parallel(layer, "bf16", rank, [4, 8])
    try:
        parallel.trace(*part_of(layer, rank, [3, 8]))
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_without_nvlink_are_refused():
    for outcome in run_ranks(2, refused):
        assert "expected GPUs that exchange tokens through each other's memory" in outcome.value, outcome.error


SIZES = ["--hidden", "256", "--inter", "128", "--experts", "8", "--topk", "2", "--tokens", "16"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--format", "fp9"], "--format: expected"),
        (["--topk", "9"], "--topk: expected at most the 8 experts, got 9"),
        (["--tokens", "0"], "--tokens: expected"),
        (["--out", "trace.txt"], "--out: expected a name that ends in .json, .json.gz, got trace.txt"),
    ],
)
def test_the_commands_mistakes(options, said, capsys):
    assert cli.main(["trace", *SIZES, *options]) == 2
    assert said in capsys.readouterr().err


def test_the_command_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["trace", *SIZES]) == 2
    assert "expected a GPU" in capsys.readouterr().err

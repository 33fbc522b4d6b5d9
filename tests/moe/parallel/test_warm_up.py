"""Warm-up by several real processes: refusals on all of them, even shares, and peers that compile for long."""

import time
from contextlib import nullcontext

import pytest

from envoi.ops.moe.parallel import ExpertParallel, api, warm_up
from envoi.ops.moe.parallel.nvlink import SharedLayout
from envoi.ops.moe.support import experts_without_memory
from envoi.runtime.devices import Target, standing_for
from envoi.runtime.planned_kernels import find
from tests.helpers.ranks import run_ranks
from tests.helpers.slow import mostly_slow
from tests.moe.layers import make

TIMEOUT_S = 2.0


def opened(timeout_s: float = 10.0) -> ExpertParallel:
    return ExpertParallel(make(experts=4).pack(), timeout_s=timeout_s)


def warm(rank: int, num_ranks: int, jobs: list) -> list:
    parallel = opened()
    found = []
    for count in jobs:
        try:
            found.append(parallel.warm_up(jobs=count[rank]))
        except ValueError as error:
            found.append(str(error))
    return found


def test_on_cpus_there_is_nothing_to_compile_and_refusals_are_everyones():
    text = "jobs: expected an int of at least 1, got 0"
    first, second = run_ranks(2, warm, [(None, 1), (None, 0), (2, 2)])
    assert first.value == [0, f"rank 1 of the group refused its arguments: {text}", 0]
    assert second.value == [0, text, 0]


def warm_counted(rank: int, num_ranks: int, sizes: list[dict]) -> list:
    """Warm up as on GPUs whose rows are counted, without compiling; return the call that is rehearsed, or the error."""
    api.compiles, found = lambda device: True, []
    api.torch.cuda.device = lambda device: nullcontext()
    api.Target.of = lambda device: Target("sm_90")
    api.compile_together = lambda channel, call, *_: [call.most, call.num_topk]
    for given in sizes:
        parallel = ExpertParallel(make(experts=4).pack(), exchange="counted", **given)
        assert parallel.exchange == "counted"
        try:
            found.append(parallel.warm_up())
        except ValueError as error:
            found.append(str(error))
    return found


def test_counted_rows_are_warmed_up_if_their_number_is_bounded():
    for outcome in run_ranks(2, warm_counted, [{"max_tokens": 20, "num_topk": 3}, {}]):
        assert outcome.text == ""
        number, text = outcome.value
        assert number == 2
        assert text.startswith("warm_up: expected max_tokens and num_topk, got None")


def compile_slowly(rank: int, num_ranks: int, fails: bool) -> tuple[list[str], float, float]:
    """Return what is loaded here, where this rank begins, and the seconds; rank 1 compiles beyond the timeout."""
    loaded, starts = [], []

    def compile_calls(calls, target, numbers, jobs, progress, for_launch, start):
        assert numbers == range(21) and jobs == 1 and for_launch
        starts.append(start)
        time.sleep(2 * TIMEOUT_S * rank)
        if fails and rank:
            raise PermissionError("no room")
        return sorted(find(calls, target, numbers).values())

    warm_up.compile_calls = compile_calls
    warm_up.load_at = lambda calls, target, site: loaded.append(str(site))
    parallel, target = opened(TIMEOUT_S), Target("sm_90")
    with standing_for(target):
        experts = experts_without_memory(256, 128, 4, "bf16", "swiglu", bias=False)
    layout = SharedLayout(2, 8, 20, 2, 256, "bf16")
    call = warm_up.ParallelCall(layout, 2, rank, (0, 4, 8), TIMEOUT_S, experts)
    start = time.monotonic()
    try:
        warm_up.compile_together(parallel.channel, call, target, 1, False)
    except RuntimeError as error:
        loaded = [str(error)]
    seconds = time.monotonic() - start
    assert parallel.channel.watch.deadline is None
    parallel.moe(*_no_tokens())  # the group is as usable as before
    return loaded, starts[0], seconds


def test_ranks_begin_apart_and_wait_for_longer_than_their_timeout():
    first, second = (outcome.value for outcome in run_ranks(2, compile_slowly, False))
    assert first[2] > TIMEOUT_S
    assert len(first[0]) == len(second[0]) >= 6
    assert (first[1], second[1]) == (0.0, 0.5), "where a rank begins, of all kernels"


def test_an_error_of_one_rank_is_soon_everyones():
    for outcome in run_ranks(2, compile_slowly, True):
        assert outcome.value[0] == ["warm-up: rank 1 of the group failed: PermissionError: no room"]
        assert outcome.value[2] < 60


def _no_tokens():
    layer = make(tokens=0, experts=8)
    return layer.tokens, layer.routing


def load_first(rank: int, num_ranks: int, late: bool) -> str:
    """Load kernels before a call: rank 1 compiles for long, or is late."""

    def compile_calls(*_, **__):
        time.sleep(2 * TIMEOUT_S * rank)
        return []

    warm_up.compile_calls = compile_calls
    parallel, target = opened(TIMEOUT_S), Target("sm_90")
    call = warm_up.CountedCall(3, 1, parallel.experts)
    if late and rank:
        time.sleep(2 * TIMEOUT_S)
    try:
        warm_up.compile_together(parallel.channel, call, target, 1, False, warm_up.FIRST)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("late", mostly_slow([False, True], [True]))
def test_a_first_call_waits_for_compilers_but_not_for_those_who_are_late(late):
    first, second = (outcome.value for outcome in run_ranks(2, load_first, late))
    if late:
        assert first.startswith("first call: rank 1 is lost or did not answer within 2 s") or "was late" in first
        assert second
    else:
        assert (first, second) == ("", "")

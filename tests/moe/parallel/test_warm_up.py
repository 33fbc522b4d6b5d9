"""Warm-up by several real processes: refusals on all of them, even shares, and peers that compile for long."""

import time
from contextlib import nullcontext

import pytest
import torch

from envoi.moe import warm_up as layer_warm_up
from envoi.moe.parallel import ExpertParallel, api, warm_up
from envoi.moe.parallel.command import experts_without_memory
from envoi.moe.parallel.symmetric_memory import SharedLayout
from envoi.runtime.compiled_marks import mark
from envoi.runtime.devices import Target, standing_for
from envoi.runtime.rehearsal import Site
from tests.helpers.ranks import run_ranks
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
    api.gathering_pays = lambda *_: False
    api.compile_together = lambda channel, call, *_: {"one": (call.most, call.num_topk), "two": None}
    for given in sizes:
        parallel = ExpertParallel(make(experts=4).pack(), **given)
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


def test_compilers_start_with_the_opening_where_nothing_was_ever_compiled(monkeypatch, tmp_path):
    started, here, target, device = [], [], Target("sm_90"), torch.device("cuda")
    monkeypatch.setattr(warm_up, "compiles", lambda device: True)
    monkeypatch.setattr(Target, "of", lambda device: target)
    monkeypatch.setattr(warm_up, "start_ahead", started.append)
    monkeypatch.setattr(warm_up, "start_here", lambda arch: here.append(arch))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for sizes in ((None, 6), (64, None)):  # what a call needs isn't known before it
        warm_up.start_compilers(device, *sizes)
    assert started == []
    warm_up.start_compilers(device, 64, 6)
    mark("digest", target, for_launch=False)
    warm_up.start_compilers(device, 64, 6)
    assert started == ["sm_90"] * 2
    mark("digest", target, for_launch=True)
    warm_up.start_compilers(device, 64, 6)
    assert started == here == ["sm_90"] * 2


def compile_slowly(rank: int, num_ranks: int, fails: bool) -> tuple[list[str], list[str], float]:
    """Return the kernels compiled here and loaded here, and the seconds; compiling takes longer than the timeout."""
    made, loaded = [], []

    def compile_here(calls, target, site, driver):
        time.sleep(2 * TIMEOUT_S * rank if not made else 0)
        made.append(str(site))
        if fails and rank:
            raise RuntimeError("no room")

    def load_at(calls, target, site, driver=None):
        loaded.append(str(site))

    layer_warm_up.load_at, warm_up.load_at = compile_here, load_at  # one job
    layer_warm_up.uncompiled = lambda sites, target, for_launch: sites
    parallel, target = opened(TIMEOUT_S), Target("sm_90")
    with standing_for(target):
        experts = experts_without_memory(256, 128, 4, "bf16", "swiglu", bias=False)
    layout = SharedLayout(2, 8, 20, 2, 256, "bf16")
    call = warm_up.ParallelCall(layout, 2, rank, (0, 4, 8), TIMEOUT_S, experts)
    start = time.monotonic()
    try:
        warm_up.compile_together(parallel.channel, call, target, 1, False)
    except RuntimeError as error:
        loaded.append(str(error))
    seconds = time.monotonic() - start
    assert parallel.channel.watch.deadline is None
    parallel.moe(*_no_tokens())  # the group is as usable as before
    return made, loaded, seconds


def _no_tokens():
    layer = make(tokens=0, experts=8)
    return layer.tokens, layer.routing


def test_ranks_compile_shares_and_wait_for_longer_than_their_timeout():
    first, second = (outcome.value for outcome in run_ranks(2, compile_slowly, False))
    assert first[2] > TIMEOUT_S
    assert len(first[1]) == len(second[1]) >= 6
    assert not set(first[0]) & set(second[0])
    assert set(first[0]) | set(second[0]) == set(first[1]) == set(second[1])
    assert abs(len(first[0]) - len(second[0])) <= 1


def load_alone(rank: int, num_ranks: int, missing: dict[str, int]) -> tuple[list[str], list[list[str]]]:
    """Compile before the first call what is missing on rank 0; return what was loaded here, and what others got."""
    sites = {name: Site(0, 1, 0, name, missing.get(name, 9)) for name in ("a", "b", "c")}
    loaded, shared = [], []

    def begin(compilers, function, items, here=None, urgent=False):
        shared.append([digest for digest, _ in items])
        return ((item, "") for item in items)

    warm_up.Compilers.begin = begin
    warm_up.load_at = layer_warm_up.load_at = lambda calls, target, site, driver=None: loaded.append(site.name)
    warm_up.Compilation.most = lambda work, numbers: lambda: sites
    layer_warm_up.begin_looking = lambda *_, **__: lambda: sites
    layer_warm_up.uncompiled = lambda sites, *_: {name: site for name, site in sites.items() if name in missing}
    parallel = opened(TIMEOUT_S)
    call = warm_up.CountedCall(3, 1, parallel.experts)
    warm_up.compile_together(parallel.channel, call, Target("sm_90"), 2, False, warm_up.FIRST)
    return loaded, shared


def test_a_single_kernel_is_compiled_where_it_is_loaded():
    first, second = (outcome.value for outcome in run_ranks(2, load_alone, {"b": 9}))
    assert first == (["b", "a", "b", "c"], [[], []])
    assert second == (["a", "b", "c"], [[], []]), "its share is empty"


def test_the_largest_kernel_is_compiled_where_it_is_loaded():
    first, second = (outcome.value for outcome in run_ranks(2, load_alone, {"a": 5, "b": 9, "c": 5}))
    assert first == (["b", "a", "b", "c"], [[], []])
    assert second == (["a", "a", "b", "c"], [["c"], []])


def fail(rank: int, num_ranks: int, name: str) -> tuple[str, float]:
    """Have a step of the warm-up fail on rank 1; return the error, and the seconds that it took."""

    def refuse(*_, **__):
        raise PermissionError(f"no {name}")

    sites = {"a": Site(0, 1, 0, "a", 9), "b": Site(0, 1, 0, "b", 9)}
    layer_warm_up.find_most = lambda *_: sites
    layer_warm_up.begin_looking = lambda *_, **__: lambda: sites
    layer_warm_up.uncompiled = lambda sites, *_: sites
    warm_up.load_at = layer_warm_up.load_at = lambda *_: None
    if rank:
        setattr(layer_warm_up, name, refuse)
    parallel = opened(TIMEOUT_S)
    start = time.monotonic()
    try:
        call = warm_up.CountedCall(3, 1, parallel.experts)
        warm_up.compile_together(parallel.channel, call, Target("sm_90"), 1, False)
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "", 0.0


@pytest.mark.parametrize("name", ["find_most", "uncompiled", "begin_looking", "load_at"])
def test_what_fails_on_one_rank_is_soon_an_error_of_all(name):
    for outcome in run_ranks(2, fail, name):
        text, seconds = outcome.value
        assert text.startswith("warm-up: rank 1 of the group failed") and f"PermissionError: no {name}" in text
        assert seconds < 60


def test_an_error_of_one_rank_is_everyones():
    for outcome in run_ranks(2, compile_slowly, True):
        (text,) = outcome.value[1]
        assert text.startswith("warm-up: rank 1 of the group failed: RuntimeError: warm_up: ")
        assert text.endswith(": no room")


def load_first(rank: int, num_ranks: int, late: bool, whole: bool) -> str:
    """Load kernels before a call: rank 1 compiles for long, or is late. whole: those of any number of tokens."""

    def load_all(*_, **__):
        time.sleep(2 * TIMEOUT_S * rank)
        return {}

    warm_up.load_all, warm_up.Compilation.most = load_all, lambda *_: load_all
    layer_warm_up.begin_looking = lambda *_, **__: dict
    parallel, target = opened(TIMEOUT_S), Target("sm_90")
    call = warm_up.CountedCall(3, 1, parallel.experts)
    if late and rank:
        time.sleep(2 * TIMEOUT_S)
    try:
        if whole:
            warm_up.compile_together(parallel.channel, call, target, 1, False, warm_up.FIRST)
        else:
            warm_up.load_together(parallel.channel, call, target, 3, warm_up.FIRST)  # pyright: ignore[reportArgumentType]
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_a_first_call_waits_for_compilers_but_not_for_those_who_are_late(late, whole):
    first, second = (outcome.value for outcome in run_ranks(2, load_first, late, whole))
    if late:
        assert first.startswith("first call: rank 1 is lost or did not answer within 2 s") or "was late" in first
        assert second
    else:
        assert (first, second) == ("", "")

"""Prepared calls on a GPU: the bits of calls as always, in graphs, on other streams, in threads, at other addresses."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from envoi.ops.gemm import gemm
from envoi.runtime import shortcuts, workspace
from envoi.runtime.prepared import calls, replay
from tests.runtime.prepared_cases import (
    Case,
    gemm_cases,
    indexer_cases,
    moe_cases,
    on,
    route_cases,
    same_bits,
    tensors_in,
)

pytestmark = [pytest.mark.gpu(arch="sm_90"), pytest.mark.usefixtures("tidy_gpu")]


def named(prefix: str, cases: dict[str, Case]) -> dict[str, Case]:
    return {f"{prefix}-{name}": case for name, case in cases.items()}


CASES = {
    **gemm_cases(300, 512, 1024), **named("decode", gemm_cases(6, 2048, 4096)),
    **route_cases(200, 256, 1024, 8), **named("decode", route_cases(3, 256, 7168, 8)),
    **moe_cases(64, 16, 4, 512, 512, "cuda"), **named("many", moe_cases(600, 8, 2, 512, 512, "cuda")),
    **indexer_cases(3000),
}  # fmt: skip
SOME = [
    "gemm-bf16", "gemm-several", "decode-gemm-bf16", "gemm-mxfp4", "grouped-fp8_block128", "route", "decode-route-all",
    "moe-bf16", "moe-fp8_block128", "moe-mxfp4", "many-moe-mxfp4", "moe-mxfp8", "indexer",
]  # fmt: skip


class Counted(calls.Calls):
    """Calls that count how many were replayed since they were prepared."""

    replayed = 0


@pytest.fixture
def counted(monkeypatch) -> Iterator[Counted]:
    made = Counted()
    run = replay.Prepared.run

    def counting(self, *given):
        made.replayed += 1
        return run(self, *given)

    monkeypatch.setattr(replay.Prepared, "run", counting)
    monkeypatch.setattr(shortcuts, "ENABLED", True)
    monkeypatch.setattr(shortcuts, "PREPARED", True)
    monkeypatch.setattr(calls, "_calls", made)
    yield made
    made.clear()


def call(case: Case, i: int) -> Callable[[], Any]:
    given, options = on("cuda", case.arguments(i))
    return lambda: case.function(*given, **options)


def as_always(run: Callable[[], Any]) -> Any:
    shortcuts.PREPARED = False
    try:
        return run()
    finally:
        shortcuts.PREPARED = True


def prepare(case: Case, counted: Counted) -> None:
    """Make the call after which such calls are replayed."""
    call(case, 0)()
    assert not counted.refusals()
    counted.replayed = 0


@pytest.mark.parametrize("name", CASES)
def test_bits(name, counted):
    prepare(CASES[name], counted)
    for i in range(1, 6):
        run = call(CASES[name], i % 4)
        got = run()
        assert counted.replayed == i
        assert same_bits(got, as_always(run))


@pytest.mark.parametrize("name", SOME)
def test_a_hundred_calls_without_waiting(name, counted):
    """The device runs late: a block that were read after the call had returned would have changed."""
    prepare(CASES[name], counted)
    runs = [call(CASES[name], i) for i in range(4)]
    want = [as_always(run) for run in runs]
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)
    got = [runs[i % 4]() for i in range(100)]
    assert counted.replayed == 100
    assert all(same_bits(x, want[i % 4]) for i, x in enumerate(got))


@pytest.mark.parametrize("name", SOME)
def test_addresses_change_their_roles(name, counted):
    """Each call's tensors are where another call had others."""
    prepare(CASES[name], counted)
    for i in range(8):
        run = call(CASES[name], i % 4)
        blockers = [torch.full((1 << (9 + (i * j) % 9),), 7, dtype=torch.uint8, device="cuda") for j in range(i)]
        got = run()
        del blockers
        assert same_bits(got, as_always(run))
        del run, got
    assert counted.replayed == 8


@pytest.mark.parametrize("name", SOME)
def test_graphs(name, counted):
    """A graph keeps its parameters while other calls write theirs to the same block."""
    case = CASES[name]
    prepare(case, counted)
    given, options = on("cuda", case.arguments(2))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = case.function(*given, **options)
    assert counted.replayed == 1
    for i in (3, 1, 0):
        call(case, (i + 1) % 4)()
        others, _ = on("cuda", case.arguments(i))
        for mine, theirs in zip(tensors_in(given), tensors_in(others), strict=True):
            mine.copy_(theirs)
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(got, as_always(partial(case.function, *given, **options)))


@pytest.mark.parametrize("name", SOME)
def test_streams(name, counted):
    prepare(CASES[name], counted)
    streams = [torch.cuda.Stream() for _ in range(3)]
    runs = [call(CASES[name], i) for i in range(4)]
    want = [as_always(run) for run in runs]
    torch.cuda.synchronize()
    got = []
    for i in range(24):
        with torch.cuda.stream(streams[i % 3]):
            got.append((i % 4, runs[i % 4]()))
    torch.cuda.synchronize()
    assert counted.replayed == 24
    assert all(same_bits(x, want[i]) for i, x in got)


@pytest.mark.parametrize("on_one_stream", [False, True], ids=["streams", "one-stream"])
@pytest.mark.parametrize("name", SOME)
def test_threads(name, on_one_stream, counted):
    """Threads that are new to CUDA, on streams of their own or on one, share a prepared call."""
    prepare(CASES[name], counted)
    runs = [call(CASES[name], i) for i in range(4)]
    want = [as_always(run) for run in runs]
    torch.cuda.synchronize()
    wrong: list[Any] = []
    shared = torch.cuda.Stream()

    def work(number: int) -> None:
        try:
            with torch.cuda.stream(shared if on_one_stream else torch.cuda.Stream()):
                found = [(i % 4, runs[i % 4]()) for i in range(number, number + 12)]
                torch.cuda.current_stream().synchronize()
            wrong.extend(i for i, x in found if not same_bits(x, want[i]))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert counted.replayed


def test_a_first_launch_of_a_thread_needs_no_context(counted):
    prepare(CASES["gemm-bf16"], counted)
    run, found = call(CASES["gemm-bf16"], 2), []
    want = as_always(run)
    thread = threading.Thread(target=lambda: found.append(run()))
    thread.start()
    thread.join()
    assert counted.replayed == 1 and same_bits(found[0], want)


def test_a_shape_that_a_new_thread_plans_needs_no_context():
    a, b = torch.randn(64, 512, device="cuda").bfloat16(), torch.randn(256, 512, device="cuda").bfloat16()
    found = []
    for _ in range(2):
        gemm(a, b)  # loads the kernels, in this thread
    for _ in range(2):
        thread = threading.Thread(target=lambda: found.extend(gemm(a[:48], b) for _ in range(2)))
        thread.start()
        thread.join()
    assert len(found) == 4 and all(same_bits(out, gemm(a[:48], b)) for out in found)


@pytest.mark.parametrize("name", SOME)
def test_nothing_waits_for_the_device(name, counted):
    prepare(CASES[name], counted)
    run = call(CASES[name], 2)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert counted.replayed == 1


def test_memory_stays_bounded(counted):
    """A prepared call holds no memory of the device, its stream only what it can have again."""
    prepare(CASES["moe-bf16"], counted)
    run = call(CASES["moe-bf16"], 2)
    run()  # which may have the stream keep more
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        run()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("on_default", [True, False], ids=["default", "other"])
def test_scratch_memory_is_of_the_streams_own(on_default, counted, monkeypatch):
    """What torch's allocator gives to one stream it takes back for that stream alone."""
    taken: list[tuple[int, int]] = []
    take = workspace.Scratch.take

    def noted(self, stream, num_floats):
        memory = take(self, stream, num_floats)
        taken.append((stream, memory.data_ptr()))
        return memory

    monkeypatch.setattr(workspace.Scratch, "take", noted)
    workspace.forget_scratch()
    stream = torch.cuda.default_stream() if on_default else torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(4):
            call(CASES["moe-bf16"], i)()
    torch.cuda.synchronize()
    assert {of for of, _ in taken} == {stream.cuda_stream}
    segments = torch.cuda.memory_snapshot()
    for of, address in taken:
        (found,) = [s for s in segments if s["address"] <= address < s["address"] + s["total_size"]]
        assert found["stream"] == of


@pytest.mark.gpu(2)
def test_devices(counted):
    """Equal shapes on two devices are two calls; a tensor on another device than the current one runs as always."""
    case = CASES["gemm-bf16"]
    for device in range(2):
        with torch.cuda.device(device):
            for i in range(4):
                given, options = on(f"cuda:{device}", case.arguments(i))
                run = partial(case.function, *given, **options)
                assert same_bits(run(), as_always(run))
    assert counted.replayed == 8 and not counted.refusals()

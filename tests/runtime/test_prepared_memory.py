"""Memory of prepared calls: what they keep, frames of threads, scratch and counters of streams, the caller's own."""

import gc
import threading
import time
import weakref

import pytest
import torch

import envoi
from envoi.ops.gemm.hopper import tune
from envoi.ops.gemm.hopper.config import Config, fitted
from envoi.runtime import launch, program, shortcuts, workspace
from envoi.runtime.prepared import calls, replay
from tests.helpers.fake_driver import INVALID_CONTEXT
from tests.runtime.prepared_cases import moe_cases, normal, route_cases
from tests.runtime.test_prepared import CPU, CPU_DEVICE, addresses, prepare, replays, sides


def test_a_prepared_call_keeps_no_tensor(hopper):
    a, b = sides()
    refs = [weakref.ref(a), weakref.ref(b)]
    for _ in range(3):
        refs.append(weakref.ref(envoi.gemm(a, b)))
    del a, b
    hopper.always.clear()
    gc.collect()
    assert [ref() for ref in refs] == [None] * 5


def test_the_number_of_calls_is_bounded_and_used_ones_stay(hopper, monkeypatch):
    monkeypatch.setattr(calls, "_calls", calls.Calls(most=5))
    prepare()
    for M in range(1, 40):
        envoi.gemm(*sides(M))
        assert replays(hopper, envoi.gemm, *sides())
        assert len(calls._calls.known) <= 5
    monkeypatch.setattr(shortcuts, "PREPARED", True)
    for M in range(1, 12):
        prepare(arguments=sides(M))
    assert len(calls._calls.known) <= 5 and not replays(hopper, envoi.gemm, *sides())


def test_new_configs_forget_the_old_calls(hopper, tmp_path):
    prepare()
    tune.keep({}, tmp_path / "gemm.json")
    assert not replays(hopper, envoi.gemm, *sides())


# Threads, streams, captures


def test_threads_take_frames_of_their_own(hopper, monkeypatch):
    prepare()
    wrong, launch = [], hopper.launch
    local = threading.local()

    def slow(*given):
        time.sleep(0.002)
        result = launch(*given)
        found = {int.from_bytes(x[:8], "little") for x in hopper.calls[-1][2] if len(x) >= 8}
        local.found = found
        return result

    lock = threading.Lock()

    def slow_and_alone(*given):
        time.sleep(0.001)
        with lock:
            return slow(*given)

    monkeypatch.setattr(hopper, "launch", slow_and_alone, raising=False)

    def work(seed):
        for i in range(10):
            a, b = sides(seed=seed + i)
            out = envoi.gemm(a, b)
            if not {x.data_ptr() for x in (a, b, out)} <= local.found:
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(100 * i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    (found,) = [x for x in calls._calls.known.values() if isinstance(x, replay.Prepared)]
    assert 1 < len(found._free) <= 6


def test_a_thread_that_is_new_to_cuda_gets_the_context(hopper):
    hopper.primary = 0  # of a thread in which nothing has been launched
    prepare()
    hopper.primary, hopper.errors = 99, [INVALID_CONTEXT]
    assert replays(hopper, envoi.gemm, *sides()) and hopper.contexts == [99]


def test_an_error_of_the_driver_is_raised(hopper):
    prepare()
    hopper.errors = [700]
    with pytest.raises(RuntimeError, match="cuLaunchKernelEx: expected 0 from the CUDA driver, got 700"):
        envoi.gemm(*sides())
    assert replays(hopper, envoi.gemm, *sides())


def test_calls_without_counters_run_on_any_stream_and_in_captures(hopper):
    prepare()
    for hopper.stream_now, hopper.capturing in ((7, False), (8, False), (8, True), (7, True)):
        assert replays(hopper, envoi.gemm, *sides())
        assert hopper.calls[-1][1].stream == hopper.stream_now


def test_scratch_memory_is_kept_by_a_stream_and_new_in_captures(hopper):
    """moe in two launches passes activations from one to the other; of other threads' calls see `test_workspace`."""
    case = moe_cases(64, 16, 4, 512, 512, "cpu")["moe-bf16"]
    prepare(case.function, case.arguments(0)[0], **case.arguments(0)[1])
    (found,) = [x for x in calls._calls.known.values() if isinstance(x, replay.Prepared)]
    assert found._scratch_floats <= workspace.MOST_SCRATCH
    seen = []
    for hopper.stream_now, hopper.capturing in ((7, False), (7, False), (8, False), (8, True), (8, False)):
        given, named = case.arguments(1)
        if replays(hopper, case.function, *given, **named):
            seen.append((hopper.stream_now, hopper.capturing, found._free[-1].scratch))
    assert len(seen) == 5
    assert len({address for stream, _, address in seen if stream == 7}) == 1
    assert len({address for stream, captured, address in seen if stream == 8 and not captured}) == 1
    assert len({address for _, _, address in seen}) == 3


def test_counters_are_those_of_the_stream_and_of_the_capture(hopper):
    call = route_cases(3, 64, 2048, 4)["route-all"].arguments(0)[0]
    prepare(envoi.route, call, return_counts=True)
    seen = []
    for hopper.stream_now, hopper.capturing in ((7, 0), (7, 0), (8, 0), (8, 1), (8, 2), (8, 0), (7, 0)):
        assert replays(hopper, envoi.route, *call, return_counts=True)
        pools = *workspace._forever, *(x for x in workspace._counters.pools.get(CPU_DEVICE, ()))
        kept = [(x.data_ptr(), x.numel() * x.itemsize) for x in pools]
        seen.append({at for at in addresses(hopper) if any(start <= at < start + size for start, size in kept)})
    assert seen[0] == seen[1] == seen[6] and seen[2] == seen[5]
    of_each = seen[0], seen[2], seen[3], seen[4]
    assert all(of_each) and len(set.union(*of_each)) == sum(map(len, of_each)), "none is shared"


def test_offsets_are_counted_from_a_tensors_start():
    """Also of one off 16 bytes, whose stand-in begins within its storage."""

    def call(a: torch.Tensor) -> None:
        launch.launch("kernel", (1,), (a, a[2:]), {})

    planned = program.plan(call, (x := torch.zeros(9)[1:],), {}, [x], CPU)
    assert [planned.place(y) for y in planned.launches[0].arguments] == [(program.INPUT, 0, 0), (program.INPUT, 0, 8)]


def test_constants_are_those_of_the_device():
    """Scratch would be theirs otherwise, which each call writes anew."""
    table = torch.arange(16)

    def call(a: torch.Tensor) -> None:
        launch.launch("kernel", (1,), (a, workspace.constant(lambda _: table, 16, torch.int64, a.device)[4:]), {})

    planned = program.plan(call, (x := torch.zeros(4),), {}, [x], CPU)
    place = planned.place(planned.launches[0].arguments[1])
    assert (place.role, place.offset) == (program.KEPT, 32) and planned.kept[place.number](CPU_DEVICE) is table


@pytest.mark.parametrize(("most", "allocates"), [(workspace.MOST_SCRATCH, False), (1000, True)])
def test_sums_over_parts_of_k_are_in_memory_that_the_stream_keeps(hopper, monkeypatch, most, allocates):
    """A replay allocates its output alone, unless the sums are too many to keep."""
    monkeypatch.setattr(workspace, "MOST_SCRATCH", most)
    forced = Config(64, 2, 128, 64, 4, split_k=4)
    monkeypatch.setattr(tune, "choose", lambda problem, code, *_: fitted(problem, forced, code))
    prepare(envoi.gemm, (normal(64, 1024), normal(1024, 1024, seed=1)))
    (found,) = calls._calls.known.values()
    assert bool(found._scratch_floats)
    assert (found._scratch is None) == allocates


# Memory of the caller's, and fewer multiprocessors


def test_out_is_written_by_the_first_call_and_by_replays(hopper):
    a, b = sides()
    out = torch.empty(64, 128, dtype=torch.bfloat16)
    for _ in range(2):
        assert envoi.gemm(a, b, out=out) is out
    assert out.data_ptr() in addresses(hopper)
    assert replays(hopper, envoi.gemm, *sides(seed=4)), "calls without it are the same"


@pytest.mark.parametrize(
    ("out", "said"),
    [
        (torch.empty(64, 127, dtype=torch.bfloat16), r"out: expected bfloat16 \[64, 128\]"),
        (torch.empty(64, 128), "out: expected bfloat16"),
        (torch.empty(128, 64, dtype=torch.bfloat16).t(), "out: expected strides"),
        (torch.empty(64 * 128 + 1, dtype=torch.bfloat16)[1:].view(64, 128), "out: expected strides .* multiple of 16"),
        ((torch.empty(64, 128), torch.empty(1)), "out: expected 1 tensors, got 2"),
        (7, "out: expected tensors of the form"),
    ],
    ids=["shape", "dtype", "strides", "address", "two", "a number"],
)
def test_an_out_of_another_form_is_refused(hopper, monkeypatch, out, said):
    for _ in range(2):
        with pytest.raises(ValueError, match=said):
            envoi.gemm(*sides(), out=out)
        prepare()
    monkeypatch.setattr(shortcuts, "PREPARED", False)
    with pytest.raises(ValueError, match=said):
        envoi.gemm(*sides(), out=out)


@envoi.epilogue
def once_and_twice(acc):
    return {"once": acc, "twice": 2.0 * acc}


def named_outs() -> dict[str, torch.Tensor]:
    return {name: torch.empty(64, 128, dtype=torch.bfloat16) for name in ("twice", "once")}


def test_outs_are_taken_by_their_names():
    a, b, out = *sides(), named_outs()
    envoi.gemm(a, b, once_and_twice, out=out)
    want = envoi.gemm(a, b, once_and_twice)
    assert all(torch.equal(out[name], want[name]) for name in want)


def test_replays_take_outs_by_their_names(hopper):
    a, b, out = *sides(), named_outs()
    for _ in range(3):
        got = envoi.gemm(a, b, once_and_twice, out=out)
        assert all(got[name] is out[name] for name in ("once", "twice"))
        prepare(envoi.gemm, (a, b, once_and_twice))
    for other in ({"once": out["once"], "thrice": out["twice"]}, tuple(out.values())):
        with pytest.raises(ValueError, match="out: expected a dict of 'once', 'twice', as the call returns, got "):
            envoi.gemm(a, b, once_and_twice, out=other)


@envoi.epilogue
def twice_and_once(acc):
    return 2.0 * acc, acc


def test_names_are_refused_where_the_call_has_none(hopper):
    """In the order of a dict's names the outputs would be under each other's."""
    a, b, out = *sides(), {"once": torch.empty(64, 128).bfloat16(), "twice": torch.empty(64, 128).bfloat16()}
    for _ in range(2):
        with pytest.raises(ValueError, match="out: expected tuple, as the call returns, got a dict of 'once', 'twice'"):
            envoi.gemm(a, b, twice_and_once, out=out)
        prepare(envoi.gemm, (a, b, twice_and_once))
    twice, once = envoi.gemm(a, b, twice_and_once, out=[out["twice"], out["once"]])
    assert twice is out["twice"] and once is out["once"]


def test_replays_compare_what_a_dataclass_says(hopper):
    call = route_cases(3, 64, 2048, 4)["route-all"].arguments(0)[0]
    prepare(envoi.route, call)
    out = envoi.Routing(torch.empty(3, 4), torch.empty(3, 4, dtype=torch.int32), 65)
    with pytest.raises(ValueError, match="^out.num_experts: expected 64, as the call returns, got 65"):
        envoi.route(*call, out=out)
    assert replays(hopper, envoi.route, *call)


def test_outs_share_no_memory(hopper):
    whole = torch.empty(2 * 64 * 128, dtype=torch.bfloat16)
    first, second = whole[: 64 * 128].view(64, 128), whole[64 * 64 :][: 64 * 128].view(64, 128)
    with pytest.raises(ValueError, match="share no memory"):
        replay.check_out([first, second], [((64, 128), (128, 1), torch.bfloat16)] * 2, CPU_DEVICE)


def test_an_out_of_one_row_may_be_a_part_of_longer_rows():
    """It counts as contiguous, and `ExpertParallel` has let it pass before its peers rely on the call."""
    out = torch.empty(3, 256, dtype=torch.bfloat16)[1:2, :128]
    assert out.is_contiguous() and out.stride() == (256, 1)
    replay.check_out([out], [((1, 128), (128, 1), torch.bfloat16)], CPU_DEVICE)


def test_a_workspace_is_the_callers(hopper):
    case = moe_cases(64, 16, 4, 512, 512, "cpu")["moe-bf16"]
    given, named = case.arguments(0)
    prepare(case.function, given, **named)
    (found,) = calls._calls.known.values()
    memory = torch.empty(4 * found._scratch_floats, dtype=torch.uint8)
    assert replays(hopper, case.function, *given, **named, workspace=memory)
    start, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
    assert any(start <= at < end for at in addresses(hopper))
    assert start == found._free[-1].scratch
    for wrong in (memory[:-16], memory[1:], memory.view(-1, 32)[:, :16]):
        with pytest.raises(ValueError, match=f"workspace: expected {memory.nbytes} contiguous bytes"):
            case.function(*given, **named, workspace=wrong)
    free = len(found._free)
    with pytest.raises(ValueError, match="workspace: expected a tensor on cpu"):
        case.function(*given, **named, workspace=memory.to("meta"))
    assert len(found._free) == free, "a refused call takes no frame"


def test_fewer_multiprocessors_are_another_plan(hopper):
    a, b = normal(4096, 128), normal(4096, 128, seed=1)
    prepare(arguments=(a, b), num_sms=7)
    assert replays(hopper, envoi.gemm, a, b, num_sms=7)
    assert tuple(hopper.calls[-1][1].grid) == (7, 1, 1)
    assert not replays(hopper, envoi.gemm, a, b) and replays(hopper, envoi.gemm, a, b)
    assert tuple(hopper.calls[-1][1].grid) == (132, 1, 1)
    for wrong in (0, -3, 2.0, True):
        with pytest.raises(ValueError, match="num_sms"):
            envoi.gemm(a, b, num_sms=wrong)


def test_what_a_call_as_always_returns_is_copied(monkeypatch):
    a, b = sides()
    out = torch.empty(64, 128, dtype=torch.bfloat16)
    assert envoi.gemm(a, b, out=out) is out
    assert torch.equal(out, envoi.gemm(a, b))

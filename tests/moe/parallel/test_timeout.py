"""PeerTimeout: what it says, and that it survives the way between processes."""

import pickle
import threading
import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from envoi import PeerTimeout
from envoi.ops.moe.parallel import failure
from envoi.ops.moe.parallel.collectives import connect_ranks
from envoi.ops.moe.parallel.failure import Watch
from envoi.ops.moe.parallel.store import Connection

CASES = {
    "rank 3 is lost": ([3], "dispatch", 2.0),
    "rank 1 (this one) was late": ([1], "dispatch", 2.0, True, 1),
    "rank 1 was late: it is there": ([1], "dispatch", 2.0, True, 0),
    "all ranks are there, but the exchange was not done within 2 s": ([], "combine", 2.0),
    "rank 1 failed: out of memory;": ([1], "opening the group", 2.0, True, 0, "", "out of memory"),
    "rank 1 (this one) failed: out of memory;": ([1], "opening the group", 2.0, True, 1, "", "out of memory"),
    "the exchange failed: NCCL error": ([], "combine", 2.0, True, 0, "", "NCCL error: invalid usage"),
    "the store is gone": ([], "combine", 2.0, False, None, "gone"),
    "no connection to the store's host": ([0, 1], "combine", 2.0, False, 2, "silent"),
}


@pytest.mark.parametrize("words", CASES)
def test_it_comes_back_from_a_pickle_as_it_was(words):
    error = PeerTimeout(*CASES[words])
    assert words in str(error)
    got = pickle.loads(pickle.dumps(error))
    assert type(got) is PeerTimeout
    assert (str(got), got.ranks, got.step) == (str(error), error.ranks, error.step)


class Work:
    """Collective that is complete when `is_done` says so."""

    def __init__(self, is_done=lambda: False):
        self.is_completed, self.waited = is_done, False

    def wait(self) -> None:
        self.waited = True


def watch(timeout_s: float, monkeypatch) -> Watch:
    made = Watch(None, "a", [0, 1], 0, timeout_s)  # pyright: ignore[reportArgumentType]
    made.deadline = None
    made.lookout = Peers(0.0)  # pyright: ignore[reportAttributeAccessIssue]

    def fail(step: str, cause: Exception, waited_s: float, **_: object) -> None:
        made.failure = PeerTimeout([1], step, timeout_s)
        raise made.failure

    monkeypatch.setattr(made, "fail", fail)
    return made


class Peers:
    """Lookout on peers of which one compiles for some seconds, from the first look on; none raises an alarm."""

    alarm = None

    def __init__(self, seconds: float):
        self.seconds, self.began = seconds, float("inf")

    def look(self) -> None:
        self.began = min(self.began, time.monotonic())

    def compiles(self) -> bool:
        return self.began < time.monotonic() < self.began + self.seconds


@pytest.mark.parametrize(("compiles_s", "most_s", "waits_s"), [(9.0, 60.0, 2.0), (1.0, 60.0, 1.0), (9.0, 0.5, 1.0)])
def test_a_collective_may_take_longer_while_a_peer_compiles(compiles_s, most_s, waits_s, monkeypatch):
    """It is done after 2 s, and the timeout after 0.5; most_s bounds what comes on top."""
    made, begun = watch(1.0, monkeypatch), time.monotonic()
    made.lookout = Peers(compiles_s)  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(failure, "MOST_S", most_s)
    slow = Work(lambda: time.monotonic() > begun + 2.0)
    with nullcontext() if waits_s == 2.0 else pytest.raises(PeerTimeout):
        made.wait(lambda: slow, "combine")
    assert waits_s <= time.monotonic() - begun < waits_s + 0.6
    assert slow.waited == (waits_s == 2.0), "the stream waits for it once it is complete"


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        (RuntimeError("NCCL error: two ranks on one GPU\nmore"), "failed: NCCL error: two ranks on one GPU; this"),
        (TimeoutError("dispatch"), "was not done within 2 s"),
    ],
)
def test_an_exchange_that_fails_of_itself_says_why(cause, said, monkeypatch):
    made = Watch(None, "a", [0, 1], 0, 2.0)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(made, "_call_roll", lambda *_: ({0: 0.1, 1: 0.1}, {}))
    with pytest.raises(PeerTimeout, match=f"but the exchange {said}"):
        made.fail("dispatch", cause, 0.1)


class CudaChannel:
    """Channel of a GPU whose first collective fails as NCCL does."""

    device = torch.device("cuda", 0)

    class watch:  # noqa: N801
        @staticmethod
        def wait_for_first(start, step):
            start()


def test_a_gpu_that_cant_be_connected_is_said_to_have_so_much_memory(monkeypatch):
    class Group:
        def size(self):
            raise RuntimeError("NCCL Error 1: unhandled cuda error (run with NCCL_DEBUG=INFO for details)\nmore")

    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (48 << 20, 80 << 30))
    with pytest.raises(RuntimeError, match=r"unhandled cuda error \(.*\); 48 MiB of its GPU's memory were free"):
        connect_ranks(CudaChannel, Group(), "opening the group")  # pyright: ignore[reportArgumentType]


def first_collectives(*steps) -> list[PeerTimeout | None]:
    """Let ranks of one process make the first collective of a group, each its own step; return their errors."""
    store, errors = dist.HashStore(), [None] * len(steps)

    def run(rank: int) -> None:
        made = Watch(Connection(store), "first", list(range(len(steps))), rank, 3.0)
        made.opened([False] * len(steps))
        try:
            made.wait_for_first(steps[rank], "opening the group")
        except PeerTimeout as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(steps))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    return errors


def test_a_first_collective_that_fails_on_a_rank_names_it_on_all(monkeypatch):
    def out_of_memory() -> None:
        raise RuntimeError("NCCL error in ProcessGroupNCCL.cpp\nLast error:\nCuda failure 2 'out of memory'")

    hung, start = threading.Event(), time.monotonic()
    errors = first_collectives(hung.wait, out_of_memory, hung.wait)
    assert time.monotonic() - start < 3.0, "the others heard of it at once"
    for rank, error in enumerate(errors):
        who = "rank 1 (this one)" if rank == 1 else "rank 1"
        assert str(error).startswith(f"opening the group: {who} failed: Cuda failure 2 'out of memory';")
        assert error.ranks == [1]
    hung.set()


def test_who_lacks_memory_is_named_not_those_whose_exchange_fails_for_it():
    def fail(text: str) -> None:
        raise ValueError(text)

    errors = first_collectives(lambda: fail("NCCL error: remote closed"), lambda: fail("CUDA out of memory"))
    assert [error.ranks for error in errors] == [[1], [1]]
    assert all("failed: CUDA out of memory" in str(error) for error in errors)


def test_a_first_collective_that_never_returns_is_bounded(monkeypatch):
    monkeypatch.setattr(failure, "CONNECT_S", 0.0)
    hung, start = threading.Event(), time.monotonic()
    errors = first_collectives(hung.wait, hung.wait)
    assert time.monotonic() - start < 4.0
    for error in errors:
        assert error.ranks == []
        assert "all ranks are there, but the exchange was not done within 3 s" in str(error)
    hung.set()


def test_a_first_collective_that_returns_is_no_error():
    assert first_collectives(lambda: None, lambda: None) == [None, None]


@pytest.mark.slow
def test_connecting_has_its_own_least_time(monkeypatch):
    """The timeout is three seconds, of which the wait has one and the roll call two."""
    monkeypatch.setattr(failure, "CONNECT_S", 5.0)
    assert first_collectives(lambda: time.sleep(2.5), lambda: None) == [None, None]
    hung = threading.Event()
    first, second = first_collectives(hung.wait, lambda: None)
    assert "rank 1 is lost or did not answer within 5 s" in str(first) and second is None
    hung.set()


def test_connecting_has_a_timeout_of_its_own_and_takes_none_of_the_openings():
    made, before = Watch(Connection(dist.HashStore()), "own", [0], 0, 3.0), time.monotonic()
    made.deadline = before + 0.1  # the rest of the opening has used nearly all of it
    made.wait_for_first(lambda: time.sleep(0.8), "opening the group")
    assert made.deadline == pytest.approx(before + 0.9, abs=0.3)
    assert made.failure is None


def test_a_collective_that_never_ends_is_a_timeout_of_its_step_and_of_all_later_ones(monkeypatch):
    made = watch(0.2, monkeypatch)
    made.wait(lambda: Work(lambda: True), "dispatch")
    with pytest.raises(PeerTimeout, match=r"^combine: rank 1 is lost") as first:
        made.wait(Work, "combine")
    with pytest.raises(PeerTimeout) as second:
        made.wait(lambda: pytest.fail("started"), "dispatch")
    assert second.value is first.value


def test_a_collective_that_cant_be_started_is_a_timeout_too(monkeypatch):
    made = watch(0.2, monkeypatch)

    def broken():
        raise RuntimeError("connection closed")

    with pytest.raises(PeerTimeout, match="^dispatch: "):
        made.wait(broken, "dispatch")


def test_a_collective_that_failed_by_itself_is_none_that_is_complete():
    """NCCL says that one with an error is complete."""
    made = Watch(Connection(dist.HashStore()), "broken", [0, 1], 0, 3.0)
    made.broken = lambda: "NCCL reports REMOTE_ERROR"
    with pytest.raises(PeerTimeout, match="combine: rank 1 is lost") as told:
        made.wait(lambda: Work(lambda: True), "combine")
    assert "REMOTE_ERROR" in str(told.value.__cause__)


def test_the_error_says_what_caused_it_in_every_thread():
    made, cause = Watch(Connection(dist.HashStore()), "cause", [0, 1], 0, 1.0), RuntimeError("NCCL error")
    with pytest.raises(PeerTimeout) as first:
        made.fail("combine", cause, 1.0)
    with pytest.raises(PeerTimeout) as second:
        made.wait(Work, "combine")
    assert first.value is second.value and first.value.__cause__ is cause

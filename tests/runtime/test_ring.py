"""Ring of stages, its own methods run over simulated mbarriers: roles take turns at random, some far slower.

Wrong are a stage that is filled before all have read it, or read before it is filled, and a wait for ever.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from triton.runtime.jit import JITFunction

from envoi.runtime import ring as module
from envoi.runtime.ring import Ring

Role = Iterator[Callable[[], Any]]  # yields what to try until it can be done


class NotYetError(Exception):
    """Barrier whose phase hasn't ended."""


@dataclass
class Barrier:
    """An mbarrier: `arrivals` complete a phase."""

    arrivals: int
    phase: int = 0
    arrived: int = 0


class Barriers(list):
    """Barriers [num_stages, 1] in shared memory."""

    def index(self, i: int) -> Barrier:
        assert 0 <= i < len(self)
        return self[i]


class Mbarrier:
    """Instructions on simulated barriers."""

    @staticmethod
    def wait(barrier: Barrier, parity: int) -> None:
        assert parity in (0, 1)
        if barrier.phase & 1 == parity:
            raise NotYetError

    @staticmethod
    def arrive(barrier: Barrier, count: int, pred: bool = True) -> None:
        barrier.arrived += count * pred
        if barrier.arrived == barrier.arrivals:
            barrier.phase, barrier.arrived = barrier.phase + 1, 0

    @staticmethod
    def expect(barrier: Barrier, num_bytes: int, pred: bool = True) -> None:
        Mbarrier.arrive(barrier, 1, pred)


@dataclass
class Simulated:
    """Fields of a ring, with the methods of `Ring`."""

    full: Barriers
    empty: Barriers
    num_stages: int
    contents: list[int] = field(default_factory=list)


for _name, _member in vars(Ring).items():
    if isinstance(_member, JITFunction) and _name != "create":
        setattr(Simulated, _name, _member.fn)


def filler(ring: Any, num_steps: int, num_readers: int, unread: list[int], by_tma: bool) -> Role:
    for step in range(num_steps):
        yield partial(ring.wait_empty, step)
        stage = ring.stage(step)
        assert unread[stage] == 0, f"step {step} overwrites what isn't read"
        ring.contents[stage], unread[stage] = step, num_readers
        if by_tma:
            yield partial(ring.expect, stage, 128)
        else:
            yield partial(ring.arrive_full, step)


def reader(ring: Any, num_steps: int, unread: list[int], late: bool) -> Role:
    """late: stages are handed back a step later, as a mainloop with two wgmma in flight does it."""

    def read(step: int) -> None:
        assert ring.contents[ring.stage(step)] == step
        unread[ring.stage(step)] -= 1

    for step in range(num_steps):
        yield partial(ring.wait_full, step)
        if late:
            if step > 0:
                read(step - 1)
            yield partial(ring.release_previous, step, step > 0)
        else:
            read(step)
            yield partial(ring.release, step)
    if late:
        read(num_steps - 1)
        yield partial(ring.release_previous, num_steps)


def run(roles: list[Role], draw: random.Random) -> None:
    """Run roles to their ends, each as fast as is drawn."""
    running = [[role, next(role), draw.choice((0.02, 1.0, 1.0))] for role in roles]
    idle = 0
    while running:
        entry = draw.choices(running, [speed for _, _, speed in running])[0]
        try:
            entry[1]()
        except NotYetError:
            idle += 1
            assert idle < 20_000, "all roles wait"
            continue
        idle = 0
        try:
            entry[1] = next(entry[0])
        except StopIteration:
            running = [other for other in running if other is not entry]


def simulated(num_stages: int, num_readers: int) -> Any:
    full, empty = ([Barrier(count) for _ in range(num_stages)] for count in (1, num_readers))
    return Simulated(Barriers(full), Barriers(empty), num_stages, [-1] * num_stages)


@pytest.mark.parametrize("by_tma", [True, False], ids=["TMA", "a role"])
@pytest.mark.parametrize("late", [False, True], ids=["at once", "a step later"])
@pytest.mark.parametrize("num_readers", [1, 2])
@pytest.mark.parametrize("num_stages", [2, 3, 4, 7])
def test_each_stage_is_read_by_all_before_it_is_filled_again(monkeypatch, num_stages, num_readers, late, by_tma):
    monkeypatch.setattr(module, "mbarrier", Mbarrier)
    for seed in range(8):
        draw = random.Random(seed)
        ring, unread = simulated(num_stages, num_readers), [0] * num_stages
        num_steps = draw.choice((1, num_stages, num_stages + 1, 5 * num_stages + 1))
        readers = [reader(ring, num_steps, unread, late) for _ in range(num_readers)]
        run([filler(ring, num_steps, num_readers, unread, by_tma), *readers], draw)
        assert unread == [0] * num_stages


def test_skipped_stages_are_handed_back_once_each_has_filled(monkeypatch):
    monkeypatch.setattr(module, "mbarrier", Mbarrier)
    ring = simulated(3, 1)
    with pytest.raises(NotYetError):
        ring.skip(0, 2)
    ring.arrive_full(0)
    ring.arrive_full(1)
    assert ring.skip(0, 2) == 2
    for step in (3, 4):
        ring.wait_empty(step)
    with pytest.raises(NotYetError):
        ring.wait_empty(5)

"""Roles of one launch of L1 and L2, simulated with random delays: what they hand over by barriers and counters.

A step of a role is what it does between two waits, or less. Roles that may go on take turns at random, some of them far
slower than others. Wrong are a word that is overwritten before it is read, or read before it is written; a barrier that
completes a phase too early, or one too many while somebody waits for it; operands of another tile in a stage; hidden
rows that aren't there; a wait for ever; counters that aren't 0 in the end.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from envoi.ops.gemm.hopper.config import Config
from envoi.ops.gemm.hopper.pipeline import WRITTEN_RING
from envoi.ops.moe.one_launch.config import FEW, SQUARE
from envoi.ops.moe.one_launch.kernel import CONSUMERS, UNIT_RING

Role = Iterator[Callable[[], bool] | None]  # yields what it waits for, or None: it may go on


class BrokenError(Exception):
    """What roles hand over is wrong."""


@dataclass
class Barrier:
    """An mbarrier: `arrivals` complete a phase."""

    arrivals: int
    phase: int = 0
    arrived: int = 0

    def arrive(self) -> None:
        self.arrived += 1
        if self.arrived == self.arrivals:
            self.phase, self.arrived = self.phase + 1, 0

    def wait(self, phase: int) -> Role:
        """Wait for a phase as the hardware does, by its parity; -1 is over before the first one."""
        yield lambda: self.phase & 1 != phase & 1
        if self.phase != phase + 1:
            raise BrokenError(f"waited for phase {phase}, went on in phase {self.phase}")


class Words:
    """Words in shared memory that one role writes in turn, and others read."""

    def __init__(self, size: int, num_readers: int = 1) -> None:
        self.slots: list[tuple[int, Any] | None] = [None] * size
        self.unread, self.num_readers = [0] * size, num_readers

    def put(self, n: int, value: Any) -> None:
        slot = n % len(self.slots)
        if self.unread[slot]:
            raise BrokenError(f"word {n} overwrites {self.slots[slot]}, which isn't read")
        self.slots[slot], self.unread[slot] = (n, value), self.num_readers

    def get(self, n: int) -> Any:
        slot = n % len(self.slots)
        found = self.slots[slot]
        if found is None or found[0] != n:
            raise BrokenError(f"word {n} isn't there, but {found}")
        self.unread[slot] -= 1
        return found[1]


@dataclass(frozen=True)
class Launch:
    """Sizes of a launch, and what tests break.

    until: for each tile of L2, of how many units of L1 it needs the hidden rows; of all of them for one, as the expert
    of the last unit has tiles. shift: log2 of the units that a counter counts. ring, unit_ring: words that tell tiles,
    None for as many as the kernel has, and units.
    """

    tiling: tuple[Config, Config]
    num_ctas: int
    num_units: int
    steps: tuple[int, int]
    until: tuple[int, ...]
    shift: int
    ring: int | None = None
    unit_ring: int = UNIT_RING.value
    waits_for_units: bool = True


@dataclass
class Memory:
    """Counters and rows in global memory."""

    counters: Counter[Any] = field(default_factory=Counter)
    hidden: Counter[int] = field(default_factory=Counter)  # shares of L1's tiles that are written, by unit
    done: Counter[Any] = field(default_factory=Counter)  # shares of either GEMM's tiles

    def take(self, counter: str) -> int:
        self.counters[counter] += 1
        return self.counters[counter] - 1


class Cta:
    """Roles of a CTA, as `kernel.py` has them."""

    def __init__(self, launch: Launch, memory: Memory) -> None:
        self.launch, self.memory = launch, memory
        first, second = launch.tiling
        self.num_stages = first.num_stages
        ring = launch.ring or self.num_stages + 1
        self.empty = [Barrier(second.consumers_per_tile) for _ in range(self.num_stages)]
        self.full = [Barrier(1) for _ in range(self.num_stages)]
        self.stages: list[Any] = [None] * self.num_stages
        self.tile_ready, self.tiles = [Barrier(1) for _ in range(ring)], Words(ring)
        self.turn = [Barrier(1) for _ in range(2)]
        self.written = [Barrier(first.num_consumers) for _ in range(WRITTEN_RING.value)]
        self.noted = [Barrier(1) for _ in range(WRITTEN_RING.value)]
        self.units, self.counts = Words(launch.unit_ring), Words(1, CONSUMERS.value - first.num_consumers)
        self.ended = Barrier(1)

    def roles(self) -> list[Role]:
        return [*(self.consumer(role) for role in range(CONSUMERS.value)), self.producer(), self.signaler()]

    # producer

    def producer(self) -> Role:
        launch, memory = self.launch, self.memory
        step = count = 0
        unit = memory.take("units")
        while unit < launch.num_units:
            self.units.put(count // 2, unit)
            for index in (2 * unit, 2 * unit + 1):
                step = yield from self.tell_and_load(0, index, step, count)
                count += 1
            unit = memory.take("units")
            yield None
        self.units.put(count // 2, -1)
        yield from self.tell(step, count, -1, launch.tiling[0].consumers_per_tile)
        count += 1
        if self.counts.num_readers:
            self.counts.put(0, (step, count))
        yield None
        self.ended.arrive()
        index = memory.take("tiles")
        while index < len(launch.until):
            if launch.waits_for_units:
                yield from self.wait_for_units(launch.until[index])
            step = yield from self.tell_and_load(1, index, step, count)
            count += 1
            index = memory.take("tiles")
            yield None
        second = launch.tiling[1]
        for i in range(CONSUMERS.value // second.consumers_per_tile):
            yield from self.tell(step + i, count + i, -1, second.consumers_per_tile)
        if memory.take("left") == launch.num_ctas - 1:
            memory.counters.clear()

    def wait_for_units(self, until: int) -> Role:
        size = 1 << self.launch.shift
        for counter in range(-(-until // size)):
            wanted = min(size, self.launch.num_units - counter * size)
            yield lambda counter=counter, wanted=wanted: self.memory.counters["written", counter] >= wanted

    def wait_empty(self, step: int) -> Role:
        yield from self.empty[step % self.num_stages].wait(step // self.num_stages - 1)

    def tell(self, step: int, count: int, index: int, num_readers: int) -> Role:
        yield from self.wait_empty(step)
        self.tiles.num_readers = num_readers
        self.tiles.put(count, index)
        yield None
        self.tile_ready[count % len(self.tile_ready)].arrive()

    def tell_and_load(self, gemm: int, index: int, step: int, count: int):
        yield from self.tell(step, count, index, self.launch.tiling[gemm].consumers_per_tile)
        if gemm == 1:
            parts = 2 * self.launch.tiling[0].num_consumers
            missing = [unit for unit in range(self.launch.until[index]) if self.memory.hidden[unit] < parts]
            if missing:
                raise BrokenError(f"tile {index} of L2 reads hidden rows that units {missing} haven't written")
        for k in range(self.launch.steps[gemm]):
            yield from self.wait_empty(step)
            self.stages[step % self.num_stages] = (gemm, index, k)
            yield None
            self.full[step % self.num_stages].arrive()
            step += 1
        return step

    # consumers

    def consumer(self, role: int) -> Role:
        if role < self.launch.tiling[0].num_consumers:
            step, count = yield from self.consume(0, 0, 0, role)
        else:
            yield from self.ended.wait(0)
            step, count = self.counts.get(0)
        yield from self.consume(1, step, count, role)

    def consume(self, gemm: int, step: int, count: int, role: int):
        config, num_steps = self.launch.tiling[gemm], self.launch.steps[gemm]
        turns = config.num_consumers // config.consumers_per_tile
        count += role // config.consumers_per_tile
        step += role // config.consumers_per_tile * num_steps
        event = 0
        index = yield from self.wait_for_tile(count)
        while index >= 0:
            if turns == 2:
                yield from self.turn[role].wait(event + role - 1)
            for k in range(num_steps):
                stage = step % self.num_stages
                yield from self.full[stage].wait(step // self.num_stages)
                if self.stages[stage] != (gemm, index, k):
                    raise BrokenError(f"stage {stage} has {self.stages[stage]}, not step {k} of tile {index}")
                yield None
                if turns == 2 and k == num_steps - 1:
                    self.turn[1 - role].arrive()
                self.empty[stage].arrive()
                step += 1
            yield None  # the epilogue
            self.memory.done[gemm, index] += 1
            if gemm == 0:
                self.memory.hidden[index // 2] += 1
                if event % 2 == 1:
                    yield from self.arrive_written(event // 2)
            step += (turns - 1) * num_steps
            count += turns
            event += 1
            index = yield from self.wait_for_tile(count)
        if gemm == 0:
            yield from self.arrive_written(event // 2)
        return step, count + 1

    def wait_for_tile(self, count: int):
        yield from self.tile_ready[count % len(self.tile_ready)].wait(count // len(self.tile_ready))
        return self.tiles.get(count)

    def arrive_written(self, n: int) -> Role:
        yield from self.noted[n % len(self.noted)].wait(n // len(self.noted) - 1)
        yield None
        self.written[n % len(self.written)].arrive()

    # signaler

    def signaler(self) -> Role:
        n = 0
        while (unit := (yield from self.wait_for_unit(n))) >= 0:
            yield None  # the release takes long
            self.memory.counters["written", unit >> self.launch.shift] += 1
            n += 1

    def wait_for_unit(self, n: int):
        yield from self.written[n % len(self.written)].wait(n // len(self.written))
        self.noted[n % len(self.noted)].arrive()
        yield None
        return self.units.get(n)


def run(launch: Launch, draw: random.Random) -> None:
    """Run a launch. Raises BrokenError."""
    memory = Memory()
    ctas = [Cta(launch, memory) for _ in range(launch.num_ctas)]
    resident = draw.randint(1, launch.num_ctas)
    waiting = [cta.roles() for cta in ctas]  # a CTA may start when another has ended
    running: list[list[Any]] = []  # of each CTA: [role, what it waits for, how fast it is]
    while waiting or running:
        while waiting and len(running) < resident:
            roles = waiting.pop()
            running.append([[role, None, draw.choice((0.02, 1.0, 1.0))] for role in roles])
        ready = [entry for cta in running for entry in cta if entry[1] is None or entry[1]()]
        if not ready:
            raise BrokenError("all roles wait")
        (entry,) = draw.choices(ready, [speed for _, _, speed in ready])
        try:
            entry[1] = next(entry[0])
        except StopIteration:
            for cta in running:
                cta[:] = [other for other in cta if other is not entry]
            running = [cta for cta in running if cta]
    if +memory.counters:
        raise BrokenError(f"counters are left: {memory.counters}")
    first, second = launch.tiling
    want = Counter({(0, index): first.num_consumers for index in range(2 * launch.num_units)})
    want.update({(1, index): second.consumers_per_tile for index in range(len(launch.until))})
    if memory.done != want:
        raise BrokenError("tiles are missing, or done twice")


def drawn(draw: random.Random, tiling, **broken: Any) -> Launch:
    """Draw a launch. Tiles of L2 need up to as many units as there are, in about their order; one needs all of them."""
    num_units = draw.choice((0, 1, 5, 12, 30))
    num_tiles = draw.choice((1, 7, 40)) if num_units else 0
    until = [min(num_units, max(1, num_units * i // num_tiles + draw.randint(-2, 4))) for i in range(num_tiles)]
    if until:
        until[draw.randint(num_tiles // 2, num_tiles - 1)] = num_units
    steps = draw.choice(((1, 1), (1, 3), (2, 1), (4, 2), (9, 7)))
    sizes = draw.randint(1, 4), num_units, steps, tuple(until), draw.choice((0, 2, 5))
    return Launch(tiling, *sizes, **broken)


@pytest.mark.parametrize("tiling", [FEW, SQUARE], ids=["few", "shared"])
def test_nothing_is_lost_read_twice_or_waited_for_for_ever(tiling):
    for seed in range(200):  # each of the faults below shows within 75
        draw = random.Random(seed)
        run(drawn(draw, tiling), draw)


@pytest.mark.parametrize(
    ("tiling", "broken", "says"),
    [
        (FEW, {"ring": 4}, "isn't read|waited for phase|isn't there"),
        (SQUARE, {"unit_ring": 4}, "isn't read|isn't there"),
        (SQUARE, {"waits_for_units": False}, "hidden rows"),
    ],
    ids=["a ring of as many tiles as stages", "a ring of four units", "no wait for units"],
)
def test_the_simulation_finds_what_is_wrong(tiling, broken, says):
    with pytest.raises(BrokenError, match=says):
        for seed in range(2000):
            draw = random.Random(seed)
            run(drawn(draw, tiling, **broken), draw)

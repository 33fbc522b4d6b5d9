"""Memory that is kept between calls: counters and blank sums, which kernels restore; scratch of prepared calls."""

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TypeVar

import torch

from envoi.runtime import program
from envoi.runtime.math import next_power_of_2

T = TypeVar("T")
LEAST = 1 << 16  # int32, minimum for a stream
FOR_GRAPHS = 1 << 22  # int32 in a pool for graphs; a new pool follows when less than a quarter is left
BLANK = -1  # bits of a sum that hasn't been written
ALIGNED = 4  # int32 in 16 bytes: Triton compiles another kernel for addresses that aren't a multiple of that

LEAST_SCRATCH, MOST_SCRATCH = 1 << 18, 1 << 22  # float32 of a prepared call that a stream keeps, 1 to 16 MiB
NONE = 0  # capture number outside any capture


@dataclass
class Kept:
    """Pool of int32 memory that holds one number before and after every launch: kernels restore what they change.

    Launches on one stream run one after the other and share memory; so do the launches that one capture takes from a
    stream. A graph may run concurrently with anything else, so each capture has its own memory, from a pool that was
    filled outside of the capture; once the pool is used up, each captured launch gets a new tensor and a fill in the
    graph.
    """

    fill: int
    shared: dict[tuple[torch.device, int, bool], tuple[int, torch.Tensor]] = field(default_factory=dict)
    pools: dict[torch.device, list[torch.Tensor]] = field(default_factory=dict)  # graphs keep parts of the old ones
    left: dict[torch.device, int] = field(default_factory=dict)  # free int32 in the last pool

    def take(self, count: int, device: torch.device) -> torch.Tensor:
        """Return at least `count` int32."""
        stream, capture = under_way(device)
        key = device, stream, capture != NONE
        known, found = self.shared.get(key, (NONE, None))
        if capture == NONE and self.left.get(device, 0) < FOR_GRAPHS // 4:
            self.pools.setdefault(device, []).append(lasting(FOR_GRAPHS, self.fill, torch.int32, device))
            self.left[device] = FOR_GRAPHS
        if found is None or known != capture or found.numel() < count:
            found = self._for_graph(count, device) if capture else self._for_stream(count, device)
            if found is None:
                return self.new(count, device)
            self.shared[key] = capture, found
        return found

    def new(self, count: int, device: torch.device) -> torch.Tensor:
        """Return a new tensor that nothing else uses."""
        return torch.full((count,), self.fill, dtype=torch.int32, device=device)

    def _for_stream(self, count: int, device: torch.device) -> torch.Tensor:
        return lasting(max(next_power_of_2(count), LEAST), self.fill, torch.int32, device)

    def _for_graph(self, count: int, device: torch.device) -> torch.Tensor | None:
        count = max(ALIGNED, next_power_of_2(count))
        if count > self.left.get(device, 0):
            return None
        self.left[device] -= count
        return self.pools[device][-1][self.left[device] :][:count]


def lasting(count: int, fill: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a filled tensor [count] that is kept for the life of the process: kernels may use it at any time.

    Another thread allocates it: an allocation of this one may go into the private pool of a CUDA graph, for example
    while torch.compile warms one up.
    """

    def make() -> torch.Tensor:
        found = torch.full((count,), fill, dtype=dtype, device=device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # before other streams use it
        return found

    found = in_another_thread(make)
    _forever.append(found)
    return found


def in_another_thread(make: Callable[[], T]) -> T:
    """Return what a new thread makes, whose allocations go into no private pool."""
    with ThreadPoolExecutor(1) as thread:
        try:
            made = thread.submit(make)
        except RuntimeError:  # at the end of the process no thread can be started
            return make()
        return made.result()


_forever: list[torch.Tensor] = []
_counters, _blanks = Kept(0), Kept(BLANK)


def counters(count: int, device: torch.device) -> torch.Tensor:
    """Return at least `count` int32 zeros. The kernel that counts in them resets them to zero."""
    return _kept(_counters, count, device)


def blanks(count: int, device: torch.device) -> torch.Tensor:
    """Return at least `count` float32 with all bits set, a NaN that no sum has; kernels that read sums restore it."""
    return _kept(_blanks, count, device).view(torch.float32)


def _kept(pool: Kept, count: int, device: torch.device) -> torch.Tensor:
    """Return memory of a pool; in a planned call what stands for that of the stream on which it will run."""
    planned = program.current()
    if planned is not None:
        return planned.take_kept(partial(_kept, pool, count), count)
    return pool.take(count, device) if device.type == "cuda" else pool.new(count, device)


def constant(find: program.Find, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return find(device), a tensor [count] that is kept for a device; in a planned call what stands for it."""
    planned = program.current()
    return find(device) if planned is None else planned.take_kept(find, count, dtype)


class Scratch:
    """Scratch memory of the calls on one device, which its streams keep, so that a prepared call allocates none.

    A call has a memory for itself from `take` to `give_back`, when its launches are under way: those of the stream's
    next call run after them. Whatever is captured allocates its own, since a graph runs beside anything else.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.free: dict[int, list[torch.Tensor]] = {}  # by stream

    def take(self, stream: int, num_floats: int) -> torch.Tensor:
        """Return at least num_floats float32, of at most MOST_SCRATCH. stream: the current one.

        They hold what a call before left there: the call's launches write whatever they read, and nobody resets it.
        """
        try:
            found = self.free[stream].pop()
        except (KeyError, IndexError):  # the stream's first call, or more threads at once than before
            return self._new(num_floats)
        return found if found.numel() >= num_floats else self._new(num_floats)

    def give_back(self, stream: int, memory: torch.Tensor) -> None:
        """Let the stream's next call have what `take` returned."""
        self.free.setdefault(stream, []).append(memory)

    def _new(self, num_floats: int) -> torch.Tensor:
        """Allocate memory on the current stream, which is the call's, in another thread: see `lasting`."""
        count = max(LEAST_SCRATCH, next_power_of_2(num_floats))
        current = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

        def make() -> torch.Tensor:
            if current is not None:
                torch.cuda.set_stream(current)  # for good: to restore it would open a context on another GPU
            return torch.empty(count, dtype=torch.float32, device=self.device)

        return in_another_thread(make)


def scratch(device: torch.device) -> Scratch:
    """Return the scratch memory of a device's streams."""
    return _scratch.setdefault(device, Scratch(device))


_scratch: dict[torch.device, Scratch] = {}


def forget_scratch() -> None:
    """Free the scratch memory that no call has at the moment."""
    for found in list(_scratch.values()):
        found.free.clear()


def under_way(device: torch.device) -> tuple[int, int]:
    """Return the current stream and the number of the capture under way on it, or NONE."""
    stream = torch.cuda.current_stream(device).cuda_stream
    if not torch.cuda.is_current_stream_capturing():
        return stream, NONE
    status, number = ctypes.c_int(), ctypes.c_uint64()
    code = _driver().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None
    )
    if code:
        raise RuntimeError(f"cuStreamGetCaptureInfo: expected 0 from the CUDA driver, got {code}")
    return stream, number.value


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")

"""Memory that kernels leave partial sums in, and counters that are zero between launches."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache

import torch

from envoi.gemm.config import power_of_two

LEAST = 1 << 16  # int32 that a stream is given
FOR_GRAPHS = 1 << 22  # int32 of a device, and again when less than a quarter of them is left
BLANK = -1  # bits of a sum that isn't there
ALIGNED = 4  # int32 on 16 bytes, as outside a graph: else a launch in it would need a kernel of its own

NONE = 0  # instead of a capture


@dataclass
class Kept:
    """Memory that every launch finds full of the same number, and leaves so.

    Launches on one stream follow each other and share it, and so do those that one capture takes from a stream. A
    graph may run beside anything, so each has its own, from a pool that was filled outside; when that is used up, each
    launch has its own, with a fill in the graph.
    """

    fill: int
    shared: dict[tuple[torch.device, int, bool], tuple[int, torch.Tensor]] = field(default_factory=dict)
    pools: dict[torch.device, list[torch.Tensor]] = field(default_factory=dict)  # graphs hold parts of the old ones
    left: dict[torch.device, int] = field(default_factory=dict)  # of the last pool

    def take(self, count: int, device: torch.device) -> torch.Tensor:
        """At least `count` int32."""
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
        """Of its own."""
        return torch.full((count,), self.fill, dtype=torch.int32, device=device)

    def _for_stream(self, count: int, device: torch.device) -> torch.Tensor:
        return lasting(max(power_of_two(count), LEAST), self.fill, torch.int32, device)

    def _for_graph(self, count: int, device: torch.device) -> torch.Tensor | None:
        count = max(ALIGNED, power_of_two(count))
        if count > self.left.get(device, 0):
            return None
        self.left[device] -= count
        return self.pools[device][-1][self.left[device] :][:count]


def lasting(count: int, fill: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory for the life of the process, also when more has taken its place: kernels may still be at it.

    By a thread of its own: what this one allocates may be on its way into the memory of a CUDA graph, as when
    torch.compile warms one up.
    """

    def make() -> torch.Tensor:
        found = torch.full((count,), fill, dtype=dtype, device=device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # other streams will use it
        return found

    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(make).result()
    _forever.append(found)
    return found


_forever: list[torch.Tensor] = []
_counters, _blanks = Kept(0), Kept(BLANK)
_floats: dict[tuple[torch.device, int], torch.Tensor] = {}


def counters(count: int, device: torch.device) -> torch.Tensor:
    """At least `count` int32 zeros. The kernel that counts with them leaves zeros again."""
    return _kept(_counters, count, device)


def blanks(count: int, device: torch.device) -> torch.Tensor:
    """At least `count` float32 whose bits are all ones, as no sum's are. Kernels that take sums leave blanks again."""
    return _kept(_blanks, count, device).view(torch.float32)


def _kept(kept: Kept, count: int, device: torch.device) -> torch.Tensor:
    return kept.take(count, device) if device.type == "cuda" else kept.new(count, device)


def floats(count: int, device: torch.device) -> torch.Tensor:
    """`count` float32 of anything, for use within one launch; launches on one stream share them."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.empty(count, dtype=torch.float32, device=device)
    key = device, torch.cuda.current_stream(device).cuda_stream
    if key not in _floats or _floats[key].numel() < count:
        _floats[key] = lasting(power_of_two(count), 0.0, torch.float32, device)
    return _floats[key]


def under_way(device: torch.device) -> tuple[int, int]:
    """The current stream, and the number of the capture that takes from it, or NONE."""
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

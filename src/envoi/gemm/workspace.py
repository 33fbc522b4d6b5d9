"""Memory that kernels leave partial sums in, and counters that are zero between launches."""

import torch

from envoi.gemm.config import power_of_two

NUM_COUNTERS = 1 << 16
NUM_CAPTURED = 1 << 22
NUM_BLANKS = 1 << 18
BLANK = -1  # bits of a sum that isn't there
ALIGNED = 4  # int32 on 16 bytes, as outside a graph: else a launch in it would need a kernel of its own

_counters: dict[tuple[torch.device, int], torch.Tensor] = {}
_floats: dict[tuple[torch.device, int], torch.Tensor] = {}
_blanks: dict[tuple[torch.device, int], torch.Tensor] = {}
_captured: dict[torch.device, tuple[torch.Tensor, int]] = {}
_captured_blanks: dict[torch.device, tuple[torch.Tensor, int]] = {}


def counters(count: int, device: torch.device) -> torch.Tensor:
    """`count` int32 zeros. The kernel that counts with them leaves zeros again.

    Launches on one stream follow each other and share them. A captured graph may run beside anything, so each launch
    in it gets its own, from a pool that was zeroed outside (or, when that is used up, with a fill in the graph).
    """
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    if torch.cuda.is_current_stream_capturing():
        return _for_graph(count, device)
    key = device, torch.cuda.current_stream(device).cuda_stream
    if key not in _counters or _counters[key].numel() < count:
        _counters[key] = torch.zeros(max(count, NUM_COUNTERS), dtype=torch.int32, device=device)
        _captured.setdefault(device, (torch.zeros(NUM_CAPTURED, dtype=torch.int32, device=device), 0))
    return _counters[key]


def _for_graph(count: int, device: torch.device) -> torch.Tensor:
    pool, used = _captured.get(device, (None, 0))
    if pool is None or used + count > pool.numel():
        return torch.zeros(count, dtype=torch.int32, device=device)
    _captured[device] = pool, used + -(-count // ALIGNED) * ALIGNED
    return pool[used : used + count]


def floats(count: int, device: torch.device) -> torch.Tensor:
    """`count` float32 of anything, for use within one launch; launches on one stream share them."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.empty(count, dtype=torch.float32, device=device)
    key = device, torch.cuda.current_stream(device).cuda_stream
    if key not in _floats or _floats[key].numel() < count:
        _floats[key] = torch.empty(power_of_two(count), dtype=torch.float32, device=device)
    return _floats[key]


def blanks(count: int, device: torch.device) -> torch.Tensor | None:
    """`count` float32 whose bits are all ones, as no sum's are. The kernel that takes sums from them leaves blanks
    again; launches share them as they share counters. None in a graph when the pool is used up."""
    if device.type != "cuda":
        return torch.empty(count, dtype=torch.float32, device=device)
    if torch.cuda.is_current_stream_capturing():
        pool, used = _captured_blanks.get(device, (None, 0))
        if pool is None or used + count > pool.numel():
            return None
        _captured_blanks[device] = pool, used + -(-count // ALIGNED) * ALIGNED
        return pool[used : used + count]
    key = device, torch.cuda.current_stream(device).cuda_stream
    if key not in _blanks or _blanks[key].numel() < count:
        _blanks[key] = _blank(max(power_of_two(count), NUM_BLANKS), device)
        _captured_blanks.setdefault(device, (_blank(NUM_CAPTURED, device), 0))
    return _blanks[key]


def _blank(count: int, device: torch.device) -> torch.Tensor:
    return torch.full((count,), BLANK, dtype=torch.int32, device=device).view(torch.float32)

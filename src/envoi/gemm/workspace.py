"""Memory that kernels leave partial sums in, and counters that are zero between launches."""

import torch

from envoi.gemm.config import power_of_two

NUM_COUNTERS = 1 << 16
NUM_CAPTURED = 1 << 22
ALIGNED = 4  # int32 on 16 bytes, as outside a graph: else a launch in it would need a kernel of its own

_counters: dict[tuple[torch.device, int], torch.Tensor] = {}
_floats: dict[tuple[torch.device, int], torch.Tensor] = {}
_captured: dict[torch.device, tuple[torch.Tensor, int]] = {}


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

"""Named ranges in profilers' timelines: `envoi.route`, `envoi.permute`, `envoi.L1`, `envoi.L2`, `envoi.combine`, ..

For few tokens on Hopper permute is a part of L1 (`envoi.ops.moe.decode`). Where L1 and L2 are one launch they are
one range, `envoi.L1 and L2`. Recorded when a profiler of torch runs in this thread
(`torch.profiler`, `torch.autograd.profiler.emit_nvtx`), and with ENVOI_NVTX=1 as NVTX ranges for Nsight
Systems. A compiler never traces them, because it doesn't trace into operators. They mark host time, so a CUDA graph
holds none of them.
"""

from contextlib import AbstractContextManager, nullcontext

import torch

from envoi import env

NVTX = env.nvtx()
_NOTHING = nullcontext()


def span(name: str) -> AbstractContextManager:
    """Return a context manager that records a named range; it does nothing without a profiler."""
    if torch.autograd._profiler_enabled():  # pyright: ignore[reportPrivateImportUsage]
        return torch.profiler.record_function(f"envoi.{name}")
    return torch.cuda.nvtx.range(f"envoi.{name}") if NVTX else _NOTHING

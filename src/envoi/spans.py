"""Named ranges in profilers' timelines: `envoi.route`, `envoi.permute`, `envoi.L1`, `envoi.L2`, `envoi.combine`, ..

They are there when a profiler of torch runs in this thread (`torch.profiler`, `torch.autograd.profiler.emit_nvtx`), and
with ENVOI_NVTX=1 as NVTX ranges for Nsight Systems. Operators aren't traced into, so a compiler never sees them; and
they are the host's, so a CUDA graph holds none of them.
"""

from contextlib import AbstractContextManager, nullcontext

import torch

from envoi import env

NVTX = env.nvtx()
_NOTHING = nullcontext()


def span(name: str) -> AbstractContextManager:
    """A range around what is done inside; nothing where nobody looks."""
    if torch.autograd._profiler_enabled():  # pyright: ignore[reportPrivateImportUsage]
        return torch.profiler.record_function(f"envoi.{name}")
    return torch.cuda.nvtx.range(f"envoi.{name}") if NVTX else _NOTHING

"""Launches of Envoi's kernels at practical sizes: what there is to compile where nothing is launched.

The arguments come from the operator's host path, with tensors that have no memory.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from envoi.runtime import triton_compat
from envoi.runtime.program import Launch

HOPPER, BLACKWELL = ("sm_90",), ("sm_100", "sm_103")
EVERY_ARCH = HOPPER + BLACKWELL
NUM_SMS = 132  # of an H100 or H200

Make = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


@dataclass(frozen=True)
class KernelCase:
    """Launch under a name. about: a line for lists. arches: what the kernel is written for, such as "sm_90"."""

    name: str
    about: str
    arches: tuple[str, ...]
    launch: Callable[[], Launch]


def kernel_key(kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], options: Mapping[str, Any]) -> str:
    """Return a key that launches on Hopper share if they run one compiled kernel."""
    return repr((triton_compat.specialize(kernel, arguments, *HOPPER), options))

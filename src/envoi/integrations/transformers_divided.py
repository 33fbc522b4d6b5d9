"""Experts that transformers divides over processes: expert parallel, tensor parallel.

transformers keeps a divided parameter as a DTensor, and calls a module with each process's part. Float weights can be
divided in any way; blocks of quantised ones belong to factors, so they are divided by experts or not at all.
"""

from typing import Any

import torch


def check_divided(module: Any) -> None:
    """Raise ValueError if a module's quantised weights aren't whole experts beside their own factors."""
    for name, weight in module._parameters.items():
        factors = next((n for n in _factors_of(name) if module._parameters.get(n) is not None), None)
        if factors is None or weight is None:
            continue
        ways, theirs = _ways(weight), _ways(module._parameters[factors])
        if ways and factors.endswith("_scale"):
            raise ValueError(
                f"expected compressed-tensors' experts whole, got {name} divided over processes, which that package "
                "doesn't load: read each rank's experts by envoi.experts.from_checkpoint and run them by "
                "envoi.ExpertParallel"
            )
        cut = next((dim for dim in ways if dim != 0), None)
        if cut is not None or ways != theirs:
            came = f"{name} divided along dimension {cut}" if cut is not None else f"{factors} divided otherwise"
            raise ValueError(
                f"expected quantised experts divided by experts with their factors, if at all, got {came}: choose "
                "expert parallelism, DistributedConfig(.., enable_expert_parallel=True), or ep_size where it has that"
            )


def local_part(x: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a DTensor, which forward gets from it; another tensor unchanged."""
    return getattr(x, "_local_tensor", x)


def without_memory(x: torch.Tensor) -> torch.nn.Parameter:
    """Return a parameter like x that has no memory, divided as x is: transformers sums outputs where one is."""
    empty = torch.empty_like(local_part(x), device="meta")
    if local_part(x) is not x:
        from torch.distributed.tensor import DTensor

        part: Any = x
        empty = DTensor.from_local(
            empty, part.device_mesh, part.placements, run_check=False, shape=x.shape, stride=x.stride()
        )
    return torch.nn.Parameter(empty, requires_grad=False)


def _factors_of(name: str) -> tuple[str, ...]:
    return f"{name}_scale_inv", f"{name}_scale", name.replace("_blocks", "_scales") if "_blocks" in name else "-"


def _ways(x: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions along which a parameter is divided, counted from the front."""
    placements = getattr(x, "placements", ())
    return tuple(p.dim % x.dim() for p in placements if not p.is_replicate())

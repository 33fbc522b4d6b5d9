"""Experts that vLLM's load balancer moves between places and ranks: what Envoi keeps of them goes with them.

vLLM moves rows of a layer's `get_expert_weights`, tensors [E, ..] with a row for an expert's place, in the memory that
captured graphs read. Packed weights that lie over parameters are such rows; others, factors by rows and biases in
float32, are added to them here.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from envoi.ops.moe.op import TENSORS, constants_of, tensors_of
from envoi.quant.bits import as_bytes
from envoi.types import ExpertWeights

_followed: WeakSet[Any] = WeakSet()  # vLLM's layers


def follow(layer: Any, packed: ExpertWeights, names: Mapping[str, Any]) -> None:
    """Let vLLM move what is packed of a layer together with its parameters. Collective.

    Raises RuntimeError if ranks have packed in different forms, since one's kernels don't read the other's experts, or
    if a tensor has no rows by expert.
    """
    expect_agreement(packed, names["get_ep_group"]().cpu_group)
    if layer in _followed:
        return
    own = layer.get_expert_weights

    def weights() -> list[torch.Tensor]:
        theirs = list(own())
        return [*theirs, *beside(packed, theirs)]

    weights()
    layer.get_expert_weights = weights
    _followed.add(layer)


def expect_agreement(packed: ExpertWeights, group: Any) -> None:
    """Raise RuntimeError unless all ranks have packed in the same form. Collective."""
    forms: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(forms, constants_of(packed), group=group)
    if any(form != forms[0] for form in forms):
        raise RuntimeError(
            "Envoi keeps the experts of ranks in different orders, and load balancing would move them: start with "
            f"ENVOI_VLLM=0; {forms}"
        )


def beside(packed: ExpertWeights, moved: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield what is packed, [E, ..] with an expert in a row, but for what lies over tensors that are moved already."""
    places = {(x.data_ptr(), x.numel() * x.itemsize) for x in moved}
    for name, x in zip(TENSORS, tensors_of(packed), strict=True):
        if x is not None and (x.data_ptr(), x.numel() * x.itemsize) not in places:
            yield by_expert(name, x)


def by_expert(name: str, x: torch.Tensor) -> torch.Tensor:
    """View a tensor of experts as [E, ..], each row all memory of an expert, also what lies between its columns."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape[1:], x.stride()[1:], strict=True))
    if x.dim() < 2 or span > x.stride(0) or min(x.stride()) < 0:
        raise RuntimeError(f"Envoi keeps {name} with experts' memory in turns, and load balancing would move it")
    return as_bytes(x).as_strided((len(x), span), (x.stride(0), 1))

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


def take(layer: Any, experts: Any, names: Mapping[str, Any]) -> None:
    """Pack a layer of vLLM's; let its load balancer, if it is on, move what is packed. Then collective.

    experts: Envoi's kernel of the layer, None if this rank runs vLLM's. Raises what `Experts.take` does, and
    RuntimeError if another rank can't pack the layer, or keeps experts in an order that this one's kernels don't read.
    """
    config = getattr(layer if experts is None else experts, "moe_config", None)
    is_balanced = config is not None and config.moe_parallel_config.enable_eplb
    failure = None
    try:
        if experts is not None:
            experts.take(layer)
    except Exception as error:
        if not is_balanced:
            raise
        failure = error
    if not is_balanced:
        return
    packed = experts.packed if experts is not None and experts.is_moved else None
    expect_agreement(packed, failure, names["get_ep_group"]().cpu_group)
    if packed is not None:
        follow(layer, packed)


def expect_agreement(packed: ExpertWeights | None, failure: Exception | None, group: Any) -> None:
    """Raise on all ranks if one couldn't pack, or if they have packed in different forms. Collective.

    packed: None if nothing has to move but parameters in vLLM's order. failure: this rank's, raised again.
    """
    form = None if packed is None else constants_of(packed)
    why = "" if failure is None else f"{type(failure).__name__}: {failure}"
    ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(ranks, (form, why), group=group)
    if failure is not None:
        raise failure
    for rank, (_, why) in enumerate(ranks):
        if why:
            raise RuntimeError(f"Envoi can't pack the experts of rank {rank} of {len(ranks)}: {why}")
    forms = [form for form, _ in ranks]
    if any(form != forms[0] for form in forms):
        raise RuntimeError(
            "Envoi keeps the experts of ranks in different orders, and load balancing would move them: start with "
            f"ENVOI_VLLM=0; {forms}"
        )


def follow(layer: Any, packed: ExpertWeights) -> None:
    """Add what is packed of a layer to what vLLM moves. Raises RuntimeError if a tensor has no rows by expert."""
    if layer in _followed:
        return
    own = layer.get_expert_weights

    def weights() -> list[torch.Tensor]:
        theirs = list(own())
        return [*theirs, *beside(packed, theirs)]

    weights()
    layer.get_expert_weights = weights
    _followed.add(layer)


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

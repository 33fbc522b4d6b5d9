"""Packed weights in the memory of those that they were packed from."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from envoi.types import ExpertWeights, Matrix, QuantTensor


def over(experts: ExpertWeights, stored: Sequence[Matrix]) -> ExpertWeights:
    """Move packed weights into the memory of those that they were packed from, gate_up and down, where they fit."""

    def moved(packed: Matrix, given: Matrix) -> Matrix:
        if isinstance(packed, torch.Tensor) and isinstance(given, torch.Tensor):
            return _moved(packed, given)
        if isinstance(packed, QuantTensor) and isinstance(given, QuantTensor):
            return replace(packed, values=_moved(packed.values, given.values), sf=_moved(packed.sf, given.sf))
        return packed

    gate_up, down = map(moved, (experts.gate_up, experts.down), stored)
    return replace(experts, gate_up=gate_up, down=down)


def _moved(x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    if x.data_ptr() == place.data_ptr() or not place.is_contiguous() or not x.is_contiguous():
        return x
    if (x.numel() * x.itemsize, x.device) != (place.numel() * place.itemsize, place.device):
        return x
    with torch.no_grad():
        return place.detach().view(torch.uint8).view(-1).view(x.dtype).view(x.shape).copy_(x)

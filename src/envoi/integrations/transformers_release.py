"""Release of the experts' weights of a transformers model once Envoi has packed them."""

from typing import Any, NamedTuple

import torch

from envoi.integrations import packings
from envoi.integrations.transformers_divided import local_part, without_memory
from envoi.ops.moe.op import tensors_of
from envoi.types import ExpertWeights


class Released(NamedTuple):
    """Packed experts of a module whose own weights are gone, and the format that was chosen for them."""

    format: str
    experts: ExpertWeights


def release(module: Any, weights: packings.Weights, recipe: packings.Recipe, format: str) -> int:
    """Keep a module's packed experts and free its own tensors where those aren't the packed ones; return the bytes
    freed."""
    experts = packings.hand_over(weights, recipe)
    kept = {x.untyped_storage().data_ptr() for x in tensors_of(experts) if x is not None}
    freed = 0
    for name, x in list(module._parameters.items()):
        own = None if x is None else local_part(x)
        if x is None or own is None or not any(own is weight for weight in weights):
            continue
        if own.untyped_storage().data_ptr() not in kept:
            freed += own.nbytes
            module._parameters[name] = without_memory(x)
    module._envoi_released = Released(format, experts)
    module.envoi_alone = True  # no other implementation has weights to read
    if freed:
        module.register_state_dict_pre_hook(_refuse)
    return freed


def _refuse(module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
    raise ValueError(
        f"state_dict: expected a model with its own weights, got one whose experts ({prefix.rstrip('.')}) were "
        "released to Envoi; save the model before, or load it again"
    )

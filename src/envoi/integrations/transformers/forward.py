"""Calls of experts modules: `experts_forward` runs one through an operator that packs its weights at its first call."""

import warnings
from typing import Any

import torch

from envoi.integrations import packings
from envoi.integrations.packings import Recipe, Weights
from envoi.integrations.transformers import modules
from envoi.integrations.transformers.modules import (
    Released,
    activation_of,
    format_for,
    is_experts,
    local_part,
    module_weights,
    own_weights,
    released,
    weight_block,
)
from envoi.ops.moe import choose, moe
from envoi.ops.moe.op import empty_out, tensors_of
from envoi.runtime.custom_op import operator
from envoi.types import ExpertWeights, Routing

HALF = (torch.bfloat16, torch.float16)


def experts_forward(
    module: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    format: str = "bf16",
) -> torch.Tensor:
    """Run an experts module by Envoi: transformers calls this in place of the module's forward.

    hidden_states [M, H] bf16 or fp16, or fp32 where the weights are 16-bit or under autocast; top_k_index [M, k] int64
    (num_experts = not on this rank), top_k_weights [M, k] float -> [M, H] in the dtype of hidden_states. Tokens and
    weights are rounded to bf16 (fp16's own range and precision aren't kept), sums are float32.
    Raises ValueError for experts that Envoi can't run, for an fp32 model without autocast, and where a gradient would
    be lost.
    """
    recipe = recipe_of(module, format)
    weights = module_weights(module)
    refuse_gradients(hidden_states, top_k_weights, *weights)
    _check_dtype(hidden_states, weights)
    kept = released(module)
    if kept is not None:
        return _run(hidden_states, top_k_weights, top_k_index, kept.experts)
    *rest, rows, columns = recipe
    return _experts(
        hidden_states, top_k_weights, top_k_index, *weights, *rest, not _made_anew(module), rows, columns
    )  # fmt: skip


def packed_experts(module: torch.nn.Module, format: str = "bf16") -> ExpertWeights:
    """Return the module's weights packed in a format; kept until they are freed or change (see the table above).

    Raises ValueError for anything but a module of experts, such as a whole model, and for experts that Envoi can't run.
    """
    if not is_experts(module):
        raise ValueError(f"module: expected an experts module of transformers, got {type(module).__name__}")
    recipe = recipe_of(module, format)
    kept = released(module)
    return packings.packed(own_weights(module), recipe) if kept is None else kept.experts


def release_module(module: Any, format: str) -> int:
    """Keep a module's packed experts and free its own tensors where those aren't the packed ones; return the bytes
    freed."""
    weights = own_weights(module)
    experts = packings.hand_over(weights, recipe_of(module, format))
    kept = {x.untyped_storage().data_ptr() for x in tensors_of(experts) if x is not None}
    freed = 0
    for name, x in list(module._parameters.items()):
        own = None if x is None else local_part(x)
        if x is None or own is None or not any(own is weight for weight in weights):
            continue
        if own.untyped_storage().data_ptr() not in kept:
            freed += own.nbytes
            module._parameters[name] = _without_memory(x)
    module._envoi_released = Released(format, experts)
    module.envoi_alone = True  # no other implementation has weights to read
    if freed:
        module.register_state_dict_pre_hook(_refuse_state)
    return freed


def _without_memory(x: torch.Tensor) -> torch.nn.Parameter:
    """Return a parameter like x that has no memory, divided as x is: transformers sums outputs where one is."""
    empty = torch.empty_like(local_part(x), device="meta")
    if local_part(x) is not x:
        from torch.distributed.tensor import DTensor

        part: Any = x
        empty = DTensor.from_local(
            empty, part.device_mesh, part.placements, run_check=False, shape=x.shape, stride=x.stride()
        )
    return torch.nn.Parameter(empty, requires_grad=False)


def _refuse_state(module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
    raise ValueError(
        f"state_dict: expected a model with its own weights, got one whose experts ({prefix.rstrip('.')}) were "
        "released to Envoi; save the model before, or load it again"
    )


def refuse_gradients(*inputs: torch.Tensor | None) -> None:
    """Raise ValueError if grad mode is on and one of the inputs requires grad."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        raise ValueError(
            "expected inputs and weights that need no gradient, since Envoi has no backward; got some that require "
            "grad, with grad mode on: for inference call the model under torch.inference_mode() or torch.no_grad(), "
            "for training choose experts_implementation='grouped_mm'"
        )


def _check_dtype(hidden_states: torch.Tensor, weights: Weights) -> None:
    if (
        hidden_states.dtype in HALF
        or (hidden_states.dtype == torch.float32 and weights.gate_up.dtype in HALF)
        or (hidden_states.dtype == torch.float32 and weights.gate_up_sf is not None)
        or torch.is_autocast_enabled(hidden_states.device.type)
    ):
        return
    raise ValueError(
        f"hidden_states: expected bfloat16 or float16, got {hidden_states.dtype}, with weights in "
        f"{weights.gate_up.dtype} and no autocast; load the model with dtype=torch.bfloat16, or call it under "
        "torch.autocast"
    )


def recipe_of(module: Any, format: str) -> Recipe:
    """Return how a module's weights are packed in a format; ValueError as `packed_experts`."""
    layout = "concat" if module.is_concatenated else "interleaved"
    activation, limit, _ = activation_of(module)
    sides = weight_block(module) or (0, 0)
    return Recipe(
        format_for(module, format), activation, limit, layout, module.is_transposed, modules.requantize, *sides
    )


def _made_anew(module: Any) -> bool:
    """Return True if the module's weight tensors are made anew for each call: by a parametrization or by offloading."""
    hook = module.__dict__.get("_hf_hook")
    return "parametrizations" in module._modules or getattr(hook, "offload", False)


def _experts_flops(hidden_states, topk_weights, topk_ids, gate_up, down, *arguments):
    return 2 * topk_ids.numel() * (gate_up[0].numel() + down[0].numel())


@operator("transformers_experts", empty_out, _experts_flops)
def _experts(
    hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor,
    gate_up: torch.Tensor, down: torch.Tensor, gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None,
    gate_up_sf: torch.Tensor | None, down_sf: torch.Tensor | None,
    format: str, activation: str, swiglu_limit: float | None, gate_up_layout: str, transposed: bool,
    requantize: bool, keep: bool, block_rows: int = 0, block_columns: int = 0,
) -> torch.Tensor:  # fmt: skip
    # The packing is looked up in the operator: compiled code runs it at each call, with the tensors of that call.
    weights = Weights(gate_up, down, gate_up_bias, down_bias, gate_up_sf, down_sf)
    block = block_rows, block_columns
    recipe = Recipe(format, activation, swiglu_limit, gate_up_layout, transposed, requantize, *block)
    if keep:
        experts = packings.packed(weights, recipe)
    else:
        _warn_of_packing()
        experts = packings.pack_weights(weights, recipe)
    return _run(hidden_states, topk_weights, topk_ids, experts)


def _run(
    hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, experts: ExpertWeights
) -> torch.Tensor:
    if topk_ids.device.type == "cpu" or not choose.has_kernels(topk_ids.device):
        # The kernels mask these themselves.
        topk_ids = topk_ids.masked_fill(topk_ids >= experts.num_local_experts, -1)
    routing = Routing(topk_weights, topk_ids, experts.num_local_experts)
    return moe(hidden_states.to(torch.bfloat16), routing, experts).to(hidden_states.dtype)


_warned = False


def _warn_of_packing() -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            "experts are packed again in every call, because their weights are: by a parametrization (LoRA with "
            "target_parameters; merge_and_unload() makes it last) or by offloading to a CPU or disk",
            stacklevel=2,
        )

"""Adapter that runs transformers' experts by Envoi: `from_pretrained(..., experts_implementation="envoi")`.

    import envoi.integrations.transformers
    envoi.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, experts_implementation="envoi")

"envoi" runs the experts in bf16, "envoi_fp8_row", "envoi_fp8_block128", "envoi_mxfp8", "envoi_mxfp4" (4-bit weights,
bf16 activations) and "envoi_mxfp4_mxfp8" in those formats; `model.set_experts_implementation(...)` switches. Weights
are packed at a module's first call; the packing is kept until the originals are freed.
`torch.compile(fullgraph=True)`, `torch.export` and `generate` with a static cache trace through one operator, which
checks at each call that its packing still fits the weights:

| what happens to the weights between two calls            | the next call, compiled or not           |
|----------------------------------------------------------|------------------------------------------|
| in-place operators, optimizer steps, `load_state_dict`   | packs again                              |
| a new parameter; `p.data = x`; `model.to(...)`           | packs again                              |
| in-place operators through `p.data` (`p.data.mul_(2)`)   | stale: torch counts no such write        |
| in-place operators on inference tensors                  | stale: torch counts none of their writes |
| anything, while CUDA graphs are replayed                 | stale: a replay calls nothing            |
| a parametrization (LoRA by `target_parameters`), offload | packs every time, and warns once         |

After a change that makes a packing stale, call `refresh(model)`. Like a call that notices a change, it packs into the
memory of the old packing where that fits, so that CUDA graphs read the new weights: `generate` with a static cache
replays graphs, and its first call, outside of them, packs again. In "envoi_mxfp8" and "envoi_mxfp4_mxfp8" graphs have
to be captured anew if the weights had no scale factor above 2 and have one now.

There is no backward: an input or weight that requires grad, with grad mode on, is an error.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from envoi.integrations import packings
from envoi.integrations.packings import Recipe, Weights
from envoi.moe import layer, moe
from envoi.moe.oracle import activate
from envoi.quant.formats import FORMATS
from envoi.runtime.custom_op import operator
from envoi.types import ExpertWeights, Routing

# Attributes that modules' gates read besides their input.
GATE_ATTRIBUTES = ("act_fn", "alpha", "limit", "swiglu_alpha", "swiglu_limit")
HALF = (torch.bfloat16, torch.float16)


def implementation_name(format: str) -> str:
    """Return the name that selects a format: "bf16" -> "envoi", "mxfp4" -> "envoi_mxfp4"."""
    return "envoi" if format == "bf16" else f"envoi_{format}"


IMPLEMENTATIONS = tuple(map(implementation_name, FORMATS))


def register() -> None:
    """Register Envoi's names with transformers (5.17 to 5.23). Calling it again changes nothing.

    From then on `from_config`, `from_pretrained` (before it reads weights) and `set_experts_implementation` raise
    ValueError for a model in which one of the names would be without effect or fail at the first call.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    from envoi.integrations import transformers_checks

    for format in FORMATS:
        ALL_EXPERTS_FUNCTIONS.register(implementation_name(format), partial(experts_forward, format=format))
    transformers_checks.install()


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
    recipe = _recipe(module, format)
    weights = module_weights(module)
    refuse_gradients(hidden_states, top_k_weights, *weights)
    _check_dtype(hidden_states, weights)
    return _experts(hidden_states, top_k_weights, top_k_index, *weights, *recipe, not _made_anew(module))


def packed_experts(module: torch.nn.Module, format: str = "bf16") -> ExpertWeights:
    """Return the module's weights packed in a format; kept until they are freed or change (see the table above)."""
    recipe = _recipe(module, format)
    return packings.packed(module_weights(module), recipe)


def refresh(model: torch.nn.Module) -> None:
    """Pack the model's experts again, as far as they are packed: needed after a change that torch doesn't count."""
    for module in model.modules():
        if is_experts(module) and not unserved(module):
            packings.refresh(module_weights(module))


def is_experts(module: Any) -> bool:
    """True for a module whose forward transformers looks up by `experts_implementation`."""
    return hasattr(type(module), "_apply_gate") and "has_gate" in vars(module)


def unserved(module: Any) -> str | None:
    """Return the reason why Envoi can't run an experts module, or None if it can."""
    try:
        _activation(module)
    except ValueError as error:
        return str(error).removeprefix(f"{type(module).__name__}: ")
    return None


def module_weights(module: Any) -> Weights:
    """Return the tensors of an experts module that has a gate, in the module's layout."""
    if not module.has_bias:
        return Weights(module.gate_up_proj, module.down_proj)
    return Weights(module.gate_up_proj, module.down_proj, module.gate_up_proj_bias, module.down_proj_bias)


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
        or torch.is_autocast_enabled(hidden_states.device.type)
    ):
        return
    raise ValueError(
        f"hidden_states: expected bfloat16 or float16, got {hidden_states.dtype}, with weights in "
        f"{weights.gate_up.dtype} and no autocast; load the model with dtype=torch.bfloat16, or call it under "
        "torch.autocast"
    )


def _recipe(module: Any, format: str) -> Recipe:
    layout = "concat" if module.is_concatenated else "interleaved"
    return Recipe(format, *_activation(module), layout, module.is_transposed)


def _made_anew(module: Any) -> bool:
    """Return True if the module's weight tensors are made anew for each call: by a parametrization or by offloading."""
    # A failing getattr on a module takes ten times as long as a look-up in its dicts.
    hook = module.__dict__.get("_hf_hook")
    return "parametrizations" in module._modules or getattr(hook, "offload", False)


def _experts_fake(hidden_states, *arguments):
    return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)


def _experts_flops(hidden_states, topk_weights, topk_ids, gate_up, down, *arguments):
    return 2 * topk_ids.numel() * (gate_up[0].numel() + down[0].numel())


@operator("transformers_experts", _experts_fake, _experts_flops)
def _experts(
    hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor,
    gate_up: torch.Tensor, down: torch.Tensor, gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None,
    format: str, activation: str, swiglu_limit: float | None, gate_up_layout: str, transposed: bool, keep: bool,
) -> torch.Tensor:  # fmt: skip
    # The packing is looked up in the operator: compiled code runs it at each call, with the tensors of that call.
    weights = Weights(gate_up, down, gate_up_bias, down_bias)
    recipe = Recipe(format, activation, swiglu_limit, gate_up_layout, transposed)
    if keep:
        experts = packings.packed(weights, recipe)
    else:
        _warn_of_packing()
        experts = packings.pack_weights(weights, recipe)
    if topk_ids.device.type == "cpu" or not layer.has_kernels(topk_ids.device):
        # The kernels mask these themselves.
        topk_ids = topk_ids.masked_fill(topk_ids >= experts.num_local_experts, -1)
    routing = Routing(topk_weights.float(), topk_ids.to(torch.int32), experts.num_local_experts)
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


def _activation(module: Any) -> tuple[str, float | None]:
    """Return `recognise_activation`, cached on the module until one of GATE_ATTRIBUTES changes."""
    known = module.__dict__.get("_envoi_activation")
    if known is None or not all(getattr(module, name) == value for name, value in known[2]):
        known = _remember_activation(module)
    return known[0], known[1]


@torch.compiler.disable(reason="the activation isn't known yet: call the model, or select Envoi, before compiling")
def _remember_activation(module: Any) -> tuple[str, float | None, tuple]:
    _check_structure(module)
    # Modules have no ==, so that for act_fn it means `is`.
    gate = tuple((name, getattr(module, name)) for name in GATE_ATTRIBUTES if hasattr(module, name))
    module._envoi_activation = known = (*recognise_activation(module), gate)
    return known


def _check_structure(module: Any) -> None:
    reason = None
    if hasattr(module, "gate_up_proj_scale_inv") or hasattr(module, "up_proj_scale_inv"):
        reason = (
            "expected bf16, fp16 or fp32 weights, got quantised ones; load with "
            "quantization_config=FineGrainedFP8Config(dequantize=True)"
        )
    elif not module.has_gate:
        reason = "expected gated experts (gate_up_proj), got a plain up_proj"
    elif getattr(module, "has_post_expert_norm", False):
        reason = "expected experts whose outputs are summed as they are, got a norm after each"
    if reason is not None:
        raise ValueError(f"{type(module).__name__}: {reason}")


@torch.no_grad()
def recognise_activation(module: Any) -> tuple[str, float | None]:
    """Find which of Envoi's activations the module computes, and its clamp, by trying it on numbers.

    Any clamp is found: it is read off the output for a huge `up`. Raises ValueError if the module computes another.
    """
    apply_gate: Callable[[torch.Tensor], torch.Tensor] = module._apply_gate

    def theirs(interleaved: torch.Tensor) -> torch.Tensor:
        if module.is_concatenated:
            interleaved = torch.cat((interleaved[:, 0::2], interleaved[:, 1::2]), dim=1)
        return apply_gate(interleaved)

    # A gate below every clamp, with ups of 0, 1 and above every clamp: up to its clamp the activation is linear in up.
    pairs = torch.tensor([[2.0**-10, 0.0], [2.0**-10, 1.0], [2.0**-10, 1e30]], dtype=torch.float64, device="cpu")
    huge = float(theirs(pairs)[2])
    for activation in ("swiglu", "swiglu_oai"):
        zero, one, _ = activate(pairs, activation, None).flatten().tolist()
        limit = _rounded((huge - zero) / (one - zero), module)
        probe = _gates_and_ups(limit or 12.0)
        if torch.allclose(activate(probe, activation, limit), theirs(probe).double(), rtol=1e-4, atol=1e-5):
            return activation, limit
    raise ValueError(
        f"{type(module).__name__}: expected the activation swiglu (silu(gate) * up) or swiglu_oai, "
        "with or without a clamp; got another"
    )


def _rounded(limit: float, module: Any) -> float | None:
    """Return the clamp measured as `limit`: the module's own number if that is near, None if there is no clamp."""
    if not 0 < limit < 1e29:
        return None
    for own in (getattr(module, name, None) for name in ("limit", "swiglu_limit")):
        if isinstance(own, (int, float)) and abs(own - limit) <= 1e-4 * limit:
            return float(own)
    return float(f"{limit:.5g}")


def _gates_and_ups(limit: float) -> torch.Tensor:
    """Make interleaved float64 pairs [n, 2] of every gate with every up, from far below a clamp to far above it."""
    side = torch.linspace(0.0, 4.0, 41, dtype=torch.float64, device="cpu") * limit
    side = torch.cat((side, torch.linspace(0.01, 12.0, 40, dtype=torch.float64, device="cpu")))
    side = torch.cat((side, -side))
    return torch.cartesian_prod(side, side)

"""Experts modules of transformers: how they are recognised, their weights, formats and activation, and the reason why
Envoi can't run one.

Attributes that Envoi adds to a module: `_envoi_released`, a `Released`; `_envoi_activation`, what `activation_of`
found; `envoi_alone`, True if no other implementation can read its weights.
"""

import inspect
import re
from collections.abc import Container, Iterator
from typing import Any, NamedTuple

import torch

from envoi.checkpoints.keys import REFUSED
from envoi.integrations.packings import Weights
from envoi.integrations.transformers.activation import recognise_activation
from envoi.ops.moe.packing import AUTO, check_sizes, format_of, padding_of
from envoi.quant.formats import FORMATS
from envoi.quant.regroup import as_stored
from envoi.types import ExpertWeights, QuantTensor

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# What the names of factors end in: those of transformers' FP8Experts, and those that Envoi's loader adds.
STORED_FACTORS = "_scale"
FACTORS = ("_scale_inv", STORED_FACTORS)
# Attributes that modules' gates read besides their input.
GATE_ATTRIBUTES = ("act_fn", "alpha", "limit", "swiglu_alpha", "swiglu_limit", "gate_softcap", "up_softcap")
# What transformers may say of a module's structure, and the parameters that it may have: others would be left out.
KNOWN_FLAGS = {"experts_class", "experts_interface", "has_gate", "has_bias", "is_transposed", "is_concatenated"}
PARAMETERS = {
    name + end
    for name in ("gate_up_proj", "up_proj", "down_proj")
    for end in ("", "_bias", "_blocks", "_scales", *FACTORS, "_activation_scale")
}
OF_OTHERS = "parametrizations."  # of peft, which change the weights before a call

requantize = False  # argument of the last `register`


class Released(NamedTuple):
    """Packed experts of a module whose own weights are gone, and the format that was chosen for them."""

    format: str
    experts: ExpertWeights


def implementation_name(format: str) -> str:
    """Return the name that selects a format: "bf16" -> "envoi", "mxfp4" -> "envoi_mxfp4"."""
    return "envoi" if format == "bf16" else f"envoi_{format}"


FORMAT_OF = {implementation_name(format): format for format in FORMATS}
IMPLEMENTATIONS = tuple(FORMAT_OF)


def is_experts(module: Any) -> bool:
    """Return True for a module whose forward transformers looks up by `experts_implementation`."""
    return hasattr(type(module), "_apply_gate") and "has_gate" in vars(module)


def released(module: torch.nn.Module) -> Released | None:
    """Return what is kept of a module whose own weights were freed, else None."""
    # A failing getattr on a module takes ten times as long as a look-up in its dicts.
    return module.__dict__.get("_envoi_released")


def served(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield path and module of the experts for which Envoi is chosen."""
    for path, module in model.named_modules():
        if is_experts(module) and module.config._experts_implementation in IMPLEMENTATIONS:  # pyright: ignore
            yield path, module


def loads_as(model: Any, formats: Container[str]) -> bool:
    """Tell whether Envoi's names are chosen for all parts of a model, and only those of these formats."""
    chosen = [name for name in model.get_experts_implementation().values() if name is not None]
    return bool(chosen) and all(name in FORMAT_OF and FORMAT_OF[name] in formats for name in chosen)


def refusal(chosen: str | None) -> str:
    """Return why an implementation can't run experts that Envoi has loaded as they are stored."""
    return (
        f"expected one of {', '.join(map(repr, IMPLEMENTATIONS))} for experts that Envoi has loaded as they are "
        f"stored, got {chosen!r}: load the model again to choose that"
    )


def unserved(module: Any, format: str = "bf16") -> str | None:
    """Return the reason why Envoi can't run an experts module in a format, or None if it can. Reads no weights."""
    try:
        stored = activation_of(module)[2]
        chosen = format_for(module, format)
        if chosen not in (AUTO, stored):
            check_sizes(*_sizes(module), FORMATS[chosen])
    except ValueError as error:
        return str(error).removeprefix(f"{type(module).__name__}: ")
    return None


def module_weights(module: Any) -> Weights:
    """Return the tensors of an experts module in its layout; without a gate, up takes the place of gate_up."""
    if hasattr(module, "gate_up_proj_blocks"):
        return Weights(
            module.gate_up_proj_blocks, module.down_proj_blocks, module.gate_up_proj_bias, module.down_proj_bias,
            module.gate_up_proj_scales, module.down_proj_scales,
        )  # fmt: skip
    ending = next((end for end in FACTORS if f"gate_up_proj{end}" in module._parameters), "")
    factors = (getattr(module, name + ending) if ending else None for name in ("gate_up_proj", "down_proj"))
    if not module.has_gate:
        factors = module._parameters.get("up_proj_scale_inv"), module._parameters.get("down_proj_scale_inv")
        biases = (module.up_proj_bias, module.down_proj_bias) if module.has_bias else (None, None)
        return Weights(module.up_proj, module.down_proj, *biases, *factors)
    if not module.has_bias:
        return Weights(module.gate_up_proj, module.down_proj, None, None, *factors)
    return Weights(module.gate_up_proj, module.down_proj, module.gate_up_proj_bias, module.down_proj_bias, *factors)


def own_weights(module: Any) -> Weights:
    """Return `module_weights`, of parameters that are divided over processes this process's part."""
    gate_up, down, *rest = module_weights(module)
    return Weights(local_part(gate_up), local_part(down), *(None if x is None else local_part(x) for x in rest))


def local_part(x: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a DTensor, which forward gets from it; another tensor unchanged."""
    return getattr(x, "_local_tensor", x)


def stored_format(module: Any) -> str | None:
    """Return the format that holds a module's quantised weights exactly as far as shapes and dtypes show, None if they
    are floats.

    Raises ValueError if there is no such format, or if weights and factors aren't divided alike over processes.
    """
    check_divided(module)
    weights = own_weights(module)
    if weights.gate_up_sf is None or weights.down_sf is None:
        return None
    block = weight_block(module)
    parts = 2 if module.has_gate and module.is_concatenated else 1
    gate_up = _outline(weights.gate_up, weights.gate_up_sf, "gate_up", block, parts)
    down = _outline(weights.down, weights.down_sf, "down", block)
    # The activations of all classes are zero at zero, as "swiglu" is.
    return format_of(gate_up, down, padding_of(gate_up, down, block, "swiglu"))


def weight_block(module: Any) -> tuple[int, int] | None:
    """Return rows and columns of the blocks of a module's FP8 weights; None if its factors are of whole sides, or if
    its weights aren't in FP8."""
    sides = getattr(module, "block_size", None)
    return None if sides is None or own_weights(module).down.dtype != torch.float8_e4m3fn else (sides[0], sides[1])


def _outline(
    weight: torch.Tensor, sf: torch.Tensor, name: str, block: tuple[int, int] | None, parts: int = 1
) -> QuantTensor:
    return as_stored(weight.detach().to("meta"), sf.detach().to("meta"), name, None, block, parts)


def _sizes(module: Any) -> tuple[int, int]:
    """Return hidden and intermediate size of a module's weights."""
    weights = own_weights(module)
    down = weights.down
    if weights.down_sf is not None:
        down = _outline(down, weights.down_sf, "down", weight_block(module))
    hidden, intermediate = down.shape[-2:]
    return (intermediate, hidden) if module.is_transposed else (hidden, intermediate)


def format_for(module: Any, format: str) -> str:
    """Return the format to pack in: for quantised weights and "bf16" the one that they are stored in.

    Raises ValueError for another one that doesn't hold them.
    """
    kept = released(module)
    if kept is not None and kept.format != format:
        raise ValueError(
            f"expected {implementation_name(kept.format)!r} for weights that were released in this format, got "
            f"{implementation_name(format)!r}: load the model again to choose that"
        )
    stored = activation_of(module)[2]
    if stored is None:
        return format
    if format == "bf16":
        return AUTO
    scheme = FORMATS[stored].weights
    if FORMATS[format].weights != scheme and not requantize:
        fit = [implementation_name(other.name) for other in FORMATS.values() if other.weights == scheme]
        raise ValueError(
            f"expected {' or '.join(map(repr, ['envoi', *fit]))} for weights that are stored so, got "
            f"{implementation_name(format)!r}; register(requantize=True) rounds them again"
        )
    return format


def activation_of(module: Any) -> tuple[str, float | None, str | None]:
    """Return `recognise_activation` and `stored_format`, cached on the module until one of GATE_ATTRIBUTES changes."""
    known = module.__dict__.get("_envoi_activation")
    if known is None or not all(getattr(module, name) == value for name, value in known[3]):
        known = _remember_activation(module)
    return known[0], known[1], known[2]


@torch.compiler.disable(reason="the activation isn't known yet: call the model, or select Envoi, before compiling")
def _remember_activation(module: Any) -> tuple[str, float | None, str | None, tuple]:
    _check_structure(module)
    # Modules have no ==, so that for act_fn it means `is`.
    gate = tuple((name, getattr(module, name)) for name in GATE_ATTRIBUTES if hasattr(module, name))
    module._envoi_activation = known = (*recognise_activation(module), stored_format(module), gate)
    return known


def _check_structure(module: Any) -> None:
    """Raise ValueError for what a module of experts says, or has beside its weights, that Envoi doesn't know."""
    from transformers.integrations.moe import use_experts_implementation

    flags = set(inspect.signature(use_experts_implementation).parameters) - KNOWN_FLAGS
    beside = [name for name, _ in module.named_parameters() if not (name in PARAMETERS or name.startswith(OF_OTHERS))]
    reasons = ["expected experts whose outputs are summed as they are, got a norm after each"] * bool(
        getattr(module, "has_post_expert_norm", False)
    )
    reasons += [
        f"expected experts of a structure that Envoi knows, got {flag}"
        for flag in sorted(flags)
        if vars(module).get(flag)
    ]
    reasons += [f"expected no parameters but the experts' weights, got {name}" for name in beside]
    reasons += [f"{key}: {why}" for key, why in REFUSED.items() if getattr(module.config, key, None)]
    if reasons:
        raise ValueError(f"{type(module).__name__}: {reasons[0]}")


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


def _factors_of(name: str) -> tuple[str, ...]:
    return f"{name}_scale_inv", f"{name}_scale", name.replace("_blocks", "_scales") if "_blocks" in name else "-"


def _ways(x: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions along which a parameter is divided, counted from the front."""
    placements = getattr(x, "placements", ())
    return tuple(p.dim % x.dim() for p in placements if not p.is_replicate())

"""Adapter that runs transformers' experts by Envoi: `from_pretrained(..., experts_implementation="envoi")`.

    import envoi.integrations.transformers
    envoi.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, experts_implementation="envoi")

"envoi" runs the experts in bf16, and quantised ones as they are stored: FP8 with a factor per block or matrix, MXFP4.
"envoi_fp8_row", "envoi_fp8_block128", "envoi_mxfp8", "envoi_mxfp4" and "envoi_nvfp4" (4-bit weights, bf16
activations), "envoi_mxfp4_fp8" and "envoi_mxfp4_mxfp8" run them in those formats;
`model.set_experts_implementation(...)` switches.
`report(model)` says what runs by Envoi, and why not. Weights are packed at a module's first call; packings are kept
until the originals are freed.
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

Weights that are read in place are never stale: bf16 ones whose experts' rows are concatenated, FP8 blocks and rows.
After a change that makes a packing stale, call `refresh(model)`. Like a call that notices a change, it packs into the
memory of the old packing where that fits, so that CUDA graphs read the new weights: `generate` with a static cache
replays graphs, and its first call, outside of them, packs again. In "envoi_mxfp8" and "envoi_mxfp4_mxfp8" graphs have
to be captured anew if the weights had no scale factor above 2 and have one now.

There is no backward: an input or weight that requires grad, with grad mode on, is an error.
"""

import inspect
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from envoi.check import expect_bool
from envoi.checkpoints.keys import REFUSED
from envoi.integrations import packings
from envoi.integrations.packings import Recipe, Weights
from envoi.integrations.transformers_activation import recognise_activation
from envoi.integrations.transformers_divided import check_divided, local_part
from envoi.ops.moe import layer, moe
from envoi.ops.moe.op import empty_out
from envoi.ops.moe.packing import AUTO, check_sizes, format_of, padding_of
from envoi.quant.formats import FORMATS
from envoi.quant.regroup import as_stored
from envoi.runtime.custom_op import operator
from envoi.types import ExpertWeights, QuantTensor, Routing

# What the names of factors end in: those of transformers' FP8Experts, and those that Envoi's loader adds.
STORED_FACTORS = "_scale"
FACTORS = ("_scale_inv", STORED_FACTORS)

if TYPE_CHECKING:
    from envoi.integrations.transformers_report import Report

# Attributes that modules' gates read besides their input.
GATE_ATTRIBUTES = ("act_fn", "alpha", "limit", "swiglu_alpha", "swiglu_limit", "gate_softcap", "up_softcap")
HALF = (torch.bfloat16, torch.float16)
# What transformers may say of a module's structure, and the parameters that it may have: others would be left out.
KNOWN_FLAGS = {"experts_class", "experts_interface", "has_gate", "has_bias", "is_transposed", "is_concatenated"}
PARAMETERS = {
    name + end
    for name in ("gate_up_proj", "up_proj", "down_proj")
    for end in ("", "_bias", "_blocks", "_scales", *FACTORS, "_activation_scale")
}
OF_OTHERS = "parametrizations."  # of peft, which change the weights before a call


def implementation_name(format: str) -> str:
    """Return the name that selects a format: "bf16" -> "envoi", "mxfp4" -> "envoi_mxfp4"."""
    return "envoi" if format == "bf16" else f"envoi_{format}"


FORMAT_OF = {implementation_name(format): format for format in FORMATS}
IMPLEMENTATIONS = tuple(FORMAT_OF)


_requantize = False


def register(requantize: bool = False) -> None:
    """Register Envoi's names with transformers (5.17 to 5.23). Calling it again changes nothing but requantize.

    From then on `from_config`, `from_pretrained` (before it reads weights) and `set_experts_implementation` raise
    ValueError for a model in which one of the names would be without effect or fail at the first call; and gpt-oss's
    MXFP4 and compressed-tensors' FP8 experts are loaded as they are stored, not widened, where one of them is chosen;
    without a GPU so are all FP8 ones of checkpoints that have nothing else in FP8.
    requantize: round stored weights again where a format can't hold their numbers exactly, which is refused else.
    """
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    from envoi.integrations import transformers_checks, transformers_fp8, transformers_fp8_cpu, transformers_mxfp4

    global _requantize
    _requantize = expect_bool("requantize", requantize)
    for format in FORMATS:
        for functions in (ALL_EXPERTS_FUNCTIONS, ALL_FP8_EXPERTS_FUNCTIONS):
            functions.register(implementation_name(format), partial(experts_forward, format=format))
    transformers_checks.install()
    transformers_mxfp4.install()
    transformers_fp8.install()
    transformers_fp8_cpu.install()


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
    released = module.__dict__.get("_envoi_released")
    if released is not None:
        return _run(hidden_states, top_k_weights, top_k_index, released.experts)
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
    recipe = _recipe(module, format)
    released = module.__dict__.get("_envoi_released")
    if released is not None:
        return released.experts
    return packings.packed(own_weights(module), recipe)


def refresh(model: torch.nn.Module) -> None:
    """Pack the model's experts again, as far as they are packed: needed after a change that torch doesn't count."""
    expect_model(model)
    for module in model.modules():
        if is_experts(module) and "_envoi_released" not in vars(module) and not unserved(module):
            packings.refresh(own_weights(module))


def release(model: torch.nn.Module) -> int:
    """Free the experts' own weights of a model for which Envoi is chosen, layer by layer; return the bytes freed.

    Only packed weights are kept, as far as they are copies: FP8 rows and blocks, and bf16 weights with concatenated
    rows, are the module's own memory anyway. From then on the experts run by Envoi in this format alone, and what needs
    the originals is refused: other implementations and formats, `state_dict` and `save_pretrained`, `model.to(...)`,
    and changes of the weights. Experts of compressed-tensors keep theirs, which that package moves at the first call.
    """
    from envoi.integrations import transformers_release

    freed = 0
    expect_model(model)
    for module in model.modules():
        kept = "_envoi_released" in vars(module) or f"down_proj{STORED_FACTORS}" in module._parameters
        if is_experts(module) and not kept:
            config: Any = module.config
            format = FORMAT_OF.get(config._experts_implementation)
            if format is not None:
                recipe = _recipe(module, format)
                freed += transformers_release.release(module, own_weights(module), recipe, format)
    return freed


def report(model: torch.nn.Module) -> "Report":
    """Return what each experts module of a model is stored as, whether Envoi runs it, and why not: print it.

    Reads no weights. `.rows` has a row for each module: `path`; `kind`, its class; `stored`, the format of its weights;
    `chosen`, its experts_implementation; `runs`, True if Envoi runs it; `why` not, else ""; `num_bytes` of its weights;
    `load`, for a module with an `envoi.ExpertParallel`, which rank and expert bound its last calls, else "".
    """
    from envoi.integrations import transformers_report

    expect_model(model)
    return transformers_report.report(model)


def expect_model(model: Any) -> None:
    """Raise ValueError for anything but a module of torch."""
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"model: expected a torch.nn.Module, got {type(model).__name__}")


def is_experts(module: Any) -> bool:
    """Return True for a module whose forward transformers looks up by `experts_implementation`."""
    return hasattr(type(module), "_apply_gate") and "has_gate" in vars(module)


def unserved(module: Any, format: str = "bf16") -> str | None:
    """Return the reason why Envoi can't run an experts module in a format, or None if it can. Reads no weights."""
    try:
        stored = _activation(module)[2]
        chosen = _format(module, format)
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


def stored_format(module: Any) -> str | None:
    """Return the format that holds a module's quantised weights exactly as far as shapes and dtypes show, None if they
    are floats.

    Raises ValueError if there is no such format, or if weights and factors aren't divided alike over processes.
    """
    check_divided(module)
    weights = own_weights(module)
    if weights.gate_up_sf is None or weights.down_sf is None:
        return None
    block = _block(module)
    parts = 2 if module.has_gate and module.is_concatenated else 1
    gate_up = _outline(weights.gate_up, weights.gate_up_sf, "gate_up", block, parts)
    down = _outline(weights.down, weights.down_sf, "down", block)
    # The activations of all classes are zero at zero, as "swiglu" is.
    return format_of(gate_up, down, padding_of(gate_up, down, block, "swiglu"))


def _block(module: Any) -> tuple[int, int] | None:
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
        down = _outline(down, weights.down_sf, "down", _block(module))
    hidden, intermediate = down.shape[-2:]
    return (intermediate, hidden) if module.is_transposed else (hidden, intermediate)


def _format(module: Any, format: str) -> str:
    """Return the format to pack in: for quantised weights and "bf16" the one that they are stored in.

    Raises ValueError for another one that doesn't hold them.
    """
    released = module.__dict__.get("_envoi_released")
    if released is not None and released.format != format:
        raise ValueError(
            f"expected {implementation_name(released.format)!r} for weights that were released in this format, got "
            f"{implementation_name(format)!r}: load the model again to choose that"
        )
    stored = _activation(module)[2]
    if stored is None:
        return format
    if format == "bf16":
        return AUTO
    scheme = FORMATS[stored].weights
    if FORMATS[format].weights != scheme and not _requantize:
        fit = [implementation_name(other.name) for other in FORMATS.values() if other.weights == scheme]
        raise ValueError(
            f"expected {' or '.join(map(repr, ['envoi', *fit]))} for weights that are stored so, got "
            f"{implementation_name(format)!r}; register(requantize=True) rounds them again"
        )
    return format


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


def _recipe(module: Any, format: str) -> Recipe:
    layout = "concat" if module.is_concatenated else "interleaved"
    activation, limit, _ = _activation(module)
    block = _block(module) or (0, 0)
    return Recipe(_format(module, format), activation, limit, layout, module.is_transposed, _requantize, *block)


def _made_anew(module: Any) -> bool:
    """Return True if the module's weight tensors are made anew for each call: by a parametrization or by offloading."""
    # A failing getattr on a module takes ten times as long as a look-up in its dicts.
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
    if topk_ids.device.type == "cpu" or not layer.has_kernels(topk_ids.device):
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


def _activation(module: Any) -> tuple[str, float | None, str | None]:
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

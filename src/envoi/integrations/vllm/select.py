"""vLLM's choice of MoE kernels with Envoi's before its own: `install` wraps the functions that choose.

Each answers with vLLM's name for a kernel that reads weights as they were loaded, and a class; Envoi's is given in its
place. What Envoi doesn't run goes to vLLM's own function, as do errors.
"""

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from envoi import env
from envoi.integrations.lines import say
from envoi.integrations.names import found_names
from envoi.integrations.vllm import loading
from envoi.integrations.vllm.used import ALL, PADDED, SELECTORS

logger = logging.getLogger("vllm.envoi")
# Function that chooses -> vLLM's name for weights as they were loaded.
BACKENDS = {
    "unquantized": ("UnquantizedMoeBackend", "TRITON"), "fp8": ("Fp8MoeBackend", "TRITON"),
    "mxfp8": ("Fp8MoeBackend", "TRITON_MXFP8"), "mxfp4": ("Mxfp4MoeBackend", "XPU"),
    "mxfp4 of DeepSeek-V4": ("Mxfp4MoeBackend", "XPU"), "nvfp4": ("NvFp4MoeBackend", "EMULATION"),
}  # fmt: skip
# Keys of weights and activations that functions without such parameters stand for.
KEYS = {
    "unquantized": (None, None), "mxfp8": ("kMxfp8Static", "kMxfp8Dynamic"), "mxfp4": ("kMxfp4Static", None),
    "mxfp4 of DeepSeek-V4": ("kMxfp4Static", None),
}  # fmt: skip
LAYERS = "vllm.model_executor.layers."  # where the methods are that run whatever kernel is chosen
SHARED = "ipc_cache"  # vLLM's name for loading from a process that keeps processed weights
ALL_GATHER = ("naive", "allgather_reducescatter")
# vLLM's variables that name a kernel.
NAMED_BY = {
    "fp8": ("VLLM_USE_DEEP_GEMM", "VLLM_MOE_USE_DEEP_GEMM", "VLLM_TEST_FORCE_FP8_MARLIN"),
    "nvfp4": ("VLLM_TEST_FORCE_FP8_MARLIN",),
}


def install() -> None:
    """Wrap the functions where they are defined, and wherever a module that is loaded has them by name.

    Raises MovedError, with nothing changed, if this vLLM isn't a known one.
    """
    names = found_names(ALL)
    changes = []
    for oracle, used in SELECTORS.items():
        old = names[used.name]
        enum, member = BACKENDS[oracle]
        new = choosing(oracle, old, getattr(names[enum], member), names)
        loaded = (module for key, module in list(sys.modules.items()) if key.startswith("vllm."))
        changes += [(module, used.name, new) for module in loaded if getattr(module, used.name, None) is old]
    for change in changes:
        setattr(*change)
    loading.install(names)


def choosing(oracle: str, old: Callable, backend: Any, names: Mapping[str, Any]) -> Callable:
    """Wrap one of vLLM's functions: Envoi's class where Envoi runs the layer, else what `old` returns."""
    signature = inspect.signature(old)

    @functools.wraps(old)
    def choose(*arguments: Any, **named: Any) -> Any:
        try:
            given = signature.bind(*arguments, **named).arguments
            caller = sys._getframe(1).f_locals.get("self")
            found = None if _is_of_a_model(caller, oracle) else _choose(oracle, given, backend, names)
        except Exception as error:
            say(logger, logging.WARNING, f"vLLM's kernels run the {oracle} MoE layers: {type(error).__name__}: {error}")
            found = None
        return old(*arguments, **named) if found is None else (backend, found)

    return choose


def _is_of_a_model(method: Any, oracle: str) -> bool:
    """Tell whether the method that asks for a kernel is one model's own; say so once.

    Such a method may end the server when it gets a kernel that it doesn't know.
    """
    kind = type(method)
    if method is None or kind.__module__.startswith(LAYERS):
        return False
    say(logger, logging.INFO, f"vLLM's kernels run the {oracle} MoE layers: {kind.__name__} chooses among them itself")
    return True


def _choose(oracle: str, given: Mapping[str, Any], backend: Any, names: Mapping[str, Any]) -> type | None:
    """Return Envoi's class for a layer, None if vLLM's kernels run it; say once which and why."""
    from envoi.integrations.vllm import experts  # Envoi's kernels aren't imported before a layer is chosen

    config = given.get("moe_config", given.get("config"))
    weight_key, activation_key = given.get("weight_key"), given.get("activation_key")
    if oracle in KEYS:
        weight_key = None if KEYS[oracle][0] is None else names[KEYS[oracle][0]]
        if oracle != "mxfp4" or activation_key is None:
            activation_key = None if KEYS[oracle][1] is None else names[KEYS[oracle][1]]
    format = experts.format_of(names, weight_key, activation_key)
    why = why_not(oracle, config, format, activation_key, names)
    if format is None or why:
        say(logger, logging.INFO, f"vLLM's kernels run the {oracle} MoE layers: {why}")
        return None
    layer = experts.layer_of(config, format, config.activation)
    if format == "mxfp4":
        hidden, intermediate = names[PADDED](backend, layer.hidden, layer.intermediate)
        layer = replace(layer, hidden=hidden, intermediate=intermediate)
    found = experts.experts_class(format)
    form = names["FusedMoEActivationFormat"].Standard
    supported, why = found.is_supported_config(found, config, weight_key, activation_key, form)
    why = "" if supported else str(why)
    why = why or experts.engines.why_not(layer)
    why = why or experts.engines.why_unbuilt(layer, experts.max_tokens(names, config))
    if why:
        say(logger, logging.WARNING, f"vLLM's kernels run the MoE layers in {layer}: {why}")
        return None
    say(logger, logging.INFO, f"Envoi runs the MoE layers in {layer}")
    return found


def why_not(oracle: str, config: Any, format: str | None, activation_key: Any, names: Mapping[str, Any]) -> str:
    """Return why Envoi doesn't run a layer of vLLM's config in a format, as far as vLLM's own terms say; "" if it does.

    format: None if it is in none of Envoi's.
    """
    from envoi.integrations.vllm.experts import ACTIVATIONS, engines, layer_of

    parallel = config.moe_parallel_config
    chosen = [name for name in NAMED_BY.get(oracle, ()) if env.is_on(name)]
    if config.moe_backend != "auto" or chosen:
        return f"{chosen[0] if chosen else f'--moe-backend {config.moe_backend}'} names them"
    if config.is_lora_enabled:
        return "LoRA is on, which Envoi's kernels don't apply"
    if config.in_dtype != torch.bfloat16:
        return f"activations are in {config.in_dtype}, and Envoi's are in bfloat16"
    if format is None:
        if activation_key is not None and activation_key == names["kFp8StaticTensorSym"]:
            return "activations have a scale from the checkpoint, which Envoi would ignore"
        return f"weights and activations are quantised as Envoi's formats aren't (activations: {activation_key})"
    name = config.activation.name
    if name not in ACTIVATIONS:
        return f"Envoi has no activation {name}"
    if name == "SWIGLUOAI_UNINTERLEAVE" and (config.swiglu_beta != 1 or config.swiglu_limit is None):
        return f"the activation adds {config.swiglu_beta} to up, clamped at {config.swiglu_limit}; Envoi's adds 1"
    if parallel.use_batched_activation_format:
        return "tokens come batched by expert"
    if parallel.use_all2all_kernels and parallel.all2all_backend not in ALL_GATHER:
        return f"tokens come by {parallel.all2all_backend}, with which Envoi is untested"
    settings = names["get_current_vllm_config_or_none"]()
    asked = _setting(settings, "model_config.quantization_config.moe.activation")
    if oracle == "mxfp4" and asked is not None:
        return f"activations in {asked} are asked for, and beside MXFP4 weights Envoi's are in bfloat16"
    elastic = _setting(settings, "parallel_config.enable_elastic_ep")
    if elastic and not layer_of(config, format, config.activation).is_viewed:
        return "elastic expert parallelism hands weights to new ranks, and Envoi keeps these in an order of its own"
    if format not in engines.VIEWED and _setting(settings, "load_config.load_format") == SHARED:
        return "their weights are shared with other processes, and Envoi would reorder them"
    return ""


def _setting(settings: Any, path: str) -> Any:
    """Return a field of vLLM's configuration, None where there is none on the path."""
    return functools.reduce(lambda place, name: getattr(place, name, None), path.split("."), settings)

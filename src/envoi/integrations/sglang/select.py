"""SGLang's runners of MoE layers, with Envoi's core where Envoi runs the layer: `install` asks for the hooks.

A runner is known to SGLang's methods by a backend. Envoi's answers as the one of Triton does, whose kernels read
weights as they were loaded; what Envoi doesn't run gets Triton's itself, as with `--moe-runner-backend triton`.
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch

from envoi.integrations.lines import say
from envoi.integrations.names import found_names
from envoi.integrations.sglang.used import ALL, MXFP4, RESOLVE, RUNNER

logger = logging.getLogger("sglang.envoi")
NAME = "envoi"


def install(everywhere: bool) -> None:
    """Register Envoi's name, its core and the hooks. Raises MovedError, with nothing changed, if SGLang isn't known.

    everywhere: whether Envoi runs layers without being named.
    """
    names = found_names(ALL)
    known = names["RegisteredMoeRunnerBackend"]
    backend = type("EnvoiBackend", (known,), {"is_triton": lambda self: True, "__module__": __name__})(NAME)

    def make_core(config: Any) -> Any:
        from envoi.integrations.sglang.experts import core_class

        return core_class(names, backend)(config)

    def resolve(original: Any, asked: Any) -> Any:
        found = original(asked)
        return backend if found.value == NAME else found

    def make_runner(original: Any, runner: Any, runner_backend: Any, config: Any, lora_enabled: bool = False) -> None:
        named = names["get_moe_runner_backend"]()
        chosen, on = runner_backend, everywhere or named.value == NAME
        if chosen.value in (NAME, "triton"):
            takes = on and _takes(names, named, config, lora_enabled)
            chosen = backend if takes else names["MoeRunnerBackend"].TRITON
        elif on:
            _say_whose(f"SGLang has chosen {chosen.value} for them")
        original(runner, chosen, config, lora_enabled)

    def process(original: Any, method: Any, layer: Any) -> None:
        if _core_of(method) is None or not _mxfp4().take(_core_of(method), layer):
            original(method, layer)

    def apply(original: Any, method: Any, layer: Any, dispatch_output: Any) -> Any:
        if _core_of(method) is None or not _mxfp4().has_taken(_core_of(method)):
            return original(method, layer, dispatch_output)
        return method.runner.run(dispatch_output, None)

    names["register_moe_runner_core"](NAME, make_core)
    names["add_moe_runner_backend_choices"]([NAME])
    hooks = {
        str(RESOLVE): resolve, f"{RUNNER}.__init__": make_runner, f"{MXFP4}.process_weights_after_loading": process,
        f"{MXFP4}.apply": apply,
    }  # fmt: skip
    for target, hook in hooks.items():
        names["HookRegistry"].register(target, hook, names["HookType"].AROUND)


def _mxfp4() -> Any:
    from envoi.integrations.sglang import mxfp4  # Envoi's kernels aren't imported before a layer is chosen

    return mxfp4


def _core_of(method: Any) -> Any:
    """Return the core of a method's runner if it is Envoi's, else None."""
    runner = getattr(method, "runner", None)
    backend = getattr(runner, "runner_backend", None)  # SGLang's, also of a server that didn't ask for Envoi
    return getattr(runner, "runner_core", None) if getattr(backend, "value", None) == NAME else None


def _takes(names: Mapping[str, Any], named: Any, config: Any, lora_enabled: bool) -> bool:
    """Decide whether Envoi's core runs a layer whose weights its runner gets as they were loaded; say why not."""
    try:
        why = why_not(names, named, config, lora_enabled)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    if why:
        _say_whose(why)
    return not why


def _say_whose(why: str) -> None:
    say(logger, logging.WARNING, f"SGLang's kernels run the MoE layers: {why}")


def why_not(names: Mapping[str, Any], named: Any, config: Any, lora_enabled: bool) -> str:
    """Return why Envoi doesn't run a layer, as far as that is known before its weights are loaded; "" if it does.

    named: SGLang's backend for the whole server.
    """
    from envoi.integrations import engines
    from envoi.integrations.sglang import experts

    transport = names["get_moe_a2a_backend"]()
    if named.value != NAME and not named.is_auto():
        return f"--moe-runner-backend {named.value} names them"
    if lora_enabled:
        return "LoRA is on, which Envoi's kernels don't apply"
    if transport.value != "none":
        return f"tokens come by {transport.value}, with which Envoi is untested"
    if config.params_dtype not in (None, torch.bfloat16):
        return f"activations are in {config.params_dtype}, and Envoi's are in bfloat16"
    if config.no_combine:
        return "the model sums a token's slots itself"
    if names["FusedOpPool"].get_fused_func("none", "triton") is None:
        return "SGLang has no function of its own for what Envoi's core would refuse"
    # Every format asks at least what bf16 asks of sizes; which one it is, weights say at the first call.
    return experts.why_not_activation(config) or engines.why_not(experts.layer_of(config, "bf16"))

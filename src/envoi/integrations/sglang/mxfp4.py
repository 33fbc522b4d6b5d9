"""Layers in MXFP4 under SGLang's method for them, which would widen their weights to bf16 for Triton's kernels.

`take` comes in place of that step: the weights stay in 4 bits, reordered over their own bytes.
"""

import logging
from dataclasses import replace
from typing import Any

import torch

from envoi.integrations.engines import Layer
from envoi.integrations.lines import say
from envoi.integrations.packings import version
from envoi.integrations.sglang.experts import Core, RefusedError, layer_of, logger, reason, why_not_on_input

STORED = ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale")  # gate_up, down and their factors


def take(core: Core, layer: Any) -> bool:
    """Pack a loaded layer of SGLang if Envoi runs it in MXFP4, and return whether it does; else say why not.

    Called again after weights were loaded anew, it packs into the same memory. Raises an error of that, and one that
    comes after weights were written over: SGLang couldn't read them.
    """
    if has_taken(core):  # captured graphs read its memory
        found = _pack(core, layer)
    else:
        before = _writes(layer)
        try:
            found = _pack(core, layer)
        except Exception as error:
            if _writes(layer) != before:  # reordered in part: widened, they would be wrong
                raise
            say(logger, logging.WARNING, f"SGLang widens the MoE layers in MXFP4 to bf16: {reason(error)}")
            return False
    core.get_ready(found)
    return True


def has_taken(core: Core) -> bool:
    """Tell whether a core has a layer in MXFP4."""
    return core.packed is not None and core.packed.format == "mxfp4"


def _writes(layer: Any) -> list[int | None]:
    """Return how often the layer's weights and factors have been written to."""
    found = [getattr(layer, name, None) for name in STORED]
    return [None if x is None else version(x) for x in found]


def _pack(core: Core, layer: Any) -> Layer:
    """Pack a layer and return what it is. Raises RefusedError if Envoi doesn't run it."""
    found = _layer_of(core, layer)
    why = why_not_on_input(core.config, core.config.top_k, found.bias)
    if why:
        raise RefusedError(f"{found}: {why}")
    core.check(found)
    # Not .data, which would count writes apart from the layer's.
    gate_up, down, gate_up_sf, down_sf = (getattr(layer, name).detach() for name in STORED)
    biases = {"gate_up_bias": _bias(layer, "w13"), "down_bias": _bias(layer, "w2")}
    core.pack(found, gate_up, down, {"gate_up_sf": gate_up_sf, "down_sf": down_sf, **biases})
    return found


def _bias(layer: Any, side: str) -> torch.Tensor | None:
    bias = getattr(layer, f"{side}_weight_bias", None)
    return None if bias is None else bias.data


def _layer_of(core: Core, layer: Any) -> Layer:
    num_experts, hidden, packed = layer.w2_weight.shape
    sizes = {"hidden": hidden, "intermediate": 2 * packed, "num_experts": num_experts}
    bias = _bias(layer, "w13") is not None
    return replace(layer_of(core.config, "mxfp4"), **sizes, bias=bias, batch_invariant=core.is_batch_invariant)

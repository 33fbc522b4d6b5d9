"""Layers in MXFP4 under SGLang's method for them, which would widen their weights to bf16 for Triton's kernels.

`take` comes in place of that step: the weights stay in 4 bits, reordered over their own bytes.
"""

import logging
from typing import Any

import torch

from envoi.integrations.engines import Layer
from envoi.integrations.lines import say
from envoi.integrations.sglang.experts import Core, layer_of, logger, reason


def take(core: Core, layer: Any) -> bool:
    """Pack a loaded layer of SGLang if Envoi runs it in MXFP4, and return whether it does; else say why not.

    Called again after weights were loaded anew, it packs into the same memory.
    """
    try:
        found = _layer_of(core, layer)
        core.check(found)
    except Exception as error:  # nothing has been changed yet
        say(logger, logging.WARNING, f"SGLang widens the MoE layers in MXFP4 to bf16: {reason(error)}")
        return False
    more = {
        "gate_up_sf": layer.w13_weight_scale.data, "down_sf": layer.w2_weight_scale.data,
        "gate_up_bias": _bias(layer, "w13"), "down_bias": _bias(layer, "w2"),
    }  # fmt: skip
    core.pack(found, layer.w13_weight.data, layer.w2_weight.data, more)
    return True


def has_taken(core: Core) -> bool:
    """Tell whether a core has a layer in MXFP4."""
    return core.packed is not None and core.packed.format == "mxfp4"


def _bias(layer: Any, side: str) -> torch.Tensor | None:
    bias = getattr(layer, f"{side}_weight_bias", None)
    return None if bias is None else bias.data


def _layer_of(core: Core, layer: Any) -> Layer:
    num_experts, hidden, packed = layer.w2_weight.shape
    found = layer_of(core.config, "mxfp4")
    return Layer(
        "mxfp4", hidden, 2 * packed, num_experts, found.top_k, found.activation, found.gate_up_layout,
        _bias(layer, "w13") is not None, found.limit, found.alpha,
    )  # fmt: skip

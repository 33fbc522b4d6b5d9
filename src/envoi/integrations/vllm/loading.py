"""Packing of a layer when vLLM has processed its loaded weights: at first, and whenever they are loaded anew.

vLLM makes its kernels in that step of a layer's method, and gives the layer to none of them but a few. Packed there, a
layer that can't be is known before memory is measured and graphs are captured, and what is loaded into a running server
reaches captured graphs.
"""

import functools
import logging
from collections.abc import Mapping
from typing import Any

from envoi import env
from envoi.integrations.lines import say
from envoi.integrations.vllm import balance, exchange
from envoi.integrations.vllm.used import DONE

logger = logging.getLogger("vllm.envoi")


def install(names: Mapping[str, Any]) -> None:
    """Let `follow` see each layer that vLLM makes."""
    kind = names["RoutedExperts"]
    init = kind.__init__

    @functools.wraps(init)
    def make(self: Any, *arguments: Any, **named: Any) -> None:
        init(self, *arguments, **named)
        follow(self, names)

    kind.__init__ = make


def follow(layer: Any, names: Mapping[str, Any]) -> None:
    """Pack a layer after each time that its method has processed its weights, if Envoi's kernels run it then.

    A layer of another make, without such a method, is left alone.
    """
    from envoi.integrations.vllm.experts import Experts  # Envoi's kernels aren't imported before a layer is made

    method = getattr(layer, "quant_method", None)
    process = getattr(method, "process_weights_after_loading", None)
    if method is None or process is None:
        return

    def process_and_pack(layer: Any) -> None:
        is_done = getattr(layer, DONE, False)
        process(layer)
        if is_done:  # then nothing has happened, and weights may be in Envoi's order
            return
        if not hasattr(method, "moe_kernel"):
            why = f"{type(method).__name__} has no moe_kernel: what is loaded anew may not reach layers that Envoi runs"
            say(logger, logging.WARNING, f"Envoi packs no MoE layers when they are loaded: {why}")
        experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
        ours = experts if isinstance(experts, Experts) else None
        balance.take(layer, ours, names)
        if ours is not None and env.exchanges_vllm():
            exchange.join(layer, method.moe_kernel)

    method.process_weights_after_loading = process_and_pack

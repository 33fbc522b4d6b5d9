"""Tokens of data-parallel ranks exchanged by `envoi.ExpertParallel` in vLLM's layers: with ENVOI_VLLM_EP=1.

vLLM gathers the tokens of all ranks on each of them and reduces what their experts made. Here a kernel's experts take
a rank's own tokens to their experts and back, and vLLM's step before and after them gets the class that does nothing.
A call is collective either way: vLLM runs a batch of padding on ranks that have no requests.
"""

import logging
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from envoi import env
from envoi.integrations.lines import say
from envoi.integrations.names import found_names
from envoi.integrations.vllm.used import EXCHANGE

logger = logging.getLogger("vllm.envoi")
# How long a rank waits for its peers: while layers are loaded, which takes ranks unequally long, and in calls.
TIMEOUT_S = 300.0
# vLLM's layer -> its exchange, which captured graphs call, whatever kernel vLLM makes for the layer later.
_opened: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
# The error of a rank that didn't come: then ranks count their exchanges differently, and no layer waits for one again.
_late: list[str] = []


def join(layer: Any, kernel: Any) -> None:
    """Let the experts of a layer exchange tokens themselves if they can, else say once why not. Collective.

    kernel: vLLM's FusedMoEKernel of the layer, whose experts are Envoi's; also if this rank couldn't pack them, which
    its peers hear of.
    """
    from envoi import PeerTimeout

    experts = kernel.fused_experts
    if experts.exchange is not None or not experts.moe_config.moe_parallel_config.use_all2all_kernels:
        return
    try:
        names = found_names(EXCHANGE)
        why = _late[0] if _late else why_not(experts, names)
        if not why:
            if layer not in _opened:
                _opened[layer] = _open(experts, names)
            experts.exchange = _opened[layer]
            kernel.impl.prepare_finalize = names["make_moe_prepare_and_finalize_no_dp_ep"](False)
            say(logger, logging.INFO, f"Envoi exchanges tokens of the MoE layers over {experts.exchange.transport}")
    except Exception as error:  # vLLM's own exchange is still in place
        why = f"{type(error).__name__}: {error}"
        if isinstance(error, PeerTimeout):
            _late.append(why)
    if why:
        say(logger, logging.WARNING, f"vLLM exchanges tokens of the MoE layers: {why}")


def why_not(experts: Any, names: Mapping[str, Any]) -> str:
    """Return why Envoi doesn't exchange tokens for a kernel's experts, "" if it does: the same on all ranks."""
    parallel, config = experts.moe_config.moe_parallel_config, names["get_current_vllm_config_or_none"]()
    if parallel.ep_size != parallel.dp_size or parallel.is_sequence_parallel:
        return "ranks that share tokens (tensor, sequence or context parallelism) have experts of their own"
    if env.is_on("VLLM_BATCH_INVARIANT"):
        return "VLLM_BATCH_INVARIANT asks for bits that don't depend on the number of tokens"
    if config is None:
        return "vLLM's configuration isn't known"
    if config.parallel_config.expert_placement_strategy != "linear":
        return f"experts are placed {config.parallel_config.expert_placement_strategy}"
    if getattr(config.model_config, "enable_sleep_mode", False):
        return "sleep mode would free memory that other ranks write to"
    return ""


def _open(experts: Any, names: Mapping[str, Any]) -> Any:
    """Return the exchange between the ranks of vLLM's group for experts."""
    from envoi import ExpertParallel

    config, group = experts.moe_config, names["get_ep_group"]().device_group
    step = experts.max_tokens // config.moe_parallel_config.dp_size
    found = ExpertParallel(experts.packed, group, TIMEOUT_S, max_tokens=step, num_topk=config.experts_per_token)
    why = ""
    if found.num_experts != config.num_experts:
        why = f"{found.num_experts} experts are on all ranks, and vLLM has {config.num_experts}"
    elif (found.transport, found.exchange) == ("nccl", "counted"):
        why = f"rows are counted, for which the host waits ({found.why}), and no graph can hold that"
    if why:
        found.close()
        raise ValueError(why)
    return found

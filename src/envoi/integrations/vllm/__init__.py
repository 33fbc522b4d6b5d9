"""vLLM's MoE layers on Envoi's kernels: with ENVOI_VLLM=1, on Hopper.

vLLM finds `register` by the entry point group "vllm.general_plugins" and calls it in each of its processes. Unless
ENVOI_VLLM=1 it does nothing: an installed package mustn't change what a server computes. `--moe-backend` wins: Envoi
takes layers only of the automatic choice. Its log, "vllm.envoi", has a line for each kind of layer that Envoi runs, and
the reason for each kind that it doesn't.

    used      names of vLLM that are relied on, checked before anything is changed
    select    wraps vLLM's functions that choose kernels for a layer
    loading   packs a layer when its weights are loaded, at first or anew
    balance   lets vLLM's load balancer move what is packed of experts
    experts   the kernel as vLLM's classes have them
    exchange  with ENVOI_VLLM_EP=1 too: tokens of data-parallel ranks go by `envoi.ExpertParallel`
    route     with ENVOI_VLLM_ROUTE=1 too: gate and top-k in one launch
"""

import logging

from envoi import env

_done = False


def register() -> None:
    """Let vLLM choose Envoi's kernels for the MoE layers that Envoi runs, if ENVOI_VLLM=1. Never raises.

    Imports neither Envoi's kernels nor, unless it is switched on, vLLM.
    """
    global _done
    logger = logging.getLogger("vllm.envoi")
    try:
        if _done or not env.serves_vllm():
            return
        env.exchanges_vllm()  # layers read it while weights are loaded, where a wrong value would end the server
        from envoi.integrations.vllm.select import install

        install()
        _done = True
        if env.routes_vllm():
            from envoi.integrations.vllm import route

            route.install()
    except Exception as error:  # an engine without Envoi is better than none
        what = "routes" if _done else "runs"
        logger.warning("Envoi %s no MoE layers: %s: %s", what, type(error).__name__, error)

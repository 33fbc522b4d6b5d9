"""SGLang's MoE layers on Envoi's kernels: by `--moe-runner-backend envoi` or ENVOI_SGLANG=1, on Hopper.

SGLang finds `register` by the entry point group "sglang.srt.plugins" and calls it in each of its processes. It makes a
runner of MoE layers known under the name "envoi" and asks SGLang's registry of hooks for the rest; unless one of the
two is asked for, what a server computes isn't changed. With ENVOI_SGLANG=1 another backend's name wins: Envoi takes
layers only of the automatic choice. The log, "sglang.envoi", has a line for each kind of layer that Envoi runs, and the
reason for each kind that it doesn't.

    used      names of SGLang that are relied on, checked before anything is changed
    select    decides which of SGLang's runners get Envoi's core
    experts   the core: runs a layer, or hands it to SGLang's own function
    mxfp4     layers in MXFP4, whose weights SGLang would widen
"""

import logging

from envoi import env

_done = False


def register() -> None:
    """Make Envoi known to SGLang. Never raises. Imports Envoi's kernels only once a layer is chosen."""
    global _done
    level = logging.WARNING
    try:
        if _done:
            return
        everywhere = env.serves_sglang()
        level = logging.WARNING if everywhere else logging.INFO
        from envoi.integrations.sglang.select import install

        install(everywhere)
        _done = True
    except Exception as error:  # an engine without Envoi is better than none
        logger = logging.getLogger("sglang.envoi")
        logger.log(level, "Envoi runs no MoE layers: %s: %s", type(error).__name__, error)

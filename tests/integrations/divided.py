"""Models that transformers divides over two processes: what each process does, and what it reports."""

import dataclasses
import os
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from envoi.integrations import packings
from envoi.integrations import transformers as integration
from tests.helpers.accuracy import relative_error
from tests.helpers.transformers_models import logits, tokens

NUM_RANKS = 2


def loaded(folder: Path, implementation: str, config: DistributedConfig | None = None) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, experts_implementation=implementation, distributed_config=config
    )


def config_of(num_ranks: int, experts: bool) -> DistributedConfig:
    if not experts:
        return DistributedConfig(tp_size=num_ranks, tp_plan="auto")
    known = {field.name for field in dataclasses.fields(DistributedConfig)}
    if "ep_size" in known:  # since 5.21; the other flag is gone
        return DistributedConfig(tp_size=num_ranks, tp_plan="auto", ep_size=num_ranks)
    return DistributedConfig(tp_size=num_ranks, enable_expert_parallel=True)


def run(rank: int, num_ranks: int, folder: str, implementation: str, experts: bool) -> dict[str, Any]:
    """Compare a divided model with the whole one; experts: divide by experts, else by tensors.

    Returns the logits' difference, that of a model without experts, how often the experts were packed by the first call
    and by all later ones, in grad mode too, the report's bytes and formats, and whether release changes the logits.
    """
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    integration.register()
    ids, packed = tokens(), []
    original = packings.pack_weights
    packings.pack_weights = lambda *given: packed.append(0) or original(*given)
    whole = loaded(Path(folder), implementation)
    want = logits(whole, ids)
    model = loaded(Path(folder), implementation, config_of(num_ranks, experts))
    found: dict[str, Any] = {"before": len(packed)}
    got = logits(model, ids)
    found["first"] = len(packed) - found["before"]
    logits(model, ids)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    again = model(ids, use_cache=False).logits
    found |= {
        "packed": len(packed) - found["before"], "error": relative_error(got, want),
        "same": bool(torch.equal(got, again)), "rows": [(r.stored, r.why, r.num_bytes) for r in report(model)],
        "whole": [row.num_bytes for row in report(whole)],
    }  # fmt: skip
    integration.refresh(model)
    found["refreshed"] = len(packed) - found["before"]
    found["freed"] = integration.release(model)
    found["released"] = bool(torch.equal(logits(model, ids), got))
    for module in whole.modules():
        if integration.is_experts(module):
            module.forward = lambda x, *_: torch.zeros_like(x)
    found["without"] = relative_error(logits(whole, ids), want)
    packings.pack_weights = original
    return found


def report(model: torch.nn.Module) -> tuple:
    return integration.report(model).rows


def refused(rank: int, num_ranks: int, folder: str, implementation: str, experts: bool) -> str:
    """Return what loading a divided model raises."""
    try:
        return str(run(rank, num_ranks, folder, implementation, experts))
    except ValueError as error:
        return str(error)

"""Calls of `envoi.route` whose kernels a warm-up compiles."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from envoi.ops.moe.router.api import check_arguments, route
from envoi.ops.moe.router.presets import named
from envoi.runtime.program import without_memory


@dataclass(frozen=True)
class RouterCall:
    """Call of `envoi.route` for a number of tokens. options: its named arguments but tokens, without memory."""

    options: Mapping[str, Any]
    dtype: torch.dtype = torch.bfloat16

    def __call__(self, num_tokens: int) -> None:
        """Make the call."""
        given = dict(self.options)
        if given.get("hash_table") is not None:
            given["token_ids"] = without_memory((num_tokens,), given["token_ids"].dtype)
        route(without_memory((num_tokens, given["gate"].shape[1]), self.dtype), **given)


def call_of_model(argument: str, model: str, num_experts: int, num_topk: int, hidden: int) -> RouterCall:
    """Return the call of a model's router, with a bf16 gate [num_experts, hidden] and the biases its checkpoint has.

    Raises ValueError, about an argument of this name, for a model without a preset or sizes that its rule can't have.
    """
    preset = named(argument, model)
    gate = without_memory((num_experts, hidden), torch.bfloat16)
    expert_bias = without_memory((num_experts,), torch.float32) if preset.has_expert_bias else None
    logit_bias = without_memory((num_experts,), torch.bfloat16) if preset.has_logit_bias else None
    options = {
        "gate": gate, "k": num_topk, "rule": model, "logit_bias": logit_bias, "expert_bias": expert_bias,
    }  # fmt: skip
    try:
        tokens = without_memory((0, hidden), torch.bfloat16)
        check_arguments(tokens, gate, num_topk, None, model, logit_bias, expert_bias, None, None, False, False, False)
    except ValueError as error:
        raise ValueError(f"{argument}: {error}") from None
    return RouterCall(options)

"""Gate and top-k of vLLM's MoE layers in one launch of `envoi.route`: with ENVOI_VLLM_ROUTE=1, in Envoi's layers.

Where a model hands its gate to the layer (Qwen3-MoE, DeepSeek-V2 and V3, Kimi-K2, EXAONE), vLLM's runner calls the gate
and then its router with the tokens and the logits. Here the runner's class, which vLLM lets a plug-in replace, gets a
gate that hands the tokens on, and a router that computes both. Logits stay in float32, where vLLM rounds those of some
gates to bf16 first.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from envoi.integrations.lines import say
from envoi.integrations.names import MovedError, found_names
from envoi.integrations.vllm.used import ROUTE

logger = logging.getLogger("vllm.envoi")
SCORES = {"softmax": "softmax", "sigmoid": "sigmoid", "sqrtsoftplus": "sqrt_softplus"}  # vLLM's -> ours
SKIP_PADDING = "VLLM_MOE_SKIP_PADDING"  # without it vLLM may leave its mask of padding as it was
# Fields of a router that make it more than a rule, and what they are where it isn't.
PLAIN = {"num_fused_shared_experts": 0, "_hash_indices_table": None, "bias_vl": None}


def install() -> None:
    """Put a runner in the place of vLLM's. Raises MovedError, with nothing changed, if this vLLM isn't a known one."""
    names = found_names(ROUTE)
    if SKIP_PADDING not in names["environment_variables"]:
        raise MovedError(f"there is no vllm.envs.{SKIP_PADDING}")
    base = names["MoERunner"]

    def init(self: Any, *given: Any, **named: Any) -> None:
        base.__init__(self, *given, **named)
        join(self, names)

    new = type("EnvoiRunner", (base,), {"__init__": init, "__module__": __name__})
    names["PluggableLayer"].register_oot(new, name=base.__name__)


def join(runner: Any, names: Mapping[str, Any]) -> None:
    """Let a runner's router compute the gate too if Envoi runs both, else say once why not."""
    try:
        why = why_not(runner, names)
        if not why:
            gate, router, rule = runner.gate, runner.router, rule_of(runner.router, names)
            router._compute_routing = partial(compute, router, gate, rule, partial(padding, names))
            gate.forward = hand_on
            named = ", ".join(f"{name} {value}" for name, value in asdict(rule).items() if value != 1 or value is True)
            say(logger, logging.INFO, f"Envoi routes {len(gate.weight)} experts, top {router.top_k}: {named}")
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    if why:
        say(logger, logging.INFO, f"vLLM's kernels route the MoE layers: {why}")


def hand_on(hidden_states: torch.Tensor) -> tuple[torch.Tensor, None]:
    """Stand for a gate: return the tokens in the place of logits."""
    return hidden_states, None


def compute(
    router: Any, gate: Any, rule: Any, is_padding: Callable[[], torch.Tensor | None], hidden_states: torch.Tensor,
    router_logits: Any, indices_type: torch.dtype | None, *, input_ids: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return weights and ids of a call's slots as vLLM's routers do, [M, k] each: no expert where a row is padding."""
    import envoi

    bias = getattr(router, "e_score_correction_bias", None)
    found = envoi.route(
        hidden_states, gate.weight.detach(), router.top_k, rule=rule,
        expert_bias=None if bias is None else bias.detach(),
    )  # fmt: skip
    ids, mask = found.topk_ids, is_padding()
    if mask is not None:
        ids.masked_fill_(mask[: len(ids), None], -1)
    return found.topk_weights, ids if indices_type is None else ids.to(indices_type)


def padding(names: Mapping[str, Any]) -> torch.Tensor | None:
    """Return which rows of a step are padding, bool [M or more], None if vLLM doesn't say or isn't to skip them."""
    if not names["environment_variables"][SKIP_PADDING]() or not names["is_forward_context_available"]():
        return None
    return names["get_forward_context"]().is_padding


def rule_of(router: Any, names: Mapping[str, Any]) -> Any:
    """Return the Rule of a router of vLLM, None for one that no Rule describes."""
    from envoi.router import Rule

    score = SCORES.get(str(getattr(router, "scoring_func", None)))
    plain = all(getattr(router, name, usual) == usual for name, usual in PLAIN.items())
    if score is None or not plain:
        return None
    kind, renormalize = type(router), bool(router.renormalize)
    if kind is names["FusedTopKRouter"]:
        return Rule(score, renormalize=renormalize)
    if kind is names["FusedTopKBiasRouter"]:
        return Rule(score, renormalize=renormalize, routed_scale=float(router.routed_scaling_factor))
    if kind is names["GroupedTopKRouter"]:
        group_score = "max" if router.e_score_correction_bias is None else "top2_sum"
        groups = router.num_expert_group, router.topk_group, group_score
        return Rule(score, *groups, renormalize, float(router.routed_scaling_factor))
    return None


def why_not(runner: Any, names: Mapping[str, Any]) -> str:
    """Return why Envoi doesn't route a runner's layer, "" if it does."""
    from envoi.integrations import engines
    from envoi.integrations.vllm.experts import Experts, max_tokens

    gate, router, config = runner.gate, runner.router, runner.moe_config
    if gate is None:
        return "the model computes the gate outside of the layer"
    experts = getattr(runner.routed_experts.quant_method, "experts_cls", None)
    if not (isinstance(experts, type) and issubclass(experts, Experts)):
        return "vLLM's kernels run their experts"
    if runner.shared_expert_gate is not None or runner.routed_input_transform is not None:
        return "their gate is computed together with another layer"
    if config.dp_size > 1 or config.pcp_size > 1 or config.is_sequence_parallel:
        return "logits are exchanged between ranks"
    weight = getattr(gate, "weight", None)
    if weight is None or weight.dtype != torch.bfloat16 or getattr(gate, "bias", None) is not None:
        return "their gate has a bias, or weights that aren't in bfloat16"
    rule = rule_of(router, names)
    if rule is None:
        return f"Envoi has no rule for {type(router).__name__} with {getattr(router, 'scoring_func', None)}"
    if rule.num_groups >= len(weight) or len(weight) % rule.num_groups:
        return f"{len(weight)} experts aren't cut into {rule.num_groups} groups"
    options = {
        "gate": weight, "k": router.top_k, "rule": rule,
        "expert_bias": getattr(router, "e_score_correction_bias", None),
    }  # fmt: skip
    return engines.why_not_routed(options, max_tokens(names, config))

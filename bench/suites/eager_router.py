"""Routing in plain torch operators, the way models' own code computes it after the matmul."""

import torch
from torch.nn import functional

from envoi.ops.moe.router import Rule

BEST_FIRST = {
    "softmax_over_topk": lambda x: x.float().softmax(-1),
    "sigmoid_of_topk": lambda x: x.float().sigmoid(),
    "identity": lambda x: x.float(),
}


def eager_route(
    logits: torch.Tensor, k: int, rule: Rule, expert_bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route by logits [M, N] with any rule: weights [M, k] float32, ids [M, k] int64."""
    plain = expert_bias is None and rule.num_groups == 1
    if plain and rule.score == "softmax" and rule.renormalize:
        # Equal to renormalising the k best of all, with fewer launches.
        best, ids = logits.topk(k, dim=-1)
        return _scaled(best.softmax(-1, dtype=torch.float32), rule), ids
    if rule.num_groups == 1 and rule.score in BEST_FIRST:
        best, ids = (logits if expert_bias is None else logits + expert_bias).topk(k, dim=-1)
        best = best if expert_bias is None else logits.gather(1, ids)
        return _weights(BEST_FIRST[rule.score](best), rule), ids
    score = _scores(logits, rule)
    key = score if expert_bias is None else score + expert_bias
    if rule.num_groups > 1:
        key = _best_groups(key, rule)
    ids = key.topk(k, dim=-1).indices
    return _weights(score.gather(1, ids), rule), ids


def _scores(logits: torch.Tensor, rule: Rule) -> torch.Tensor:
    if rule.score == "softmax":
        return logits.softmax(-1, dtype=torch.float32)
    if rule.score == "sqrt_softplus":
        return functional.softplus(logits.float()).sqrt()
    if rule.score == "sigmoid":
        return logits.float().sigmoid()
    raise ValueError(f"rule.score: expected no groups beside {rule.score!r}, got some")


def _best_groups(key: torch.Tensor, rule: Rule) -> torch.Tensor:
    groups = key.unflatten(1, (rule.num_groups, -1))
    size = 2 if rule.group_score == "top2_sum" else 1
    best = groups.topk(size, dim=-1).values.sum(-1).topk(rule.num_topk_groups, dim=-1).indices
    kept = torch.zeros(groups.shape[:2], dtype=torch.bool, device=key.device).scatter_(1, best, True)
    return groups.masked_fill(~kept.unsqueeze(-1), 0.0).flatten(1)


def _weights(weights: torch.Tensor, rule: Rule) -> torch.Tensor:
    if rule.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return _scaled(weights, rule)


def _scaled(weights: torch.Tensor, rule: Rule) -> torch.Tensor:
    return weights if rule.routed_scale == 1.0 else weights * rule.routed_scale

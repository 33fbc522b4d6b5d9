"""Reference of the router in torch, on any device.

    for each token m:
        logits  = alpha * tokens[m] @ gate.T + logit_bias                        float32
        score   = softmax | sigmoid | sqrt(softplus) of the logits, or the logits themselves
        key     = score + expert_bias                                            selection only
        keep the num_topk_groups best groups of experts, by the max or by the sum of the two best keys
        ids     = the k best keys; a tie goes to the smaller id                  (or hash_table[token_ids[m]])
        weights = score[ids]                                                     without expert_bias
        weights = weights / (sum(weights) + 1e-20)                               if renormalize
        weights = weights * routed_scale

Only finite logits and keys compete: NaN and the infinities never win and take no part in the softmax. Slots without an
expert get id -1 and weight 0. If the score keeps the logits' order (no bias, no sum) the key is the logit itself, so
that a saturated score can't tie experts with different logits.
"""

import torch

from envoi.ops.gemm.reference import accumulate
from envoi.ops.moe.router.spec import RANKED_BY_LOGITS, Rule

EPS = 1e-20  # keeps a sum of underflowed weights from dividing by zero


def router_logits(
    tokens: torch.Tensor, gate: torch.Tensor, alpha: float, logit_bias: torch.Tensor | None
) -> torch.Tensor:
    """Compute the logits, float32 [M, N]: alpha * tokens @ gate.T + logit_bias."""
    logits = accumulate(tokens, gate) * alpha
    return logits if logit_bias is None else logits + logit_bias.float()


def select(
    logits: torch.Tensor, k: int, rule: Rule, expert_bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select by logits [M, N] (float32; float64 for the oracle): topk_weights [M, k] of that dtype, topk_ids int32."""
    score = scores(logits, rule)
    key = selection_key(logits, score, rule, expert_bias)
    if rule.num_groups > 1:
        key = keep_best_groups(key, rule)
    ranked, ids = key.sort(dim=-1, descending=True, stable=True)
    ids = ids[:, :k].masked_fill(ranked[:, :k] == -torch.inf, -1)
    return weigh(logits, score, ids, rule), ids.to(torch.int32)


def weigh(logits: torch.Tensor, score: torch.Tensor, ids: torch.Tensor, rule: Rule) -> torch.Tensor:
    """Compute the weights [M, k] of chosen ids [M, k] (int64, -1 = masked slot)."""
    masked = ids < 0
    if rule.score == "softmax_over_topk":
        chosen = logits.gather(1, ids.clamp(min=0)).masked_fill(masked, -torch.inf)
        weights = _finite_softmax(chosen)
    else:
        weights = score.gather(1, ids.clamp(min=0)).masked_fill(masked, 0.0)
    if rule.renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + EPS)
    return weights * rule.routed_scale


def scores(logits: torch.Tensor, rule: Rule) -> torch.Tensor:
    """Compute the scores [M, N], elementwise or over the row's finite logits; 0 for a logit that isn't finite."""
    finite = logits.isfinite()
    if rule.score == "softmax":
        return _finite_softmax(logits.masked_fill(~finite, -torch.inf))
    if rule.score == "sqrt_softplus":
        score = (logits.clamp(min=0) + (-logits.abs()).exp().log1p()).sqrt()  # exp can't overflow
    elif rule.score == "identity":
        score = logits
    else:
        score = _sigmoid(logits)
    return score.masked_fill(~finite, 0.0)


def selection_key(
    logits: torch.Tensor, score: torch.Tensor, rule: Rule, expert_bias: torch.Tensor | None
) -> torch.Tensor:
    """Compute the keys [M, N] by which experts are ranked; -inf for an expert that can't be chosen."""
    sums = rule.num_groups > 1 and rule.group_score == "top2_sum"
    key = logits if rule.score in RANKED_BY_LOGITS or (expert_bias is None and not sums) else score
    if expert_bias is not None:
        key = key + expert_bias.to(key.dtype)
    return key.masked_fill(~(logits.isfinite() & key.isfinite()), -torch.inf)


def keep_best_groups(key: torch.Tensor, rule: Rule) -> torch.Tensor:
    """Set the keys of all but the best groups to -inf; a tie between groups goes to the smaller group."""
    groups = key.unflatten(1, (rule.num_groups, -1))
    best = groups.sort(dim=-1, descending=True).values
    group_key = best[..., 0]
    if rule.group_score == "top2_sum":  # a group with one usable expert has its key alone
        group_key = group_key + best[..., 1].masked_fill(best[..., 1] == -torch.inf, 0.0)
    ranked = group_key.sort(dim=-1, descending=True, stable=True).indices
    kept = torch.zeros_like(group_key, dtype=torch.bool)
    kept.scatter_(1, ranked[:, : rule.num_topk_groups], True)
    return groups.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Compute the sigmoid. torch.sigmoid rounds a tensor's last elements otherwise: bits would depend on the batch."""
    exps = (-x.abs()).exp()
    return torch.where(x >= 0, 1.0, exps) / (1.0 + exps)


def _finite_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Compute the softmax over the entries that aren't -inf; a row of only -inf gives zeros."""
    top = logits.amax(dim=-1, keepdim=True) if logits.shape[-1] else logits
    exps = (logits - top.masked_fill(top == -torch.inf, 0.0)).exp()
    return exps / exps.sum(dim=-1, keepdim=True).clamp(min=EPS)


def to_dense(topk_weights: torch.Tensor, topk_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Scatter weights [M, k] to the columns ids [M, k] of a tensor of zeros [M, N]."""
    dense = topk_weights.new_zeros(topk_ids.shape[0], num_experts + 1)
    dense.scatter_(1, torch.where(topk_ids < 0, num_experts, topk_ids).long(), topk_weights)
    return dense[:, :num_experts].contiguous()


def count_tokens(topk_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Count the tokens of each expert: int32 [N]; masked slots don't count."""
    ids = torch.where(topk_ids < 0, num_experts, topk_ids).flatten().long()
    counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=topk_ids.device)
    return counts.scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))[:num_experts].clone()


def exclusive_offsets(counts: torch.Tensor) -> torch.Tensor:
    """Return the offsets of counts [N], int32 [N + 1]: the first row of each expert, and the total."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)

"""Router's rule for one token in plain Python, in float64: the vectorised reference is compared with it."""

import math

from envoi.ops.moe.router.rules import Rule


def select(logits: list[float], k: int, rule: Rule, bias: list[float] | None) -> tuple[list[float], list[int]]:
    """Select the weights and ids of one row, best first."""
    finite = [math.isfinite(x) for x in logits]
    score = [_score(logits, finite, i, rule) for i in range(len(logits))]
    sums = rule.num_groups > 1 and rule.group_score == "top2_sum"
    first = rule.score in ("softmax_over_topk", "sigmoid_of_topk")
    key = list(logits) if first or (bias is None and not sums) else list(score)
    if bias is not None:
        key = [a + b for a, b in zip(key, bias, strict=True)]
    key = [x if ok and math.isfinite(x) else -math.inf for x, ok in zip(key, finite, strict=True)]
    size = len(key) // rule.num_groups
    if rule.num_groups > 1:
        groups = [sorted(key[g * size : (g + 1) * size], reverse=True) for g in range(rule.num_groups)]
        strength = [g[0] if rule.group_score == "max" or g[1] == -math.inf else g[0] + g[1] for g in groups]
        kept = sorted(range(rule.num_groups), key=lambda g: (-strength[g], g))[: rule.num_topk_groups]
        key = [x if i // size in kept else -math.inf for i, x in enumerate(key)]
    ranked = sorted(range(len(key)), key=lambda i: (-key[i], i))[:k]
    ids = [i if key[i] > -math.inf else -1 for i in ranked]
    weights = [score[i] if i >= 0 else 0.0 for i in ids]
    if rule.score == "softmax_over_topk":
        top = max((logits[i] for i in ids if i >= 0), default=0.0)
        exps = [math.exp(logits[i] - top) if i >= 0 else 0.0 for i in ids]
        weights = [e / sum(exps) if sum(exps) else 0.0 for e in exps]
    if rule.renormalize:
        total = sum(weights) + 1e-20
        weights = [w / total for w in weights]
    return [w * rule.routed_scale for w in weights], ids


def _score(logits: list[float], finite: list[bool], i: int, rule: Rule) -> float:
    if not finite[i]:
        return 0.0
    x = logits[i]
    if rule.score == "softmax":
        top = max(v for v, ok in zip(logits, finite, strict=True) if ok)
        return math.exp(x - top) / sum(math.exp(v - top) for v, ok in zip(logits, finite, strict=True) if ok)
    if rule.score == "sqrt_softplus":
        return math.sqrt(math.log1p(math.exp(-abs(x))) + max(x, 0.0))
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))

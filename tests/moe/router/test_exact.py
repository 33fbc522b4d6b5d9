"""Exact selection: six thousand rows a rule, recomputed from the operator's own logits by another library."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from envoi.ops.moe.router import PRESETS, Rule, route
from envoi.ops.moe.router.reference import scores

ROWS, HIDDEN = 6_000, 24


def distinct_presets() -> list[str]:
    """Return one model for each size and rule, whatever its scale."""
    kinds = {(p.num_experts, p.num_topk, unscaled(p.rule), p.has_expert_bias): name for name, p in PRESETS.items()}
    return list(kinds.values())


def distinct_rules() -> list[str]:
    """Return one model for each rule, whatever its size and scale."""
    return list({(unscaled(p.rule), p.has_expert_bias): name for name, p in PRESETS.items()}.values())


def unscaled(rule: Rule) -> Rule:
    return replace(rule, routed_scale=1.0)


def ranking_key(logits: torch.Tensor, rule: Rule, bias: torch.Tensor | None) -> np.ndarray:
    """Compute the keys that a rule ranks by, before groups are barred: scores where logits rank otherwise."""
    by_score = bias is not None or (rule.num_groups > 1 and rule.group_score == "top2_sum")
    if by_score and rule.score not in ("softmax_over_topk", "sigmoid_of_topk"):
        logits = scores(logits, rule)
    return (logits if bias is None else logits + bias).cpu().numpy()


def hard_rows(num_experts: int, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    """Make tokens and a gate; logits by thirds: around 0; around -2, so of both signs at the cut; 1 +- 1e-4."""
    source = torch.Generator().manual_seed(num_experts)
    tokens = torch.randn(rows, HIDDEN, generator=source)
    gate = torch.randn(num_experts, HIDDEN, generator=source) / HIDDEN**0.5
    gate[:, 0] = 1.0
    third = rows // 3
    tokens[:, 0] = 0.0
    tokens[third : 2 * third, 0] = -2.0
    tokens[2 * third :] *= 3e-5
    tokens[2 * third :, 0] = 1.0
    return tokens, gate


def wrong_rows(key: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Find the rows of ids that aren't the k largest keys, largest first, the smaller id first in a tie."""
    chosen = np.take_along_axis(key, ids, 1)
    falls = (chosen[:, :-1] > chosen[:, 1:]) | ((chosen[:, :-1] == chosen[:, 1:]) & (ids[:, :-1] < ids[:, 1:]))
    taken = np.zeros(key.shape, bool)
    np.put_along_axis(taken, ids, True, 1)
    last, last_id = chosen[:, -1:], ids[:, -1:]
    loses = (key < last) | ((key == last) & (np.arange(key.shape[1]) > last_id))
    return ~(falls.all(1) & (taken.sum(1) == ids.shape[1]) & (taken | loses).all(1))


def bar_groups(key: np.ndarray, rule: Rule) -> np.ndarray:
    """Set keys outside the best groups to -inf; a tie goes to the smaller group."""
    groups = key.reshape(len(key), rule.num_groups, -1)
    best = -np.sort(-groups, axis=2)
    strength = best[..., 0] if rule.group_score == "max" else best[..., 0] + best[..., 1]
    order = np.lexsort((np.broadcast_to(np.arange(rule.num_groups), strength.shape), -strength), axis=1)
    kept = np.zeros(strength.shape, bool)
    np.put_along_axis(kept, order[:, : rule.num_topk_groups], True, 1)
    return np.where(kept[..., None], groups, -np.inf).reshape(key.shape)


@pytest.mark.parametrize("name", distinct_rules())
def test_not_one_wrong_id(name):
    chosen = PRESETS[name]
    rule = chosen.rule
    tokens, gate = hard_rows(chosen.num_experts)
    source = torch.Generator().manual_seed(1)
    bias = torch.randn(chosen.num_experts, generator=source) * 0.05 if chosen.has_expert_bias else None
    got = route(tokens, gate, chosen.num_topk, rule=name, expert_bias=bias, return_logits=True)
    key = ranking_key(got.logits, rule, bias)
    if rule.num_groups > 1:
        key = bar_groups(key, rule)
    wrong = wrong_rows(key, got.topk_ids.numpy())
    assert not wrong.any(), f"{wrong.sum()} of {len(wrong)} rows, the first is {wrong.argmax()}"


@pytest.mark.parametrize("rule", [Rule(), Rule("sigmoid"), Rule("sqrt_softplus")], ids=lambda rule: rule.score)
def test_scores_are_within_a_few_units_of_float64(rule):
    tokens, gate = hard_rows(64, 3000)
    x = tokens @ gate.T * 4
    wide = scores(x.double(), rule)
    error = ((scores(x, rule).double() - wide) / wide).abs().max()
    assert error < (3e-6 if rule.score == "softmax" else 3 * 2**-24), error


def test_a_sigmoid_far_below_zero_isnt_lost():
    x = torch.tensor([[-100.0, -88.0, -30.0, 0.0, 30.0, 100.0]])
    torch.testing.assert_close(scores(x, Rule("sigmoid")).double(), x.double().sigmoid(), rtol=1e-6, atol=2.0**-149)


def test_signs_may_differ_within_a_rows_choice():
    tokens, gate = hard_rows(32)
    got = route(tokens, gate, 8, return_logits=True)
    chosen = got.logits.gather(1, got.topk_ids.long())
    mixed = ((chosen > 0).any(1) & (chosen < 0).any(1)).numpy()
    assert mixed.sum() > 900
    assert not wrong_rows(got.logits.numpy(), got.topk_ids.numpy())[mixed].any()
    want = chosen.double().softmax(1)  # a renormalised softmax equals the softmax over the chosen
    torch.testing.assert_close(got.topk_weights.double(), want, rtol=2e-6, atol=1e-8)

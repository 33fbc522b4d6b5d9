"""Selection: exact, the smaller id wins ties, hostile logits, every rule."""

import torch

from envoi.ops.moe.router import Rule
from envoi.ops.moe.router.reference import select

RULES = {
    "softmax": Rule(),
    "softmax, not renormalised": Rule(renormalize=False, routed_scale=16.0),
    "softmax, groups by max": Rule("softmax", 4, 2, "max", renormalize=False),
    "sigmoid": Rule("sigmoid"),
    "sigmoid, groups by two": Rule("sigmoid", 4, 2, "top2_sum", routed_scale=2.5),
    "sqrt(softplus)": Rule("sqrt_softplus", routed_scale=1.5),
    "softmax over the k": Rule("softmax_over_topk", renormalize=False),
    "sigmoid of the k": Rule("sigmoid_of_topk", renormalize=False),
    "identity": Rule("identity", renormalize=False),
    "identity, groups by two": Rule("identity", 4, 2, "top2_sum", renormalize=False, routed_scale=-0.5),
}


def test_ties_between_groups_go_to_the_smaller_group():
    x = torch.zeros(1, 16)
    _, ids = select(x, 4, Rule("softmax", 4, 2), None)
    assert ids.tolist() == [[0, 1, 2, 3]]
    _, ids = select(x, 8, Rule("sigmoid", 4, 2, "top2_sum"), None)
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]


def test_saturated_scores_do_not_tie_what_the_logits_tell_apart():
    x = torch.tensor([[50.0, 60.0, 55.0, 40.0]])  # the sigmoid of each is 1.0 in float32
    _, ids = select(x, 2, Rule("sigmoid"), None)
    assert ids.tolist() == [[1, 2]]

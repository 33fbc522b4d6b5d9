"""Selection: exact, the smaller id wins ties, hostile logits, every rule."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from envoi.ops.moe.router import Rule
from envoi.ops.moe.router.reference import select
from tests.helpers.inputs import LOGITS, logits
from tests.moe.router import naive

RULES = {
    "softmax": Rule(),
    "softmax, not renormalised": Rule(renormalize=False, routed_scale=16.0),
    "softmax, groups by max": Rule("softmax", 4, 2, "max", renormalize=False),
    "sigmoid": Rule("sigmoid"),
    "sigmoid, groups by two": Rule("sigmoid", 4, 2, "top2_sum", routed_scale=2.5),
    "sqrt(softplus)": Rule("sqrt_softplus", routed_scale=1.5),
    "softmax over the k": Rule("softmax_over_topk", renormalize=False),
    "sigmoid of the k": Rule("sigmoid_of_topk", renormalize=False),
}


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("biased", [False, True])
def test_hostile_logits_against_plain_python(kind, rule, biased):
    k, n = 4, 16
    x = logits(kind, 24, n, k).double()
    bias = torch.randn(n, generator=torch.Generator().manual_seed(7)).double() * 0.2 if biased else None
    weights, ids = select(x, k, RULES[rule], bias)
    for row in range(len(x)):
        want_weights, want_ids = naive.select(x[row].tolist(), k, RULES[rule], bias.tolist() if biased else None)
        assert ids[row].tolist() == want_ids
        torch.testing.assert_close(weights[row], torch.tensor(want_weights, dtype=torch.float64), rtol=1e-9, atol=1e-12)


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


@given(
    rows=st.integers(0, 9), groups=st.sampled_from([1, 2, 4]), size=st.integers(2, 9), data=st.data(),
    kind=st.sampled_from(list(LOGITS)), rule=st.sampled_from(list(RULES)),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_invariants(rows, groups, size, data, kind, rule):
    n = groups * size * RULES[rule].num_groups
    most = n * RULES[rule].num_topk_groups // RULES[rule].num_groups
    k = data.draw(st.integers(1, min(most, 32)))
    x = logits(kind, rows, n, k)
    weights, ids = select(x, k, RULES[rule], None)
    assert weights.shape == ids.shape == (rows, k)
    assert bool(weights.isfinite().all())
    assert bool((weights[ids < 0] == 0).all())
    for row in range(rows):
        chosen = [i for i in ids[row].tolist() if i >= 0]
        assert len(set(chosen)) == len(chosen)
        assert ids[row].tolist() == chosen + [-1] * (k - len(chosen))
        assert all(bool(x[row, i].isfinite()) for i in chosen)
        if RULES[rule].renormalize and chosen and kind in ("randn", "all equal", "crowded around 1"):
            assert abs(float(weights[row].sum()) / RULES[rule].routed_scale - 1) < 1e-5

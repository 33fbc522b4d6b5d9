"""Yardsticks themselves: results that must never pass."""

import math

import pytest
import torch

from tests.helpers.accuracy import assert_at_most_twice, assert_same_bits, relative_error
from tests.helpers.inputs import LOGITS, logits

WANT = torch.tensor([3.0, 4.0])


def test_relative_error():
    assert relative_error(WANT, WANT) == 0
    assert relative_error(torch.tensor([3.0, 4.5]), WANT) == pytest.approx(0.1)
    assert relative_error(torch.zeros(0), torch.zeros(0)) == 0
    assert relative_error(torch.full((2,), 0.5), torch.zeros(2)) > 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_on_one_side_never_passes(bad):
    assert relative_error(torch.tensor([3.0, bad]), WANT) == math.inf
    assert relative_error(WANT, torch.tensor([3.0, bad])) == math.inf
    with pytest.raises(AssertionError):
        assert_at_most_twice(torch.tensor([3.0, bad]), WANT + 1, WANT)
    with pytest.raises(AssertionError):  # a broken yardstick excuses nothing
        assert_at_most_twice(WANT + 9, torch.tensor([3.0, bad]), WANT)


@pytest.mark.parametrize("shared", [math.nan, math.inf])
def test_what_is_not_finite_on_both_sides_hides_no_error(shared):
    want = torch.tensor([3.0, 4.0, shared])
    assert relative_error(want, want) == 0
    assert relative_error(torch.tensor([0.0, 0.0, shared]), want) == 1
    assert relative_error(torch.tensor([3.0, 4.0, math.inf]), torch.tensor([3.0, 4.0, -math.inf])) == math.inf


def test_twice_is_the_limit():
    assert_at_most_twice(WANT * 1.002, WANT * 1.001, WANT)
    with pytest.raises(AssertionError, match=r"error 0.0021, torch's 0.001"):
        assert_at_most_twice(WANT * 1.0021, WANT * 1.001, WANT)


def test_same_bits():
    assert_same_bits(torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 1.0]))
    for got, want in (
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([1.0]), torch.tensor([1.0 + 2**-23])),
        (torch.tensor([1]), torch.tensor([1.0])),
        (torch.tensor([1.0]), torch.tensor([[1.0]])),
    ):
        with pytest.raises(AssertionError):
            assert_same_bits(got, want)


@pytest.mark.parametrize("kind", LOGITS)
def test_hostile_logits_are_what_they_say(kind):
    x = logits(kind, 50, 16, 4)
    assert (x.shape, x.dtype) == ((50, 16), torch.float32)
    assert logits(kind, 0, 16, 4).shape == (0, 16)
    ranked = x.nan_to_num(-1e9, -1e9, -1e9).sort(1, descending=True).values
    assert {
        "all negative": lambda: bool((x < 0).all()),
        "mixed signs": lambda: bool(((ranked[:, :4] > 0).any(1) & (ranked[:, :4] < 0).any(1)).any()),
        "crowded around 1": lambda: bool(((x - 1).abs() <= 1.001e-4).all()) and len(x.unique()) > 100,
        "ties at the boundary": lambda: bool((ranked[:, 3] == ranked[:, 4]).all()),
        "ties between groups": lambda: bool((x[:, :8] == x[:, 8:]).all()),
        "fewer than k finite": lambda: bool((x.isfinite().sum(1) == 3).all()),
        "none finite": lambda: not bool(x.isfinite().any()),
        "one finite": lambda: bool((x.isfinite().sum(1) == 1).all()),
        "NaN": lambda: bool(x.isnan().any()) and bool(x.isfinite().any()),
        "saturating": lambda: bool((x.sigmoid() == 1).all()) and len(x.unique()) > 100,
    }.get(kind, lambda: True)()

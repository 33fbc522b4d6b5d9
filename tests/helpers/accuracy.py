"""Error measures: against float64, and compared with torch's result in the same dtype."""

import math

import torch


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return |got - want| / |want| over all finite elements in float64.

    A NaN or an infinity on one side only is an infinite error; one on both sides is no error and hides none.
    """
    got, want = got.detach().double(), want.detach().double()
    assert got.shape == want.shape, f"{list(got.shape)} against {list(want.shape)}"
    finite = got.isfinite() & want.isfinite()
    same = (got == want) | (got.isnan() & want.isnan())
    if not bool((finite | same).all()):
        return math.inf
    difference, norm = float((got - want)[finite].norm()), float(want[finite].norm())
    return difference / norm if norm else difference


def assert_at_most_twice(ours: torch.Tensor, torchs: torch.Tensor, oracle: torch.Tensor) -> None:
    """Assert that our error is at most twice torch's own; both against the same float64 result."""
    mine, theirs = relative_error(ours, oracle), relative_error(torchs, oracle)
    assert math.isfinite(theirs), "torch's result isn't finite where it should be: nothing to compare with"
    assert mine <= 2 * theirs + 1e-12, f"error {mine:.3g}, torch's {theirs:.3g}"


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    """Assert equal shape, dtype and bits, the sign of a zero too; a NaN equals a NaN."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    if got.is_floating_point():
        got, want = got.detach().double(), want.detach().double()
        same = ((got == want) & (got.signbit() == want.signbit())) | (got.isnan() & want.isnan())
    else:
        same = got == want
    assert bool(same.all()), f"{int((~same).sum())} of {same.numel()} elements differ"

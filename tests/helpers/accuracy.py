"""How wrong is a result: against float64, and beside what torch gets in the same dtype."""

import torch


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want| / |want| over all elements in float64. A NaN on one side only is an error without bound."""
    got, want = got.double(), want.double()
    assert got.shape == want.shape, f"{list(got.shape)} against {list(want.shape)}"
    if bool((got.isnan() != want.isnan()).any()):
        return float("inf")
    difference = (got - want).nan_to_num(nan=0.0)
    norm = float(want.nan_to_num(nan=0.0).norm())
    return float(difference.norm()) / norm if norm else float(difference.norm())


def assert_at_most_twice(ours: torch.Tensor, torchs: torch.Tensor, oracle: torch.Tensor) -> None:
    """Our error is at most twice torch's own; both against the same float64 result."""
    mine, theirs = relative_error(ours, oracle), relative_error(torchs, oracle)
    assert mine <= 2 * theirs + 1e-12, f"error {mine:.3g}, torch's {theirs:.3g}"


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal shape, dtype and bits; a NaN equals a NaN."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    if got.is_floating_point():
        got, want = got.float(), want.float()
        same = (got == want) | (got.isnan() & want.isnan())
    else:
        same = got == want
    assert bool(same.all()), f"{int((~same).sum())} of {same.numel()} elements differ"

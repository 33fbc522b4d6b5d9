"""Epilogues that can be measured, by name, with the kinds of their operands."""

from envoi.epilogues import Epilogue, Tile, epilogue, exp, log, row_max, row_sum, tanh
from envoi.epilogues.library import absmax, gelu_residual, scale_bias_relu, swiglu, swiglu_fp8

CAP = 30.0


@epilogue
def capped_residual_max(acc, residual: Tile):
    """Return cap * tanh(acc / cap) + residual, and the largest value of each row."""
    x = CAP * tanh(acc / CAP) + residual
    return x, row_max(x)


@epilogue
def logsumexp(acc):
    """Return the accumulator and the logarithm of each row's sum of exponentials; values stay below 88."""
    return acc, log(row_sum(exp(acc)))


@epilogue
def logsumexp_of_max(acc):
    """Return what `logsumexp` does, for values of any size: each row's largest is subtracted before exp.

    It is known once the row is complete, so that a second kernel reads the product again.
    """
    largest = row_max(acc)
    return acc, log(row_sum(exp(acc - largest))) + largest


# None: the product as it is.
EPILOGUES: dict[str, Epilogue | None] = {
    "store": None, "swiglu": swiglu, "swiglu_fp8": swiglu_fp8, "scale_bias_relu": scale_bias_relu,
    "gelu_residual": gelu_residual, "absmax": absmax, "capped_residual_max": capped_residual_max,
    "logsumexp": logsumexp, "logsumexp_of_max": logsumexp_of_max,
}  # fmt: skip
# Kinds of operands by name: "Col" [N], "Tile" [M, N], or a number.
OPERANDS: dict[str, dict[str, str | float]] = {
    "scale_bias_relu": {"alpha": 0.5, "bias": "Col"},
    "gelu_residual": {"bias": "Col", "residual": "Tile"},
    "capped_residual_max": {"residual": "Tile"},
}

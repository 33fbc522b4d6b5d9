"""Epilogues: plain Python functions of an accumulator -> small IR -> torch reference and device code.

`envoi.epilogue` is both this package and the decorator: `@envoi.epilogue` decorates, `envoi.epilogue.silu` is a
function of the language. `envoi.epilogue.vocabulary` defines all functions of the language.
"""

import sys
from collections.abc import Callable
from types import ModuleType

from envoi.epilogue.api import Epilogue, epilogue
from envoi.epilogue.errors import EpilogueError
from envoi.epilogue.ir import IR, Node
from envoi.epilogue.reference import evaluate
from envoi.epilogue.trace import Col, HalfCol, HalfTile, Row, Scalar, Tile
from envoi.epilogue.vocabulary import (
    cast,
    clip,
    col_absmax,
    col_max,
    col_sum,
    exp,
    exp2,
    gelu,
    halves,
    hardswish,
    leaky_relu,
    log,
    log2,
    maximum,
    minimum,
    pairs,
    quantize,
    relu,
    round_bf16,
    row_absmax,
    row_max,
    row_sum,
    rsqrt,
    sigmoid,
    silu,
    softmax,
    softplus,
    sqrt,
    tanh,
    topk,
    total_absmax,
    total_max,
    total_sum,
    where,
)

__all__ = [
    "IR", "Col", "Epilogue", "EpilogueError", "HalfCol", "HalfTile", "Node", "Row", "Scalar", "Tile", "cast", "clip",
    "col_absmax", "col_max", "col_sum", "epilogue", "evaluate", "exp", "exp2", "gelu", "halves", "hardswish",
    "leaky_relu", "log", "log2", "maximum", "minimum", "pairs", "quantize", "relu", "round_bf16", "row_absmax",
    "row_max", "row_sum", "rsqrt", "sigmoid", "silu", "softmax", "softplus", "sqrt", "tanh", "topk", "total_absmax",
    "total_max", "total_sum", "where",
]  # fmt: skip


class _Decorator(ModuleType):
    """Callable module, so that the name `envoi.epilogue` serves the package and the decorator."""

    def __call__(self, function: Callable) -> Epilogue:
        return epilogue(function)


sys.modules[__name__].__class__ = _Decorator

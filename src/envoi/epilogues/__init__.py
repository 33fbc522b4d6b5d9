"""Epilogues: plain Python functions of an accumulator -> small IR -> torch reference and device code.

`@envoi.epilogue` decorates; `from envoi.epilogues import silu, Col`: functions of the language, annotations.
`envoi.epilogues.vocabulary` defines all functions of the language.
"""

from envoi.epilogues.api import Epilogue, epilogue
from envoi.epilogues.errors import EpilogueError
from envoi.epilogues.ir import IR, Node
from envoi.epilogues.reference import evaluate
from envoi.epilogues.trace import Col, HalfCol, HalfTile, Row, Scalar, Tile
from envoi.epilogues.vocabulary import (
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
    round_mxfp8,
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
    "leaky_relu", "log", "log2", "maximum", "minimum", "pairs", "quantize", "relu", "round_bf16", "round_mxfp8",
    "row_absmax", "row_max", "row_sum", "rsqrt", "sigmoid", "silu", "softmax", "softplus", "sqrt", "tanh", "topk",
    "total_absmax", "total_max", "total_sum", "where",
]  # fmt: skip

"""Text of operations on the values of a lowered epilogue."""

import math

import torch

from envoi.epilogues.ir import Node
from envoi.quant.formats import Scheme

INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==",
    "ne": "!=", "logical_and": "&", "logical_or": "|",
}  # fmt: skip
LANGUAGE = ("abs", "log", "log2", "sqrt", "rsqrt", "where")
TYPE_NAMES = {
    torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32", torch.float8_e4m3fn: "float8e4nv",
    torch.int32: "int32", torch.uint8: "uint8", torch.float8_e8m0fnu: "uint8",
}  # fmt: skip


def number(value: float) -> str:
    """Return the text of a constant."""
    return repr(value) if math.isfinite(value) else f'float("{value}")'


def fold(function: str, names: list[str]) -> str:
    """Return the text of a function of two values applied to all names in turn."""
    text = names[0]
    for name in names[1:]:
        text = f"{function}({text}, {name})"
    return text


def call(node: Node, args: list[str]) -> str:
    """Return the text of an elementwise operation."""
    if node.op in INFIX:
        return f"{args[0]} {INFIX[node.op]} {args[1]}"
    if node.op == "neg":
        return f"{args[0]} * -1.0"  # the language's own is 0 - x, with another sign of zero
    if node.op == "logical_not":
        return f"~{args[0]}"
    if node.op == "pow":
        return power(args[0], node.attribute("exponent"))
    if node.op == "gelu":
        return f"{'gelu_tanh' if node.attribute('approximate') == 'tanh' else 'gelu'}({args[0]})"
    if node.op == "leaky_relu":
        return f"leaky_relu({args[0]}, {number(node.attribute('slope'))})"
    if node.op in LANGUAGE:
        return f"L.{node.op}({', '.join(args)})"
    return f"{node.op}({', '.join(args)})"


def power(x: str, exponent: int) -> str:
    """Return the text of x to an integer power."""
    if exponent < 0:
        return f"1.0 / ({power(x, -exponent)})"
    if exponent == 0:
        return f"{x} * 0.0 + 1.0"
    half = power(x, exponent // 2) if exponent > 1 else ""
    if exponent == 1:
        return x
    return f"({half}) * ({half})" + (f" * {x}" if exponent % 2 else "")


def converted(value: str, dtype: torch.dtype) -> str:
    """Return the text of a value in another dtype."""
    if dtype == torch.float8_e4m3fn:
        return f"e4m3({value})"
    if dtype == torch.bfloat16:
        return f"bf16({value})"
    return value if dtype in (torch.float32, torch.int32) else f"{value}.to(L.{TYPE_NAMES[dtype]})"


def scale_factors(amax: str, scheme: Scheme) -> str:
    """Return the text of (stored scale factors, multipliers), as in `envoi.quant.quantize`."""
    if scheme.sf == torch.float8_e8m0fnu:
        return f"e8m0_ceil(divide({amax}, {scheme.max_value}))"
    if scheme.sf == torch.float8_e4m3fn:
        return f"e4m3_scale(divide({amax}, {scheme.max_value}))"
    return f"divide({amax}, {scheme.max_value}), divide({scheme.max_value}, {amax})"

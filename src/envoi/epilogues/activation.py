"""Activations of experts that a user writes: a function of gate and up, or of up alone, and its operations as text.

    written    a function -> "relu_gate(gate, up): %2 = relu %0; %3 = mul %2 %1; %3"
    computed   that text, and gate and up -> the activation: recorded in an epilogue, or computed on torch tensors

The text is all that packed experts keep of the function, so that files, other processes and other ranks need no code
of the user, and equal texts compute equal numbers. %0 and %1 are gate and up, or %0 is up alone.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from envoi.check import expect_choice, fits_float32
from envoi.epilogues.api import Epilogue
from envoi.epilogues.errors import EpilogueError, refuse_at
from envoi.epilogues.ir import IR
from envoi.epilogues.operations import OPERATIONS
from envoi.epilogues.trace import Traced, trace
from envoi.epilogues.vocabulary import pairs
from envoi.types import UNGATED, has_gate

GATED = ("swiglu", "swiglu_oai", "geglu", "geglu_tanh")
ACTIVATIONS = (*GATED, *UNGATED)
SPLITTING = ("even", "odd", "left", "right")  # operations that part an accumulator into gate and up
MOST_STEPS = 256  # of a text; far more than a kernel could keep in registers

_TEXT = re.compile(r"([A-Za-z_]\w*)\((gate, up|up)\): (.+)", re.ASCII)
_STEP = re.compile(r"%(\d+) = (\w+)((?: [^ ;]+)+)", re.ASCII)


class Step(NamedTuple):
    """Operation of a text. args: the number of an earlier value, or a constant. attributes: by name."""

    op: str
    args: tuple[int | float, ...]
    attributes: tuple[tuple[str, Any], ...]


class Program(NamedTuple):
    """Parsed text: how many values it takes, its steps, and which value is the result."""

    num_inputs: int
    steps: tuple[Step, ...]
    result: int


def expect_activation(value: Any) -> str:
    """Return the name of an activation, or the text of a user's.

    value: one of ACTIVATIONS, a text, or a function as `written` takes it. Raises ValueError for anything else.
    """
    if isinstance(value, str) and ":" in value:
        try:
            _parsed(value)
        except ValueError as error:
            raise ValueError(f"activation: expected a text that envoi.experts.pack has written, {error}") from None
        return value
    if callable(value) and not isinstance(value, type):
        return written(value)
    if not isinstance(value, str):
        raise ValueError(
            f"activation: expected one of {', '.join(map(repr, ACTIVATIONS))} or a function of gate and up, or of up, "
            f"got {value!r}"
        )
    return expect_choice("activation", value, ACTIVATIONS)


def written(function: Callable | Epilogue) -> str:
    """Return a user's activation as text. It is called once, on stand-ins: numbers that it reads become constants.

    function: of gate and up, or of up for experts without a gate, each [M, I], with operators and the functions of
    `envoi.epilogues`; further parameters need defaults. Or an epilogue without operands that splits its accumulator by
    `pairs` or `halves`, or doesn't split it. Its value is one number for each gate and up, float32.
    Raises EpilogueError, a ValueError, with the file, the line and the reason.
    """
    if isinstance(function, Epilogue):
        return _text(function.ir, function.function)
    parameters, name = _parameters(function), getattr(function, "__name__", type(function).__name__)

    def activation(acc):
        value = function(*pairs(acc)) if parameters == 2 else function(acc)
        if not isinstance(value, Traced) or value.node.dtype != "f32":
            came = "a mask; use where(mask, 1.0, 0.0)" if isinstance(value, Traced) else type(value).__name__
            _refuse(function, f"expected one value for each gate and up as its result, got {came}")
        return value

    ir = trace(activation)
    return _text(IR(name, ir.operands, ir.nodes, ir.outputs), function, parameters)


def computed(text: str, *values: Any) -> Any:
    """Return the activation of gate and up, or of up: values of an epilogue being traced, or float tensors [M, I]."""
    return _run(_parsed(text), values)


def _run(program: Program, values: Sequence[Any]) -> Any:
    found, first = list(values), values[0]
    for step in program.steps:
        args = [found[arg] if isinstance(arg, int) else arg for arg in step.args]
        if isinstance(first, Traced):
            found.append(first.graph.apply(step.op, *args, **dict(step.attributes)))
        else:
            tensors = (arg if isinstance(arg, torch.Tensor) else first.new_full((1, 1), arg) for arg in args)
            found.append(OPERATIONS[step.op].torch(*tensors, **dict(step.attributes)))
    return found[program.result]


def _parameters(function: Callable) -> int:
    """Return how many values a function takes, 1 or 2."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise EpilogueError(f"activation: expected a Python function, got {function!r}") from None
    needed = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(needed) not in (1, 2) or any(p.kind is p.KEYWORD_ONLY for p in needed):
        came = ", ".join(p.name for p in needed) or "none"
        _refuse(function, f"expected a function of gate and up, or of up alone, got one that needs {came}")
    return len(needed)


def _text(ir: IR, function: Callable, wanted: int | None = None) -> str:
    """Return an IR as text. wanted: how many of gate and up it must read; None: see whether it splits."""
    if ir.operands:
        _refuse(function, f"expected no operands, got {ir.operands[0]}: a number can be a default, or be read outside")
    inputs: dict[int, int] = {}  # node -> number of a value
    splits = any(node.op in SPLITTING for node in ir.nodes)
    for position, node in enumerate(ir.nodes):
        if node.op in SPLITTING:
            inputs[position] = int(node.op in ("odd", "right"))
        elif node.op == "acc" and not splits:
            inputs[position] = 0
    num_inputs = wanted or 1 + splits
    if len(set(inputs.values())) != num_inputs:
        _refuse(function, "expected all that it takes to take part in what it returns; gate and up, or up alone")
    names: dict[int, str] = {position: f"%{number}" for position, number in inputs.items()}
    lines: list[str] = []
    for position, node in enumerate(ir.nodes):
        if position in names or (node.op == "acc" and splits):
            continue
        if node.op == "constant":
            names[position] = repr(node.attribute("value"))
            continue
        if node.step != "element" or any(arg not in names for arg in node.args):
            _refuse(function, f"{node.op} isn't possible in an activation, which sees its own gate and up alone")
        names[position] = f"%{num_inputs + len(lines)}"
        words = [names[arg] for arg in node.args] + [f"{key}={value}" for key, value in node.attributes]
        lines.append(f"{names[position]} = {node.op} {' '.join(words)}")
    if len(ir.outputs) != 1 or ir.outputs[0][0]:
        _refuse(function, f"expected one value as its result, got {len(ir.outputs)}")
    result = names.get(ir.outputs[0][1], "")
    if not result.startswith("%"):
        _refuse(function, "expected one value for each gate and up as its result, got a constant")
    if len(lines) > MOST_STEPS:
        _refuse(function, f"expected at most {MOST_STEPS} operations, got {len(lines)}")
    name = ir.name if ir.name.isidentifier() and ir.name.isascii() else "activation"
    return f"{name}({'gate, up' if num_inputs == 2 else 'up'}): {'; '.join([*lines, result])}"


def _refuse(function: Any, reason: str) -> Any:
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        raise EpilogueError(f"activation: {reason}")
    refuse_at(code.co_filename, code.co_firstlineno, f"activation: {reason}")


@lru_cache(maxsize=256)
def _parsed(text: str) -> Program:
    """Return the program of a text, which may come from a file. Raises ValueError for what `written` wouldn't write."""
    whole = _TEXT.fullmatch(text)
    if whole is None:
        raise ValueError(f"got {text[:80]!r}")
    num_inputs, (*lines, result) = 1 + has_gate(text), whole[3].split("; ")
    if len(lines) > MOST_STEPS:
        raise ValueError(f"of at most {MOST_STEPS} operations, got {len(lines)}")
    steps = tuple(_step(line, num_inputs + place) for place, line in enumerate(lines))
    last = num_inputs + len(steps) - 1
    if not re.fullmatch(r"%\d+", result, re.ASCII) or int(result[1:]) > last:
        raise ValueError(f"got {result[:80]!r} as its result")
    program = Program(num_inputs, steps, int(result[1:]))
    _check(program)
    return program


def _step(line: str, position: int) -> Step:
    found = _STEP.fullmatch(line)
    rule = OPERATIONS.get(found[2]) if found else None
    if found is None or rule is None or rule.step != "element" or int(found[1]) != position:
        raise ValueError(f"got {line[:80]!r}")
    op, words = found[2], found[3].split()
    attributes: tuple[tuple[str, Any], ...] = ()
    if op in _ATTRIBUTES:
        name, kind = _ATTRIBUTES[op]
        key, equals, value = words.pop().partition("=")
        if not equals or key != name:
            raise ValueError(f"got {line[:80]!r} without {name}")
        attributes = ((name, kind(value)),)
    if len(words) != _ARITY.get(op, 1):
        raise ValueError(f"got {line[:80]!r} with {len(words)} arguments")
    return Step(op, tuple(_argument(word, position) for word in words), attributes)


def _argument(word: str, position: int) -> int | float:
    if not word.startswith("%"):
        return _constant(word)
    number = int(word[1:]) if word[1:].isdecimal() else position
    if number >= position:
        raise ValueError(f"got {word!r} before it is known")
    return number


def _constant(word: str) -> float:
    number = float(word)
    if not fits_float32(number):
        raise ValueError(f"got {word!r}, which float32 can't hold")
    return number


def _approximation(word: str) -> str:
    return expect_choice("approximate", word, ("none", "tanh"))


_ATTRIBUTES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "gelu": ("approximate", _approximation), "leaky_relu": ("slope", _constant), "pow": ("exponent", int),
}  # fmt: skip
_ARITY = {"where": 3} | dict.fromkeys((
    "add", "sub", "mul", "div", "minimum", "maximum", "lt", "le", "gt", "ge", "eq", "ne", "logical_and", "logical_or",
), 2)  # fmt: skip


def _check(program: Program) -> None:
    """Trace a program, so that a mask in a number's place, or a result without rows, is found where it is read."""

    def activation(acc):
        return _run(program, pairs(acc) if program.num_inputs == 2 else (acc,))

    ir = trace(activation)
    if not ir.nodes[ir.outputs[0][1]].shape.spans_columns:
        raise ValueError("got a constant as its result")

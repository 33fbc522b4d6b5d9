"""Tracer of epilogues: runs the user's function once, on stand-ins that record the operations on them."""

import inspect
from collections.abc import Callable, Mapping
from numbers import Integral
from types import SimpleNamespace
from typing import Any, NoReturn, get_type_hints

import torch

from envoi.check import fits_float32
from envoi.epilogues.errors import EpilogueError, last_user_line, refuse, refuse_at, users_frame
from envoi.epilogues.ir import COL, HALF_COL, HALF_TILE, IR, ROW, SCALAR, TILE, Node, Operand, Shape
from envoi.epilogues.operands import is_number
from envoi.epilogues.operations import OPERATIONS, infer


class Graph:
    """Nodes recorded so far; an operation that is already recorded is not added again."""

    def __init__(self):
        self.nodes: list[Node] = []
        self._positions: dict[tuple[Node, str], int] = {}

    def add(self, node: Node) -> "Traced":
        """Add a node unless it is recorded already; return its stand-in."""
        key = node, repr(node.attributes)  # 0.0 == -0.0, but their reprs differ
        if key not in self._positions:
            self._positions[key] = len(self.nodes)
            self.nodes.append(node)
        return Traced(self, self._positions[key])

    def apply(self, op: str, *values: Any, **attributes: Any) -> "Traced":
        """Record an operation on stand-ins and numbers; return its stand-in."""
        args = [self.coerce(op, value) for value in values]
        pairs = tuple(sorted(attributes.items()))
        node = infer(op, tuple(self.nodes[arg.position] for arg in args), pairs)
        return self.add(Node(op, tuple(arg.position for arg in args), pairs, node.shape, node.dtype, node.step))

    def coerce(self, op: str, value: Any) -> "Traced":
        """Return the stand-in for an argument of an operation: a stand-in or a number."""
        if isinstance(value, Traced):
            if value.graph is not self:
                refuse(f"{op}: expected values of this epilogue, got one of another")
            return value
        if isinstance(value, torch.Tensor):
            refuse(f"{op}: got a torch tensor that isn't an operand; make it a parameter (Row, Col, Tile) and pass it")
        if not is_number(value):
            refuse(f"{op}: expected a value of the epilogue or a number, got {type(value).__name__}")
        if not fits_float32(value):
            refuse(f"{op}: expected a number that float32 can hold, got {value!r}")
        return self.add(Node("constant", (), (("value", float(value)),), SCALAR, "f32", "load"))


def _binary(op: str) -> Callable:
    def apply(self: "Traced", other: Any) -> "Traced":
        return self.graph.apply(op, self, other)

    return apply


def _reflected(op: str) -> Callable:
    def apply(self: "Traced", other: Any) -> "Traced":
        return self.graph.apply(op, other, self)

    return apply


def _refused(reason: str) -> Callable[..., NoReturn]:
    def method(self: "Traced", *args: Any, **kwargs: Any) -> NoReturn:
        refuse(reason)

    return method


_BRANCH = (
    "the value isn't known while tracing, so it can't decide a branch, a loop, `and`, `or` or `not`; use where(), & | ~"
)
_INDEX = (
    "a value is one element of a tile and can't be indexed, counted or iterated over; "
    "pairs(x) splits even and odd columns"
)
_NUMBER = (
    "the value isn't known while tracing, so it can't become a Python number, as math.* and float() need; "
    "use the functions of envoi.epilogues"
)
_REDUCE = "row_sum(x), row_max(x), col_sum(x), total_sum(x) .. reduce"
_DTYPE = 'values are float32; cast(x, "bf16") says how one leaves'
_HINTS = {
    **dict.fromkeys(("T", "mT", "H", "t", "transpose", "permute", "view", "reshape"), "transpose what gemm returns"),
    **dict.fromkeys(("dtype", "to", "type", "float", "double", "half", "bfloat16"), _DTYPE),
    **dict.fromkeys(("shape", "size", "ndim", "numel", "device"), "sizes and devices aren't known while tracing"),
    **dict.fromkeys(("sum", "mean", "max", "min", "amax", "norm"), _REDUCE),
    **dict.fromkeys(("clamp", "clamp_", "clip"), "use clip(x, low, high)"),
    **dict.fromkeys(("add", "sub", "mul", "div", "pow", "neg", "abs"), "use x + y, x * y, -x, abs(x) .."),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), "use x == y, x < y .."),
    **dict.fromkeys(("logical_and", "logical_or", "logical_not"), "use x & y, x | y, ~x"),
    **dict.fromkeys(("pairs", "even", "odd"), "use pairs(x)"),
    **dict.fromkeys(("halves", "left", "right"), "use halves(x)"),
    **dict.fromkeys(("topk", "topk_values", "topk_ids"), "use topk(x, k)"),
    **dict.fromkeys(("item", "tolist", "numpy"), _NUMBER),
}
_UFUNCS = {
    "add": "add", "subtract": "sub", "multiply": "mul", "divide": "div", "true_divide": "div", "less": "lt",
    "less_equal": "le", "greater": "gt", "greater_equal": "ge", "equal": "eq", "not_equal": "ne",
}  # fmt: skip
_LIBRARY = "only the functions of envoi.epilogues work on values of an epilogue, not those of torch or numpy"


class Traced:
    """Stand-in for a value of the epilogue during tracing."""

    __slots__ = ("graph", "position")
    __hash__ = object.__hash__

    def __init__(self, graph: Graph, position: int):
        object.__setattr__(self, "graph", graph)
        object.__setattr__(self, "position", position)

    @property
    def node(self) -> Node:
        """Node that this stands for."""
        return self.graph.nodes[self.position]

    def __repr__(self) -> str:
        return f"%{self.position} ({self.node})"

    __add__, __radd__ = _binary("add"), _reflected("add")
    __sub__, __rsub__ = _binary("sub"), _reflected("sub")
    __mul__, __rmul__ = _binary("mul"), _reflected("mul")
    __truediv__, __rtruediv__ = _binary("div"), _reflected("div")
    __lt__, __le__, __gt__, __ge__ = _binary("lt"), _binary("le"), _binary("gt"), _binary("ge")
    __eq__, __ne__ = _binary("eq"), _binary("ne")  # pyright: ignore[reportAssignmentType]
    __and__, __rand__ = _binary("logical_and"), _reflected("logical_and")
    __or__, __ror__ = _binary("logical_or"), _reflected("logical_or")

    def __neg__(self) -> "Traced":
        return self.graph.apply("neg", self)

    def __abs__(self) -> "Traced":
        return self.graph.apply("abs", self)

    def __invert__(self) -> "Traced":
        return self.graph.apply("logical_not", self)

    def __pow__(self, exponent: Any) -> "Traced":
        if isinstance(exponent, bool) or not isinstance(exponent, Integral):
            refuse(f"**: expected a constant int as the exponent, got {type(exponent).__name__}; use exp(y * log(x))")
        return self.graph.apply("pow", self, exponent=int(exponent))

    __bool__ = _refused(_BRANCH)
    __len__ = __iter__ = __getitem__ = __setitem__ = __contains__ = __reversed__ = _refused(_INDEX)
    __int__ = __float__ = __index__ = __complex__ = __round__ = __trunc__ = __floor__ = __ceil__ = _refused(_NUMBER)
    __array__ = __array_function__ = _refused(_LIBRARY)
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __matmul__ = __rmatmul__ = __rpow__ = __xor__ = __rxor__ = (
        __lshift__
    ) = __rshift__ = _refused("this operator isn't in the language; + - * / ** (int) abs() < <= > >= == != & | ~ are")

    # Tracing could make a new value, but on torch tensors these operators would change the caller's.
    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ifloordiv__ = __imod__ = __imatmul__ = __ipow__ = __iand__ = (
        __ior__
    ) = __ixor__ = __ilshift__ = __irshift__ = _refused("a value can't be changed in place; write x = x + y")

    def __array_ufunc__(self, function: Any, method: str, *values: Any, **rest: Any) -> "Traced":
        """Apply an operator whose left operand is a NumPy scalar; NumPy calls this method then."""
        op = _UFUNCS.get(function.__name__)
        values = tuple(x.item() if not isinstance(x, Traced) and getattr(x, "shape", None) == () else x for x in values)
        if op is None or method != "__call__" or not all(isinstance(x, Traced) or is_number(x) for x in values):
            refuse(_LIBRARY)
        return self.graph.apply(op, *values)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        if any(isinstance(arg, torch.Tensor) for arg in args):
            refuse("got a torch tensor that isn't an operand; make it a parameter (Row, Col, Tile) and pass it")
        refuse(_LIBRARY)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)  # Python and libraries probe for protocols that Traced doesn't have
        written = f"write {name}(x)" if name in OPERATIONS else "use the functions of envoi.epilogues.vocabulary"
        hint = _HINTS.get(name, written)
        refuse(f"a value has no attribute {name!r}; {hint}")

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        refuse(f"a value can't be changed (.{name} = ..); give the result a name instead")


class Scalar(Traced):
    """Annotation of an operand of one value: a number, or a tensor of one element. May have a number as its default."""

    shape = SCALAR


class Row(Traced):
    """Annotation of an operand with a value for each row: [M]."""

    shape = ROW


class Col(Traced):
    """Annotation of an operand with a value for each column: [N]; in a grouped GEMM for each expert, [E, N]."""

    shape = COL


class Tile(Traced):
    """Annotation of an operand with a value for each element: [M, N]."""

    shape = TILE


class HalfCol(Traced):
    """Annotation of a Col for the outputs of `pairs` and `halves`: [N / 2]; in a grouped GEMM [E, N / 2]."""

    shape = HALF_COL


class HalfTile(Traced):
    """Annotation of a Tile for the outputs of `pairs` and `halves`: [M, N / 2]."""

    shape = HALF_TILE


TAKEN = (
    "a", "b", "rows", "weights", "offsets", "epilogue", "out_dtype", "batch_invariant", "out", "workspace", "num_sms",
)  # fmt: skip
ANNOTATIONS = {kind.__name__: kind for kind in (Scalar, Row, Col, Tile, HalfCol, HalfTile)}


def trace(function: Callable) -> IR:
    """Run the function on stand-ins; return its IR. Raises EpilogueError for anything outside the language."""
    operands = _operands(function)
    graph = Graph()
    values = [graph.add(Node("acc", (), (), TILE, "f32", "load"))]
    loads = (Node("load", (), (("name", o.name),), o.shape, "f32", "load") for o in operands)
    values += [graph.add(load) for load in loads]
    try:
        returned = function(*values)
    except EpilogueError:
        raise
    except Exception as error:
        place = last_user_line(error.__traceback__) or _place(function)
        refuse_at(*place, f"{type(error).__name__} while tracing: {error}")
    outputs = _outputs(function, graph, returned)
    ir = _prune(function.__name__, operands, graph.nodes, outputs, function)
    if ir.takes_halves:
        _check_halves(ir, function)
    return ir


def inline(ir: IR, acc: Traced, operands: Mapping[str, Any]) -> list[Traced]:
    """Record an epilogue's operations on the values of another one; return the outputs. Constants keep their values.

    Operands are values of the other epilogue or numbers. Refuses those that are wider than their annotations.
    """
    graph, given = acc.graph, acc.node.shape
    if given.rows != "M" or not given.spans_columns:
        refuse(f"epilogue {ir.name}: expected a tile as its accumulator, got a {given}")
    values: list[Traced] = []
    for node in ir.nodes:
        if node.op == "acc":
            values.append(acc)
        elif node.op == "constant":
            values.append(graph.coerce("constant", node.attribute("value")))
        elif node.op == "load":
            values.append(_given(ir, ir.operand(node.attribute("name")), given, graph, operands))
        else:
            values.append(graph.apply(node.op, *(values[arg] for arg in node.args), **dict(node.attributes)))
    return [values[position] for _, position in ir.outputs]


def _given(ir: IR, operand: Operand, acc: Shape, graph: Graph, operands: Mapping[str, Any]) -> Traced:
    value = operands.get(operand.name)
    found = graph.coerce(operand.name, operand.default if value is None else value)
    shape, columns = found.node.shape, operand.shape.columns
    if operand.shape.spans_columns and operand.shape.divisor * acc.divisor > 1:
        columns = f"N/{operand.shape.divisor * acc.divisor}"
    want = Shape(operand.shape.rows, columns)
    if shape.rows not in ("1", want.rows) or shape.columns not in ("1", want.columns):
        refuse(f"{operand.name}: epilogue {ir.name} expects a {want} ({operand.kind}), got a {shape}")
    return found


def _place(function: Callable) -> tuple[str, int]:
    code = function.__code__
    return code.co_filename, code.co_firstlineno


def _operands(function: Callable) -> tuple[Operand, ...]:
    place = _place(function)
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters:
        refuse_at(*place, "an epilogue takes the accumulator as its first parameter, this takes none")
    for parameter in parameters:
        if parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
            refuse_at(
                *place, f"parameter {parameter.name}: expected a plain parameter, got {parameter.kind.description}"
            )
    if parameters[0].annotation is not inspect.Parameter.empty or parameters[0].default is not inspect.Parameter.empty:
        refuse_at(
            *place, f"parameter {parameters[0].name}: the first is the accumulator, without annotation or default"
        )
    return tuple(_operand(parameter, place, function) for parameter in parameters[1:])


def _operand(parameter: inspect.Parameter, place: tuple[str, int], function: Callable) -> Operand:
    if parameter.name in TAKEN:
        refuse_at(
            *place, f"parameter {parameter.name}: envoi.gemm and envoi.grouped_gemm take one of that name; rename it"
        )
    kind, why = _resolved(parameter.annotation, function)
    if not any(kind is known for known in ANNOTATIONS.values()):
        came = "none" if parameter.annotation is inspect.Parameter.empty else f"{parameter.annotation!r}{why}"
        refuse_at(*place, f"parameter {parameter.name}: expected an annotation of {', '.join(ANNOTATIONS)}, got {came}")
    if parameter.default is inspect.Parameter.empty:
        return Operand(parameter.name, kind.__name__, kind.shape)
    if kind is not Scalar or not is_number(parameter.default):
        refuse_at(*place, f"parameter {parameter.name}: only a Scalar can have a default, and it is a number")
    if not fits_float32(parameter.default):
        refuse_at(*place, f"parameter {parameter.name}: expected a default that float32 can hold")
    return Operand(parameter.name, kind.__name__, kind.shape, float(parameter.default))


def _resolved(annotation: Any, function: Callable) -> tuple[Any, str]:
    """Return the object that an annotation names, and for text that can't be resolved the reason.

    Text is looked up in the function's globals, its closure and the names where it is decorated. Names of the language
    resolve without that: they may be imported for type checkers alone.
    """
    if not isinstance(annotation, str):
        return annotation, ""
    function = inspect.unwrap(function)
    names = {**users_frame().f_locals, **inspect.getclosurevars(function).nonlocals}
    try:
        text = SimpleNamespace(__annotations__={"it": annotation})
        return get_type_hints(text, function.__globals__, names)["it"], ""
    except NameError as error:
        return ANNOTATIONS.get(annotation.strip("'\"")), f" ({error})"
    except Exception as error:  # evaluating the text may raise anything
        return None, f" ({type(error).__name__}: {error})"


def _outputs(function: Callable, graph: Graph, returned: Any) -> list[tuple[str, Traced]]:
    values: list[Any] = [returned]
    names = [""]
    if isinstance(returned, dict):
        values, names = list(returned.values()), list(returned)
        if any(not isinstance(name, str) or not name for name in names):
            refuse_at(*_place(function), f"{function.__name__}: expected text as the names of outputs, got {names}")
    elif isinstance(returned, tuple):
        values, names = list(returned), [""] * len(returned)
    if not values or any(not isinstance(value, Traced) or value.graph is not graph for value in values):
        came = [type(value).__name__ for value in values if not isinstance(value, Traced)]
        refuse_at(
            *_place(function),
            f"{function.__name__}: expected to return values of the epilogue (one, a tuple or a dict), "
            f"got {', '.join(came) or 'nothing'}",
        )
    for value in values:
        if value.node.dtype == "bool":
            refuse_at(*_place(function), f"{function.__name__}: a mask can't be returned; use where(mask, 1.0, 0.0)")
    return list(zip(names, values, strict=True))


def _prune(
    name: str, operands: tuple[Operand, ...], nodes: list[Node], outputs: list[tuple[str, Traced]], function: Callable
) -> IR:
    """Drop nodes that no output needs; refuse an operand that no output needs."""
    needed: set[int] = set()
    stack = [value.position for _, value in outputs]
    while stack:
        position = stack.pop()
        if position not in needed:
            needed.add(position)
            stack += nodes[position].args
    for position, operand in enumerate(operands, 1):
        if position not in needed:
            refuse_at(*_place(function), f"{name}: operand {operand.name} takes no part in what is returned; remove it")
    order = sorted(needed)
    new = {old: position for position, old in enumerate(order)}
    kept = tuple(
        Node(n.op, tuple(new[arg] for arg in n.args), n.attributes, n.shape, n.dtype, n.step)
        for n in (nodes[old] for old in order)
    )
    return IR(name, operands, kept, tuple((label, new[value.position]) for label, value in outputs))


def _check_halves(ir: IR, function: Callable) -> None:
    """Refuse what a kernel can't do whose tile's columns are those of the two halves in turn."""
    for node in ir.nodes:
        wide = any(ir.nodes[arg].shape.columns == TILE.columns for arg in node.args)
        if wide and node.step not in ("element", "half"):
            refuse_at(*_place(function), f"{ir.name}: {node.op} of a value of N columns isn't possible beside halves")
    for operand in ir.operands:
        if operand.shape == TILE:
            refuse_at(
                *_place(function), f"{ir.name}: operand {operand.name}: expected a HalfTile beside halves, got a Tile"
            )
    if any(ir.nodes[position].shape.columns == TILE.columns for _, position in ir.outputs):
        refuse_at(*_place(function), f"{ir.name}: a value of N columns can't be returned beside halves")

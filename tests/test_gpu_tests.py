"""Tests that only run on a GPU call functions by arguments that these have: without a GPU nothing else would tell."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TESTS = Path(__file__).parent
FILES = sorted(path.relative_to(TESTS.parent) for path in TESTS.rglob("test_*gpu.py"))
SCOPES = ast.FunctionDef | ast.Lambda | ast.GeneratorExp | ast.ListComp | ast.DictComp | ast.SetComp


def bound_in(scope: ast.AST) -> set[str]:
    """Return the names that a function, a lambda or a comprehension binds, and those within it."""
    found = {node.arg for node in ast.walk(scope) if isinstance(node, ast.arg)}
    found |= {node.id for node in ast.walk(scope) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    inner = (node for node in ast.walk(scope) if node is not scope)
    return found | {node.name for node in inner if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def calls_in(node: ast.AST, bound: frozenset[str] = frozenset()) -> Iterator[tuple[ast.Call, frozenset[str]]]:
    """Yield the calls in a piece of code, each with the names that aren't the module's there.

    Calls that are expected to raise are left out.
    """
    if isinstance(node, ast.With) and any("raises" in ast.unparse(item.context_expr) for item in node.items):
        return
    if isinstance(node, ast.Call):
        yield node, bound
    if isinstance(node, SCOPES):
        bound = bound | bound_in(node)
    for child in ast.iter_child_nodes(node):
        yield from calls_in(child, bound)


def called(function: ast.expr, module: ModuleType, bound: frozenset[str]) -> Any:
    """Return what an expression of names and dots stands for, None if that isn't a module's or a class's."""
    if isinstance(function, ast.Name):
        return None if function.id in bound else getattr(module, function.id, None)
    if isinstance(function, ast.Attribute):
        owner = called(function.value, module, bound)
        return getattr(owner, function.attr) if isinstance(owner, ModuleType) else None
    return None


def complaint(call: ast.Call, module: ModuleType, bound: frozenset[str]) -> str:
    """Return what is wrong with a call's arguments, "" if nothing is or if they aren't known."""
    function = called(call.func, module, bound)
    known = inspect.isfunction(function) or inspect.isclass(function)
    if not known or not (function.__module__ or "").startswith(("envoi", "tests", "tools")):
        return ""
    named = {word.arg: None for word in call.keywords if word.arg is not None}
    some_unknown = any(isinstance(x, ast.Starred) for x in call.args) or len(named) < len(call.keywords)
    try:
        if some_unknown:
            inspect.signature(function).bind_partial(**named)
        else:
            inspect.signature(function).bind(*call.args, **named)
    except TypeError as error:
        return f"line {call.lineno}, {ast.unparse(call)[:80]}: {error}"
    return ""


def complaints(source: str, module: ModuleType) -> list[str]:
    """Return what is wrong with the calls of a module."""
    found = (complaint(call, module, bound) for call, bound in calls_in(ast.parse(source)))
    return [text for text in found if text]


@pytest.mark.parametrize("path", FILES, ids=str)
def test_arguments_exist(path):
    module = importlib.import_module(".".join(path.with_suffix("").parts))
    assert complaints((TESTS.parent / path).read_text(), module) == []


def one(a, *, b=1):
    return a + b


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("one(1)", False), ("one(1, b=2)", False), ("one(*x)", False), ("one(**x)", False), ("print(1, sep='')", False),
        ("one(1, c=2)", True), ("one(1, 2)", True), ("one()", True), ("one(*x, c=2)", True), ("unknown(1, 2)", False),
        ("def f():\n    return [one(i, 2) for i in x]", True), ("def f(one):\n    one(1, 2)", False),
        ("def f():\n    one = len\n    one(1, 2)", False), ("with pytest.raises(TypeError):\n    one(1, 2)", False),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_found(source, wrong):
    module = ModuleType("tests.made")
    module.__dict__.update(one=one, pytest=pytest)
    assert bool(complaints(source, module)) == wrong

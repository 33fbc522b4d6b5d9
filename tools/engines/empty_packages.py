"""Packages that an engine imports and a check doesn't need, stood for by ones whose names are all there and do nothing.

Only for code that isn't run: a class of them can be derived from, annotated with, or called as a decorator.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


def stand_for(names: Sequence[str]) -> None:
    """Import empty packages under these names, and modules below them."""
    sys.meta_path.insert(0, _Finder(names))


class _Kind(type):
    """Class of classes whose attributes are such classes."""

    def __new__(cls, name: str, bases: tuple, body: dict, **more: Any) -> Any:
        return type.__new__(cls, name, bases, body)

    def __init__(cls, name: str, bases: tuple, body: dict, **more: Any) -> None:
        type.__init__(cls, name, bases, body)

    def __getattr__(cls, name: str) -> Any:
        return _of(name)

    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else type.__call__(cls)

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


def _of(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    decorates = {"__init_subclass__": classmethod(lambda cls, **more: None), "__call__": lambda self, x=None, *more: x}
    return _Kind(name, (), {"__getattr__": lambda self, name: _of(name)} | decorates)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """Return a spec for one of the packages."""
        if any(fullname == name or fullname.startswith(f"{name}.") for name in self.names):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        """Return a module that has any name."""
        found = ModuleType(spec.name)
        found.__getattr__ = _of
        return found

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing."""

"""Names of an engine that an integration wraps, calls or implements, and whether a release still has them.

    Used       a name, and what of it is relied on
    fact_of    what an imported release has of a name
    missing    Used, fact -> what isn't as it was, "" if all is

An integration checks all names before it changes anything: an engine that has moved one runs as it is, and a line of
its log says which. The facts of the supported releases are recorded in tests/integrations/engines.json.
"""

import importlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Fact = Mapping[str, Any]


class MovedError(Exception):
    """Name that a release of an engine doesn't have, or has in another form."""


@dataclass(frozen=True)
class Used:
    """Name in a module of an engine.

    takes: parameters of a function that are passed or read by name; it may have others.
    methods: methods that are implemented or wrapped, by name: exactly these parameters, without self.
    members: attributes, fields and enum members that are read.
    abstract: of a class that is subclassed, which abstract methods it may have.
    """

    module: str
    name: str
    takes: tuple[str, ...] = ()
    methods: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    members: tuple[str, ...] = ()
    abstract: tuple[str, ...] | None = None

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


def fact_of(used: Used, value: Any) -> Fact:
    """Return what a name's value has of what is relied on: see `missing`."""
    found: dict[str, Any] = {}
    if used.takes:
        found["parameters"] = _parameters(value)
    if used.methods:
        found["methods"] = {name: _parameters(getattr(value, name)) for name in used.methods if hasattr(value, name)}
    if used.members:
        known = {*dir(value), *getattr(value, "__dataclass_fields__", {}), *getattr(value, "__annotations__", {})}
        found["members"] = [name for name in used.members if name in known]
    if used.abstract is not None:
        found["abstract"] = sorted(getattr(value, "__abstractmethods__", ()))
    return found


def _parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


def missing(used: Used, fact: Fact | None) -> str:
    """Return what a release doesn't have of a name, or has in another form; "" if all is as it was.

    fact: parameters of a function; of a class methods with their parameters, members that it has, abstract methods;
        None if there is no such name.
    """
    if fact is None:
        return f"there is no {used}"
    lost = [name for name in used.takes if name not in fact["parameters"]]
    if lost:
        return f"{used} doesn't take {', '.join(lost)}"
    lost = [name for name in used.members if name not in fact["members"]]
    if lost:
        return f"{used} has no {', '.join(lost)}"
    for name, parameters in used.methods.items():
        given = fact["methods"].get(name)
        if given is None or tuple(given) != parameters:
            return f"{used}.{name} takes {_listed(given)}, and {_listed(parameters)} is what is known"
    new = [] if used.abstract is None else [name for name in fact["abstract"] if name not in used.abstract]
    return f"{used} wants {', '.join(new)} implemented" if new else ""


def _listed(names: Sequence[str] | None) -> str:
    return "(no such method)" if names is None else f"({', '.join(names)})"


def _cause(used: Used, error: Exception) -> str:
    """Return what else kept a name's module from being imported, "" if the module or the name isn't there."""
    absent = isinstance(error, AttributeError)
    if isinstance(error, ModuleNotFoundError):
        absent = f"{used.module}.".startswith(f"{error.name}.")
    return "" if absent else f": {error}"


def found_names(all_used: Sequence[Used]) -> dict[str, Any]:
    """Import an engine's names; return their values by name.

    Raises MovedError for the first that isn't as it was, ModuleNotFoundError if the engine isn't installed.
    """
    found: dict[str, Any] = {}
    for used in all_used:
        try:
            value = getattr(importlib.import_module(used.module), used.name)
        except (ImportError, AttributeError) as error:
            engine = used.module.partition(".")[0]
            if isinstance(error, ModuleNotFoundError) and error.name == engine:
                raise ModuleNotFoundError(f"{engine} isn't installed", name=engine) from None
            raise MovedError(f"{missing(used, None)}{_cause(used, error)}") from None
        why = missing(used, fact_of(used, value))
        if why:
            raise MovedError(why)
        found[used.name] = value
    return found

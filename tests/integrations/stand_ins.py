"""Modules that stand for a serving engine's: made from the recorded facts of a release, they have its names alone."""

import enum
import inspect
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from envoi.integrations import engines, lines
from envoi.integrations.names import Fact, Used
from envoi.integrations.vllm.select import BACKENDS, PADDED

RECORD = json.loads((Path(__file__).parent / "engines.json").read_text())
OWN = ("the engine's", None)  # what an engine's function answers


def modules(facts: dict[str, Fact], all_used: Sequence[Used]) -> dict[str, ModuleType]:
    """Return a release's modules by name, with packages above them."""
    found: dict[str, ModuleType] = {}
    for used in all_used:
        parts = used.module.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            found.setdefault(name, ModuleType(name)).__path__ = []
        setattr(found[used.module], used.name, stand_in(used, facts[str(used)]))
    return found


def install(monkeypatch: Any, found: dict[str, ModuleType], integration: ModuleType, *switches: str) -> None:
    """Put modules in an engine's place, with Envoi's switches on, on what stands for a Hopper GPU with all kernels."""
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in switches:
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(integration, "_done", False)
    monkeypatch.setattr(engines, "_why_not_here", lambda: "")
    monkeypatch.setattr(engines, "why_unbuilt", lambda layer, max_tokens: "")
    monkeypatch.setattr(lines, "_said", set())


def stand_in(used: Used, fact: Fact) -> Any:
    """Return a function, a class, an enum or a value as a fact says."""
    if used.name == PADDED:
        return padded
    if used.takes:
        return function(fact["parameters"])
    if used.abstract is not None:
        return base(used, fact)
    if used.methods:
        methods = {name: function(["self", *given]) for name, given in fact["methods"].items()}
        return type(used.name, (), dict.fromkeys(fact.get("members", ())) | methods)
    if used.members and all(name.lstrip("k")[:1].isupper() for name in used.members):
        return enum.Enum(used.name, {name: name for name in fact["members"]})
    if used.members:
        return type(used.name, (), dict.fromkeys(fact["members"]))
    if used.name.startswith("k"):
        return used.name
    return (lambda: None) if used.name.startswith("get_") else type(used.name, (), {})


def padded(backend: Any, hidden_size: int, intermediate_size: int) -> tuple[int, int]:
    """Stand for vLLM's function that pads sizes, as it answers for the backend whose name Envoi's layers get."""
    assert backend.name == BACKENDS["mxfp4"][1]
    return hidden_size, -(-intermediate_size // 64) * 64


def function(parameters: Sequence[str], result: Any = OWN) -> Any:
    """Return a function with such parameters that returns `result`."""

    def stands(*arguments: Any, **named: Any) -> Any:
        stands.calls += 1  # pyright: ignore[reportFunctionMemberAccess]
        return result

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    stands.__signature__ = inspect.Signature([inspect.Parameter(x, kind, default=None) for x in parameters])
    stands.calls = 0
    return stands


def base(used: Used, fact: Fact) -> type:
    """Return the class that an integration derives its own from."""

    def init(self: Any, moe_config: Any, quant_config: Any, max_num_tokens=None, num_dispatchers=None) -> None:
        self.moe_config, self.quant_config = moe_config, quant_config

    body: dict[str, Any] = dict.fromkeys(fact["members"])
    for name, parameters in fact["methods"].items():
        answer = (True, None) if name == "is_supported_config" else None
        body[name] = init if name == "__init__" else function(["self", *parameters], answer)
    body["is_supported_config"] = staticmethod(function(fact["methods"]["is_supported_config"], (True, None)))
    for name in fact["abstract"]:
        body[name] = abstractmethod(body.get(name) or function(["self"]))
    return type(used.name, (ABC,), body)

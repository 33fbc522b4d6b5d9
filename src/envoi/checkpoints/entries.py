"""Entries of quantization_config: closed lists of those that are understood, and names of modules."""

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

OFF = (None, {}, [])  # values of an entry that says nothing


class Entries:
    """An object in config.json whose entries are either understood or refused by name.

    file, path: where it is, for messages. used: entries that a reader looks at. harmless: entries that don't change
    what the stored numbers mean, such as how activations are quantised, since Envoi quantises them by what they are or
    not at all. Raises ValueError that names the file and the entry for any other, unless its value says nothing.
    """

    def __init__(self, file: Path, path: str, given: Any, used: Iterable[str], harmless: Iterable[str] = ()):
        if not isinstance(given, dict):
            raise ValueError(f"{file}: {path}: expected an object, got {given!r}")
        self.file, self.path, self.given = file, path, given
        known = {*used, *harmless}
        for key, value in given.items():
            if key not in known and value not in OFF:
                raise self.error(key, "an entry that Envoi knows", value)

    def error(self, key: str, expected: str, value: Any) -> ValueError:
        """Return the error of an entry."""
        return ValueError(f"{self.file}: {self.path}.{key}: expected {expected}, got {value!r}")

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of an entry, the default if it says nothing."""
        value = self.given.get(key)
        return default if value in OFF else value

    def one_of(self, key: str, allowed: tuple, default: Any = None) -> Any:
        """Return the value of an entry, which must be the default or one of those."""
        value = self.get(key, default)
        # True == 1, and False == 0
        if not any(type(value) is type(one) and value == one for one in (*allowed, default)):
            raise self.error(key, " or ".join(map(repr, allowed)), value)
        return value

    def names(self, *keys: str) -> tuple[str, ...]:
        """Return the names or patterns in the lists that these entries are."""
        found: list[str] = []
        for key in keys:
            value = self.get(key, [])
            if not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
                raise self.error(key, "a list of names", value)
            found += value
        return tuple(found)

    def block(self, key: str) -> tuple[int, int]:
        """Return rows and columns of a block."""
        sides = self.get(key)
        if isinstance(sides, str) and re.fullmatch(r"\d+x\d+", sides):
            sides = [int(side) for side in sides.split("x")]
        if not (isinstance(sides, list) and len(sides) == 2 and all(type(side) is int and side > 0 for side in sides)):
            raise self.error(key, "rows and columns of a block", sides)
        return sides[0], sides[1]


def named_by(pattern: str, module: str) -> bool:
    """Return whether a pattern of a list of modules is of a module, or of a part of the model that it belongs to.

    The pattern: "re:" and a regular expression; names with wildcards; or a path, or a piece of one, such as "gate" of
    "mlp.gate". A wildcard at the end begins with a dot: "layers.1*" is layers.1 and all in it, not layers.10.
    """
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    if "*" in pattern or "?" in pattern:
        root = pattern.removesuffix("*").removesuffix(".")
        return fnmatchcase(module, root) or fnmatchcase(module, f"{root}.*")
    return f".{pattern}." in f".{module}."

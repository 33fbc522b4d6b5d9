"""Entries of quantization_config: closed lists of those that are understood, and names of modules."""

import re
from collections.abc import Iterable
from fnmatch import translate
from itertools import combinations
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

    def modules(self, *keys: str) -> "Names":
        """Return the modules that these entries name."""
        try:
            return Names(self.names(*keys))
        except re.error as error:
            raise ValueError(f"{self.file}: {self.path}: expected regular expressions after 're:': {error}") from None

    def block(self, key: str) -> tuple[int, int]:
        """Return rows and columns of a block."""
        sides = self.get(key)
        if isinstance(sides, str) and re.fullmatch(r"\d+x\d+", sides):
            sides = [int(side) for side in sides.split("x")]
        if not (isinstance(sides, list) and len(sides) == 2 and all(type(side) is int and side > 0 for side in sides)):
            raise self.error(key, "rows and columns of a block", sides)
        return sides[0], sides[1]


class Names:
    """Modules that a list of patterns names, each with all modules in it.

    A pattern: "re:" and a regular expression; names with wildcards; or a path, or a piece of one, such as "gate" of
    "mlp.gate". A wildcard at the end begins with a dot: "layers.1*" is layers.1 and all in it, not layers.10.
    """

    def __init__(self, patterns: Iterable[str]):
        self.paths: set[str] = set()
        self.patterns: list[re.Pattern[str]] = []
        for pattern in patterns:
            if pattern.startswith("re:"):
                self.patterns.append(re.compile(pattern.removeprefix("re:")))
            elif "*" in pattern or "?" in pattern:
                root = pattern.removesuffix("*").removesuffix(".")
                self.patterns += [re.compile(translate(root)), re.compile(translate(f"{root}.*"))]
            else:
                self.paths.add(pattern)

    def __contains__(self, module: str) -> bool:
        pieces = module.split(".")
        ranges = combinations(range(len(pieces) + 1), 2)
        named = any(".".join(pieces[first:last]) in self.paths for first, last in ranges) if self.paths else False
        return named or any(pattern.match(module) for pattern in self.patterns)

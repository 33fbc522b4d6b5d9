"""What releases of the engines have of the names that the integrations rely on, read from their wheels' sources.

Nothing of an engine is imported or kept: a fact is a list of parameters, members or methods (`integrations.names`).
"""

import ast
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from envoi.integrations.names import Fact, Used, missing
from envoi.integrations.sglang.used import ALL as SGLANG
from envoi.integrations.vllm.used import ALL, ATTRIBUTES, EXCHANGE, ROUTE

RECORD = Path(__file__).resolve().parents[2] / "tests" / "integrations" / "engines.json"
RELEASES = {"vllm": ("0.26.0", "0.33.0"), "sglang": ("0.5.23",)}
USED: dict[str, Sequence[Used]] = {"vllm": (*ALL, *ROUTE, *EXCHANGE), "sglang": SGLANG}
Read = Callable[[str], str | None]  # a path in a wheel -> its text, None if it isn't there


def recorded() -> dict[str, dict[str, Fact | None]]:
    """Return the facts of each release, "vllm 0.26.0", by name."""
    return json.loads(RECORD.read_text())


def record(facts: dict[str, dict[str, Fact | None]]) -> None:
    """Write the facts of all releases."""
    RECORD.write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n")


def problems(engine: str, facts: dict[str, Fact | None]) -> list[str]:
    """Return what a release with these facts has in another form than the integration knows."""
    return [why for used in USED[engine] if (why := missing(used, facts.get(str(used))))]


def downloaded(engine: str, release: str | None, folder: str) -> Path:
    """Download a release's wheel, None for the newest, and return where it is."""
    wanted = engine if release is None else f"{engine}=={release}"
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", folder]
    subprocess.run([*command, wanted], check=True)
    (wheel,) = Path(folder).glob("*.whl")
    return wheel


@contextmanager
def sources(wheel: Path) -> Iterator[Read]:
    """Give what returns the text of a path in a wheel, None if there is no such file."""
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        yield lambda path: file.read(path).decode() if path in names else None


def facts_of(engine: str, wheel: Path) -> tuple[str, dict[str, Fact | None]]:
    """Return a wheel's version and facts."""
    with sources(wheel) as read:
        return wheel.name.split("-")[1], {str(used): fact(used, read) for used in USED[engine]}


def unnamed(engine: str, wheel: Path) -> list[str]:
    """Return which of the attributes that the integration reads a wheel's sources don't name, and where."""
    with sources(wheel) as read:
        found = []
        for module, names in ATTRIBUTES.items() if engine == "vllm" else ():
            nodes = ast.walk(ast.parse(read(f"{module.replace('.', '/')}.py") or ""))
            named = {getattr(node, "attr", getattr(node, "value", None)) for node in nodes}
            found += [f"{module} names no {name}" for name in names if name not in named]
        return found


def fact(used: Used, read: Read) -> Fact | None:
    """Return the fact of a name as `names.fact_of` would, by a module's source."""
    place = _find(used.module, used.name, read)
    if place is None:
        return None
    found: dict[str, Any] = {}
    node, tree = place
    if used.takes:
        found["parameters"] = _parameters(node)
    if not isinstance(node, ast.ClassDef):
        return found
    lines = _ancestry(node, tree)
    defined = {item.name: item for part in reversed(lines) for item in part.body if isinstance(item, ast.FunctionDef)}
    if used.methods:
        found["methods"] = {name: _parameters(defined[name]) for name in used.methods if name in defined}
    if used.members:
        known = {*defined, *(name for part in lines for name in _fields(part))}
        found["members"] = [name for name in used.members if name in known]
    if used.abstract is not None:
        found["abstract"] = sorted(name for name, item in defined.items() if _is_abstract(item))
    return found


def _find(module: str, name: str, read: Read) -> tuple[Any, ast.Module] | None:
    """Return a name's definition and the module that has it, which may be another that this one imports it from."""
    path = module.replace(".", "/")
    package = read(f"{path}/__init__.py")
    text = package or read(f"{path}.py")
    if text is None:
        return None
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if (
            not isinstance(node, ast.ImportFrom)
            or not node.module
            or (source := _source(node, module, package)) == module
        ):
            continue
        if any((alias.asname or alias.name) == name for alias in node.names):
            return _find(source, name, read)
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if getattr(node, "name", None) == name or any(getattr(x, "id", None) == name for x in targets):
            return node, tree
    return None


def _source(node: ast.ImportFrom, module: str, package: str | None) -> str:
    """Return the module that a module, or a package with that text, imports from."""
    parts = module.split(".")
    above = parts[: len(parts) - node.level + (package is not None)] if node.level else []
    return ".".join((*above, str(node.module)))


def _ancestry(node: ast.ClassDef, tree: ast.Module) -> list[ast.ClassDef]:
    """Return a class and its bases in the same module, the class first."""
    classes = {item.name: item for item in tree.body if isinstance(item, ast.ClassDef)}
    bases = [classes[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in classes]
    return [node, *(part for base in bases for part in _ancestry(base, tree))]


def _fields(node: ast.ClassDef) -> list[str]:
    found = []
    for item in node.body:
        targets = item.targets if isinstance(item, ast.Assign) else [getattr(item, "target", None)]
        found += [x.id for x in targets if isinstance(x, ast.Name)]
    return found


def _parameters(node: Any) -> list[str]:
    names = [x.arg for x in (*node.args.posonlyargs, *node.args.args)]
    names += [node.args.vararg.arg] if node.args.vararg else []
    names += [x.arg for x in node.args.kwonlyargs] + ([node.args.kwarg.arg] if node.args.kwarg else [])
    return [name for name in names if name not in ("self", "cls")]


def _is_abstract(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(x).endswith("abstractmethod") for x in node.decorator_list)

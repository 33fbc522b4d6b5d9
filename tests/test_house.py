"""Rules of the house that a machine can check."""

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
from pathlib import Path

import pytest

import envoi

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "envoi"
FILES = sorted(SOURCE.rglob("*.py"))

# A room may import from those named, and from itself.
BASE = {"types", "check", "env", "log", "operators", "spans", "table", "triton_compat"}
ALLOWED = {
    "types": set(), "check": set(), "env": set(), "table": set(), "triton_compat": set(),
    "log": {"env"}, "spans": {"env"}, "operators": {"check", "log", "spans"},
    "quant": BASE,
    "epilogue": BASE | {"quant"},
    "gemm": BASE | {"quant", "epilogue"},
    "router": BASE | {"quant", "epilogue", "gemm"},
    "experts": BASE | {"quant", "epilogue", "gemm"},
    "indexer": BASE | {"quant", "epilogue", "gemm"},
    "plan": BASE | {"quant", "epilogue", "gemm"},
    "ep": BASE | {"quant", "epilogue", "gemm", "experts", "router", "plan"},
}  # fmt: skip

# These may import anything; nothing above imports them, which ALLOWED sees to.
FREE = {"__init__", "integrations", "bench", "cli", "demo", "info", "sass"}


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module] if node.module != "envoi" else [f"envoi.{alias.name}" for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name and name.startswith("envoi.")}
    return rooms


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_run_one_way(path):
    room = room_of(path)
    if room in ALLOWED:
        assert imported_rooms(path) <= ALLOWED[room] | {room}


def test_every_room_has_a_place_in_the_order():
    assert {room_of(path) for path in FILES} <= set(ALLOWED) | FREE


def test_the_order_has_no_circle():
    placed: set[str] = set()
    left = dict(ALLOWED)
    while left:
        free = {room for room, below in left.items() if below - {room} <= placed}
        assert free, f"circle among {sorted(left)}"
        placed |= free
        left = {room: below for room, below in left.items() if room not in free}
    assert ALLOWED["ep"] >= {"experts", "router"}
    for stage in ("router", "experts", "indexer"):
        assert not ALLOWED[stage] & {"router", "experts", "indexer", "ep"}


def test_the_scan_sees_every_form_of_import(tmp_path):
    path = tmp_path / "x.py"
    path.write_text(
        "import envoi.ep.api as a\nfrom envoi import router\ndef f():\n    from envoi.gemm.api import gemm\n"
        "if True:\n    import torch, envoi.quant\nfrom os import path\n"
    )
    assert imported_rooms(path) == {"ep", "router", "gemm", "quant"}


def test_environment_has_one_reader():
    readers = {path.name for path in FILES if re.search(r"\benviron\b|getenv", path.read_text())}
    assert readers == {"env.py"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_and_functions_are_small(path):
    tree = ast.parse(path.read_text())
    assert len(path.read_text().splitlines()) < 500
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno - node.lineno < 60, f"{node.name} has {node.end_lineno - node.lineno + 1} lines"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_asserts_and_nothing_unfinished(path):
    text = path.read_text()
    asserts = [node.lineno for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Assert)]
    assert not asserts, f"assert in lines {asserts}: a user's mistake needs words"
    assert not re.search(r"\bTODO\b|\bFIXME\b|raise NotImplementedError", text)


def test_public_names_are_documented():
    for module in [envoi, *walk_packages()]:
        assert inspect.getdoc(module), f"{module.__name__} has no docstring"
        for name in getattr(module, "__all__", ()):
            thing = getattr(module, name)
            if inspect.isfunction(thing) or inspect.isclass(thing) or inspect.ismodule(thing):
                assert inspect.getdoc(thing), f"{module.__name__}.{name} has no docstring"


def walk_packages():
    for info in pkgutil.walk_packages(envoi.__path__, "envoi."):
        if info.ispkg:
            yield importlib.import_module(info.name)


def test_no_path_of_a_machine_is_committed():
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    places = re.compile("|".join(f"/{place}/" for place in ("root", "work", "home")))
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        is_text = path.suffix in (".py", ".md", ".toml", ".json", ".jsonl", ".txt") or path.name in ("Makefile", "run")
        if is_text and path.is_file():
            found = places.search(path.read_text())
            assert found is None, f"{name}: {found.group()}"


def test_versions_agree():
    declared = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert declared is not None
    assert declared.group(1) == envoi.__version__

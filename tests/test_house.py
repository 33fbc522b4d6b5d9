"""House rules that a machine can check."""

import ast
import re
import subprocess
from collections.abc import Sequence
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import envoi

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "envoi"
FILES = sorted(SOURCE.rglob("*.py"))
OURS = [*FILES, *sorted((ROOT / "tools" / "machine_code").glob("*.py"))]


# A package may import from those named, and from itself. Packages within moe/ have an order of their own.
BASE = {"types", "check", "constant", "env", "cache_file", "log", "progress", "spans", "table", "runtime"}
PRODUCTS = BASE | {"quant", "epilogues", "gemm"}
ALLOWED = {
    "types": {"check"}, "check": set(), "constant": set(), "env": set(), "cache_file": set(), "table": set(),
    "progress": set(),
    "log": {"env"}, "spans": {"env"},
    "runtime": {"check", "env", "log", "progress", "spans"},
    "quant": BASE,
    "epilogues": BASE | {"quant"},
    "gemm": BASE | {"quant", "epilogues"},
    "moe": PRODUCTS,
    "moe.router": PRODUCTS,
    "indexer": PRODUCTS,
    "estimates": PRODUCTS | {"moe"},
    "checkpoints": PRODUCTS | {"moe"},
    "moe.parallel": PRODUCTS | {"moe", "moe.router", "estimates"},
}  # fmt: skip


@cache
def tree_of(text: str) -> ast.Module:
    return ast.parse(text)


def parsed(path: Path) -> ast.Module:
    return tree_of(path.read_text())


def room_of(path: Path) -> str:
    return named_room(path.relative_to(SOURCE).with_suffix("").parts)


def named_room(parts: Sequence[str]) -> str:
    """Return the package of a module, given by its names below envoi, those of `ops` without it."""
    parts = parts[1:] if parts[0] == "ops" and len(parts) > 1 else parts
    nested = ".".join(parts[:2])
    return nested if nested in ALLOWED else parts[0]


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(parsed(path)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module] if node.module != "envoi" else [f"envoi.{alias.name}" for alias in node.names]
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("envoi."):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        rooms |= {named_room(name.split(".")[1:]) for name in names if name and name.startswith("envoi.")}
    return rooms


def test_imports_run_one_way():
    wrong = {
        str(path.relative_to(SOURCE)): strange
        for path in FILES
        if (room := room_of(path)) in ALLOWED and (strange := imported_rooms(path) - ALLOWED[room] - {room})
    }
    assert not wrong


def test_the_package_needs_no_tools():
    importing = [
        path for path in FILES if re.search(r"^\s*(from|import) (tools|bench|tests|examples)\b", path.read_text(), re.M)
    ]
    assert not importing, "only src/ is in the wheel"


def test_no_modules_import_each_other_in_a_circle():
    modules = {
        ".".join(("envoi", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in FILES
    }
    graph = {}
    for name, path in modules.items():
        named = set()
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                inner = (f"{node.module}.{alias.name}" for alias in node.names)
                named |= {full if full in modules else node.module for full in inner}
        graph[name] = (named & set(modules)) - {name}
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_environment_has_one_reader():
    readers = {path.name for path in FILES if re.search(r"\benviron\b|getenv", path.read_text())}
    assert readers == {"env.py"}


def test_files_and_functions_are_small():
    long = [f"{path.relative_to(ROOT)}" for path in OURS if len(path.read_text().splitlines()) >= 500]
    for path in OURS:
        for node in ast.walk(parsed(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                num_lines = node.end_lineno - node.lineno + 1
                if num_lines > (120 if is_device_code(node) else 60):
                    long.append(f"{path.relative_to(ROOT)}: {node.name} has {num_lines} lines")
    assert not long


def is_device_code(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    called = (d.func if isinstance(d, ast.Call) else d for d in function.decorator_list)
    return any(ast.unparse(decorator).endswith(".jit") for decorator in called)


# A launch takes no TMA descriptor within a tuple, so entry points have flat arguments.
def test_device_functions_have_few_parameters():
    found = [(path.name, function) for path in FILES for function in device_functions(path)]
    inner = [(file, function) for file, function in found if not function.name.endswith("_kernel")]
    many = [f"{file}: {function.name}" for file, function in inner if num_parameters(function) > 8]
    assert not many


def num_parameters(function: ast.FunctionDef) -> int:
    return sum(argument.arg != "self" for argument in function.args.args)


def device_functions(path: Path) -> list[ast.FunctionDef]:
    functions = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.FunctionDef)]
    return [function for function in functions if is_device_code(function)]


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

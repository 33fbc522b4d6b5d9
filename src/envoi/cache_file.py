"""JSON cache files: validated on reading, replaced atomically, written by one process at a time."""

import contextlib
import json
import os
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

_warned: set[Path] = set()


def entries(path: Path | None, parse: Callable[[Any], T]) -> dict[str, T]:
    """Return the entries of a file by name, each as `parse` returns it; none without a file, or if the path is None.

    parse: raises ValueError for an entry that is corrupt or that another version of Envoi wrote. Such an entry, or a
    whole file that isn't a JSON object, is ignored, with one UserWarning a file and process.
    """
    if path is None:
        return {}
    try:
        known = _read(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        _warn(path, f"{reason}; going on without it")
        return {}
    found, problems = {}, []
    for name, value in known.items():
        try:
            found[name] = parse(value)
        except ValueError as error:
            problems.append(f"{name!r}: {error}")
    if problems:
        _warn(path, f"{problems[0]}; going on without {len(problems)} of {len(known)} entries")
    return found


def add(path: Path | None, new: dict[str, Any]) -> Path:
    """Add entries to a file, replacing those with equal names; create it and its folder if needed. Return its path.

    A reader sees the file before or after the change, nothing in between. A lock on <name>.lock beside the file, which
    stays, serialises writers. A file that isn't a JSON object is kept as <name>.spoilt, with a warning.
    Raises OSError if it can't be written, or if the path is None.
    """
    if path is None:
        raise FileNotFoundError("there is no home directory, and ENVOI_CACHE_DIR isn't set")
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_name(f"{path.name}.lock")):
        try:
            known = _read(path)
        except ValueError as error:
            kept = path.with_name(f"{path.name}.spoilt")
            os.replace(path, kept)
            _warn(path, f"{error}; moved to {kept}, begun anew")
            known = {}
        replace(path, json.dumps(known | new, indent=1, sort_keys=True) + "\n")
    return path


def replace(path: Path, text: str) -> None:
    """Write a file whose readers see it before or after the change, nothing in between. Raises OSError."""
    written = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        written.write_text(text)
        os.replace(written, path)
    finally:
        written.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any]:
    """Return a file's entries as parsed JSON. Raises ValueError for another content, OSError for an unreadable file."""
    try:
        known = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    if not isinstance(known, dict):
        raise ValueError(f"expected a JSON object, got {json.dumps(known)[:40]}")
    return known


def _warn(path: Path, problem: str) -> None:
    if path not in _warned:
        _warned.add(path)
        warnings.warn(f"{path}: {problem}", UserWarning, stacklevel=4)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    import fcntl  # not available on every system that runs the torch path

    with path.open("a") as lock:
        with contextlib.suppress(OSError):  # a file system without locks: of two writers one may lose
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield

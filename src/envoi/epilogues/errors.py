"""Errors of the tracer: the line of the user's function, what is wrong, and what to do instead."""

import linecache
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

_STANDARD = str(Path(os.__file__).parent) + os.sep
_SPECS = (find_spec(name) for name in ("envoi.epilogues", "torch", "numpy"))
_OTHERS = tuple(str(Path(spec.origin).parent) + os.sep for spec in _SPECS if spec is not None and spec.origin)


class EpilogueError(ValueError):
    """Raised for a function that can't become an epilogue; the message has file, line, its text and the reason."""


def _is_users(filename: str) -> bool:
    """Return False for code of this package, torch, numpy and the standard library, which call back into epilogues."""
    installed = "site-packages" in filename or "dist-packages" in filename  # may be inside the standard library
    standard = filename.startswith("<frozen ") or (filename.startswith(_STANDARD) and not installed)
    return not standard and not filename.startswith(_OTHERS)


def users_frame() -> FrameType:
    """Return the innermost frame on the stack that runs the user's code."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def refuse(reason: str) -> NoReturn:
    """Raise EpilogueError for the innermost line of the user's code on the stack."""
    frame = users_frame()
    refuse_at(frame.f_code.co_filename, frame.f_lineno, reason)


def refuse_at(filename: str, line: int, reason: str) -> NoReturn:
    """Raise EpilogueError for a given line."""
    text = linecache.getline(filename, line).strip()
    raise EpilogueError(f"{filename}:{line}: {reason}" + (f"\n    {text}" if text else ""))


def last_user_line(traceback: TracebackType | None) -> tuple[str, int] | None:
    """Return file and line of the innermost user's code in a traceback, or None."""
    found = None
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        if _is_users(filename):
            found = filename, traceback.tb_lineno
        traceback = traceback.tb_next
    return found

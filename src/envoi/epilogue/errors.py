"""Refusals of the tracer: where in the user's function, what, and what to do instead."""

import linecache
import sys
from pathlib import Path
from types import TracebackType
from typing import NoReturn

_HERE = str(Path(__file__).parent)


class EpilogueError(ValueError):
    """A function that can't become an epilogue. The message has the file, the line, its text and the reason."""


def refuse(reason: str) -> NoReturn:
    """Raise EpilogueError for the innermost line on the stack that isn't this package's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    refuse_at(frame.f_code.co_filename, frame.f_lineno, reason)


def refuse_at(filename: str, line: int, reason: str) -> NoReturn:
    """Raise EpilogueError for a given line."""
    text = linecache.getline(filename, line).strip()
    raise EpilogueError(f"{filename}:{line}: {reason}" + (f"\n    {text}" if text else ""))


def last_user_line(traceback: TracebackType | None) -> tuple[str, int] | None:
    """The innermost line of a traceback that isn't this package's."""
    found = None
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        if not filename.startswith(_HERE):
            found = filename, traceback.tb_lineno
        traceback = traceback.tb_next
    return found

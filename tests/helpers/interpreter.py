"""Tests of Triton kernels in its CPU interpreter, which is chosen when Triton is imported.

pytest                      all but the folders called `interpreted`, whose tests are deselected with a count
TRITON_INTERPRET=1 pytest   these folders, and nothing else
"""

import functools
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._mode_utils import no_dispatch

FOLDER = "interpreted"

_empty, _new_empty = torch.empty, torch.Tensor.new_empty


def is_for_interpreter(path: Path) -> bool:
    """Return whether a test file runs in the interpreter, by its folder's name."""
    return path.parent.name == FOLDER


def configure(config: pytest.Config) -> None:
    """Prepare a process whose Triton interprets."""
    _ignore_numpy(config)
    _find_builtins_once()


def poison_new_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new tensors with NaN; for dtypes without NaN, with a huge number."""
    monkeypatch.setattr(torch, "empty", lambda *size, **options: _poisoned(_empty(*size, **options)))
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda x, *size, **options: _poisoned(_new_empty(x, *size, **options))
    )


def _poisoned(x: torch.Tensor) -> torch.Tensor:
    with no_dispatch():  # on a GPU torch fills inside `empty`, where no mode sees it
        x.untyped_storage().fill_(0xFF if x.is_floating_point() else 0x7F)
    return x


def _ignore_numpy(config: pytest.Config) -> None:
    """Ignore numpy's warnings about intended uses of NaN and infinity, and one of the interpreter's own."""
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning")
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array:DeprecationWarning")


def _find_builtins_once() -> None:
    """Cache the interpreter's list of the language's functions.

    Without the cache it lists all members of `triton.language` at every call of a device function, a fifth of these
    tests' time; the names don't change.
    """
    import triton.language as tl  # not all tests need Triton
    from triton.runtime import interpreter

    @functools.cache
    def names(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name in names(package):
            member = getattr(package, name)
            if tl.core.is_builtin(member):  # not if a running kernel has replaced it already
                interpreter._patch_attr(package, name, member, builder, scope)

    for package in (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base):
        names(package)  # before anything is replaced
    assert callable(interpreter._patch_builtin), "Triton's interpreter has changed: see what it does instead"
    interpreter._patch_builtin = patch_builtin

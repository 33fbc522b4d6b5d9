"""Tests of Triton kernels in its CPU interpreter, which is chosen when Triton is imported.

pytest                      all but the folders called `interpreted`
TRITON_INTERPRET=1 pytest   these folders, and nothing else
"""

from pathlib import Path

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
    from tests.helpers import interpreter_shortcuts  # imports Triton, which not all tests need

    interpreter_shortcuts.install()


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

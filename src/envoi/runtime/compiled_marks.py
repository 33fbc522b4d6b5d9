"""Marks in Triton's disk cache of the kernels that a warm-up has compiled there, so that a later one needn't look.

A mark is an empty file, which goes when the cache is emptied. One that outlives its kernel does no harm: who loads the
kernel compiles it.
"""

from pathlib import Path

from triton import knobs

from envoi.runtime import triton_compat
from envoi.runtime.devices import Target


def is_marked(digest: str, target: Target, for_launch: bool) -> bool:
    """Tell whether a kernel was compiled. digest: as `rehearsal.find` has it; for_launch: as for `compile_at`."""
    return _exists(_mark(digest, target, for_launch))


def mark(digest: str, target: Target, for_launch: bool) -> None:
    """Note that a kernel was compiled; where that can't be written, nothing."""
    path = _mark(digest, target, for_launch)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError:
        return


def any_marked(target: Target) -> bool:
    """Tell whether any kernel was compiled so that it can be launched, by this release or another."""
    return _exists(_folder(target, True))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a folder that this user may not read
        return False


def _mark(digest: str, target: Target, for_launch: bool) -> Path:
    return _folder(target, for_launch) / digest


def _folder(target: Target, for_launch: bool) -> Path:
    kind = "launch" if for_launch else "compile"
    return Path(knobs.cache.dir) / f"envoi-{triton_compat.VERSION}-{target.arch}-{kind}"

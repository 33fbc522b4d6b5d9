"""Choices between kernels that tests make by hand."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from envoi.ops.gemm.hopper import two_kernels
from envoi.ops.moe import choose
from envoi.runtime import prepared

PLACES = {
    "decode": (choose, "decode_pays"), "decode_mx": (choose, "decode_mx_pays"),
    "one_launch": (choose, "one_launch_pays"), "pairs": (choose, "pairs_pay"), "two_kernels": (two_kernels, "pay"),
}  # fmt: skip


def force(patch: pytest.MonkeyPatch, **wanted: bool | None) -> None:
    """Take kernels wherever they can run (True) or nowhere (False), until the patch is undone; None: as always.

    wanted: by a name of `PLACES`. Prepared calls, which hold what was chosen, are forgotten; after `patch` is undone
    `prepared.clear()` forgets those that were made in between.
    """
    for name, want in wanted.items():
        if want is not None:
            patch.setattr(*PLACES[name], lambda *_, want=want: want)
    prepared.clear()


_used = pytest.MonkeyPatch()


def use(**wanted: bool | None) -> None:
    """Force these choices, and no others, from now on."""
    _used.undo()
    force(_used, **wanted)


@contextmanager
def forced(**wanted: bool | None) -> Iterator[None]:
    """Force choices inside the context."""
    with pytest.MonkeyPatch.context() as patch:
        force(patch, **wanted)
        yield
    prepared.clear()

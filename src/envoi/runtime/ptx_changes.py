"""Changes to a kernel's PTX between Triton and the assembler, for what Gluon has no words for.

A kernel asks for a change by a remark, a comment of its PTX: `remark`. `triton_compat.own` has Envoi's kernels compiled
with the changes; what others compile in the process doesn't come here. Triton's cache on disk finds a kernel by its
source, which has the remark: a change that does something else from now on needs another remark, hence the number in
each, else old machine code would be found.
"""

from collections.abc import Callable

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

Change = Callable[[str], str]

_changes: list[Change] = []


@gluon.jit
def remark(TEXT: gl.constexpr):
    """Put a comment into the kernel's PTX where this is called. TEXT: "// .. $0"; a register's name replaces $0."""
    gl.inline_asm_elementwise(TEXT, "=r", [], gl.int32, is_pure=False, pack=1)  # pyright: ignore[reportArgumentType]


def before_assembly(change: Change) -> Change:
    """Decorate a change that every kernel's PTX goes through; it must return PTX without its remark as it is."""
    _changes.append(change)
    return change


def changed(ptx: str) -> str:
    """Return a kernel's PTX after all changes."""
    for change in _changes:
        ptx = change(ptx)
    return ptx

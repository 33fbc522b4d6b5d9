"""Programmatic dependent launch: a kernel that starts before the one in front of it has ended."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon


@gluon.jit
def wait_for_grid():
    """Until the kernel in front of this one has ended and all that it wrote can be read."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_next_start():
    """A kernel behind this one may start, if it was launched to start early; its `wait_for_grid` waits for our end."""
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, is_pure=False, pack=1)

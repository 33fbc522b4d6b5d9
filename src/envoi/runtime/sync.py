"""Synchronisation in device code: arrival counters between CTAs, programmatic dependent launch between kernels."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from envoi.runtime.triton_compat import role_barrier


@gluon.jit
def arrive(counter, count):
    """Count an arrival at `counter`; return True to the last of `count` arrivals. Never waits.

    counter: pointer to an int32 that is 0 before the first arrival; the last arrival resets it to 0 for the next
    launch. Called by all warps of a role. Release-acquire at GPU scope: the last arrival sees every global write that
    the other roles made before theirs.
    """
    role_barrier()  # every warp of this role has written
    is_last = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1
    if is_last:
        gl.store(counter, 0)
    return is_last


# Programmatic dependent launch: a kernel that starts before the one launched ahead of it has ended.


@gluon.jit
def wait_for_grid():
    """Wait until the kernel launched before this one has ended; everything it wrote is visible afterwards.

    Returns at once in a launch without `launch_pdl`.
    """
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_next_start():
    """Allow the next kernel to start before this one ends, if it is launched with `launch_pdl`.

    That kernel's `wait_for_grid` still waits for the end of this one.
    """
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, is_pure=False, pack=1)

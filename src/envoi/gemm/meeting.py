"""Roles of several CTAs that wait for the last of them."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from envoi.triton_compat import role_barrier


@gluon.jit
def arrive(counter, count):
    """True for the last of `count` roles to come, who sees all that the others wrote before. Resets the counter."""
    role_barrier()
    last = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1
    if last:
        gl.store(counter, 0)
    return last

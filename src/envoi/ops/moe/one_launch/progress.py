"""Progress of a launch, in counters that its CTAs wait for; see the package, which has them in a table."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from envoi.ops.moe.one_launch import config
from envoi.runtime.triton_compat import role_barrier

# The first counter, number 0, is unused.
LEFT = gl.constexpr(1)
TAKEN = gl.constexpr(2)  # units of L1
TAKEN_IN_L2 = gl.constexpr(3)  # tiles
WRITTEN = gl.constexpr(config.OTHER_COUNTERS)  # the first of the counters of written units
LANES = gl.constexpr(config.LANES)
NUM_COUNTERS = gl.constexpr(config.NUM_COUNTERS)


@gluon.jit
def signal(counter):
    """Add 1 to a counter (release): a role that acquires it sees what this one has seen."""
    role_barrier()
    gl.atomic_add(counter, 1, sem="release", scope="gpu")


@gluon.jit
def signal_unit(progress, unit, shift):
    """Count a unit of L1 as written. shift: log2 of the units that a counter counts."""
    signal(progress + WRITTEN + (unit >> shift))


@gluon.jit
def wait_for_units(progress, known, end, num_units, shift):
    """Wait until units [0, end) are written, of which the first `known` are; return how many are known to be then.

    All units must have been taken: those of the last counter are waited for too, up to 2**shift - 1 after `end`. A look
    loads a counter a lane, 1024 units or more. A call ends with an acquire, which costs two microseconds and the SM's
    L1 cache: while L1 ends that is one for each expert, afterwards one or two for all.
    """
    while known < end:
        counter = (known >> shift) + lanes()
        wanted = gl.minimum(num_units - (counter << shift), 1 << shift)
        is_short = load_of_lanes(progress + WRITTEN + counter) < wanted
        num_complete = gl.min(gl.where(is_short, lanes(), LANES), 0)
        known = gl.minimum(((known >> shift) + num_complete) << shift, num_units)
    acquire()
    return known


@gluon.jit
def lanes():
    """Return the numbers of a warp's lanes."""
    return gl.arange(0, LANES, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))


@gluon.jit
def load_of_lanes(counters):
    """Load an int32 a lane, relaxed. Not acquired, which would empty the L1 cache each time."""
    return gl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.s32 $0, [$1];", "=r,l", [counters.to(gl.int64)], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def acquire():
    """Acquire at GPU scope what any lane's relaxed loads have seen, and order it before this role's TMA loads."""
    gl.inline_asm_elementwise("fence.acq_rel.gpu; // $0", "=r", [], gl.int32, is_pure=False, pack=1)
    role_barrier()
    gl.inline_asm_elementwise("fence.proxy.async; // $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def leave(progress):
    """Count this producer, which waits for nothing any more; the last one resets the counters."""
    role_barrier()
    if gl.atomic_add(progress + LEFT, 1, sem="acq_rel", scope="gpu") == gl.num_programs(0) - 1:
        for first in range(0, NUM_COUNTERS, LANES):
            gl.store(progress + first + lanes(), 0, mask=first + lanes() < NUM_COUNTERS)

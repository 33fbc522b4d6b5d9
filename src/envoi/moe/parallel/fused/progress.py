"""Progress of a launch, in counters that its CTAs wait for; see the package, which has them in a table."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from envoi.moe.parallel.fused import config
from envoi.runtime.triton_compat import role_barrier

PULLED = gl.constexpr(0)
EARLY = gl.constexpr(1)
ENDED = gl.constexpr(2)
WAITED = gl.constexpr(3)
TAKEN = gl.constexpr(4)
NUM_COUNTERS = gl.constexpr(config.NUM_COUNTERS)


@gluon.jit
def tell(counter):
    """Add this CTA to a counter (release): whoever acquires it sees what this role has seen."""
    role_barrier()
    gl.atomic_add(counter, 1, sem="release", scope="gpu")


@gluon.jit
def wait_for_all(counter):
    """Wait until all CTAs have added to a counter; what they wrote may be read then, by TMA loads too."""
    while load_relaxed(counter) < gl.num_programs(0):
        pass
    acquire()


@gluon.jit
def load_relaxed(counter):
    """Load an int32 that other multiprocessors change. Not an acquire, which would empty the L1 cache each time."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    found = gl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.s32 $0, [$1];", "=r,l", [(counter + lane * 0).to(gl.int64)], gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip
    return gl.max(found, 0)


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
    if gl.atomic_add(progress + WAITED, 1, sem="acq_rel", scope="gpu") == gl.num_programs(0) - 1:
        for i in gl.static_range(NUM_COUNTERS):
            gl.store(progress + i, 0)

"""Ring of stages in shared memory between the roles that fill them and the roles that read them.

A loop of n steps has num_stages buffers: step s uses stage s % num_stages, in round s // num_stages. Two mbarriers for
each stage keep the roles apart: `full` completes once a round when the stage is filled, `empty` when all have read it.
A timeline with 3 stages, and one role on each side; F waits on `full` of the step's stage, E on `empty`, e arrives
there:

    time ---------------------------------------------------------------------------------------------->
    filler   E fill 0   E fill 1   E fill 2     E fill 3      E fill 4      E fill 5      E fill 6 ..
    reader              F read 0 e   F read 1 e    F read 2 e    F read 3 e    F read 4 e ..

    step                 0  1  2  3  4  5  6
    stage                0  1  2  0  1  2  0     s % 3
    round                0  0  0  1  1  1  2     s // 3
    parity F waits for   0  0  0  1  1  1  0     round & 1: the stage has been filled in this round
    parity E waits for   1  1  1  0  0  0  1     1 - that: the stage has been read in the round before

A barrier starts in phase 0 and enters the next phase each time all its arrivals have come; waiting for a parity ends
once the barrier has left the latest phase of that parity. The phase before phase 0 counts as left, so the first round
of E doesn't wait. Nothing is reset: steps are counted from the kernel's start, across tiles. Parities can't tell a
round from the next but one, so no role may wait for a stage more than one round ahead of the others.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from envoi.runtime.aggregate import aggregate
from envoi.runtime.barrier_setup import set_up_together


@aggregate
class Ring:
    """Barriers of a ring's stages. The buffers belong to the caller, which indexes them by `stage(step)`."""

    full: gl.shared_memory_descriptor  # mbarriers [num_stages, 1]: who fills arrives, often TMA; readers wait
    empty: gl.shared_memory_descriptor | gl.constexpr  # mbarriers [num_stages, 1]: readers arrive, who fills waits; or
    # None: a stage is filled once, or other means tell that it has been read
    num_stages: gl.constexpr

    @staticmethod
    @gluon.jit
    def create(num_stages: gl.constexpr, num_fillers: gl.constexpr, num_readers: gl.constexpr):
        """Allocate the barriers and initialise them. The caller fences before any role uses them.

        num_fillers, num_readers: arrivals that complete a round of a stage's `full` and of its `empty`, which a ring
        without readers doesn't have.
        """
        if num_readers > 0:
            empty = allocate_barriers(num_stages)
        else:
            empty: gl.constexpr = None
        ring = Ring(allocate_barriers(num_stages), empty, num_stages)
        ring.set_up(num_fillers, num_readers)
        return ring

    @gluon.jit
    def set_up(self, num_fillers: gl.constexpr, num_readers: gl.constexpr):
        """Initialise the barriers as `create` does it, for a caller that has allocated them."""
        num_stages: gl.constexpr = self.num_stages
        set_up_together()
        for i in gl.static_range(num_stages):
            if num_readers > 0:
                mbarrier.init(self.empty.index(i), count=num_readers)
            mbarrier.init(self.full.index(i), count=num_fillers)

    @gluon.jit
    def stage(self, step):
        """Return the stage of a step."""
        return step % self.num_stages

    # who fills

    @gluon.jit
    def wait_empty(self, step):
        """Wait until the step's stage has been read in the round before; in the first round don't wait."""
        mbarrier.wait(self.empty.index(self.stage(step)), ((step // self.num_stages) & 1) ^ 1)

    @gluon.jit
    def expect(self, stage, num_bytes: gl.constexpr, pred=True):
        """Arrive on `full` of a stage: TMA is to bring so many bytes there, with which the round completes."""
        mbarrier.expect(self.full.index(stage), num_bytes, pred=pred)

    @gluon.jit
    def arrive_full(self, step):
        """Arrive on `full` of the step's stage, which the calling role has filled."""
        mbarrier.arrive(self.full.index(self.stage(step)), count=1)

    # who reads

    @gluon.jit
    def wait_full(self, step):
        """Wait until the step's stage has been filled."""
        self.wait_round(self.stage(step), step // self.num_stages)

    @gluon.jit
    def wait_round(self, stage, round):
        """Wait until a stage has been filled in a round, for a loop that counts both."""
        mbarrier.wait(self.full.index(stage), round & 1)

    @gluon.jit
    def release(self, step, pred=True):
        """Hand the step's stage back to who fills it, if anybody waits for it. A wgmma that read it has completed."""
        if self.empty is not None:
            mbarrier.arrive(self.empty.index(self.stage(step)), count=1, pred=pred)

    @gluon.jit
    def release_previous(self, step, pred=True):
        """Hand back the stage of the step before. At step 0, where there is none, pred is False."""
        self.release(step + self.num_stages - 1, pred)

    @gluon.jit
    def skip(self, step, num_steps):
        """Hand back the stages of so many steps as they fill, unread; return the next step."""
        for _ in range(num_steps):
            self.wait_full(step)
            self.release(step)
            step += 1
        return step


@gluon.jit
def new_barriers(COUNT: gl.constexpr, arrivals: gl.constexpr):
    """Allocate mbarriers [COUNT, 1], and initialise each for so many arrivals."""
    barriers = allocate_barriers(COUNT)
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=arrivals)
    return barriers


@gluon.jit
def allocate_barriers(COUNT: gl.constexpr):
    """Allocate mbarriers [COUNT, 1], to be initialised by the caller."""
    return gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())

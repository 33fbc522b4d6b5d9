"""Config of the decode kernel: its stages, and the sizes it takes."""

from dataclasses import dataclass

from envoi.ops.gemm.hopper.tile_config import SwappedTiles
from envoi.runtime.devices import SHARED_BYTES
from envoi.runtime.math import cdiv, next_power_of_2
from envoi.types import ExpertWeights, QuantTensor

MAX_EXPERTS = 512  # the ends of their tiles are in every warp's registers
MAX_SLOTS = 512  # every CTA reads all ids
MAX_TOPK = 32
FEATURES, TOKENS = 64, 8  # of a tile: the least that wgmma multiplies
STEP_BYTES = 128  # of a row of weights in a step
SLAB = 2  # steps of tokens that are copied at once
SCALE_BLOCK = 128  # elements that share a scale factor
CTAS = 2  # of a multiprocessor; with one, loads wait for products
MOST_STAGE_BYTES = 65536  # of all stages of a CTA; with more, requests of tokens queue after megabytes of weights
# By `block_scaled`, in order of preference: (steps of a stage, least number of stages, slabs of a chunk). The first
# that fits is taken. Two steps are neighbours in memory, and reading them at once is faster. In FP8 two chunks of
# tokens wait to be quantised.
WHOLE_CHUNK = 4
RINGS = {False: ((2, 3, 0), (1, 5, 0)), True: ((2, 3, WHOLE_CHUNK), (2, 3, 2))}
RESERVED = 4096  # bytes of shared memory of a CTA that are the driver's, or go to reductions and the epilogue


@dataclass(frozen=True)
class DecodeConfig(SwappedTiles):
    """Constants of the decode kernel.

    num_stages: stages of weights. stage_steps: 1 or 2, the steps of K in a stage.
    num_steps: of K, 128 bytes of a row of weights each. room_steps: the larger num_steps of L1 and L2. Both allocate
        shared memory for it, so that a CTA of L2 fits wherever one of L1 has ended.
    is_l1: tokens come by the slots' ids, else in the order of experts. num_topk: slots of a token.
    block_scaled: FP8 weights with a factor for 128 x 128; tokens are quantised while they are read.
    max_experts: a power of two, at least 32. max_slots: a power of two, at least 128.
    chunk_slabs: slabs of tokens that are quantised at once; 0 in bf16.
    """

    num_stages: int
    stage_steps: int
    num_steps: int
    room_steps: int
    is_l1: bool
    num_topk: int
    block_scaled: bool
    max_experts: int
    max_slots: int
    chunk_slabs: int

    num_consumers = 1
    rows_per_consumer = FEATURES
    block_y = TOKENS

    @property
    def step(self) -> int:
        """Elements of K in a step."""
        return STEP_BYTES if self.block_scaled else STEP_BYTES // 2

    @property
    def slab(self) -> int:
        """Steps of K that are copied to shared memory, and quantised, at once."""
        return SLAB

    @property
    def num_slabs(self) -> int:
        """Slabs of K."""
        return cdiv(self.num_steps, self.slab)

    @property
    def room_slabs(self) -> int:
        """Slabs of the GEMM with the larger K."""
        return cdiv(self.room_steps, self.slab)

    @property
    def max_steps(self) -> int:
        """Power of two, no less than the steps."""
        return max(32, next_power_of_2(self.num_steps))


def token_bytes(room_steps: int, block_scaled: bool, chunk_slabs: int = 0) -> int:
    """Return the shared memory of a strip's tokens: whole slabs; for FP8 also two chunks in bf16, and scale factors."""
    steps = cdiv(room_steps, SLAB) * SLAB
    if not block_scaled:
        return TOKENS * steps * STEP_BYTES
    copied = 2 * chunk_slabs * SLAB * TOKENS * 2 * STEP_BYTES
    return TOKENS * steps * (STEP_BYTES + 4) + copied + 8 * max(32, next_power_of_2(steps))


def ring(room_steps: int, block_scaled: bool) -> tuple[int, int, int]:
    """Return stages of a CTA, steps of a stage and slabs of a chunk; zeros if the tokens don't fit beside enough."""
    for stage_steps, least, chunk_slabs in RINGS[block_scaled]:
        stage_bytes = FEATURES * STEP_BYTES * stage_steps
        room = SHARED_BYTES // CTAS - RESERVED - token_bytes(room_steps, block_scaled, chunk_slabs)
        if room >= least * stage_bytes:
            return min(MOST_STAGE_BYTES, room) // stage_bytes, stage_steps, chunk_slabs
    return 0, 0, 0


def configs_of(experts: ExpertWeights, num_tokens: int, num_topk: int) -> tuple[DecodeConfig, DecodeConfig]:
    """Return the configs of L1 and of L2."""
    scaled = isinstance(experts.gate_up, QuantTensor)
    step = STEP_BYTES if scaled else STEP_BYTES // 2
    l1_steps, l2_steps = experts.gate_up.shape[-1] // step, experts.down.shape[-1] // step
    room = max(l1_steps, l2_steps)
    stages, stage_steps, chunk_slabs = ring(room, scaled)
    shared = (
        num_topk, scaled, max(32, next_power_of_2(experts.num_local_experts)),
        max(128, next_power_of_2(num_tokens * num_topk)), chunk_slabs,
    )  # fmt: skip
    stages_of = stages, stage_steps
    l1, l2 = (l1_steps, room, True), (l2_steps, room, False)
    return DecodeConfig(*stages_of, *l1, *shared), DecodeConfig(*stages_of, *l2, *shared)

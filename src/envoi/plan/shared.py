"""Shared memory of the fused kernel: fixed part, bytes per pipeline stage, and the number of stages that fit."""

from dataclasses import dataclass

from envoi.plan.layer import MoeLayer, element_bits
from envoi.plan.machines import WIDENED, Machine

MIN_STAGES = 2  # one is filled while the other is read
ALIGNMENT = 1024
BARRIER_BYTES = 8
STORE_TURNS = 2  # store buffers that tiles of L1 use in rotation


@dataclass(frozen=True)
class Roles:
    """Warps of the fused kernel, and the tile of a CTA.

    block_m, block_n, block_k: the tile and its stage. store_m: rows per store.
    num_dispatch_warps, num_epilogue_warps: 4 epilogue warps are a warpgroup.
    cluster: CTAs that share the rows of a tile. num_accumulators: tiles whose accumulators exist at once.
    pulls_through_shared: whether a dispatch warp keeps the row that it pulls in shared memory.
    widens: whether shared memory has tokens in bf16 and packed weights, which are widened in registers.
    """

    block_m: int
    block_n: int
    block_k: int
    store_m: int
    num_dispatch_warps: int
    num_epilogue_warps: int
    cluster: int
    num_accumulators: int
    pulls_through_shared: bool
    widens: bool = False


@dataclass(frozen=True)
class SharedMemory:
    """Bytes of a CTA: `fixed` and, for each stage, `per_stage`, both by content; `capacity`: the total available."""

    fixed: dict[str, int]
    per_stage: dict[str, int]
    capacity: int

    @property
    def fixed_bytes(self) -> int:
        """Bytes of the part that exists once."""
        return sum(self.fixed.values())

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage."""
        return sum(self.per_stage.values())

    @property
    def num_stages(self) -> int:
        """Number of stages that fit; fewer than MIN_STAGES can't run."""
        return max(0, self.capacity - self.fixed_bytes) // self.stage_bytes


def roles_of(machine: Machine, format: str, block_m: int, block_n: int, block_k: int) -> Roles:
    """Return the roles: Hopper's dispatch warps pull rows via registers; Blackwell pairs CTAs, with tensor memory."""
    tile = (block_m, block_n, block_k)
    if machine.arch == "sm_90":
        widens = format in WIDENED
        return Roles(*tile, min(block_m, 64), 2, 8, 1, 1, pulls_through_shared=False, widens=widens)
    return Roles(*tile, min(block_m, 32), 4, 8, 2, 2, pulls_through_shared=True)


def shared_memory(layer: MoeLayer, roles: Roles, capacity: int) -> SharedMemory:
    """Return the shared-memory layout of a CTA.

    Example: hidden 7168 and 256 experts in mxfp8, tiles of 128 x 128, stages of 128, on a pair of Blackwell's CTAs:
    47300 bytes fixed, 25616 per stage, of 232448 bytes: 7 stages.
    """
    groups = roles.num_epilogue_warps // 4
    row_bits, y_bits = (element_bits(scheme) for scheme in (layer.formats.activations, layer.formats.weights))
    x_bits = 16 if roles.widens else row_bits
    if not roles.widens:
        y_bits = max(y_bits, row_bits)  # E2M1 takes as many bits as its other operand
    l1 = groups * roles.store_m * roles.block_n // 2 * row_bits // 8 * STORE_TURNS
    l2 = groups * roles.store_m * roles.block_n * 2
    quantises = layer.formats.activations is not None
    per_row = layer.format in ("bf16", "fp8_row")
    barriers = roles.num_dispatch_warps + 2 * roles.num_accumulators + 2 * roles.num_epilogue_warps
    pulled = roles.num_dispatch_warps * layer.hidden * row_bits // 8 if roles.pulls_through_shared else 0
    fixed = {
        "rows per expert": _align(4 * layer.num_experts),
        "pulled rows": _align(pulled),
        "output tiles": max(l1, l2),
        "largest values": roles.store_m * roles.num_epilogue_warps * 4 if quantises else 0,
        "barriers": barriers * BARRIER_BYTES,
        "tensor memory address": 4 if roles.num_accumulators > 1 else 0,
    }
    factors = 0 if per_row else 4 * -(-roles.block_k // 128)  # a float32, or four powers of two, per 128 of K
    weights = layer.formats.weights
    shared_by = weights.group[0] if weights else 1
    per_stage = {
        "tokens": roles.block_m // roles.cluster * roles.block_k * x_bits // 8,
        "weights": roles.block_n * roles.block_k * y_bits // 8,
        "tokens' factors": 0 if roles.widens else roles.block_m * factors,
        "weights' factors": -(-roles.block_n // max(1, shared_by)) * factors,
        "barriers": 2 * BARRIER_BYTES,
    }
    return SharedMemory(fixed, per_stage, capacity)


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT

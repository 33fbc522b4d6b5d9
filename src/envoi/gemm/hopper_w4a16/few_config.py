"""Config of the kernel for few tokens: its tiles, its stages, its shared memory, the sizes it takes."""

from dataclasses import dataclass, replace

from envoi.constant import Constant
from envoi.runtime.devices import SHARED_BYTES
from envoi.runtime.math import cdiv, next_power_of_2

MAX_EXPERTS = 512  # the sums of their rows are in every warp's registers
WIDE_FROM = 4  # rows of an expert on average, from which tiles have 16
MOST_SLOTS = 1024  # for which the first GEMM reads the ids itself
MANY_STEPS = 96  # of K; above, the tokens of tiles of 16 wouldn't fit the shared memory
RESERVED = 3072  # bytes of shared memory of a CTA that are the driver's, or go to barriers, reductions and the epilogue
BOX_BYTES = 2048 + 128  # weights and factors of 64 rows x 64 of K
MOST_STAGE_BYTES = 65536  # of all stages of a CTA that has others beside it
LEAST_STAGES = 3
# By tile_tokens: (CTAs of an SM, steps of a stage), in order of preference. The first that has room for the least
# stages is taken.
RINGS = {8: ((2, 4), (1, 4), (1, 2), (1, 1)), 16: ((1, 4), (1, 2), (1, 1))}
ORDER = "ahead"


@dataclass(frozen=True)
class FewConfig(Constant):
    """Constants of the kernel for few tokens.

    tile_tokens: 8 or 16 tokens of a tile. num_warps: 4 or 8, each with 16 features.
    num_steps: K / 64. room_steps: that of the GEMM with the larger K. Both take as much shared memory: while CTAs of
        the first end and those of the second begin, none finds a gap that is too small for it.
    all_row_tiles: tiles of 64 rows of an expert's weights.
    unroll: steps of K in a stage, the unit in which work is shared out. num_stages: stages of weights.
    ctas_per_sm: CTAs of an SM. order: "ahead", a step's products are started before those of the one in front are
        finished; "" or "rolled", after that, in a loop that is unrolled or rolled.
    is_l1: gate and up in, tokens of the second GEMM out; else the second GEMM. activation, limit: of `is_l1`.
    max_experts: a power of two, at least 32. max_slots: a power of two, at least one for each thread, if the first
        GEMM reads ids itself, else 0.
    slab: steps of tokens that one copy brings. overlaps: programmatic dependent launch.
    """

    tile_tokens: int
    num_warps: int
    num_steps: int
    room_steps: int
    all_row_tiles: int
    unroll: int
    num_stages: int
    ctas_per_sm: int
    is_l1: bool
    activation: str
    limit: float | None
    has_bias: bool
    max_experts: int
    max_slots: int = 0
    order: str = "ahead"
    slab: int = 8
    overlaps: bool = True

    @property
    def reads_ids(self) -> bool:
        """Return True if experts' rows are counted from the ids, not read from `offsets`."""
        return self.max_slots > 0

    @property
    def waits_first(self) -> bool:
        """Return True if the kernel can do nothing before the previous one has ended."""
        return self.overlaps and self.is_l1 and not self.reads_ids

    @property
    def num_row_tiles(self) -> int:
        """Tiles of 64 rows that a tile has, one for each warpgroup."""
        return self.num_warps // 4

    @property
    def tiles_per_strip(self) -> int:
        """Tiles with the same tokens: all rows of an expert's weights."""
        return cdiv(self.all_row_tiles, self.num_row_tiles)

    @property
    def num_groups(self) -> int:
        """Units of `unroll` steps along K."""
        return cdiv(self.num_steps, self.unroll)

    @property
    def num_slabs(self) -> int:
        """Slabs of K in which tokens are copied to shared memory."""
        return cdiv(self.num_steps, self.slab)

    @property
    def room_slabs(self) -> int:
        """Slabs of the GEMM with the larger K."""
        return cdiv(self.room_steps, self.slab)

    @property
    def groups_per_step(self) -> int:
        """Groups of features in a step of L2 whose tokens share a power of two: the features of one tile of L1."""
        return 2 // self.num_row_tiles

    @property
    def num_k_groups(self) -> int:
        """Room for all groups' factors; a power of two."""
        return next_power_of_2(self.groups_per_step * self.room_steps)

    @property
    def factors_at(self) -> int:
        """Place of the groups' factors after the tokens, in pieces as large as they are."""
        return cdiv(self.room_slabs * self.slab * 32, self.num_k_groups)

    @property
    def all_steps(self) -> int:
        """Steps whose tokens take as many bytes as all tokens and the factors of 4 bytes."""
        from envoi.runtime.triton_compat import WHOLE_VIEWS  # not at the top: `import envoi` must not import Triton

        steps = cdiv((self.factors_at + 1) * self.num_k_groups, 32)
        whole = max(self.slab, self.num_k_groups // 32)
        return cdiv(steps, whole) * whole if WHOLE_VIEWS else steps

    @property
    def token_bytes(self) -> int:
        """Shared memory of a tile's tokens."""
        return self.all_steps * self.tile_tokens * 128

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage."""
        return self.unroll * self.num_row_tiles * BOX_BYTES

    @property
    def registers(self) -> int:
        """Registers of a thread: as many as the SM has for its CTAs."""
        return min(255, 65536 // (32 * self.num_warps * self.ctas_per_sm) // 8 * 8)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA."""
        return self.token_bytes + self.num_stages * self.stage_bytes + RESERVED


def with_ring(config: FewConfig) -> FewConfig:
    """Return a config with as many stages as fit, 0 if too few do."""
    for ctas, unroll in RINGS[config.tile_tokens]:
        config = replace(config, ctas_per_sm=ctas, unroll=unroll)
        room = SHARED_BYTES // ctas - RESERVED - config.token_bytes
        num_stages = (room if ctas == 1 else min(room, MOST_STAGE_BYTES)) // config.stage_bytes
        if num_stages >= LEAST_STAGES:
            return replace(config, num_stages=num_stages)
    return config


def few_configs(
    hidden: int,
    intermediate: int,
    num_experts: int,
    num_slots: int,
    activation: str,
    limit: float | None,
    has_bias: bool,
) -> tuple[FewConfig, FewConfig]:
    """Return the configs of both GEMMs for so many slots of all tokens."""
    l1, l2, room = hidden // 64, intermediate // 64, max(hidden, intermediate) // 64
    wide = num_slots > WIDE_FROM * num_experts and room <= MANY_STEPS
    tile, experts = (16, 8) if wide else (8, 4), max(32, next_power_of_2(num_experts))
    slots = max(32 * tile[1], next_power_of_2(num_slots)) if num_slots <= MOST_SLOTS else 0
    l1_config = FewConfig(
        *tile, l1, room, 2 * l2, 1, 0, 1, True, activation, limit, has_bias, experts, slots, ORDER
    )  # fmt: skip
    l2_config = FewConfig(*tile, l2, room, l1, 1, 0, 1, False, "", None, has_bias, experts, 0, ORDER)
    return with_ring(l1_config), with_ring(l2_config)

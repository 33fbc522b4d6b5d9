"""Config of the kernel for few tokens: its tiles, its shared memory, the sizes it takes."""

from dataclasses import dataclass, replace

from envoi.constant import Constant
from envoi.runtime.devices import SHARED_BYTES
from envoi.runtime.math import next_power_of_2

MAX_EXPERTS = 512  # the ends of their tiles are in every warp's registers
UNROLLED = (5, 4, 6, 3)  # steps that are requested together; the first that divides K / 64, else the first
UNROLLED_FP8 = (9, 8, 7, 6, 5, 4, 3)  # no product waits for its factor, which leaves registers for more steps
WIDE_FROM = 4  # rows of an expert on average, from which tiles have 16
MOST_SLOTS, FEW_EXPERTS = 32, 128  # for which the first GEMM reads the ids itself
MANY_STEPS = 96  # of K; above, the tokens of tiles of 16 wouldn't fit the shared memory
LATE = 2  # steps of five, in tiles of 16
SHORT_STEPS = 32  # of K; up to here the first GEMM doesn't prefetch in tiles of 16
RESERVED = 2048  # bytes of shared memory of a CTA that are the driver's, or go to reductions


@dataclass(frozen=True)
class Int4Form(Constant):
    """Form of INT4 weights in fragments: factors of a row in 64 of K, whether in fp16 or bf16, and whether with zeros.

    per_step: 1 or 2 factors, that is words of a pair of rows. half: fp16. has_zeros: zero points, else 8 everywhere.
    """

    per_step: int
    half: bool
    has_zeros: bool

    @property
    def up(self) -> float:
        """What sums of E4M3 weights have yet to be multiplied by, more than those of MXFP4: 2^8 or 2^9 is all of it."""
        return 16.0 if self.has_zeros else 8.0


@dataclass(frozen=True)
class FewConfig(Constant):
    """Constants of the kernel for few tokens.

    tile_tokens: 8 or 16 tokens of a tile. num_warps: 4 or 8, or 16 of `fp8`, each with 16 features.
    num_steps: K / 64. room_steps: that of the GEMM with the larger K. Both take as much shared memory: while CTAs of
        the first end and those of the second begin, none finds a gap that is too small for it.
    unroll: steps of K whose weights are requested together, the unit in which work is shared out.
    is_l1: gate and up in, tokens of the second GEMM out; else the second GEMM. activation, limit: of `is_l1`.
    max_experts: a power of two, at least 32. max_slots: a power of two if the first GEMM reads ids itself, else 0.
    late: steps at the end of a group whose weights are requested when its products begin; those of the others are
        requested a group earlier.
    prefetches: ask for weights of the group after the next one to be brought into the L2 cache.
    overlaps: programmatic dependent launch.
    fp8: tokens are FP8 with a scale each (`few_tokens.Fp8Tokens`). looks_up: tables of its weights come from memory,
        else they are computed, which only shifts from -5 on allow (`envoi.quant.fp8_fragments`).
    int4: form of INT4 weights, None for MXFP4.
    """

    tile_tokens: int
    num_warps: int
    num_steps: int
    room_steps: int
    unroll: int
    is_l1: bool
    activation: str
    limit: float | None
    has_bias: bool
    max_experts: int
    max_slots: int = 0
    late: int = 0
    prefetches: bool = False
    overlaps: bool = True
    fp8: bool = False
    looks_up: bool = False
    int4: Int4Form | None = None

    @property
    def words_per_step(self) -> int:
        """Return the words of factors that a pair of rows has in a step."""
        return 1 if self.int4 is None else self.int4.per_step

    @property
    def holds_more(self) -> bool:
        """Return True if a step's factors take so many registers that one step less is requested a group earlier."""
        return self.is_l1 and self.int4 is not None and self.words_per_step == 2 and not self.int4.has_zeros

    @property
    def shares_factors(self) -> bool:
        """Return True if all weights of a row in a step, and all numbers of a token, have one factor."""
        return self.int4 is not None and self.words_per_step == 1 and (self.is_l1 or self.groups_per_step == 1)

    @property
    def quantises(self) -> bool:
        """Return True if tokens are bf16 that the kernel quantises itself."""
        return self.fp8 and not self.is_l1

    @property
    def token_bytes(self) -> int:
        """Return the bytes of a token in shared memory, a step."""
        return 64 if self.fp8 else 128

    @property
    def zero_tail(self) -> bool:
        """Return True if weights after the last step of K are to be 0, not anything."""
        return self.fp8 and self.num_steps % self.unroll > 0

    @property
    def reads_ids(self) -> bool:
        """Return True if bounds of experts' rows are computed from the ids, not read from `offsets`."""
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
    def num_groups(self) -> int:
        """Units of `unroll` steps along K."""
        return -(-self.num_steps // self.unroll)

    @property
    def num_slabs(self) -> int:
        """Slabs of K, 16 steps each, in which tokens are copied to shared memory."""
        return -(-self.num_steps // 16)

    @property
    def room_slabs(self) -> int:
        """Slabs of the GEMM with the larger K."""
        return -(-self.room_steps // 16)

    @property
    def groups_per_step(self) -> int:
        """Groups of features in a step of L2 whose tokens share a power of two: the features of one tile of L1."""
        return 2 // self.num_row_tiles

    @property
    def num_k_groups(self) -> int:
        """Room for all groups' factors; a power of two."""
        return next_power_of_2(self.groups_per_step * self.room_steps)

    @property
    def factor_steps(self) -> int:
        """Steps whose tokens take at least as many bytes as the factors, of 4 bytes each."""
        if self.fp8:
            return 0
        from envoi.runtime.triton_compat import WHOLE_VIEWS  # not at the top: `import envoi` must not import Triton

        steps = -(-self.num_k_groups // 32)
        return -(-steps // 16) * 16 if WHOLE_VIEWS else steps

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA."""
        return (self.room_slabs * 16 + self.factor_steps) * self.tile_tokens * self.token_bytes + RESERVED

    @property
    def ctas_per_sm(self) -> int:
        """CTAs of an SM: as many as fit, at 128 registers a thread."""
        return min(SHARED_BYTES // self.shared_bytes, 16 // self.num_warps)


def unroll_of(num_steps: int) -> int:
    """Return the steps of K that are requested together."""
    return next((u for u in UNROLLED if num_steps % u == 0), UNROLLED[0])


def few_configs(
    hidden: int,
    intermediate: int,
    num_experts: int,
    num_slots: int,
    activation: str,
    limit: float | None,
    has_bias: bool,
    fp8: bool = False,
    looks_up: bool = False,
    forms: tuple[Int4Form | None, Int4Form | None] = (None, None),
) -> tuple[FewConfig, FewConfig]:
    """Return the configs of both GEMMs for so many slots of all tokens."""
    l1, l2, room = hidden // 64, intermediate // 64, max(hidden, intermediate) // 64
    wide = num_slots > WIDE_FROM * num_experts and (fp8 or room <= MANY_STEPS)
    tile, experts = (16, 8) if wide else (8, 4), max(32, next_power_of_2(num_experts))
    slots = max(4, next_power_of_2(num_slots)) if num_slots <= MOST_SLOTS and num_experts <= FEW_EXPERTS else 0
    first = FewConfig(*tile, l1, room, unroll_of(l1), True, activation, limit, has_bias, experts, slots)
    second = FewConfig(*tile, l2, room, unroll_of(l2), False, "", None, has_bias, experts)
    first, second = replace(first, int4=forms[0]), replace(second, int4=forms[1])
    if fp8:
        first, second = (_with_fp8(config, looks_up) for config in (first, second))
    return _requesting(first, wide, slots > 0), _requesting(second, wide, slots > 0)


def _with_fp8(config: FewConfig, looks_up: bool) -> FewConfig:
    """Return the config for FP8 tokens: 8 in a tile if 16 don't fit, and 16 warps on an SM as far as those fit."""
    config = replace(config, fp8=True, looks_up=looks_up)
    if not looks_up:
        unroll = next((u for u in UNROLLED_FP8 if config.num_steps % u == 0), UNROLLED_FP8[1])
        config = replace(config, unroll=unroll)
    if config.shared_bytes > SHARED_BYTES:
        config = replace(config, tile_tokens=8)
    warps = (replace(config, num_warps=num_warps) for num_warps in (4, 8, 16) if num_warps >= config.num_warps)
    return next((fits for fits in warps if fits.ctas_per_sm * fits.num_warps == 16), config)


def _requesting(config: FewConfig, wide: bool, is_short: bool) -> FewConfig:
    """Return the config with the way in which it requests weights that was measured to be fastest.

    is_short: so few slots that a CTA has few groups.
    """
    if wide and not config.fp8 and config.unroll == 5 and config.num_steps % 5 == 0:
        return replace(config, late=LATE + config.holds_more)
    pays = not (wide and config.is_l1 and config.num_steps <= SHORT_STEPS)
    return replace(config, prefetches=pays and not is_short)

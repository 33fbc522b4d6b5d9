"""Config of the kernel for few tokens: its tiles, its shared memory, the sizes it takes."""

from dataclasses import dataclass, replace
from functools import cache
from math import gcd

from envoi.constant import Constant
from envoi.runtime.devices import SHARED_BYTES
from envoi.runtime.math import next_power_of_2

MAX_EXPERTS = 512  # the ends of their tiles are in every warp's registers
# Steps that are requested together, the first that divides K / 64, and those where none does. In FP8 no product waits
# for its factor, so that there are registers for more steps.
UNROLLED = (5, 4, 6, 3), 5
UNROLLED_FP8 = (9, 8, 7, 6, 5, 4, 3), 8
WIDE_FROM = 4  # rows of an expert on average, from which tiles have 16
MOST_SLOTS, FEW_EXPERTS = 32, 128  # for which the first GEMM reads the ids itself
MOST_SLAB = 16  # steps of K that one copy of tokens brings
SM_WARPS = 16  # that 128 registers a thread leave room for
# Tokens of a tile and warps of a CTA. The first that fills an SM is taken: tokens' whole K is in shared memory, so that
# where they are wide fewer CTAs fit, of more warps. Tiles of 16 by 4 warps are slower.
TILES = (16, 8), (16, 16), (8, 4), (8, 8), (8, 16)
LATE, LATE_MXFP8 = 2, 3  # steps of five, in tiles of 16; of tokens in one E4M3, which with two spill registers
LATE_INT4 = {(1, True): 1, (1, False): 1, (2, True): 3, (2, False): 2}  # by words of factors a step, and whether L1
LATE_BF16 = {1: 1, 2: 2}  # by words of factors a step: with fewer, registers are spilled
SHORT_STEPS = 32  # of K; up to here the first GEMM doesn't prefetch in tiles of 16
INT4_UP = 8.0  # what sums of INT4 weights in E4M3, times 2^-8, lack more than those of MXFP4
RESERVED = 2048  # bytes of shared memory of a CTA that are the driver's, or go to reductions


@dataclass(frozen=True)
class Int4Form(Constant):
    """Form of INT4 weights in fragments: factors of a row in 64 of K, whether in fp16 or bf16, and whether with zeros.

    per_step: 1 or 2 factors, that is words of a pair of rows. half: fp16. has_zeros: zero points, else 8 everywhere.
    """

    per_step: int
    half: bool
    has_zeros: bool


@dataclass(frozen=True)
class FewConfig(Constant):
    """Constants of the kernel for few tokens.

    tile_tokens: 8 or 16 tokens of a tile. num_warps: 4, 8 or 16, each with 16 features.
    num_steps: K / 64. room_steps: steps of tokens for which there is shared memory, in both GEMMs: while CTAs of the
        first end and those of the second begin, none finds a gap that is too small for it.
    unroll: steps of K whose weights are requested together, the unit in which work is shared out.
    is_l1: gate and up in, tokens of the second GEMM out; else the second GEMM. activation, limit: of `is_l1`.
    max_experts: a power of two, at least 32. max_slots: a power of two if the first GEMM reads ids itself, else 0.
    late: steps at the end of a group whose weights are requested when its products begin; those of the others are
        requested a group earlier.
    prefetches: ask for weights of the group after the next one to be brought into the L2 cache.
    fp8: tokens are FP8 with a scale each (`few_tokens.Fp8Tokens`). looks_up: tables of its weights come from memory,
        else they are computed, which only shifts from -5 on allow (`envoi.quant.fp8_fragments`).
    int4: form of INT4 weights, None for MXFP4. mxfp8: tokens are MXFP8's numbers, so that one E4M3 holds them.
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
    fp8: bool = False
    looks_up: bool = False
    int4: Int4Form | None = None
    mxfp8: bool = False

    @property
    def words_per_step(self) -> int:
        """Return the words of factors that a pair of rows has in a step."""
        return 1 if self.int4 is None else self.int4.per_step

    @property
    def shares_factors(self) -> bool:
        """Return True if all weights of a row in a step, and all numbers of a token, have one factor."""
        if self.int4 is None or self.words_per_step > 1:
            return False
        return self.tokens_unscaled or self.groups_per_step == 1

    @property
    def bf16(self) -> bool:
        """Return True if tokens stay bf16: weights are INT4 less zero points, which take fewer operations in bf16."""
        return self.int4 is not None and self.int4.has_zeros

    @property
    def tokens_unscaled(self) -> bool:
        """Return True if a token's numbers of all steps have one factor, or none."""
        return self.is_l1 or self.bf16

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
        return self.is_l1 and not self.reads_ids

    @property
    def num_row_tiles(self) -> int:
        """Tiles of 64 rows that a tile has, one for each warpgroup."""
        return self.num_warps // 4

    @property
    def num_groups(self) -> int:
        """Units of `unroll` steps along K."""
        return -(-self.num_steps // self.unroll)

    @property
    def token_steps(self) -> int:
        """Steps of tokens that are copied to shared memory; those after the last of K are 0."""
        return -(-self.num_steps // MOST_SLAB) * MOST_SLAB

    @property
    def slab(self) -> int:
        """Return the steps of K that one copy brings; where views must be whole, they have to divide all the room."""
        return gcd(self.room_steps, MOST_SLAB) if _whole_views() else MOST_SLAB

    @property
    def num_slabs(self) -> int:
        """Slabs of K in which tokens are copied to shared memory."""
        return self.token_steps // self.slab

    @property
    def groups_per_step(self) -> int:
        """Groups of features in a step of L2 whose tokens share a power of two: those of a tile of L1, at most 64."""
        return 2 if self.num_row_tiles == 1 else 1

    @property
    def num_k_groups(self) -> int:
        """Room for the factors of a token's groups, of the second GEMM; a power of two, 0 if there are none."""
        return 0 if self.tokens_unscaled or self.fp8 else _room(self.groups_per_step * self.num_steps)

    @property
    def own_steps(self) -> int:
        """Steps of tokens that take as much shared memory as this GEMM needs."""
        steps = self.token_steps + self.num_k_groups // 32
        unit = self.num_warps // 2 if _whole_views() else 1  # what all warps copy at once
        return -(-steps // unit) * unit

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA."""
        return self.room_steps * self.tile_tokens * self.token_bytes + RESERVED

    @property
    def ctas_per_sm(self) -> int:
        """CTAs of an SM: as many as fit, at 128 registers a thread."""
        return min(SHARED_BYTES // self.shared_bytes, SM_WARPS // self.num_warps)

    @property
    def warps_per_sm(self) -> int:
        """Warps of all CTAs of an SM."""
        return self.ctas_per_sm * self.num_warps


def _whole_views() -> bool:
    from envoi.runtime.triton_compat import WHOLE_VIEWS  # not at the top: `import envoi` must not import Triton

    return WHOLE_VIEWS


def _room(count: int) -> int:
    """Return a length of vectors that holds so many: a power of two of float32, whole steps of tokens."""
    return max(32, next_power_of_2(count))


def unroll_of(num_steps: int, allowed: tuple[int, ...], otherwise: int) -> int:
    """Return the steps of K that are requested together: the first allowed that divides num_steps, else `otherwise`."""
    return next((u for u in allowed if num_steps % u == 0), otherwise)


@cache
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
    mxfp8: bool = False,
) -> tuple[FewConfig, FewConfig]:
    """Return the configs of both GEMMs for so many slots of all tokens."""
    wide = num_slots > WIDE_FROM * num_experts
    experts = max(32, next_power_of_2(num_experts))
    slots = max(4, next_power_of_2(num_slots)) if num_slots <= MOST_SLOTS and num_experts <= FEW_EXPERTS else 0

    l1, l2 = hidden // 64, intermediate // 64
    unrolls = UNROLLED_FP8 if fp8 and not looks_up else UNROLLED
    common = FewConfig(
        8, 4, l1, 0, unroll_of(l1, *unrolls), True, activation, limit, has_bias, experts, slots, fp8=fp8,
        looks_up=looks_up, int4=forms[0], mxfp8=mxfp8,
    )  # fmt: skip

    def pair(tile_tokens: int, num_warps: int) -> tuple[FewConfig, FewConfig]:
        first = replace(common, tile_tokens=tile_tokens, num_warps=num_warps)
        second = replace(
            first, num_steps=l2, unroll=unroll_of(l2, *unrolls), is_l1=False, activation="", limit=None, max_slots=0,
            int4=forms[1],
        )  # fmt: skip
        room = max(first.own_steps, second.own_steps)
        return replace(first, room_steps=room), replace(second, room_steps=room)

    tiles = (tile for tile in TILES if wide or tile[0] == 8)
    full = (configs for configs in (pair(*tile) for tile in tiles) if configs[0].warps_per_sm == SM_WARPS)
    first, second = next(full, None) or pair(*TILES[-1])
    return _requesting(first, slots > 0), _requesting(second, slots > 0)


def _requesting(config: FewConfig, is_short: bool) -> FewConfig:
    """Return the config with the way in which it requests weights that was measured to be fastest.

    is_short: so few slots that a CTA has few groups.
    """
    wide = config.tile_tokens == 16
    if config.bf16 and wide:
        return replace(config, late=LATE_BF16[config.words_per_step])
    if wide and not config.fp8 and config.unroll == 5 and config.num_steps % 5 == 0:
        of_mxfp4 = LATE_MXFP8 if config.mxfp8 else LATE
        late = of_mxfp4 if config.int4 is None else LATE_INT4[config.words_per_step, config.is_l1]
        return replace(config, late=late)
    spills = config.bf16 and config.words_per_step == 2
    pays = not (wide and config.is_l1 and config.num_steps <= SHORT_STEPS)
    return replace(config, prefetches=pays and not spills and not is_short)

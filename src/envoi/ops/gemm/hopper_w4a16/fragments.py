"""Weights in fragment order (`envoi.quant.fragments`) on the device: loads, and widening to E4M3 and to bf16, in Gluon.

A tile of 64 rows x 64 of K is 512 words of weights and 32 words of scale factors, of 32 bits for MXFP4 and of 64 for
NVFP4, which are widened to bf16 alone; of INT4 of 32 bits, two factors of 64 of K, or of 64, and zero points in half a
word or in one. A thread of a warpgroup has four words of weights (k16 x half) and one of
factors, which the four threads of a row pair share. The kernel for few tokens loads them by volatile PTX with a
predicate: the compiler would sink a plain load to its first use, after the waits for wgmma, and there would be none in
flight.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from envoi.runtime.aggregate import Scalar, aggregate

TILE = gl.constexpr(64)
WORDS = gl.constexpr(512)  # of weights, a tile
SF_WORDS = gl.constexpr(32)  # of scale factors, a tile
NVFP4_UP = gl.constexpr(256.0)  # what products of NVFP4 weights from `to_bf16` have yet to be multiplied by
NOTHING = gl.constexpr(None)
TAME = gl.constexpr(0x01010101)  # added to a word of factors: see `row_factors`


@gluon.constexpr_function
def thread_layout(warps):
    """Layout with one element a thread."""
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon.constexpr_function
def pair_layout(warps):
    """Layout of [8 * warps] pairs of rows: each warp holds 8, and all four threads of a pair hold it."""
    over_warps = [[8 << i] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout([], [[0], [0], [1], [2], [4]], over_warps, [], [8 * warps])


@gluon.constexpr_function
def load_code(words, offset, or_zero=False):
    """PTX of a load of 1, 2 or 4 words from a pointer plus an offset in bytes, if the last operand isn't 0.

    or_zero: else the words are 0, not anything.
    """
    outputs = ", ".join(f"${i}" for i in range(words))
    to, kind = (f"{{{outputs}}}", f".v{words}") if words > 1 else ("$0", "")
    load = f"ld.global.L1::no_allocate{kind}.b32 {to}, [${words} + {offset}];"
    zeros = " ".join(f"mov.b32 ${i}, 0;" for i in range(words)) + " " if or_zero else ""
    return f"{{ .reg .pred p; setp.ne.b32 p, ${words + 1}, 0; {zeros}@p {load} }}"


@gluon.constexpr_function
def zeros_code(per_step, step):
    """PTX of a load of a pair's zero points, two bytes or four, `step` tiles further; 0 if the last operand is 0."""
    kind = "u16" if per_step == 1 else "b32"  # a register of 32 bits may receive 16, the others become 0
    load = f"ld.global.L1::no_allocate.{kind} $0, [$1 + {step * 64 * per_step}];"
    return f"{{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p {load} }}"


@gluon.constexpr_function
def prefetch_code(offset, num_bytes):
    """PTX with which one thread of four warps asks for num_bytes from a pointer plus an offset, for the L2 cache.

    Nothing is asked for if the last operand is 0. The output has no meaning.
    """
    ask = f"cp.async.bulk.prefetch.L2.global [$1 + {offset}], {num_bytes};"
    first = "mov.u32 $0, %tid.x; and.b32 $0, $0, 127; setp.eq.and.u32 p, $0, 0, q;"
    return f"{{ .reg .pred p, q; setp.ne.b32 q, $2, 0; {first} @p {ask} }}"


@gluon.constexpr_function
def is_nvfp4(word):
    """Return True for the type of NVFP4's words of factors."""
    return word == gl.int64


@aggregate
class Weights:
    """Weights of all experts for one GEMM, and their tiles in memory: num_row_tiles x num_steps an expert."""

    words: gl.tensor  # int32 pointer
    factors: gl.tensor  # int32 pointer
    zeros: Scalar  # uint8 pointer, or None
    num_row_tiles: Scalar
    num_steps: gl.constexpr
    per_step: gl.constexpr  # words of factors of a pair of rows

    @gluon.jit
    def at(self, expert, row_tile, step):
        """Return each thread's place in the tiles from row_tile on, one for each four warps, at a step along K.

        Warps after the last tile of rows get its own again.
        """
        warps: gl.constexpr = gl.num_warps()
        thread = gl.arange(0, 32 * warps, thread_layout(warps))
        pair = gl.arange(0, 8 * warps, pair_layout(warps))
        first = expert.to(gl.int64) * self.num_row_tiles
        last = self.num_row_tiles - 1
        tile = (first + gl.minimum(row_tile + thread // 128, last)) * self.num_steps + step
        words = self.words + tile * WORDS + thread % 128 * 4
        tile = (first + gl.minimum(row_tile + pair // SF_WORDS, last)) * self.num_steps + step
        place = tile * SF_WORDS + pair % SF_WORDS
        factors = (self.factors + place * self.per_step).to(gl.int64)
        if self.zeros is None:
            return Place(words.to(gl.int64), factors, NOTHING, self.per_step)
        else:
            zeros = (self.zeros + place * (2 * self.per_step)).to(gl.int64)
            return Place(words.to(gl.int64), factors, zeros, self.per_step)


@aggregate
class Words:
    """A thread's four words of weights in a tile, by k16 and half: int32 [32 * warps] each."""

    k0_half0: gl.tensor
    k0_half1: gl.tensor
    k1_half0: gl.tensor
    k1_half1: gl.tensor


@aggregate
class Step:
    """Weights of a tile, as they were loaded, and a word of scale factors for each pair of rows.

    factors: int32 [8 * warps]. second: of INT4 with two words a pair the one of block 1, else None. zeros: a byte for
    each factor, int32 [8 * warps], or None.
    """

    words: Words
    factors: gl.tensor
    second: Scalar
    zeros: Scalar


@aggregate
class Place:
    """Addresses that each thread reads next."""

    words: gl.tensor  # int64 [32 * warps]
    factors: gl.tensor  # int64 [8 * warps]
    zeros: Scalar  # int64 [8 * warps], or None
    per_step: gl.constexpr

    @gluon.jit
    def load(self, step: gl.constexpr, is_wanted, OR_ZERO: gl.constexpr = False):
        """Return a thread's weights and factors `step` tiles further along K; if is_wanted is 0 anything, or 0."""
        first, second, third, fourth = gl.inline_asm_elementwise(
            load_code(4, step * 2048, OR_ZERO), "=&r,=&r,=&r,=&r,l,r", [self.words, is_wanted],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1,
        )  # fmt: skip
        words = Words(first, second, third, fourth)
        if self.zeros is None:
            zeros: gl.constexpr = NOTHING
        else:
            zeros = self.load_zeros(step, is_wanted)
        if self.per_step == 1:
            factors = gl.inline_asm_elementwise(
                load_code(1, step * 128), "=&r,l,r", [self.factors, is_wanted], dtype=gl.int32, is_pure=False, pack=1
            )
            return Step(words, factors, NOTHING, zeros)
        else:
            block0, block1 = gl.inline_asm_elementwise(
                load_code(2, step * 256), "=&r,=&r,l,r", [self.factors, is_wanted], dtype=(gl.int32, gl.int32),
                is_pure=False, pack=1,
            )  # fmt: skip
            return Step(words, block0, block1, zeros)

    @gluon.jit
    def load_zeros(self, step: gl.constexpr, is_wanted):
        """Return the zero points `step` tiles further along K, 0 if is_wanted is 0."""
        code: gl.constexpr = zeros_code(self.per_step, step)
        return gl.inline_asm_elementwise(
            code, "=&r,l,r", [self.zeros, is_wanted], dtype=gl.int32, is_pure=False, pack=1
        )

    @gluon.jit
    def prefetch(self, step: gl.constexpr, steps: gl.constexpr, is_wanted):
        """Ask for the weights and factors of so many tiles along K, from `step` tiles further on, for the L2 cache."""
        words: gl.constexpr = prefetch_code(step * 2048, steps * 2048)
        factor_bytes: gl.constexpr = 128 * self.per_step
        factors: gl.constexpr = prefetch_code(step * factor_bytes, steps * factor_bytes)
        gl.inline_asm_elementwise(words, "=&r,l,r", [self.words, is_wanted], gl.int32, is_pure=False, pack=1)
        gl.inline_asm_elementwise(factors, "=&r,l,r", [self.factors, is_wanted], gl.int32, is_pure=False, pack=1)

    @gluon.jit
    def advance(self, steps: gl.constexpr):
        """Return the place so many tiles further along K."""
        words, factors = self.words + steps * 2048, self.factors + steps * (128 * self.per_step)
        if self.zeros is None:
            return Place(words, factors, NOTHING, self.per_step)
        else:
            return Place(words, factors, self.zeros + steps * (64 * self.per_step), self.per_step)


@gluon.jit
def either(condition, a, b):
    """Return one of two places."""
    words, factors = gl.where(condition, a.words, b.words), gl.where(condition, a.factors, b.factors)
    if a.zeros is None:
        return Place(words, factors, NOTHING, a.per_step)
    else:
        return Place(words, factors, gl.where(condition, a.zeros, b.zeros), a.per_step)


@gluon.jit
def by_thread(words):
    """Return four words of each thread as a tensor [warp, half, g, k16, t]."""
    warps: gl.constexpr = gl.num_warps()
    x = gl.join(gl.join(words.k0_half0, words.k0_half1), gl.join(words.k1_half0, words.k1_half1))  # [thread, half, k16]
    return x.reshape([warps, 8, 4, 2, 2]).permute([0, 3, 1, 4, 2])


# MXFP4 to E4M3 times 2^-6. $0: block 0, $1: block 1, from a word $2.
E4M3_CODE = gl.constexpr(
    "{ .reg .b32 a, b; shl.b32 a, $2, 2; and.b32 $0, a, 0x9C9C9C9C; "
    "shr.u32 b, $2, 4; and.b32 b, b, 0x04040404; and.b32 a, $2, 0x98989898; or.b32 $1, a, b; }"
)


@gluon.jit
def to_e4m3(words, CODE: gl.constexpr, dot: gl.constexpr):
    """Widen four words of each thread to two operands E4M3 [16 * warps, 32], one of block 0 and one of block 1.

    CODE: `E4M3_CODE`, or `INT4_CODE` of weights without zero points; it says what they are times.
    """
    warps: gl.constexpr = gl.num_warps()
    x = by_thread(words).reshape([warps, 2, 8, 2, 4, 1])
    x = gl.join(gl.join(x, x), gl.join(x, x)).reshape([16 * warps, 32])  # the same register for its four elements
    x = gl.convert_layout(x, dot, assert_trivial=True)
    first, second = gl.inline_asm_elementwise(
        CODE, "=&r,=&r,r,r,r,r", [x], dtype=(gl.int8, gl.int8), is_pure=True, pack=4
    )
    return first.to(gl.float8e4nv, bitcast=True), second.to(gl.float8e4nv, bitcast=True)


@gluon.jit
def by_row(first, second, dot: gl.constexpr):
    """Return [16 * warps, 32], constant along K, from numbers of the two rows of each pair [8 * warps]."""
    warps: gl.constexpr = gl.num_warps()
    x = gl.join(first, second).reshape([warps, 8, 2]).permute([0, 2, 1]).reshape([16 * warps])
    rows: gl.constexpr = gl.SliceLayout(1, dot)
    x = gl.convert_layout(x, rows, assert_trivial=True)
    return gl.convert_layout(x[:, None].broadcast_to([16 * warps, 32]), dot, assert_trivial=True)


@gluon.jit
def row_factors(word, FIRST: gl.constexpr, rows: gl.constexpr):
    """Return 2^(byte - 126) of bytes FIRST and FIRST + 1 of a word of factors, one each row: float32 [16 * warps].

    One more than the factor, so that byte 0 has a power of two that isn't subnormal; allowed bytes stay below NaN.
    """
    warps: gl.constexpr = gl.num_warps()
    EXPONENT: gl.constexpr = 0x7F800000
    if FIRST == 0:
        x = gl.join((word << 23) & EXPONENT, (word << 15) & EXPONENT)
    else:
        x = gl.join((word << 7) & EXPONENT, (word >> 1) & EXPONENT)
    x = x.reshape([warps, 8, 2]).permute([0, 2, 1]).reshape([16 * warps])
    return gl.convert_layout(x, rows, assert_trivial=True).to(gl.float32, bitcast=True)


@gluon.constexpr_function
def _widening(k16, half, f0, f1):
    """PTX that widens a word, two weights of each block at each k8, by the factors of the blocks."""
    word = f"${16 + 8 * k16 + 2 * half}"
    lines = [f"shr.u32 x, {word}, 8;"]
    for k8, v in enumerate((word, "x")):
        first, second = (f"${8 * block + 4 * k16 + 2 * k8 + half}" for block in range(2))
        lines.append(
            f"and.b32 v, {v}, 0x00270027; mul.lo.u32 v, v, 0x440; and.b32 v, v, 0x81C081C0; "
            f"mul.rn.bf16x2 {first}, v, {f0}; "
            f"and.b32 q, {v}, 0x00400040; and.b32 v, {v}, 0x00980098; mul.lo.u32 v, v, 0x110; "
            f"and.b32 v, v, 0x81808180; or.b32 v, v, q; mul.rn.bf16x2 {second}, v, {f1};"
        )
    return lines


@gluon.constexpr_function
def bf16_code():
    """PTX that widens a thread's 32 weights of a tile, factors in: $0 .. $15 from words $16 .. and factors $48.

    Every operand stands for 32 elements, in whose number the bits are (block, k16, k8, half, b). A weight's bits moved
    to where bf16 has them are its value times 2^-126; the factor 2^(byte - 1) makes that right, exactly.
    """
    lines = ["{ .reg .b32 v, x, q, f0, f1;"]
    for half in range(2):
        for block, f in enumerate(("f0", "f1")):
            lines.append(f"bfe.u32 {f}, $48, {16 * block + 8 * half}, 8; mad.lo.u32 {f}, {f}, 0x00800080, 0x3F003F00;")
        for k16 in range(2):
            lines += _widening(k16, half, "f0", "f1")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def nvfp4_code():
    """PTX as `bf16_code`, from words $16 .. and 64 bits of E4M3 factors $48, bytes (block, k16, half), none negative.

    The products are weight times factor times 2^-8: a factor's bits moved to where bf16 has them are its value times
    2^-120, also where it is subnormal or 0. Two products with powers of two, of which bf16 holds no 2^238, make it the
    factor times 2^118, exactly; a weight is its value times 2^-126, and their product has six significant bits.
    """
    lines = ["{ .reg .b32 v, x, q, up, more, low, high, f00, f01, f10, f11; .reg .b64 both;"]
    lines.append("mov.b32 up, 0x7F007F00; mov.b32 more, 0x77007700;")
    lines.append("cvt.u32.u64 low, $48; shr.u64 both, $48, 32; cvt.u32.u64 high, both;")
    for k16 in range(2):
        for block, word in enumerate(("low", "high")):
            lines.append(
                f"prmt.b32 v, {word}, 0, {(0x4140, 0x4342)[k16]:#x}; shl.b32 v, v, 4; mul.rn.bf16x2 v, v, up; "
                f"mul.rn.bf16x2 v, v, more; prmt.b32 f{block}0, v, 0, 0x1010; prmt.b32 f{block}1, v, 0, 0x3232;"
            )
        for half in range(2):
            lines += _widening(k16, half, f"f0{half}", f"f1{half}")
    return "\n".join([*lines, "}"])


BF16_OPERANDS = gl.constexpr(",".join(["=&r"] * 16 + ["r"] * 64))
NVFP4_OPERANDS = gl.constexpr(",".join(["=&r"] * 16 + ["r"] * 32 + ["l"] * 32))


@gluon.constexpr_function
def each_thread_layout(warps):
    """[8 * warps, 4]: one of four neighbours for each thread of a row pair."""
    over_warps = [[8 << i, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout([], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], over_warps, [], [8 * warps, 4])


@gluon.jit
def to_bf16(x, factors, dot: gl.constexpr):
    """Return a tile's operand, bf16 [16 * warps, 64], K in order, from its words [warp, half, g, k16, t].

    factors: int32, or int64 of NVFP4, whose operand lacks a factor `NVFP4_UP`.
    """
    nvfp4: gl.constexpr = is_nvfp4(factors.dtype)
    code: gl.constexpr = nvfp4_code() if nvfp4 else bf16_code()
    operands: gl.constexpr = NVFP4_OPERANDS if nvfp4 else BF16_OPERANDS
    given = [each_word(x, dot), each_pair(factors, dot)]
    return gl.inline_asm_elementwise(code, operands, given, gl.bfloat16, is_pure=True, pack=32)


@gluon.jit
def each_word(x, dot: gl.constexpr):
    """Repeat a tile's words [warp, half, g, k16, t] for the elements in each, [16 * warps, 64]."""
    warps: gl.constexpr = gl.num_warps()
    x = gl.join(gl.join(gl.join(x, x), gl.join(x, x)), gl.join(gl.join(x, x), gl.join(x, x)))
    x = x.permute([0, 1, 2, 5, 3, 6, 4, 7]).reshape([16 * warps, 64])
    return gl.convert_layout(x, dot, assert_trivial=True)


@gluon.jit
def each_pair(factors, dot: gl.constexpr, COLUMNS: gl.constexpr = 64):
    """Repeat a word of each pair of rows [8 * warps] for the elements of both, [16 * warps, COLUMNS], 32 or 64."""
    warps: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = each_thread_layout(warps)
    none = gl.arange(0, 4, gl.SliceLayout(0, layout)) * 0
    c = gl.convert_layout(factors, gl.SliceLayout(1, layout), assert_trivial=True)[:, None] + none[None, :]
    c = repeat(repeat(c.reshape([warps, 8, 4])))  # [warp, g, t, ..]
    if COLUMNS == 64:
        c = gl.join(c, c)
        c = c.permute([0, 3, 1, 4, 5, 6, 2, 7])
    else:
        c = c.permute([0, 3, 1, 4, 5, 2, 6])
    return gl.convert_layout(c.reshape([16 * warps, COLUMNS]), dot, assert_trivial=True)


@gluon.jit
def repeat(x):
    """Repeat every element of [..] in [.., 2, 2], in one register."""
    x = gl.join(x, x)
    return gl.join(x, x)

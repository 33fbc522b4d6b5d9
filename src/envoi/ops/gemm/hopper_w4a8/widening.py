"""Widening of MXFP4 weights in fragment order (`envoi.quant.fp8_fragments`) to E4M3 operands of wgmma, in Gluon."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from envoi.ops.gemm.hopper_w4a16.fragments import by_row

# $0, $1: four weights each of block 0 and of block 1, from a word $2, with the tables of its row's two shifts: eight
# bytes in $6 and $10, and in $14 and $18. An operand stands for four elements, hence the numbers.
WIDEN = gl.constexpr(
    "{ .reg .b32 m, s; and.b32 m, $2, 0x77777777; prmt.b32 $0, $6, $10, m; shr.u32 m, m, 16; prmt.b32 $1, $14, $18, m; "
    "shl.b32 s, $2, 4; lop3.b32 $0, $2, 0x80808080, $0, 0xEA; lop3.b32 $1, s, 0x80808080, $1, 0xEA; }"
)
OPERANDS = gl.constexpr(",".join(["=&r"] * 2 + ["r"] * 20))

# A table's words are LOW * index + LOW_OF_0, of magnitudes 0, 0.5, 1, 1.5, and HIGH * index + HIGH_OF_0, of 2, 3, 4, 6:
# with the next index all numbers but 0 have the next exponent.
LOW, LOW_OF_0 = gl.constexpr(0x08080800), gl.constexpr(-0x04081000)
HIGH, HIGH_OF_0 = gl.constexpr(0x08080808), gl.constexpr(0x0C080400)

words_layout = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [2, 2], [1, 0]))  # int32 [2, 256]: four a thread
# int32 [1, 32]: each warp has eight pairs of rows, which all four threads of a pair hold.
pairs_layout = gl.constexpr(
    gl.DistributedLinearLayout([], [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]], [[0, 8], [0, 16]], [], [1, 32])
)
# int32 [1, 64]: a thread has both words of its pair.
two_words_layout = gl.constexpr(
    gl.DistributedLinearLayout([[0, 1]], [[0, 0], [0, 0], [0, 2], [0, 4], [0, 8]], [[0, 16], [0, 32]], [], [1, 64])
)


@gluon.jit
def tables_of(index, lut, LOOKS_UP: gl.constexpr):
    """Return the tables of shifts, two words for each: E4M3 bytes of E2M1's magnitudes times 2^(index - 8).

    lut: pointer to the tables as int64, or None: then they are computed, for an index of at least 3.
    """
    if LOOKS_UP:
        both = gl.load(lut + index)
        return both.to(gl.int32), (both >> 32).to(gl.int32)
    # Magnitudes 0, 0.5, 1, 1.5 | 2, 3, 4, 6 of index 2 would be 0, 0, 8, 12 | 16, 20, 24, 28.
    return index * 0x08080800 - 0x04081000, index * 0x08080808 + 0x0C080400


@gluon.jit
def by_block(words):
    """Return a tile's words [2, 256] as [warp, half, g, k16, t]."""
    return words.reshape([4, 8, 4, 2, 2]).permute([0, 4, 1, 3, 2])


@gluon.jit
def words_of_pairs(factors, WORDS: gl.constexpr):
    """Load the factors [1, WORDS] of a tile's pairs of rows: int32 [32], or int64 where a pair has two words."""
    if WORDS == 32:
        return factors.load(pairs_layout).reshape([32])
    else:  # noqa: RET505 - the compiler must not see this branch
        low, high = gl.split(factors.load(two_words_layout).reshape([32, 2]))
        return (high.to(gl.int64) << 32) | (low.to(gl.int64) & 0xFFFFFFFF)


@gluon.jit
def operands(words, factors, lut, LOOKS_UP: gl.constexpr, dot: gl.constexpr):
    """Return a tile's two operands, E4M3 [64, 32] of block 0 and of block 1.

    words: int32 [2, 256] in `words_layout`. factors: int32 [32], a word for each pair of rows.
    """
    return widened(by_block(words), factors, lut, LOOKS_UP, dot)


@gluon.jit
def widened(words, factors, lut, LOOKS_UP: gl.constexpr, dot: gl.constexpr):
    """Return the two operands of tiles side by side, one for four warps, E4M3 [16 * warps, 32] of each block.

    words: int32 [warp, half, g, k16, t]. factors: int32 [8 * warps], a word for each pair of rows.
    """
    warps: gl.constexpr = gl.num_warps()
    x = words.reshape([warps, 2, 8, 2, 4, 1])
    x = gl.join(gl.join(x, x), gl.join(x, x)).reshape([16 * warps, 32])  # the same register for its four elements
    x = gl.convert_layout(x, dot, assert_trivial=True)
    low00, high00 = tables_of(factors & 0xFF, lut, LOOKS_UP)
    low01, high01 = tables_of((factors >> 8) & 0xFF, lut, LOOKS_UP)
    low10, high10 = tables_of((factors >> 16) & 0xFF, lut, LOOKS_UP)
    low11, high11 = tables_of((factors >> 24) & 0xFF, lut, LOOKS_UP)
    low0, high0 = by_row(low00, low01, dot), by_row(high00, high01, dot)
    low1, high1 = by_row(low10, low11, dot), by_row(high10, high11, dot)
    first, second = gl.inline_asm_elementwise(
        WIDEN, OPERANDS, [x, low0, high0, low1, high1], dtype=(gl.int8, gl.int8), is_pure=True, pack=4
    )
    return first.to(gl.float8e4nv, bitcast=True), second.to(gl.float8e4nv, bitcast=True)

"""Widening of keys in FP4 to a register operand of wgmma, in Gluon: E5M2 numbers, and a scale for each key.

    key[32 t + c] = e2m1 * 2^(f[t] - 127)                                     t 0 .. 3
    r             = the largest f of a group that isn't all zeros
    operand       = e2m1 * 2^(f[t] - r + 13), an E5M2 number for f[t] - r from -26 to 0; less counts as zero
    scale         = 2^(r - 127 - 13), or NaN if any f is

Thread t of the four that hold a row of a wgmma operand has group t of the key: its 16 bytes in one load, one factor.
So the operand's columns are the key's values in another order, `value_of`, in which the queries are put too.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from envoi.epilogues.codes_triton import from_e8m0

GROUP: gl.constexpr = gl.constexpr(32)
LARGEST_SHIFT: gl.constexpr = gl.constexpr(13)  # 6 * 2^13 is below E5M2's 57344; 0.5 * 2^-13 is its least normal number
LEAST_SCALE: gl.constexpr = gl.constexpr(2.0**-13)

# $0, $1: four values each of the lower and the upper half of a word $2, looked up in a table of eight bytes, $6 and
# $10. The signs: a byte permute repeats the selected byte's top bit where the selector's is set, 0x80 -> 0xff.
# An operand stands for four elements, hence the numbers.
WIDEN = gl.constexpr(
    "{ .reg .b32 m, s, x; and.b32 m, $2, 0x77777777; prmt.b32 $0, $6, $10, m; shr.u32 m, m, 16; "
    "prmt.b32 $1, $6, $10, m; mov.b32 x, 0x80808080; prmt.b32 s, x, x, $2; shl.b32 s, s, 7; "
    "lop3.b32 $0, s, 0x80808080, $0, 0xEA; shr.u32 m, $2, 16; prmt.b32 s, x, x, m; shl.b32 s, s, 7; "
    "lop3.b32 $1, s, 0x80808080, $1, 0xEA; }"
)
OPERANDS = gl.constexpr(",".join(["=&r"] * 2 + ["r"] * 12))


@gluon.constexpr_function
def words_layout(rows):
    """Return the layout of int32 [rows, 16]: thread t of a row's four has words 4 t ..; rows as in a wgmma operand."""
    of_thread = [[0, 1], [0, 2], [8, 0]] + [[64, 0]] * (rows > 64)
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(of_thread, lanes, [[16, 0], [32, 0]], [], [rows, 16])


@gluon.jit
def value_of(column):
    """Return which of the key's values a column of the operand has."""
    word, half, t, i = column // 32, column // 16 % 2, column // 4 % 4, column % 4
    return t * GROUP + word * 8 + half * 4 + i


@gluon.jit
def tables_of(index):
    """Return the two words of E5M2 bytes of E2M1's eight magnitudes times 2^(index - 13), index 0 .. 26."""
    # Magnitudes 0, 0.5, 1, 1.5 | 2, 3, 4, 6 of index 0 are 0, 4, 8, 10 | 12, 14, 16, 18; of the next, all but 0 + 4.
    return index * 0x04040400 + 0x0A080400, index * 0x04040404 + 0x12100E0C


@gluon.jit
def four(x):
    """Repeat elements of [row, group, word] for the four values that come of each: the same registers."""
    return gl.join(gl.join(x, x), gl.join(x, x)).reshape([x.shape[0], 4, 4, 4])


@gluon.jit
def widen(words, factors, dot: gl.constexpr):
    """Return the operand of a tile or a page, E5M2 [rows, 128], and the keys' scales [rows] float32.

    words: shared memory, int32 [rows, 16], eight values each; factors: int32 [rows], four UE8M0 bytes each.
    """
    rows: gl.constexpr = words.shape[0]
    x = words.load(words_layout(rows)).reshape([rows, 4, 4])  # row, group, word
    groups: gl.constexpr = gl.SliceLayout(2, x.type.layout)
    keys: gl.constexpr = gl.SliceLayout(1, groups)
    t = gl.arange(0, 4, gl.SliceLayout(0, groups))
    f = (factors.load(keys)[:, None] >> (8 * t)[None, :]) & 0xFF
    counts = gl.max(x & 0x77777777, 2) != 0
    largest = gl.max(gl.where(counts, f, 0), 1)
    scale = gl.where(gl.max(f, 1) == 255, float("nan"), from_e8m0(largest) * LEAST_SCALE)
    index = gl.minimum(f - largest[:, None] + 2 * LARGEST_SHIFT, 2 * LARGEST_SHIFT)
    low, high = tables_of(index)
    low, high = gl.where(index < 0, 0, low), gl.where(index < 0, 0, high)
    low, _ = gl.broadcast(low[:, :, None], x)
    high, _ = gl.broadcast(high[:, :, None], x)
    first, second = gl.inline_asm_elementwise(
        WIDEN, OPERANDS, [four(x), four(low), four(high)], dtype=(gl.int8, gl.int8), is_pure=True, pack=4
    )
    both = gl.join(first, second).permute([0, 2, 4, 1, 3]).reshape([rows, 128])  # row, word, half, group, value
    operand = gl.convert_layout(both.to(gl.float8e5, bitcast=True), dot, assert_trivial=True)
    return operand, scale

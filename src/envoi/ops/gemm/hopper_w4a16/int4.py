"""INT4 weights in fragment order (`envoi.quant.fragments`) on the device: widening to E4M3 and to bf16, in Gluon.

Without zero points a nibble is a code of `envoi.quant.int4.to_codes`; with them it is the integer itself.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from envoi.ops.gemm.hopper_w4a16.fragments import by_thread, each_pair, each_word

# As E4M3_CODE, of INT4 without zero points (`envoi.quant.int4.to_codes`): a nibble 2 m | s becomes the byte of m, or of
# -m - 1 where s is 1, times 2^-8: up to 16 times 2^-9, E4M3 is linear. Bytes don't carry.
INT4_CODE = gl.constexpr(
    "{ .reg .b32 a, b; and.b32 a, $2, 0x01010101; and.b32 b, $2, 0x0E0E0E0E; shr.u32 $1, $2, 4; "
    "mad.lo.u32 $0, a, 0x82, b; and.b32 a, $1, 0x01010101; and.b32 b, $1, 0x0E0E0E0E; mad.lo.u32 $1, a, 0x82, b; }"
)


@gluon.constexpr_function
def less_zeros_code(per_step):
    """PTX that widens a thread's 32 INT4 weights of a tile, less their zero points, to bf16: integers, -15 to 15.

    $0 .. $7: of block 0, $8 .. $15: of block 1, in whose number the bits are (k16, k8, row). $16 ..: words. $32 ..:
    zero points. A nibble in the mantissa of 128 is 128 more than it; less 128 and the zero point it is exact.

    Not q here and the zero point times sums of tokens later, which would be fewer operations: where most weights are
    zero and tokens have a mean, that cancels nearly all of a sum.
    """
    lines = ["{ .reg .b32 v, z00, z01, z10, z11;"]
    for row in range(2):
        for block in range(2):
            place = row + 2 * block * (per_step - 1)
            if per_step == 1 and block == 1:
                lines.append(f"mov.b32 z{row}1, z{row}0;")
            else:
                lines.append(f"bfe.u32 v, $32, {8 * place}, 8; mad.lo.u32 z{row}{block}, v, 0x00010001, 0x43004300;")
    for row in range(2):
        for k16 in range(2):
            word = f"${16 + 8 * k16 + 2 * row}"
            for block in range(2):
                for k8 in range(2):
                    shift, out = 4 * block + 8 * k8, f"${8 * block + 4 * k16 + 2 * k8 + row}"
                    lines.append(f"shr.u32 v, {word}, {shift};" if shift else f"mov.b32 v, {word};")
                    lines.append("lop3.b32 v, v, 0x000F000F, 0x43004300, 0xEA;")
                    lines.append(f"sub.rn.bf16x2 {out}, v, z{row}{block};")
    return "\n".join([*lines, "}"])


LESS_ZEROS_OPERANDS = gl.constexpr(",".join(["=&r"] * 16 + ["r"] * 32))


@gluon.jit
def int4_less_zeros(words, zeros, dot: gl.constexpr, PER_STEP: gl.constexpr):
    """Widen four words of each thread to two operands bf16 [16 * warps, 32], of block 0 and of block 1, K in order.

    zeros: zero points that are subtracted, bytes of int32 [8 * warps].
    """
    warps: gl.constexpr = gl.num_warps()
    x = by_thread(words)
    x = gl.join(gl.join(x, x), gl.join(x, x))  # [warp, half, g, k16, t, .., ..]
    x = gl.convert_layout(x.permute([0, 1, 2, 3, 5, 4, 6]).reshape([16 * warps, 32]), dot, assert_trivial=True)
    code: gl.constexpr = less_zeros_code(PER_STEP)
    return gl.inline_asm_elementwise(
        code, LESS_ZEROS_OPERANDS, [x, each_pair(zeros, dot, 32)], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True,
        pack=16,
    )  # fmt: skip


@gluon.jit
def int4_factors(word, rows: gl.constexpr, HALF: gl.constexpr):
    """Return the two factors of a pair's word, one each row: float32 [16 * warps]. HALF: they are fp16, not bf16."""
    warps: gl.constexpr = gl.num_warps()
    if HALF:
        first = word.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        second = (word >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        x = gl.join(first, second)
    else:
        HIGH: gl.constexpr = -0x10000
        x = gl.join((word << 16).to(gl.float32, bitcast=True), (word & HIGH).to(gl.float32, bitcast=True))
    x = x.reshape([warps, 8, 2]).permute([0, 2, 1]).reshape([16 * warps])
    return gl.convert_layout(x, rows, assert_trivial=True)


@gluon.constexpr_function
def int4_code(per_step, half, has_zeros):
    """PTX that widens a thread's 32 INT4 weights of a tile, factors in, rounded to bf16 once: $0 .. as `bf16_code`.

    $16 ..: words; $48: factors, 32 bits, or 64 of two blocks; $80: zero points. A nibble in the mantissa of 128 is 128
    more than it, and the difference to 128 plus the zero point is exact. half: factors are fp16; high is one rounded to
    bf16, low what is left of it, four bits at most, so that n * low is exact, and fma rounds n * (high + low) once.
    """
    lines = ["{ .reg .b32 v, x, t, z, low, high, f0, f1, g0, g1; .reg .b64 both; .reg .f32 a, b; .reg .b16 h;"]
    if per_step == 1:
        lines.append("mov.b32 low, $48; mov.b32 high, $48;")
    else:
        lines.append("cvt.u32.u64 low, $48; shr.u64 both, $48, 32; cvt.u32.u64 high, both;")
    for row in range(2):
        for block, word in enumerate(("low", "high")):
            if half:
                lines.append(f"shr.u32 v, {word}, {16 * row}; cvt.u16.u32 h, v; cvt.f32.f16 a, h;")
                lines.append(f"cvt.rn.bf16x2.f32 f{block}, a, a; shl.b32 v, f{block}, 16; mov.b32 b, v;")
                lines.append(f"sub.rn.f32 b, a, b; cvt.rn.bf16x2.f32 g{block}, b, b;")
            else:
                lines.append(f"prmt.b32 f{block}, {word}, 0, {(0x1010, 0x3232)[row]:#x};")
        for k16 in range(2):
            word = f"${16 + 8 * k16 + 2 * row}"
            if not has_zeros:  # from codes to q, but for the highest bit
                lines.append(f"and.b32 t, {word}, 0x11111111; mul.lo.u32 t, t, 15; shr.u32 x, {word}, 1;")
                lines.append("lop3.b32 x, x, 0x77777777, t, 0x6A;")
            for block in range(2):
                for k8 in range(2):
                    shift = 4 * block + 8 * k8
                    out = f"${8 * block + 4 * k16 + 2 * k8 + row}"
                    taken = word if has_zeros else "x"
                    lines.append(f"shr.u32 v, {taken}, {shift};" if shift else f"mov.b32 v, {taken};")
                    if has_zeros:
                        place = row + 2 * block * (per_step - 1)
                        lines.append("lop3.b32 v, v, 0x000F000F, 0x43004300, 0xEA;")
                        lines.append(f"bfe.u32 z, $80, {8 * place}, 8; mad.lo.u32 z, z, 0x00010001, 0x43004300;")
                        lines.append("sub.rn.bf16x2 v, v, z;")
                    else:
                        lines.append("and.b32 v, v, 0x000F000F; xor.b32 v, v, 0x43084308; mov.b32 z, 0x43084308;")
                        lines.append("sub.rn.bf16x2 v, v, z;")
                    if half:
                        lines.append(f"mul.rn.bf16x2 t, v, g{block}; fma.rn.bf16x2 {out}, v, f{block}, t;")
                    else:
                        lines.append(f"mul.rn.bf16x2 {out}, v, f{block};")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def int4_operands(per_step, has_zeros):
    """Return the constraints of `int4_code`."""
    factors = ["r"] * 32 if per_step == 1 else ["l"] * 32
    return ",".join(["=&r"] * 16 + ["r"] * 32 + factors + ["r"] * (32 if has_zeros else 0))


@gluon.jit
def int4_to_bf16(x, factors, zeros, dot: gl.constexpr, PER_STEP: gl.constexpr, HALF: gl.constexpr):
    """Return a tile's operand, bf16 [16 * warps, 64], K in order, of INT4: words as of `to_bf16`.

    factors: int32 of two factors a pair, or int64 of four. zeros: bytes of int32, or None. HALF: factors are fp16.
    """
    has_zeros: gl.constexpr = zeros is not None
    code: gl.constexpr = int4_code(PER_STEP, HALF, has_zeros)
    operands: gl.constexpr = int4_operands(PER_STEP, has_zeros)
    if zeros is None:
        given = [each_word(x, dot), each_pair(factors, dot)]
    else:
        given = [each_word(x, dot), each_pair(factors, dot), each_pair(zeros, dot)]
    return gl.inline_asm_elementwise(code, operands, given, gl.bfloat16, is_pure=True, pack=32)

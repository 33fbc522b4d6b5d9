"""Mainloop of the Hopper GEMM for MX weights: widen in registers, multiply.

In each 64 bytes of a weight row a thread reads 16 neighbours, which share a scale factor. This permutes K;
`tokens.widen_kernel` permutes the tokens' K in this order too.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from envoi.ops.gemm.hopper_mx.dequant import operands, widening
from envoi.ops.gemm.hopper_mx.pipeline import SPAN

AT_ONCE = gl.constexpr(64)  # elements along K that are widened at once

# Row 4 a + 2 b + c in each 8 of the instruction's rows is feature 4 c + 2 a + b. Then 8 lanes that read 16 bytes each
# at once read two rows in different halves of the swizzled banks.
ROW_LANES = gl.constexpr([[4, 0], [1, 0], [2, 0]])


@gluon.constexpr_function
def warps_over(rows):
    """Return the bases of the warps: 16 rows each, in the order of the warps."""
    return [[16 << i, 0] for i in range((rows // 16).bit_length() - 1)]


@gluon.constexpr_function
def words_layout(rows, words):
    """Return a layout of [rows, words] in which a thread has four neighbours in each 16 of two rows."""
    halves = [[0, 16]] if words == 32 else []
    lanes = [[0, 4], [0, 8], *ROW_LANES.value]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], *halves, [8, 0]], lanes, warps_over(rows), [], [rows, words])


@gluon.constexpr_function
def factors_layout(rows):
    """Return a layout of [rows, 4] factors in which a thread has one factor of each of two rows."""
    return gl.DistributedLinearLayout([[8, 0]], [[0, 1], [0, 2], *ROW_LANES.value], warps_over(rows), [], [rows, 4])


@gluon.constexpr_function
def factor_words_layout(rows):
    """Return a layout of [rows, 4] words of factors, each for 128 of K, in which a thread has all of two rows."""
    lanes = [[0, 0], [0, 0], *ROW_LANES.value]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [8, 0]], lanes, warps_over(rows), [], [rows, 4])


@gluon.constexpr_function
def elements_layout(rows):
    """Return the layout of [rows, 64] elements that matches wgmma's operand registers."""
    registers, lanes = [[0, 1], [0, 8], [0, 16], [0, 32], [8, 0]], [[0, 2], [0, 4], *ROW_LANES.value]
    return gl.DistributedLinearLayout(registers, lanes, warps_over(rows), [], [rows, 64])


WIDENING = gl.constexpr({(bits, bounded): widening(bits, bounded) for bits in (4, 8) for bounded in (True, False)})
CONSTRAINTS = gl.constexpr({bounded: operands(bounded) for bounded in (True, False)})


@gluon.constexpr_function
def widening_ptx(bits, bounded):
    """Return the PTX that widens weights of `bits` bits."""
    return WIDENING.value[bits, bounded]


@gluon.constexpr_function
def widening_constraints(bounded):
    """Return the constraints of the widening PTX's operands."""
    return CONSTRAINTS.value[bounded]


@gluon.jit
def repeated(x):
    """Repeat the elements of [rows, 4, ..] to [rows, 4, 2, 2, 2, 2]; all copies share a register."""
    if len(x.shape) == 6:
        return x
    else:
        return repeated(gl.join(x, x))


@gluon.jit
def elementwise(x, bits: gl.constexpr):
    """Reshape values for 64 elements along K, [rows, thread, ..], to [rows, 64] in the order of K.

    The dimensions after the thread are the word, then the bits of a place in it: its register and the half of that
    register, as `dequant` has them.
    """
    rows: gl.constexpr = x.shape[0]
    x = repeated(x)
    if bits == 4:
        x = gl.permute(x, (0, 2, 4, 5, 1, 3))
    else:
        x = gl.permute(x, (0, 2, 3, 5, 1, 4))
    return gl.convert_layout(gl.reshape(x, (rows, 64)), elements_layout(rows), assert_trivial=True)


@gluon.jit
def for_each_thread(x):
    """Broadcast [rows] to [rows, 4], one column for each of four threads."""
    layout: gl.constexpr = factors_layout(x.shape[0])
    none = gl.arange(0, 4, gl.SliceLayout(0, layout)) * 0
    return gl.convert_layout(x, gl.SliceLayout(1, layout), assert_trivial=True)[:, None] + none[None, :]


@gluon.jit
def factors_of(words, PRODUCT: gl.constexpr, bits: gl.constexpr):
    """Return the bytes [rows, 4] that product PRODUCT, of 64 of K, needs of words [rows], each for 128 of K."""
    threads = gl.arange(0, 4, gl.SliceLayout(0, factors_layout(words.shape[0])))
    if bits == 4:
        shifts = threads * 8
    else:
        shifts = threads // 2 * 8 + PRODUCT % 2 * 16
    return (for_each_thread(words) >> shifts[None, :]) & 255


@gluon.jit
def large(words):
    """Return [rows, 4], not 0 if a byte of `words` [rows] in this warp is 128 or more: scaling may take two steps."""
    found = gl.inline_asm_elementwise(
        """{ .reg .b32 x; .reg .pred p; or.b32 x, $2, $3; and.b32 x, x, 0x80808080; setp.ne.u32 p, x, 0;
        vote.sync.any.pred p, p, 0xFFFFFFFF; selp.b32 $0, 1, 0, p; mov.b32 $1, $0; }""", "=&r,=&r,r,r",
        [words], gl.int32, is_pure=True, pack=2,
    )  # fmt: skip
    return for_each_thread(found)


@gluon.jit
def widen(words, factors, steps, dot: gl.constexpr, cfg: gl.constexpr):
    """Widen a product's words [rows, 4, ..] with factors [rows, 4] to bf16 [rows, 64], wgmma's operand in registers.

    steps: from `large`, not used with `scales_at_most_2`.
    """
    ptx: gl.constexpr = widening_ptx(cfg.bits, cfg.scales_at_most_2)
    constraints: gl.constexpr = widening_constraints(cfg.scales_at_most_2)
    words = elementwise(words, cfg.bits)
    factors = elementwise(factors, cfg.bits)
    if cfg.scales_at_most_2:
        wide = gl.inline_asm_elementwise(ptx, constraints, [words, factors], gl.bfloat16, is_pure=True, pack=32)
    else:
        steps = elementwise(steps, cfg.bits)
        wide = gl.inline_asm_elementwise(ptx, constraints, [words, factors, steps], gl.bfloat16, is_pure=True, pack=32)
    return as_operand(wide, dot)


@gluon.jit
def as_operand(wide, dot: gl.constexpr):
    """Permute features to the instruction's rows, within a thread's registers: see ROW_LANES."""
    rows: gl.constexpr = wide.shape[0]
    wide = gl.reshape(gl.permute(gl.reshape(wide, (rows // 8, 2, 2, 2, 64)), (0, 2, 3, 1, 4)), (rows, 64))
    return gl.convert_layout(wide, dot, assert_trivial=True)


@gluon.jit
def in_order(acc):
    """Permute the instruction's rows back to features; inverse of `as_operand`."""
    rows: gl.constexpr = acc.shape[0]
    columns: gl.constexpr = acc.shape[1]
    return gl.reshape(gl.permute(gl.reshape(acc, (rows // 8, 2, 2, 2, columns)), (0, 3, 1, 2, 4)), (rows, columns))


@gluon.jit
def by_product(words, bits: gl.constexpr):
    """Split a stage's words [rows, words] into a tuple with those of each product.

    4 bits: [rows, thread, 2]; 8 bits: [rows, thread, 2, 2].
    """
    rows: gl.constexpr = words.shape[0]
    if words.shape[1] == 32:
        first, second = gl.split(gl.permute(gl.reshape(words, (rows, 2, 16)), (0, 2, 1)))
        return by_product(first, bits) + by_product(second, bits)
    else:
        words = gl.reshape(words, (rows, 4, 2, 2))
        if bits == 8:
            return (words,)
        else:
            return gl.split(gl.permute(words, (0, 1, 3, 2)))


@gluon.jit
def columns_of(x):
    """Return the four columns of [rows, 4]."""
    even, odd = gl.split(gl.reshape(x, (x.shape[0], 2, 2)))
    c0, c2 = gl.split(even)
    c1, c3 = gl.split(odd)
    return c0, c1, c2, c3


@gluon.jit
def factor_words(sf_buf, step, cfg: gl.constexpr):
    """Return a stage's words of factors out of its span's: a tuple with one [rows] for each 128 of K."""
    c0, c1, c2, c3 = columns_of(sf_buf.load(factor_words_layout(sf_buf.shape[0])))
    if cfg.block_k == 256:
        first = step % 2 == 0
        return gl.where(first, c0, c2), gl.where(first, c1, c3)
    else:
        even = step % 2 == 0
        return (gl.where(step % 4 < 2, gl.where(even, c0, c1), gl.where(even, c2, c3)),)


@gluon.jit
def accumulate(pipeline, step, num_spans, role: gl.constexpr):
    """Compute acc = weights @ tokens.T over the next `num_spans` spans of K; return acc and the next step.

    acc: float32 [rows_per_consumer, block_y], its rows in the order of `as_operand`. One part of a stage is multiplied
    while the next is widened. Waits on `full` of each stage, releases it once its last wgmma has completed.
    """
    cfg: gl.constexpr = pipeline.cfg
    ring = pipeline.ring
    rows: gl.constexpr = cfg.rows_per_consumer
    steps_per_span: gl.constexpr = SPAN // cfg.block_k
    num_products: gl.constexpr = cfg.block_k // AT_ONCE
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, cfg.block_y, 16]
    )
    dot: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2)
    acc = gl.full((rows, cfg.block_y), 0.0, gl.float32, layout)
    for _s in range(steps_per_span * num_spans):
        stage = ring.stage(step)
        ring.wait_full(step)
        sf_buf = pipeline.sf_bufs.index(step // steps_per_span % cfg.num_sf_spans).slice(role * rows, rows, 0)
        factors = factor_words(sf_buf, step, cfg)
        steps = large(factors[0] | factors[-1])
        x = pipeline.x_bufs.index(stage)
        w_buf = pipeline.w_bufs.index(stage).slice(role * rows, rows, 0)
        words = by_product(w_buf.load(words_layout(rows, w_buf.shape[1])), cfg.bits)
        for h in gl.static_range(num_products):
            w = widen(words[h], factors_of(factors[h // 2], h, cfg.bits), steps, dot, cfg)
            acc = warpgroup_mma(w, x.slice(h * AT_ONCE, AT_ONCE, 1).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=1 if h + 1 < num_products else 0, deps=(acc,))
        ring.release(step)
        step += 1
    return acc, step

"""The GEMM of Hopper for MXFP4 and MXFP8 weights: widened between shared memory and the tensor cores, in registers.

    for each tile of this CTA:                  producers                      consumers, one for each role_m features
        for 512 of K:                           TMA scale factors
            for block_k of K:                   TMA weights; TMA tokens        for 64 of K:
                                                                                   weights -> bf16 registers, scaled
                                                                                   acc += registers @ tokens.T
        acc -> visit(acc) -> outputs

E2M1 and E4M3 times a power of two are exact in bf16 (but for what is below its least), so the factors cost nothing
after the product and K is summed as in bf16. Weights are the instruction's M side, as they lie in memory: of 64 bytes
of a row a thread takes 16 neighbours, under one factor. That gives K an order of its own, in which the tokens have to
be (`mx_tokens`); the weights needn't wait for them, so each has a producer.
Widening is arithmetic that many warps have to hide, but every role has a copy of the loop, and all of them share the
caches of instructions: hence two roles of 8 warps, and a short loop.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from envoi.gemm.kernel_sm90 import end_tile
from envoi.gemm.mx_widening import operands, widening
from envoi.gemm.overlap import wait_for_grid
from envoi.gemm.schedule import corner, steps_at, work
from envoi.triton_compat import role_barrier, tma_load

SPAN = gl.constexpr(512)  # elements of K whose scale factors come at once: 16 bytes a row
AT_ONCE = gl.constexpr(64)  # elements of K that are widened at once

# Which of 8 neighbouring rows the instruction's row 4 a + 2 b + c is: 4 c + 2 a + b. So the 8 lanes that read 16 bytes
# each at a time read from two rows that lie in different halves of the swizzled banks.
ROW_LANES = gl.constexpr([[4, 0], [1, 0], [2, 0]])


@gluon.constexpr_function
def warps_over(rows):
    """A warp's 16 rows, one warp below the other."""
    return [[16 << i, 0] for i in range((rows // 16).bit_length() - 1)]


@gluon.constexpr_function
def words_layout(rows, words):
    """Of [rows, words], a thread's: four neighbours in each 16 of two rows."""
    halves = [[0, 16]] if words == 32 else []
    lanes = [[0, 4], [0, 8], *ROW_LANES.value]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], *halves, [8, 0]], lanes, warps_over(rows), [], [rows, words])


@gluon.constexpr_function
def factors_layout(rows):
    """Of [rows, 4] factors: the one of four neighbours among them."""
    return gl.DistributedLinearLayout([[8, 0]], [[0, 1], [0, 2], *ROW_LANES.value], warps_over(rows), [], [rows, 4])


@gluon.constexpr_function
def factor_words_layout(rows):
    """Of [rows, 4] words of factors, each for 128 of K: all of two rows."""
    lanes = [[0, 0], [0, 0], *ROW_LANES.value]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [8, 0]], lanes, warps_over(rows), [], [rows, 4])


@gluon.constexpr_function
def elements_layout(rows):
    """Of [rows, 64] elements in the tensor cores' order."""
    registers, lanes = [[0, 1], [0, 8], [0, 16], [0, 32], [8, 0]], [[0, 2], [0, 4], *ROW_LANES.value]
    return gl.DistributedLinearLayout(registers, lanes, warps_over(rows), [], [rows, 64])


# By bits of a weight; the first if it is tame.
WIDEN_4 = gl.constexpr((widening(4, True), widening(4, False)))
WIDEN_8 = gl.constexpr((widening(8, True), widening(8, False)))
WIDEN_OPERANDS = gl.constexpr((operands(True), operands(False)))


@gluon.jit
def repeated(x):
    """[rows, 4, ..] -> [rows, 4, 2, 2, 2, 2]: each as often as it takes, in the register that it is in."""
    if len(x.shape) == 6:
        return x
    else:
        return repeated(gl.join(x, x))


@gluon.jit
def elementwise(x, bits: gl.constexpr):
    """Of 64 elements of K each: [rows, thread, ..] -> [rows, 64] in K's own order.

    Behind the thread are the word, and the bits of a place in it: its register and which half of that, as
    `mx_widening` has them.
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
    """A number [rows] for each of four threads -> [rows, 4]."""
    layout: gl.constexpr = factors_layout(x.shape[0])
    none = gl.arange(0, 4, gl.SliceLayout(0, layout)) * 0
    return gl.convert_layout(x, gl.SliceLayout(1, layout), assert_trivial=True)[:, None] + none[None, :]


@gluon.jit
def factors_of(words, PRODUCT: gl.constexpr, bits: gl.constexpr):
    """The bytes [rows, 4] of some words [rows], each for 128 of K, that a product of 64 of K needs."""
    threads = gl.arange(0, 4, gl.SliceLayout(0, factors_layout(words.shape[0])))
    if bits == 4:
        shifts = threads * 8
    else:
        shifts = threads // 2 * 8 + PRODUCT % 2 * 16
    return (for_each_thread(words) >> shifts[None, :]) & 255


@gluon.jit
def large(words):
    """Words [rows] -> [rows, 4], not 0 if a byte in this warp is 128 or more: where scaling may take two steps."""
    found = gl.inline_asm_elementwise(
        """{ .reg .b32 x; .reg .pred p; or.b32 x, $2, $3; and.b32 x, x, 0x80808080; setp.ne.u32 p, x, 0;
        vote.sync.any.pred p, p, 0xFFFFFFFF; selp.b32 $0, 1, 0, p; mov.b32 $1, $0; }""", "=&r,=&r,r,r",
        [words], gl.int32, is_pure=True, pack=2,
    )  # fmt: skip
    return for_each_thread(found)


@gluon.jit
def widen(words, factors, steps, dot: gl.constexpr, cfg: gl.constexpr):
    """A product's words [rows, 4, ..], factors [rows, 4] -> bf16 [rows, 64] as its operand. steps: see `large`."""
    code: gl.constexpr = WIDEN_4 if cfg.bits == 4 else WIDEN_8
    words = elementwise(words, cfg.bits)
    factors = elementwise(factors, cfg.bits)
    if cfg.tame:
        wide = gl.inline_asm_elementwise(
            code[0], WIDEN_OPERANDS[0], [words, factors], gl.bfloat16, is_pure=True, pack=32
        )
    else:
        steps = elementwise(steps, cfg.bits)
        wide = gl.inline_asm_elementwise(
            code[1], WIDEN_OPERANDS[1], [words, factors, steps], gl.bfloat16, is_pure=True, pack=32
        )
    return as_operand(wide, dot)


@gluon.jit
def as_operand(wide, dot: gl.constexpr):
    """Features -> rows of the instruction, as the thread has them: see ROW_LANES."""
    rows: gl.constexpr = wide.shape[0]
    wide = gl.reshape(gl.permute(gl.reshape(wide, (rows // 8, 2, 2, 2, 64)), (0, 2, 3, 1, 4)), (rows, 64))
    return gl.convert_layout(wide, dot, assert_trivial=True)


@gluon.jit
def in_order(acc):
    """Rows of the instruction -> features."""
    rows: gl.constexpr = acc.shape[0]
    columns: gl.constexpr = acc.shape[1]
    return gl.reshape(gl.permute(gl.reshape(acc, (rows // 8, 2, 2, 2, columns)), (0, 3, 1, 2, 4)), (rows, columns))


@gluon.jit
def by_product(words, bits: gl.constexpr):
    """[rows, words] of a stage -> each product's: [rows, thread, 2] of weights of 4 bits, else [rows, thread, 2, 2]."""
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
    """[rows, 4] -> its four columns."""
    even, odd = gl.split(gl.reshape(x, (x.shape[0], 2, 2)))
    c0, c2 = gl.split(even)
    c1, c3 = gl.split(odd)
    return c0, c1, c2, c3


@gluon.jit
def factor_words(sf_buf, step, cfg: gl.constexpr):
    """A stage's words of factors out of a span's: one [rows] for each 128 of K."""
    c0, c1, c2, c3 = columns_of(sf_buf.load(factor_words_layout(sf_buf.shape[0])))
    if cfg.block_k == 256:
        first = step % 2 == 0
        return gl.where(first, c0, c2), gl.where(first, c1, c3)
    else:
        even = step % 2 == 0
        return (gl.where(step % 4 < 2, gl.where(even, c0, c1), gl.where(even, c2, c3)),)


@gluon.jit
def multiply(stages, step, num_spans, R: gl.constexpr, cfg: gl.constexpr):
    """acc = weights @ tokens.T over the next spans of K; a part of a stage is multiplied while the next widens."""
    w_bufs, sf_bufs, x_bufs, empty, ready = stages
    rows: gl.constexpr = cfg.role_m
    steps_per_span: gl.constexpr = SPAN // cfg.block_k
    num_products: gl.constexpr = cfg.block_k // AT_ONCE
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, cfg.block_y, 16]
    )
    dot: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2)
    acc = gl.full((rows, cfg.block_y), 0.0, gl.float32, layout)
    for _s in range(steps_per_span * num_spans):
        stage = step % cfg.num_stages
        mbarrier.wait(ready.index(stage), (step // cfg.num_stages) & 1)
        sf_buf = sf_bufs.index(step // steps_per_span % cfg.num_sf).slice(R * rows, rows, 0)
        factors = factor_words(sf_buf, step, cfg)
        steps = large(factors[0] | factors[-1])
        x = x_bufs.index(stage)
        w_buf = w_bufs.index(stage).slice(R * rows, rows, 0)
        words = by_product(w_buf.load(words_layout(rows, w_buf.shape[1])), cfg.bits)
        for h in gl.static_range(num_products):
            w = widen(words[h], factors_of(factors[h // 2], h, cfg.bits), steps, dot, cfg)
            acc = warpgroup_mma(w, x.slice(h * AT_ONCE, AT_ONCE, 1).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=1 if h + 1 < num_products else 0, deps=(acc,))
        mbarrier.arrive(empty.index(stage), count=1)
        step += 1
    return acc, step


@gluon.jit
def weights_producer(descs, stages, sizes, offsets, cfg: gl.constexpr, GROUPED: gl.constexpr, MAX_GROUPS: gl.constexpr):
    """One warp: fills the stages' weights by TMA, as far ahead as they reach.

    A span's factors need no barriers of their own: they come with its first stage, and there is room for as many as
    the stages in flight can belong to.
    """
    w_desc, sf_desc, _x_desc = descs
    w_bufs, sf_bufs, _x_bufs, empty, ready = stages
    N = sizes[1]
    num_bytes: gl.constexpr = w_desc.block_type.nbytes
    words: gl.constexpr = w_desc.block_type.shape[1]
    steps_per_span: gl.constexpr = SPAN // cfg.block_k
    plan = work(sizes, offsets, cfg, GROUPED, MAX_GROUPS)
    step = 0
    for u in range(gl.program_id(0), plan[2], gl.num_programs(0)):
        tile, first, last, part, cut = steps_at(u, plan, sizes[4], gl.cdiv(sizes[2], SPAN), cfg, GROUPED)
        row, _token, _row_end, e = corner(tile, plan, sizes, cfg, GROUPED)
        row += e * N
        for span in range(first, last):
            for p in gl.static_range(steps_per_span):
                stage = step % cfg.num_stages
                bar = ready.index(stage)
                mbarrier.wait(empty.index(stage), ((step // cfg.num_stages) & 1) ^ 1)
                if p == 0:
                    mbarrier.expect(bar, num_bytes + sf_desc.block_type.nbytes)
                    sf_buf = sf_bufs.index(step // steps_per_span % cfg.num_sf)
                    tma_load(sf_desc, [row, span * (SPAN // 128)], bar, sf_buf)
                else:
                    mbarrier.expect(bar, num_bytes)
                k = span * steps_per_span + p
                tma_load(w_desc, [row, k * words], bar, w_bufs.index(stage))
                step += 1


@gluon.jit
def tokens_producer(descs, stages, sizes, offsets, cfg: gl.constexpr, GROUPED: gl.constexpr, MAX_GROUPS: gl.constexpr):
    """One warp: fills the stages' tokens, once the kernel before this one has widened them."""
    x_desc = descs[2]
    steps_per_span: gl.constexpr = SPAN // cfg.block_k
    _w_bufs, _sf_bufs, x_bufs, empty, ready = stages
    plan = work(sizes, offsets, cfg, GROUPED, MAX_GROUPS)
    step = 0
    wait_for_grid()
    for u in range(gl.program_id(0), plan[2], gl.num_programs(0)):
        tile, first, last, part, cut = steps_at(u, plan, sizes[4], gl.cdiv(sizes[2], SPAN), cfg, GROUPED)
        _row, token, _row_end, _e = corner(tile, plan, sizes, cfg, GROUPED)
        for k in range(steps_per_span * first, steps_per_span * last):
            stage = step % cfg.num_stages
            bar = ready.index(stage)
            mbarrier.wait(empty.index(stage), ((step // cfg.num_stages) & 1) ^ 1)
            mbarrier.expect(bar, x_desc.block_type.nbytes)
            tma_load(x_desc, [token, k * cfg.block_k], bar, x_bufs.index(stage))
            step += 1


@gluon.jit
def consumer(
    given, R: gl.constexpr, cfg: gl.constexpr, code: gl.constexpr, GROUPED: gl.constexpr, MAX_GROUPS: gl.constexpr
):
    """Four or eight warps: multiply role_m features of every tile, then its epilogue. R: which of the roles."""
    sizes, offsets = given[2], given[3]
    plan = work(sizes, offsets, cfg, GROUPED, MAX_GROUPS)
    step = 0
    for u in range(gl.program_id(0), plan[2], gl.num_programs(0)):
        tile, first, last, part, cut = steps_at(u, plan, sizes[4], gl.cdiv(sizes[2], SPAN), cfg, GROUPED)
        x, y, row_end, e = corner(tile, plan, sizes, cfg, GROUPED)
        acc, step = multiply(given[1], step, last - first, R, cfg)
        x += R * cfg.role_m
        if x < sizes[1]:
            end_tile(in_order(acc), (x, y, row_end, e), 0, False, given, (), (), GROUPED, cfg, code)


@gluon.jit
def mx_kernel(
    w_desc, sf_desc, x_desc, operands, outputs, offsets, row_parts, row_counters, M, N, K, num_groups, num_tiles,
    cfg: gl.constexpr, code: gl.constexpr, GROUPED: gl.constexpr, MAX_GROUPS: gl.constexpr,
):  # fmt: skip
    """Set up the stages, then one role for each partition of warps."""
    w_shape: gl.constexpr = [cfg.num_stages] + w_desc.block_type.shape
    sf_shape: gl.constexpr = [cfg.num_sf] + sf_desc.block_type.shape
    x_shape: gl.constexpr = [cfg.num_stages] + x_desc.block_type.shape
    w_bufs = gl.allocate_shared_memory(w_desc.dtype, w_shape, w_desc.layout)
    sf_bufs = gl.allocate_shared_memory(sf_desc.dtype, sf_shape, sf_desc.layout)
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, x_shape, x_desc.layout)
    empty = gl.allocate_shared_memory(gl.int64, [cfg.num_stages, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [cfg.num_stages, 1], mbarrier.MBarrierLayout())
    num_stages: gl.constexpr = cfg.num_stages
    for i in gl.static_range(num_stages):
        mbarrier.init(empty.index(i), count=cfg.num_roles)
        mbarrier.init(ready.index(i), count=2)
    fence_async_shared()
    role_barrier()
    stages = (w_bufs, sf_bufs, x_bufs, empty, ready)
    sizes = (M, N, K, num_groups, num_tiles)
    descs = (w_desc, sf_desc, x_desc)
    scratch = (row_parts, row_counters, row_parts, row_counters)
    given = ((), stages, sizes, offsets, operands, outputs, scratch, ())
    # The tuples of arguments are written out: bound to a name, their constants would become tensors.
    if cfg.num_roles == 1:
        gl.warp_specialize([
            (consumer, (given, 0, cfg, code, GROUPED, MAX_GROUPS)),
            (weights_producer, (descs, stages, sizes, offsets, cfg, GROUPED, MAX_GROUPS)),
            (tokens_producer, (descs, stages, sizes, offsets, cfg, GROUPED, MAX_GROUPS)),
        ], [1, 1], [40, 40])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (given, 0, cfg, code, GROUPED, MAX_GROUPS)),
            (consumer, (given, 1, cfg, code, GROUPED, MAX_GROUPS)),
            (weights_producer, (descs, stages, sizes, offsets, cfg, GROUPED, MAX_GROUPS)),
            (tokens_producer, (descs, stages, sizes, offsets, cfg, GROUPED, MAX_GROUPS)),
        ], [cfg.num_warps, 1, 1], [cfg.registers, 24, 24])  # fmt: skip

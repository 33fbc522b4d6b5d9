# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
"""Tokens on their way into the kernel for few of them, in Triton.

    permute_kernel    topk_ids -> offsets, slot_to_pos; tokens -> rows by expert, split into two E4M3, in FP8 or in bf16

bf16 has 8 significant bits, E4M3 has 4: a number is high + low, exactly, if it isn't far smaller than what the power of
two is chosen for, the row's largest magnitude; what is 2^17 below that is lost.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from envoi.epilogues.codes_triton import from_e4m3, to_e4m3, widen
from envoi.epilogues.device import cast_back, divide, e4m3, group_amax
from envoi.epilogues.tile_triton import round_mxfp8
from envoi.runtime.topk import experts_at

GROUP: tl.constexpr = tl.constexpr(32)
E4M3_MAX: tl.constexpr = tl.constexpr(448.0)


@triton.jit
def count_before(topk_ids, experts, slots, num_slots, num_experts, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Count for each (expert, slot) [COUNT] the slots of earlier experts, and the earlier slots of the same expert."""
    before = tl.zeros((COUNT, BLOCK), tl.int32)
    for first in range(0, num_slots, BLOCK):
        others = first + tl.arange(0, BLOCK)
        e = experts_at(topk_ids, others, num_slots, num_experts)[None, :]
        earlier = (e == experts[:, None]) & (others[None, :] < slots[:, None])
        before += ((e < experts[:, None]) | earlier).to(tl.int32)
    return tl.sum(before, 1)


@triton.jit
def split_token(x, ON_GPU: tl.constexpr):
    """Split float32 [N] into the bits of high and low in E4M3, and the factor of their products: see `few_epilogue`."""
    # As integers, magnitudes compare as they do as numbers, and NaN is above all.
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    exponent = tl.maximum(largest >> 23, 8)
    up = ((261 - exponent) << 23).to(tl.float32, bitcast=True)
    factor = tl.where(exponent == 255, 0x7FC00000, (exponent - 2) << 23).to(tl.float32, bitcast=True)
    x = x * up
    if ON_GPU:
        high = x.to(tl.float8e4nv)
        low = (x - cast_back(high, x)).to(tl.float8e4nv)
        return high.to(tl.uint8, bitcast=True), low.to(tl.uint8, bitcast=True), factor
    high = to_e4m3(x)
    return high, to_e4m3(x - from_e4m3(high)), factor


@triton.jit
def scale_token(x, ON_GPU: tl.constexpr):
    """Quantise float32 [N] to the bits of E4M3, and return them with their scale [1], as `envoi.quant.quantize`."""
    # As integers, magnitudes compare as they do as numbers, and NaN is above all.
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0, keep_dims=True)
    amax = group_amax(largest.to(tl.float32, bitcast=True))
    x = x * divide(E4M3_MAX, amax)
    if ON_GPU:
        return e4m3(x).to(tl.uint8, bitcast=True), divide(amax, E4M3_MAX)
    return to_e4m3(x), divide(amax, E4M3_MAX)


@triton.jit
def permute_kernel(
    tokens, stride, topk_weights, topk_ids, offsets, slot_to_pos, rows, row_factors, row_weights, largest, num_tokens,
    num_experts, width, K: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    EXPERTS: tl.constexpr, EACH: tl.constexpr, MXFP8: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """Write one token to the rows of its slots, or of every EACH-th; the programs behind these: EXPERTS offsets each.

    EACH: programs of a token. One writes 8 rows of 7168 columns in more than a microsecond.

    topk_ids [num_tokens, K], -1 = masked. rows: E4M3 bits [num_tokens * K, width / 32, 2, 32], high and low; the places
    in a group, called (k16, t1, t0, b, k8), hold the elements (k16, k8, t1, t0, b). row_factors: what a row's products
    have yet to be multiplied by. SLOTS, WIDTH: powers of two of K and width. BLOCK: slots that are counted at once.

    largest: None, or int32 [num_tokens * K], which is set to 0 for the first GEMM's rows; then rows are FP8 with a
    scale each, E4M3 bits [num_tokens * K, width] in order and row_factors, bit for bit as `envoi.quant.quantize`.
    row_factors: None, and rows are the tokens, [num_tokens * K, width] of their dtype.
    MXFP8: tokens are rounded to it before; then low would be 0, and isn't written.
    ON_GPU: it casts to E4M3 itself, and the next kernel may start before this one ends; not in the interpreter.

    Each program reads all ids instead of waiting for others: nothing is counted by atomics, the order is fixed.
    """
    if ON_GPU:
        gdc_launch_dependents()
    m = tl.program_id(0) // EACH
    own_slot = tl.program_id(0) % EACH
    num_slots = num_tokens * K
    if m >= num_tokens:
        own = (tl.program_id(0) - num_tokens * EACH) * EXPERTS + tl.arange(0, EXPERTS)
        before = count_before(topk_ids, own, own * 0, num_slots, num_experts, EXPERTS, BLOCK)
        tl.store(offsets + own, before, mask=own <= num_experts)
    else:
        # Under way while slots are counted.
        c = tl.arange(0, WIDTH)
        x = tl.load(tokens + m.to(tl.int64) * stride + c, mask=c < width, other=0.0)
        s = tl.arange(0, SLOTS)
        slots = m * K + s
        weights = tl.load(topk_weights + slots, mask=s < K, other=0.0)
        if ON_GPU:
            # ptxas moves loads down to their first use, but not past this.
            tl.inline_asm_elementwise("bar.warp.sync 0xffffffff; // $0", "=r", [], tl.int32, is_pure=False, pack=1)
        e = tl.where(s < K, experts_at(topk_ids, slots, num_slots, num_experts), num_experts)
        pos = count_before(topk_ids, e, slots, num_slots, num_experts, SLOTS, BLOCK)
        pos = tl.where(e < num_experts, pos, -1)
        tl.store(slot_to_pos + slots, pos, mask=s < K)
        tl.store(row_weights + pos, widen(weights), mask=pos >= 0)
        if largest is not None or row_factors is None:
            if largest is not None:
                tl.store(largest + pos, tl.zeros((SLOTS,), tl.int32), mask=pos >= 0)
                x, factor = scale_token(widen(x), ON_GPU)
                tl.store(row_factors + pos, factor + tl.zeros((SLOTS,), tl.float32), mask=pos >= 0)
            for slot in range(own_slot, K, EACH):
                row = tl.sum(tl.where(s == slot, pos, 0), 0)
                if row >= 0:
                    tl.store(rows + row.to(tl.int64) * width + c, x, mask=c < width)
        else:
            x = widen(x)
            if MXFP8:
                x = round_mxfp8(tl.reshape(x, (1, WIDTH)))
            x = tl.reshape(x, (WIDTH // GROUP, 2, 2, 4, 2))  # k16, k8, t, b
            x = tl.reshape(tl.permute(x, (0, 1, 3, 4, 2)), (WIDTH,))
            high, low, factor = split_token(x, ON_GPU)
            place = c // GROUP * (2 * GROUP) + c % GROUP
            tl.store(row_factors + pos, factor + tl.zeros((SLOTS,), tl.float32), mask=pos >= 0)
            for slot in range(own_slot, K, EACH):
                row = tl.sum(tl.where(s == slot, pos, 0), 0)
                if row >= 0:
                    at = rows + row.to(tl.int64) * (2 * width) + place
                    tl.store(at, high, mask=c < width)
                    if not MXFP8:
                        tl.store(at + GROUP, low, mask=c < width)

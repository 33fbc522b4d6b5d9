# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
"""From rows of logits to experts and weights on the device, in Triton; the Gluon kernel uses the same functions.

for each row:
    ids = the k best experts, fast, or again by exact keys (`envoi.moe.router.selection`); or what a table says
    weights = scores of the chosen; renormalised, scaled
"""

import triton
import triton.language as tl

from envoi.epilogue.device import INF, INTERPRETED, divide, plus
from envoi.moe.router.selection import as_in, at_column, barred, choose_exactly, choose_fast, is_finite, pick, score_of

EPS: tl.constexpr = tl.constexpr(1e-20)


@triton.jit
def look_up(usable, rows, live, columns, slots, tables, spec: tl.constexpr):
    """The experts that the table has for each row's token; -1 outside it, and where the logit isn't finite."""
    _logit_bias, _expert_bias, token_ids, hash_table, vocabulary = tables
    token = tl.load(token_ids + rows, mask=live, other=-1).to(tl.int64)
    inside = live & (token >= 0) & (token < vocabulary)
    token = as_in(tl.where(inside, token, -1), tl.max(slots, 1), spec)[:, None]
    ids = tl.load(hash_table + token * spec.k + slots, mask=(token >= 0) & (slots < spec.k), other=-1).to(tl.int32)
    found = slots + ids * 0
    ids = tl.where((ids < spec.num_experts) & (slots < spec.k), ids, -1)
    finite = pick(tl.where(usable, 1.0, 0.0), tl.maximum(ids, 0), columns, found, spec)
    return tl.where(finite > 0.0, ids, -1), found


@triton.jit
def weigh(ids, chosen, top, total, routed_scale, spec: tl.constexpr):
    """The weights [R, slots] of the chosen experts; 0 where there is none. chosen: their logits."""
    some = ids >= 0
    if spec.rule.score == "softmax" or spec.rule.score == "softmax_over_topk":
        if not spec.whole_softmax:
            top = tl.max(tl.where(some, chosen, -INF), 1)
        weights = score_of(tl.where(some, chosen - top[:, None], 0.0), spec)
        if spec.whole_softmax:
            weights = divide(weights, total[:, None])
    else:
        weights = score_of(chosen, spec)
    weights = tl.where(some, weights, 0.0)
    if spec.rule.renormalize or spec.rule.score == "softmax_over_topk":
        weights = divide(weights, (tl.sum(weights, 1) + EPS)[:, None])
    return weights * routed_scale


@triton.jit
def store_dense(dense, weights, ids, found, rows, columns, k, spec: tl.constexpr):
    """The weights at their experts' columns, zeros elsewhere."""
    all = (columns + (rows * 0)[:, None]).to(tl.float32) * 0.0
    for r in range(k):
        id = as_in(tl.max(tl.where(found == r, ids, -1), 1), rows, spec)
        weight = as_in(at_column(weights, found == r), rows, spec)
        all = tl.where(columns == id[:, None], weight[:, None], all)
    at = rows.to(tl.int64)[:, None] * spec.num_experts + columns
    tl.store(dense + at, all, mask=(rows >= 0)[:, None] & (columns < spec.num_experts))


@triton.jit
def load_biases(tables, columns, spec: tl.constexpr):
    """The biases of logits and of keys [1, C], 0 if there are none; -inf bars an expert from being chosen."""
    logit_bias, expert_bias, _token_ids, _hash_table, _vocabulary = tables
    real = columns < spec.num_experts
    of_logits = 0.0
    of_keys = 0.0
    if spec.has_logit_bias:
        of_logits = tl.load(logit_bias + columns, mask=real, other=0.0).to(tl.float32)
    if spec.has_expert_bias:
        of_keys = tl.load(expert_bias + columns, mask=real, other=-INF).to(tl.float32)
        of_keys = barred(of_keys, of_keys)  # such an expert is never chosen
    return of_logits, of_keys


@triton.jit
def scaled(logits, alpha):
    """alpha * logits, rounded wherever it is used: the compiler would make it part of some sums and not of others."""
    if INTERPRETED:
        return logits * alpha
    else:
        asm: tl.constexpr = "mul.rn.f32 $0, $1, $2;"
        return tl.inline_asm_elementwise(asm, "=f,f,f", [logits, alpha], tl.float32, is_pure=True, pack=1)


@triton.jit
def meant(logits, columns, numbers, logit_bias, spec: tl.constexpr):
    """The product with alpha and bias; what competes; the largest, and the sum of e^x, if a softmax wants them."""
    alpha, _routed_scale, _k = numbers
    logits = scaled(logits, alpha)
    if spec.has_logit_bias:
        logits += logit_bias
    usable = (columns < spec.num_experts) & is_finite(logits)
    top = 0.0
    total = 1.0
    if spec.whole_softmax:
        top = tl.max(tl.where(usable, logits, -INF), 1)
        top = tl.where(top == -INF, 0.0, top)
        total = tl.sum(tl.where(usable, score_of(logits - top[:, None], spec), 0.0), 1)
        total = tl.maximum(total, EPS)
    return logits, usable, top, total


@triton.jit
def store_rows(logits, ids, found, rows, top, total, columns, numbers, outputs, spec: tl.constexpr):
    """The experts and weights of rows -> all outputs but logits and offsets; nothing of those whose number is -1."""
    _alpha, routed_scale, k = numbers
    weights_out, ids_out, _logits_out, dense_out, histogram = outputs
    ids = tl.where(found < spec.k, ids, -1)
    chosen = pick(logits, tl.maximum(ids, 0), columns, found, spec)
    if spec.whole_softmax:
        top = as_in(top, tl.max(found, 1), spec)
        total = as_in(total, tl.max(found, 1), spec)
    weights = weigh(ids, chosen, top, total, routed_scale, spec)
    slot_rows = as_in(rows, tl.max(found, 1), spec)
    mask = (slot_rows >= 0)[:, None] & (found < spec.k)
    at = slot_rows.to(tl.int64)[:, None] * spec.k + found
    tl.store(ids_out + at, ids, mask=mask)
    tl.store(weights_out + at, weights, mask=mask)
    if spec.want_counts:
        tl.atomic_add(histogram + ids, ids * 0 + 1, mask=mask & (ids >= 0), sem="relaxed")
    if spec.want_dense:
        store_dense(dense_out, weights, ids, found, rows, columns, k, spec)


@triton.jit
def route_rows(logits, rows, live, places, numbers, biases, tables, outputs, spec: tl.constexpr):
    """All that follows the product: logits [R, C], before alpha and bias, of `rows` [R] -> all outputs but the counts.
    Returns the rows that aren't certain, and -1 for others: but for their logits, those are left to `route_exactly`.

    live: rows that there are. places: 0, 1, 2 ... for columns [1, C] in the layout of logits, slots [1, slots] in any
    that keeps a row in one warp, and groups [1, groups] in that of logits. Whatever the layout, sums over slots have
    the same order. numbers: alpha, routed_scale, and spec.k once more: as a constant it would unroll loops, and what
    runs once runs at the speed of its instructions' fetching. biases: of `load_biases`. tables: logit_bias,
    expert_bias, token_ids, hash_table, vocabulary. outputs: weights, ids, logits, dense, histogram.
    """
    columns, slots, _group_slots = places
    logit_bias, expert_bias = biases
    logits, usable, top, total = meant(logits, columns, numbers, logit_bias, spec)
    if spec.want_logits:
        at = rows.to(tl.int64)[:, None] * spec.num_experts + columns
        tl.store(outputs[2] + at, logits, mask=live[:, None] & (columns < spec.num_experts))
    if spec.hashed:
        ids, found = look_up(usable, rows, live, columns, slots, tables, spec)
        certain = live
    else:
        ids, found, certain = choose_fast(logits, top, total, places, expert_bias, numbers[2], spec)
    stored = tl.where(live & certain, rows, -1)
    store_rows(logits, ids, found, stored, top, total, columns, numbers, outputs, spec)
    return tl.where(live & (certain == 0), rows, -1)


@triton.jit
def route_exactly(logits, rows, places, numbers, biases, outputs, spec: tl.constexpr):
    """The same by exact keys, for rows whose number isn't -1; their logits are written."""
    columns, _slots, _group_slots = places
    logit_bias, expert_bias = biases
    logits, usable, top, total = meant(logits, columns, numbers, logit_bias, spec)
    ids, found = choose_exactly(logits, usable, top, total, places, expert_bias, numbers[2], spec)
    store_rows(logits, ids, found, rows, top, total, columns, numbers, outputs, spec)


@triton.jit
def route_tile(logits, rows, live, places, numbers, biases, tables, outputs, spec: tl.constexpr):
    """Both: if one row isn't certain the whole tile is done again."""
    again = route_rows(logits, rows, live, places, numbers, biases, tables, outputs, spec)
    if not spec.hashed:
        if tl.max(again, 0) >= 0:
            route_exactly(logits, again, places, numbers, biases, outputs, spec)


@triton.jit
def store_counts(histogram, counts, offsets, experts, spec: tl.constexpr):
    """The histogram as counts and exclusive offsets; zeros are left in it. experts: 0, 1, 2 ..."""
    real = experts < spec.num_experts
    count = tl.load(histogram + experts, mask=real, other=0, volatile=True)
    tl.store(counts + experts, count, mask=real)
    tl.store(offsets + 1 + experts, tl.associative_scan(count, 0, plus), mask=real)
    tl.store(offsets + experts, count * 0, mask=experts == 0)
    tl.store(histogram + experts, count * 0, mask=real)

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
"""Routing of rows of logits to experts and weights on the device, in Triton; the Gluon kernel calls it too.

for each row:
    ids = the k best experts, fast, or again by exact keys (`envoi.ops.moe.router.selection`); or looked up in a table
    weights = scores of the chosen; renormalised, scaled
"""

import triton
import triton.language as tl

from envoi.epilogues.device import INF, bf16, divide, plus, rounded_product
from envoi.ops.moe.router.device_types import Chosen, Softmax
from envoi.ops.moe.router.selection import (
    as_in,
    at_column,
    choose_exactly,
    choose_fast,
    is_finite,
    pick,
    score_of,
)

EPS: tl.constexpr = tl.constexpr(1e-20)


@triton.jit
def look_up(usable, rows, live, positions, tables, spec: tl.constexpr):
    """Look up the experts of each row's token in the hash table: Chosen, -1 outside it and for logits not finite.

    usable [R, C]: experts whose logit is finite. live [R]: rows that exist.
    """
    slots = positions.slots
    token = tl.load(tables.token_ids + rows, mask=live, other=-1).to(tl.int64)
    inside = live & (token >= 0) & (token < tables.vocabulary)
    token = as_in(tl.where(inside, token, -1), tl.max(slots, 1), spec)[:, None]
    inside = (token >= 0) & (slots < spec.k)
    ids = tl.load(tables.hash_table + token * spec.k + slots, mask=inside, other=-1).to(tl.int32)
    found = slots + ids * 0
    ids = tl.where((ids < spec.num_experts) & (slots < spec.k), ids, -1)
    finite = pick(tl.where(usable, 1.0, 0.0), tl.maximum(ids, 0), positions.columns, found, spec)
    return Chosen(tl.where(finite > 0.0, ids, -1), found)


@triton.jit
def weigh(ids, logits, softmax, routed_scale, spec: tl.constexpr):
    """Compute the weights [R, slots] of the chosen experts, 0 for id -1. logits [R, slots]: their logits."""
    some = ids >= 0
    if spec.rule.score == "softmax" or spec.rule.score == "softmax_over_topk":
        largest = softmax.largest
        if not spec.whole_softmax:
            largest = tl.max(tl.where(some, logits, -INF), 1)
        weights = score_of(tl.where(some, logits - largest[:, None], 0.0), spec)
        if spec.whole_softmax:
            weights = divide(weights, softmax.total[:, None])
    else:
        weights = score_of(logits, spec)
    weights = tl.where(some, weights, 0.0)
    if spec.rule.renormalize or spec.rule.score == "softmax_over_topk":
        weights = divide(weights, (tl.sum(weights, 1) + EPS)[:, None])
    return weights * routed_scale


@triton.jit
def rounded(x, at):
    """Round float32 to the dtype that pointers point to, to nearest even."""
    if at.dtype.element_ty == tl.bfloat16:
        return bf16(x)
    else:
        return x.to(at.dtype.element_ty)


@triton.jit
def store_dense(dense, weights, chosen, rows, columns, k, spec: tl.constexpr):
    """Store each row's weights at its experts' columns and zeros elsewhere: dense [M, N]."""
    all = (columns + (rows * 0)[:, None]).to(tl.float32) * 0.0
    for r in range(k):
        id = as_in(tl.max(tl.where(chosen.slots == r, chosen.ids, -1), 1), rows, spec)
        weight = as_in(at_column(weights, chosen.slots == r), rows, spec)
        all = tl.where(columns == id[:, None], weight[:, None], all)
    at = rows.to(tl.int64)[:, None] * spec.num_experts + columns
    tl.store(dense + at, rounded(all, dense), mask=(rows >= 0)[:, None] & (columns < spec.num_experts))


@triton.constexpr_function
def halvings(columns):
    """Return how often a power of two can be halved."""
    return columns.bit_length() - 1


@triton.jit
def sum_of_columns(x):
    """Sum each row of x [R, C], neighbours first: in one order, whichever lanes and registers hold the columns."""
    rows: tl.constexpr = x.shape[0]
    for _ in tl.static_range(halvings(x.shape[1])):
        x = tl.sum(tl.reshape(x, (rows, x.shape[1] // 2, 2)), 2)
    return tl.sum(x, 1)


@triton.jit
def router_logits(product, columns, alpha, logit_bias, spec: tl.constexpr):
    """Return logits alpha * product + bias, the mask of finite logits of real experts, each row's Softmax if needed."""
    logits = rounded_product(product, alpha)
    if spec.has_logit_bias:
        logits += logit_bias
    usable = (columns < spec.num_experts) & is_finite(logits)
    top = 0.0
    total = 1.0
    if spec.whole_softmax:
        top = tl.max(tl.where(usable, logits, -INF), 1)
        top = tl.where(top == -INF, 0.0, top)
        total = sum_of_columns(tl.where(usable, score_of(logits - top[:, None], spec), 0.0))
        total = tl.maximum(as_in(total, top, spec), EPS)
    return logits, usable, Softmax(top, total)


@triton.jit
def store_rows(logits, chosen, rows, softmax, columns, args, spec: tl.constexpr):
    """Store experts and weights of rows: all outputs but logits and offsets. Rows whose number is -1 are skipped."""
    found = chosen.slots
    ids = chosen.ids
    outputs = args.outputs
    ids = tl.where(found < spec.k, ids, -1)
    chosen_logits = pick(logits, tl.maximum(ids, 0), columns, found, spec)
    if spec.whole_softmax:
        top = as_in(softmax.largest, tl.max(found, 1), spec)
        total = as_in(softmax.total, tl.max(found, 1), spec)
        weights = weigh(ids, chosen_logits, Softmax(top, total), args.scalars.routed_scale, spec)
    else:
        weights = weigh(ids, chosen_logits, softmax, args.scalars.routed_scale, spec)
    slot_rows = as_in(rows, tl.max(found, 1), spec)
    mask = (slot_rows >= 0)[:, None] & (found < spec.k)
    at = slot_rows.to(tl.int64)[:, None] * spec.k + found
    tl.store(outputs.ids + at, ids, mask=mask)
    tl.store(outputs.weights + at, rounded(weights, outputs.weights), mask=mask)
    if spec.want_counts:
        tl.atomic_add(outputs.histogram + ids, ids * 0 + 1, mask=mask & (ids >= 0), sem="relaxed")
    if spec.want_dense:
        store_dense(outputs.dense, weights, Chosen(ids, found), rows, columns, args.scalars.k, spec)


@triton.jit
def route_rows(product, rows, live, positions, biases, args, SETTLE: tl.constexpr, spec: tl.constexpr):
    """Route `rows` [R] by their products [R, C] with the gate; store all outputs but the counts.

    Returns the rows that aren't certain, -1 for the others, and 0 if there can be none: of uncertain rows only the
    logits are stored, the rest by `route_exactly`. live [R]: rows that exist. SETTLE: see `choose_fast`.
    """
    logits, usable, softmax = router_logits(product, positions.columns, args.scalars.alpha, biases.logit, spec)
    if spec.want_logits:
        at = rows.to(tl.int64)[:, None] * spec.num_experts + positions.columns
        tl.store(args.outputs.logits + at, logits, mask=live[:, None] & (positions.columns < spec.num_experts))
    if spec.hashed:
        chosen = look_up(usable, rows, live, positions, args.tables, spec)
        certain = live
        doubt = 0
    else:
        chosen, certain, doubt = choose_fast(logits, softmax, live, positions, biases.key, args, SETTLE, spec)
    stored = tl.where(live & certain, rows, -1)
    store_rows(logits, chosen, stored, softmax, positions.columns, args, spec)
    return tl.where(live & (certain == 0), rows, -1), doubt


@triton.jit
def route_exactly(product, rows, positions, biases, args, spec: tl.constexpr):
    """Route by exact keys the rows whose number isn't -1; their logits are stored already."""
    logits, usable, softmax = router_logits(product, positions.columns, args.scalars.alpha, biases.logit, spec)
    chosen = choose_exactly(logits, usable, softmax, positions, biases.key, args.scalars.k, spec)
    store_rows(logits, chosen, rows, softmax, positions.columns, args, spec)


@triton.jit
def route_tile(product, rows, live, positions, biases, args, spec: tl.constexpr):
    """Route rows fast, and the whole tile again by exact keys if one of them isn't certain."""
    again, doubt = route_rows(product, rows, live, positions, biases, args, True, spec)
    if not spec.hashed:
        if doubt > 0:
            if tl.max(again, 0) >= 0:
                route_exactly(product, again, positions, biases, args, spec)


@triton.jit
def store_counts(histogram, counts, offsets, experts, spec: tl.constexpr):
    """Store the histogram as counts [N] and exclusive offsets [N + 1], and zero it for the next launch.

    experts: 0, 1, 2, ..
    """
    real = experts < spec.num_experts
    count = tl.load(histogram + experts, mask=real, other=0, volatile=True)
    tl.store(counts + experts, count, mask=real)
    tl.store(offsets + 1 + experts, tl.associative_scan(count, 0, plus), mask=real)
    tl.store(offsets + experts, count * 0, mask=experts == 0)
    tl.store(histogram + experts, count * 0, mask=real)

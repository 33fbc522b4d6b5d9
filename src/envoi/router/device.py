# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
"""From rows of logits to experts and weights on the device, in Triton; the Gluon kernel uses the same functions.

    for each row:
        key = logit, or score (+ expert_bias); only what is finite competes, and only the best groups
        k times: the best key, of equals that of the smallest id; it leaves
        weights = scores of the chosen; renormalised, scaled

That is done twice at most. First with 32-bit integers that hold how far a key is below the largest, and its column, one
reduction a round, and a sigmoid to six digits. Then it is checked that no two keys that matter are so near that this
could have erred; if some of the chosen are, they are put in order by exact keys; if the choice itself may be wrong, the
rows go through exact keys, which equal those of `envoi.router.reference` bit for bit: exact
division and root, the exponential of CUDA's own library.
"""

import triton
import triton.experimental.gluon.language as gl
import triton.language as tl
from triton.language.extra import libdevice

from envoi.epilogue.device import INF, INTERPRETED, divide, in_order, plus, sigmoid

LOWEST: tl.constexpr = tl.constexpr(-(2**31))  # below the key of any float
NOWHERE: tl.constexpr = tl.constexpr(1 << 30)  # behind any column
EPS: tl.constexpr = tl.constexpr(1e-20)
TOLERANCE: tl.constexpr = tl.constexpr(1e-6)  # twice what `fast_score` errs, and the rounding of a sum of two


@triton.jit
def as_in(x, y, spec: tl.constexpr):
    """x in the layout of y."""
    if spec.gluon:
        return gl.convert_layout(x, y.type.layout)
    else:
        return x


@triton.jit
def exponential(x):
    """e^x as torch has it on this device."""
    if INTERPRETED:
        return tl.exp(x)
    else:
        return libdevice.exp(x)


@triton.jit
def log1p(x):
    """log(1 + x) for x in [0, 1], as torch has it on this device."""
    if INTERPRETED:
        return tl.where(x < 1e-3, x * (1.0 - x * (0.5 - x * 0.33333333)), tl.log(1.0 + x))
    else:
        return libdevice.log1p(x)


@triton.jit
def root(x):
    """The square root, rounded to nearest."""
    if INTERPRETED:
        return tl.sqrt(x)
    else:
        s = tl.inline_asm_elementwise("sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
        half = tl.inline_asm_elementwise("rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
        return tl.where(x > 0.0, tl.fma(tl.fma(-s, s, x), 0.5 * half, s), 0.0)


@triton.jit
def score_of(logits, spec: tl.constexpr):
    """Elementwise scores; e^x for the kinds of softmax, whose caller has subtracted the largest."""
    if spec.rule.score == "sqrt_softplus":
        return root(tl.maximum(logits, 0.0) + log1p(exponential(-tl.abs(logits))))
    elif spec.rule.score == "sigmoid" or spec.rule.score == "sigmoid_of_topk":
        small = exponential(-tl.abs(logits))
        return divide(tl.where(logits >= 0.0, 1.0, small), 1.0 + small)
    else:
        return exponential(logits)


@triton.jit
def order(x):
    """Integers that compare as floats do; 0 and -0 are equal."""
    return in_order((x + 0.0).to(tl.int32, bitcast=True))


@triton.jit
def is_finite(x):
    """False for NaN and the infinities."""
    return tl.abs(x) < INF


@triton.jit
def fast_score(logits, spec: tl.constexpr):
    """`score_of` to within TOLERANCE where that saves much."""
    if spec.rule.score == "sigmoid":
        return sigmoid(logits)
    else:
        return score_of(logits, spec)


@triton.jit
def at_column(x, here):
    """The value of each row where `here` is true, for one column at most; 0 for none. Exact: a sum of bits."""
    return tl.sum(tl.where(here, x.to(tl.int32, bitcast=True), 0), 1).to(tl.float32, bitcast=True)


@triton.jit
def slot(x, found, j, spec: tl.constexpr):
    """Slot j of each row, in all slots. found: 0, 1, 2 ..."""
    if spec.gluon:
        return tl.gather(x, found * 0 + j, 1)
    else:
        return at_column(x, found == j)[:, None] + (found * 0).to(tl.float32)


@triton.jit
def pick(x, ids, columns, found, spec: tl.constexpr):
    """x [R, C] at columns `ids` [R, slots]. columns: 0, 1, 2 ...; Triton's gather fails where warps share rows."""
    if spec.gluon:
        return tl.gather(x, ids, 1)
    else:
        picked = ids.to(tl.float32) * 0.0
        for r in range(spec.slots):
            id = tl.max(tl.where(found == r, ids, -1), 1)
            picked = tl.where(found == r, at_column(x, columns == id[:, None])[:, None], picked)
        return picked


@triton.jit
def best_of(key, columns):
    """The largest key of each row, and the first column that has it."""
    best = tl.max(key, 1)
    return best, tl.min(tl.where(key == best[:, None], columns, NOWHERE), 1)


@triton.jit
def merge_two(a, second_a, b, second_b):
    """The two largest of two pairs."""
    return tl.maximum(a, b), tl.maximum(tl.minimum(a, b), tl.maximum(second_a, second_b))


@triton.jit
def group_score(key, spec: tl.constexpr):
    """Of keys along the last axis: the largest, or the sum of the two largest, or of one if there is but one."""
    axis: tl.constexpr = len(key.shape) - 1
    if spec.rule.group_score == "max":
        return tl.max(key, axis)
    else:
        best, second = tl.reduce((key, tl.where(key > key, 0.0, -INF)), axis, merge_two)
        return best + tl.where(second == -INF, 0.0, second)


@triton.jit
def group_scores(key, columns, group_slots, spec: tl.constexpr):
    """The score of every group [R, groups], and the groups' numbers."""
    size: tl.constexpr = spec.group_size
    num_groups: tl.constexpr = spec.rule.num_groups
    if spec.groups_fill:
        scores = group_score(tl.reshape(key, (key.shape[0], num_groups, size)), spec)
        if spec.gluon:
            numbers = gl.arange(0, num_groups, gl.SliceLayout(0, scores.type.layout))[None, :]
        else:
            numbers = tl.arange(0, num_groups)[None, :]
        return scores, numbers + (scores > scores).to(tl.int32)
    else:
        numbers = group_slots + tl.max((key > key).to(tl.int32), 1)[:, None]
        scores = numbers.to(tl.float32) * 0.0 - INF
        for g in range(num_groups):
            score = group_score(tl.where(columns // size == g, key, -INF), spec)
            scores = tl.where(numbers == g, score[:, None], scores)
        return scores, numbers


@triton.jit
def best_groups(key, columns, group_slots, tolerance, spec: tl.constexpr):
    """key, -inf outside the best groups, of equals the smaller number; and the rows that are certain."""
    scores, numbers = group_scores(key, columns, group_slots, spec)
    num_groups: tl.constexpr = spec.rule.num_groups
    better = numbers * 0
    for g in tl.static_range(num_groups):
        other = slot(scores, numbers, g, spec)
        better += ((other > scores) | ((other == scores) & (g < numbers))).to(tl.int32)
    keep = (better < spec.rule.num_topk_groups) & (numbers < num_groups)
    kept = tl.sum(tl.where(keep, 1 << numbers, 0), 1)
    least = tl.min(tl.where(keep, scores, INF), 1)
    sure = (least - tl.max(tl.where(keep, -INF, scores), 1) > tolerance).to(tl.int32)
    kept = as_in(kept, tl.max(key, 1), spec)
    sure = as_in(sure, tl.max(key, 1), spec)
    return tl.where(((kept[:, None] >> (columns // spec.group_size)) & 1) != 0, key, -INF), sure > 0


@triton.jit
def selection_key(logits, usable, top, total, columns, expert_bias, FAST: tl.constexpr, spec: tl.constexpr):
    """What experts are ranked by; -inf for those that can't be chosen. FAST: scores to within TOLERANCE."""
    key = logits
    if spec.by_score:
        if spec.rule.score == "softmax":
            key = divide(score_of(logits - top[:, None], spec), total[:, None])
        elif FAST:
            key = fast_score(logits, spec)
        else:
            key = score_of(logits, spec)
    if spec.has_expert_bias:
        key += expert_bias  # finite, or -inf
    return tl.where(usable, key, -INF)


@triton.constexpr_function
def reach(spec):
    """How far below the largest key packed keys tell others apart."""
    if spec.by_score and spec.rule.score in ("sigmoid", "softmax"):
        return 4.0 if spec.rule.score == "sigmoid" else 1.0
    return 32.0


@triton.constexpr_function
def portion_code(spec):
    """The instruction for 1 + x / reach, kept in [0, 1]; 0 for -inf and NaN."""
    return f"fma.rn.sat.f32 $0, $1, {1 / reach(spec)}, 1.0;"


@triton.jit
def portion(x, spec: tl.constexpr):
    """1 + x / reach, not below 0 nor above 1; 0 for -inf and NaN."""
    if INTERPRETED:
        x = x * (1.0 / reach(spec))
        return tl.where(x > -1.0, tl.minimum(x + 1.0, 1.0), 0.0)
    else:
        return tl.inline_asm_elementwise(portion_code(spec), "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.constexpr_function
def num_steps(columns):
    """Into which the reach of packed keys is cut: what the column's bits leave, and a float can count."""
    return min(1 << 23, (1 << 31) // columns)


@triton.jit
def pack(key, largest, columns, spec: tl.constexpr):
    """uint32 that order as the keys do: how many steps each is above the end of the reach, then the column. Below
    key.shape[1] for -inf, and for what is out of reach."""
    low: tl.constexpr = key.shape[1] - 1
    steps: tl.constexpr = num_steps(key.shape[1])
    # The lowest bits of a float from 2^23 on count; the others leave.
    counted = portion(key - largest[:, None], spec) * steps + 8388608.0
    return ((counted.to(tl.int32, bitcast=True) - 0x4B000000) * (low + 1) + (low - columns)).to(tl.uint32, bitcast=True)


@triton.jit
def next_packed(packed, best):
    """The largest below the last best of each row; 0 stays 0."""
    # What isn't below wraps around, and is farther away.
    gap = tl.min((best - 1)[:, None] - packed, 1)
    return tl.where(best > 0, best - 1 - gap, best)


@triton.jit
def choose_packed(key, columns, slots, k, tolerance: tl.constexpr, spec: tl.constexpr):
    """The ids [R, slots] of the k best packed keys, 0, 1, 2 ... for the slots, and which rows have their choice, and
    its order, for certain: if the next key, and those of neighbours, are farther away than packed keys may err.

    They err by three steps of the reach, and by the tolerance, which stands for keys of about one.
    """
    low: tl.constexpr = key.shape[1] - 1
    largest = tl.max(key, 1)
    largest = tl.where(largest == -INF, 0.0, largest)
    packed = pack(key, largest, columns, spec)
    none = (largest > largest).to(tl.int32)
    found = slots + as_in(none, tl.max(slots, 1), spec)[:, None]
    bests = found * 0
    best = (none - 1).to(tl.uint32, bitcast=True)
    for r in range(k):
        best = next_packed(packed, best)
        bests = tl.where(found == r, as_in(best.to(tl.int32, bitcast=True), tl.max(found, 1), spec)[:, None], bests)
    ids = (bests & low) ^ low
    rival = next_packed(packed, best)  # if there is none, it wraps around to the first
    err = (tolerance + tl.abs(largest) * (tolerance * 0.25)) * (num_steps(key.shape[1]) / reach(spec)) + 4.0
    margin = tl.minimum(err, 1.0 * num_steps(key.shape[1])).to(tl.int32) * (low + 1) + low
    certain = (best > low) & (best - rival > margin.to(tl.uint32, bitcast=True))
    bests = bests.to(tl.uint32, bitcast=True)
    behind = pick(bests.to(tl.int32, bitcast=True), tl.minimum(found + 1, spec.slots - 1), found, found, spec)
    distance = bests - behind.to(tl.uint32, bitcast=True)
    far = distance > as_in(margin, tl.max(found, 1), spec).to(tl.uint32, bitcast=True)[:, None]
    falls = tl.min((far | (found >= k - 1)).to(tl.int32), 1)
    return ids, found, certain, as_in(falls, best, spec) > 0


@triton.jit
def put_in_order(ids, keys, found, k, spec: tl.constexpr):
    """The chosen by their exact keys, of equals the smallest id first."""
    rank = found * 0
    for j in range(k):
        other = slot(keys, found, j, spec)
        other_id = slot(ids.to(tl.float32), found, j, spec).to(tl.int32)
        rank += ((other > keys) | ((other == keys) & (other_id < ids))).to(tl.int32)
    place = found * 0
    for j in range(k):
        place = tl.where(slot(rank.to(tl.float32), found, j, spec).to(tl.int32) == found, j, place)
    return pick(ids.to(tl.float32), place, found, found, spec).to(tl.int32)


@triton.jit
def choose(ranks, columns, found, k, spec: tl.constexpr):
    """The ids [R, slots] of the k best ranks (integers), best first, of equals the smallest; -1 where none is left."""
    ids = found * 0 - 1
    for r in range(k):
        best, id = best_of(ranks, columns)
        ranks = tl.where(columns == id[:, None], LOWEST, ranks)
        id = as_in(tl.where(best > LOWEST, id, -1), tl.max(found, 1), spec)
        ids = tl.where(found == r, id[:, None], ids)
    return ids


@triton.jit
def slot_keys(logits, ids, top, total, columns, found, expert_bias, spec: tl.constexpr):
    """The exact keys of experts ids [R, slots]."""
    chosen = pick(logits, ids, columns, found, spec)
    some = found >= 0
    if spec.whole_softmax:
        top = as_in(top, tl.max(found, 1), spec)
        total = as_in(total, tl.max(found, 1), spec)
    bias = 0.0
    if spec.has_expert_bias:
        bias = pick(expert_bias + logits * 0.0, ids, columns, found, spec)
    return selection_key(chosen, some, top, total, columns, bias, False, spec)


@triton.jit
def select(logits, live, usable, top, total, columns, slots, group_slots, expert_bias, k, spec: tl.constexpr):
    """The ids [R, slots] of the chosen, best first, -1 where none is left: fast, and again where that may err."""
    tolerance: tl.constexpr = TOLERANCE if spec.by_score and spec.rule.score == "sigmoid" else 0.0
    key = selection_key(logits, usable, top, total, columns, expert_bias, True, spec)
    if spec.rule.num_groups > 1:
        key, sure = best_groups(key, columns, group_slots, tolerance, spec)
    ids, found, certain, falls = choose_packed(key, columns, slots, k, tolerance, spec)
    if spec.rule.num_groups > 1:
        certain = certain & sure
    nobody = live == 0
    if tl.min((certain & falls | nobody).to(tl.int32), 0) == 0:
        if tl.min((certain | nobody).to(tl.int32), 0) == 0:
            key = selection_key(logits, usable, top, total, columns, expert_bias, False, spec)
            if spec.rule.num_groups > 1:
                key, sure = best_groups(key, columns, group_slots, tolerance, spec)
            ids = choose(tl.where(key > -INF, order(key), LOWEST), columns, found, k, spec)
        else:
            keys = slot_keys(logits, ids, top, total, columns, found, expert_bias, spec)
            ids = put_in_order(ids, keys, found, k, spec)
    return tl.where(found < spec.k, ids, -1), found


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
def store_dense(dense, weights, ids, found, rows, live, columns, k, spec: tl.constexpr):
    """The weights at their experts' columns, zeros elsewhere."""
    all = (columns + (rows * 0)[:, None]).to(tl.float32) * 0.0
    for r in range(k):
        id = as_in(tl.max(tl.where(found == r, ids, -1), 1), rows, spec)
        weight = as_in(at_column(weights, found == r), rows, spec)
        all = tl.where(columns == id[:, None], weight[:, None], all)
    at = rows.to(tl.int64)[:, None] * spec.num_experts + columns
    tl.store(dense + at, all, mask=live[:, None] & (columns < spec.num_experts))


@triton.jit
def load_biases(tables, columns, spec: tl.constexpr):
    """The biases of logits and of keys [1, C]; 0 for those that there aren't."""
    logit_bias, expert_bias, _token_ids, _hash_table, _vocabulary = tables
    real = columns < spec.num_experts
    of_logits = 0.0
    of_keys = 0.0
    if spec.has_logit_bias:
        of_logits = tl.load(logit_bias + columns, mask=real, other=0.0).to(tl.float32)
    if spec.has_expert_bias:
        of_keys = tl.load(expert_bias + columns, mask=real, other=0.0).to(tl.float32)
        of_keys = tl.where(is_finite(of_keys), of_keys, -INF)  # such an expert is never chosen
    return of_logits, of_keys


@triton.jit
def route_rows(
    logits, rows, num_rows, columns, slots, group_slots, numbers, biases, tables, outputs,
    spec: tl.constexpr,
):  # fmt: skip
    """All that follows the product: logits [R, C], before alpha and bias, of `rows` [R] -> all outputs but the counts.

    columns [1, C] and group_slots [1, groups]: 0, 1, 2 ... in the layout of logits; slots [1, slots] in any that keeps
    a row in one warp. Layouts are the same for every number of rows, so that sums have the same order.
    numbers: alpha, routed_scale, and spec.k once more: as a constant it would unroll loops, and what runs once runs at
    the speed of its instructions' fetching. biases: of `load_biases`. tables: logit_bias, expert_bias, token_ids,
    hash_table, vocabulary. outputs: weights, ids, logits, dense, histogram.
    """
    alpha, routed_scale, k = numbers
    logit_bias, expert_bias = biases
    weights_out, ids_out, logits_out, dense_out, histogram = outputs
    live = rows < num_rows
    real = columns < spec.num_experts
    logits = logits * alpha
    if spec.has_logit_bias:
        logits += logit_bias
    if spec.want_logits:
        at = rows.to(tl.int64)[:, None] * spec.num_experts + columns
        tl.store(logits_out + at, logits, mask=live[:, None] & real)
    usable = real & is_finite(logits)
    top = 0.0
    total = 1.0
    if spec.whole_softmax:
        top = tl.max(tl.where(usable, logits, -INF), 1)
        top = tl.where(top == -INF, 0.0, top)
        total = tl.sum(tl.where(usable, score_of(logits - top[:, None], spec), 0.0), 1)
        total = tl.maximum(total, EPS)
    if spec.hashed:
        ids, found = look_up(usable, rows, live, columns, slots, tables, spec)
    else:
        ids, found = select(logits, live, usable, top, total, columns, slots, group_slots, expert_bias, k, spec)
    chosen = pick(logits, tl.maximum(ids, 0), columns, found, spec)
    if spec.whole_softmax:
        top = as_in(top, tl.max(found, 1), spec)
        total = as_in(total, tl.max(found, 1), spec)
    weights = weigh(ids, chosen, top, total, routed_scale, spec)
    slot_rows = as_in(rows, tl.max(found, 1), spec)
    mask = (slot_rows < num_rows)[:, None] & (found < spec.k)
    at = slot_rows.to(tl.int64)[:, None] * spec.k + found
    tl.store(ids_out + at, ids, mask=mask)
    tl.store(weights_out + at, weights, mask=mask)
    if spec.want_counts:
        tl.atomic_add(histogram + ids, ids * 0 + 1, mask=mask & (ids >= 0), sem="relaxed")
    if spec.want_dense:
        store_dense(dense_out, weights, ids, found, rows, live, columns, k, spec)


@triton.jit
def store_counts(histogram, counts, offsets, experts, spec: tl.constexpr):
    """The histogram as counts and exclusive offsets; zeros are left in it. experts: 0, 1, 2 ..."""
    real = experts < spec.num_experts
    count = tl.load(histogram + experts, mask=real, other=0, volatile=True)
    tl.store(counts + experts, count, mask=real)
    tl.store(offsets + 1 + experts, tl.associative_scan(count, 0, plus), mask=real)
    tl.store(offsets + experts, count * 0, mask=experts == 0)
    tl.store(histogram + experts, count * 0, mask=real)

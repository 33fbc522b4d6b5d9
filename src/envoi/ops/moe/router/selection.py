# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
"""Selection of each row's experts on the device, in Triton; the Gluon kernel calls these functions too.

    for each row:
        key = logit, or score (+ expert_bias); only finite keys compete, and only the best groups
        k times: take out the best key; a tie goes to the smallest id

First by packed keys, 32-bit integers of a key's distance below the largest and its column, with one reduction a round,
and a sigmoid or a root to about six digits. A row is certain if no two keys that matter are so near that this could
have erred. If near ties are only among its k best and the next, they are settled by exact keys of these k + 1 experts,
where `SETTLE` says so. Rows that are still uncertain are selected again by exact keys of all experts. Exact keys equal
those of `envoi.ops.moe.router.reference` bit for bit: exact division and root, the exponential of CUDA's own library.
"""

import triton
import triton.experimental.gluon.language as gl
import triton.language as tl
from triton.language.extra import libdevice

from envoi.epilogues.device import INF, INTERPRETED, divide, exp, in_order, sigmoid
from envoi.ops.moe.router.device_types import Biases, Chosen, Packed, Softmax

LOWEST: tl.constexpr = tl.constexpr(-(2**31))  # below the key of any float
NOWHERE: tl.constexpr = tl.constexpr(1 << 30)  # greater than any column
# Error of a sigmoid's keys, u = 2^-24: `fast_score` errs by 3.4u at most (2^x by 4u, 1 / x by 2u of themselves), the
# exact one by 2.3u; with a bias each key is rounded once more, by u of its size, which is at most that of the row's
# largest and the reach. So two keys err by 12u + 4u (largest + 2): 20u (1 + largest / 5).
TOLERANCE: tl.constexpr = tl.constexpr(1.2e-6)
# The same of sqrt(softplus) of logits up to MOST_ROOTED, whose scores are at most 8. `fast_root_softplus` errs by up to
# 6.7e-7 where the softplus is small, since the logarithm errs by 3.3e-7, and by 1.3e-6 at 8, the exact score by 1.2e-6.
# So two keys err by 5.4e-6 at most, and by the rounding of their sums with a bias.
ROOT_TOLERANCE: tl.constexpr = tl.constexpr(1e-5)
MOST_ROOTED: tl.constexpr = tl.constexpr(64.0)


@triton.jit
def as_in(x, y, spec: tl.constexpr):
    """Convert x to the layout of y."""
    if spec.gluon:
        return gl.convert_layout(x, y.type.layout)
    else:
        return x


@triton.jit
def exponential(x):
    """Compute e^x with torch's bits on this device."""
    if INTERPRETED:
        return tl.exp(x)
    else:
        return libdevice.exp(x)


@triton.jit
def log1p(x):
    """Compute log(1 + x) for x in [0, 1] with torch's bits on this device."""
    if INTERPRETED:
        return tl.where(x < 1e-3, x * (1.0 - x * (0.5 - x * 0.33333333)), tl.log(1.0 + x))
    else:
        return libdevice.log1p(x)


@triton.jit
def root(x):
    """Compute the square root, rounded to nearest."""
    if INTERPRETED:
        return tl.sqrt(x)
    else:
        s = tl.inline_asm_elementwise("sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
        half = tl.inline_asm_elementwise("rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
        return tl.where(x > 0.0, tl.fma(tl.fma(-s, s, x), 0.5 * half, s), 0.0)


@triton.jit
def score_of(logits, spec: tl.constexpr):
    """Compute elementwise scores; e^x for the kinds of softmax, whose caller has subtracted the largest."""
    if spec.rule.score == "identity":
        return logits
    elif spec.rule.score == "sqrt_softplus":
        return root(tl.maximum(logits, 0.0) + log1p(exponential(-tl.abs(logits))))
    elif spec.rule.score == "sigmoid" or spec.rule.score == "sigmoid_of_topk":
        small = exponential(-tl.abs(logits))
        return divide(tl.where(logits >= 0.0, 1.0, small), 1.0 + small)
    else:
        return exponential(logits)


@triton.jit
def order(x):
    """Map floats to integers in the same order; 0 and -0 are equal."""
    return in_order((x + 0.0).to(tl.int32, bitcast=True))


@triton.jit
def is_finite(x):
    """Return the mask of elements that are neither NaN nor infinite."""
    return tl.abs(x) < INF


@triton.jit
def barred(x, y):
    """Return x where y is finite, else -inf; without predicate registers, of which there are only seven."""
    if INTERPRETED:
        return tl.where(is_finite(y), x, -INF)
    else:
        return tl.maximum(tl.fma(y, 0.0, x), -INF)


@triton.jit
def fast_score(logits, spec: tl.constexpr):
    """Compute `score_of` to within TOLERANCE, if that saves much time."""
    if spec.rule.score == "sigmoid":
        return sigmoid(logits)
    elif spec.rule.score == "sqrt_softplus" and not INTERPRETED:
        return fast_root_softplus(logits)
    else:
        return score_of(logits, spec)


@triton.jit
def fast_root_softplus(x):
    """Compute sqrt(log(1 + e^x)) to within half of ROOT_TOLERANCE, for x up to MOST_ROOTED."""
    small = exp(-tl.abs(x))
    series = tl.fma(small, tl.fma(small, tl.fma(small, tl.fma(small, 0.2, -0.25), 0.33333333), -0.5), 1.0) * small
    log2 = tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [small + 1.0], tl.float32, is_pure=True, pack=1
    )
    softplus = tl.maximum(x, 0.0) + tl.where(small < 0.0625, series, log2 * 0.69314718)
    return tl.inline_asm_elementwise(
        "sqrt.approx.ftz.f32 $0, $1;", "=f,f", [softplus], tl.float32, is_pure=True, pack=1
    )


@triton.jit
def at_column(x, here):
    """Return each row's value in the column, one at most, where `here` is true; 0 for none. Exact: a sum of bits."""
    return tl.sum(tl.where(here, x.to(tl.int32, bitcast=True), 0), 1).to(tl.float32, bitcast=True)


@triton.jit
def slot(x, found, j, spec: tl.constexpr):
    """Broadcast slot j of each row to all slots. found: 0, 1, 2 ..."""
    if spec.gluon:
        return tl.gather(x, found * 0 + j, 1)
    else:
        return at_column(x, found == j)[:, None] + (found * 0).to(tl.float32)


@triton.jit
def pick(x, ids, columns, found, spec: tl.constexpr):
    """Gather x [R, C] at columns `ids` [R, slots]. columns: 0, 1, 2 ...; Triton's gather fails if warps share rows."""
    if spec.gluon:
        return tl.gather(x, ids, 1)
    else:
        picked = ids.to(tl.float32) * 0.0
        for r in range(found.shape[1]):
            id = tl.max(tl.where(found == r, ids, -1), 1)
            picked = tl.where(found == r, at_column(x, columns == id[:, None])[:, None], picked)
        return picked


@triton.jit
def best_of(key, columns):
    """Return the largest key of each row, and the first column that has it."""
    best = tl.max(key, 1)
    return best, tl.min(tl.where(key == best[:, None], columns, NOWHERE), 1)


@triton.jit
def merge_two(a, second_a, b, second_b):
    """Merge two pairs (largest, second largest) into one."""
    return tl.maximum(a, b), tl.maximum(tl.minimum(a, b), tl.maximum(second_a, second_b))


@triton.jit
def best_two(key, spec: tl.constexpr):
    """Return the largest key along the last axis, and the second largest if a group's score includes it; 0 for none."""
    axis: tl.constexpr = len(key.shape) - 1
    if spec.rule.group_score == "max":
        best = tl.max(key, axis)
        return best, tl.where(best > best, best, 0.0)
    else:
        best, second = tl.reduce((key, tl.where(key > key, 0.0, -INF)), axis, merge_two)
        return best, tl.where(second == -INF, 0.0, second)


@triton.jit
def best_of_groups(key, columns, group_slots, spec: tl.constexpr):
    """Return `best_two` of every group [R, groups], and the groups' numbers."""
    size: tl.constexpr = spec.group_size
    num_groups: tl.constexpr = spec.rule.num_groups
    if spec.groups_fill:
        bests, seconds = best_two(tl.reshape(key, (key.shape[0], num_groups, size)), spec)
        if spec.gluon:
            numbers = gl.arange(0, num_groups, gl.SliceLayout(0, bests.type.layout))[None, :]
        else:
            numbers = tl.arange(0, num_groups)[None, :]
        return bests, seconds, numbers + (bests > bests).to(tl.int32)
    else:
        numbers = group_slots + tl.max((key > key).to(tl.int32), 1)[:, None]
        bests = numbers.to(tl.float32) * 0.0 - INF
        seconds = numbers.to(tl.float32) * 0.0
        for g in range(num_groups):
            best, second = best_two(tl.where(columns // size == g, key, -INF), spec)
            bests = tl.where(numbers == g, best[:, None], bests)
            seconds = tl.where(numbers == g, second[:, None], seconds)
        return bests, seconds, numbers


@triton.jit
def best_groups(key, columns, group_slots, tolerance, spec: tl.constexpr):
    """Set keys outside the best groups to -inf; also return each row's largest key kept, and which rows are certain.

    A tie between groups goes to the smaller number. A group's score errs by as much as two keys, 12u and 2u of their
    sizes, by its own rounding, 2u of these, and by that of the ends of the interval, u: 0.6 and 0.25 of TOLERANCE.
    """
    bests, seconds, numbers = best_of_groups(key, columns, group_slots, spec)
    scores = bests + seconds
    num_groups: tl.constexpr = spec.rule.num_groups
    better = numbers * 0
    for g in tl.static_range(num_groups):
        other = slot(scores, numbers, g, spec)
        better += ((other > scores) | ((other == scores) & (g < numbers))).to(tl.int32)
    keep = (better < spec.rule.num_topk_groups) & (numbers < num_groups)
    kept = tl.sum(tl.where(keep, 1 << numbers, 0), 1)
    doubt = tolerance * (0.6 + 0.25 * (tl.abs(bests) + tl.abs(seconds)))
    doubt = tl.where(bests > -INF, doubt, 0.0)
    least = tl.min(tl.where(keep, scores - doubt, INF), 1)
    sure = (least >= tl.max(tl.where(keep, -INF, scores + doubt), 1)).to(tl.int32)
    largest = tl.max(tl.where(keep, bests, -INF), 1)
    of_rows = tl.max(key, 1)
    kept = as_in(kept, of_rows, spec)
    key = tl.where(((kept[:, None] >> (columns // spec.group_size)) & 1) != 0, key, -INF)
    return key, as_in(largest, of_rows, spec), as_in(sure, of_rows, spec) > 0


@triton.jit
def load_biases(tables, columns, spec: tl.constexpr):
    """Load the Biases of columns [1, C], 0.0 if there are none; an expert whose key is -inf is never chosen."""
    real = columns < spec.num_experts
    of_logits = 0.0
    of_keys = 0.0
    if spec.has_logit_bias:
        of_logits = tl.load(tables.logit_bias + columns, mask=real, other=0.0).to(tl.float32)
    if spec.has_expert_bias:
        of_keys = tl.load(tables.expert_bias + columns, mask=real, other=-INF).to(tl.float32)
        of_keys = barred(of_keys, of_keys)  # such an expert is never chosen
    return Biases(of_logits, of_keys)


@triton.jit
def selection_key(logits, softmax, expert_bias, FAST: tl.constexpr, spec: tl.constexpr):
    """Compute the keys by which experts are ranked. FAST: scores to within TOLERANCE."""
    key = logits
    if spec.by_score:
        if spec.rule.score == "softmax":
            key = divide(score_of(logits - softmax.largest[:, None], spec), softmax.total[:, None])
        elif FAST:
            key = fast_score(logits, spec)
        else:
            key = score_of(logits, spec)
    if spec.has_expert_bias:
        key += expert_bias  # finite, or -inf
    return key


@triton.constexpr_function
def reach(spec):
    """Return the distance below the largest key within which packed keys differ; a power of two."""
    reaches = {"softmax": 1.0, "sigmoid": 2.0, "sqrt_softplus": 8.0}
    return reaches[spec.rule.score] if spec.by_score else 32.0


@triton.constexpr_function
def tolerance_of(spec):
    """Return the tolerance of fast keys: TOLERANCE, ROOT_TOLERANCE, or 0 for keys that are exact."""
    tolerances = {"sigmoid": TOLERANCE.value, "sqrt_softplus": ROOT_TOLERANCE.value}
    return tolerances.get(spec.rule.score, 0.0) if spec.by_score else 0.0


@triton.constexpr_function
def portion_code(spec):
    """Return the instruction for x / reach + y, clamped to [0, 1]; 0 for -inf and NaN."""
    return f"fma.rn.sat.f32 $0, $1, {1 / reach(spec)}, $2;"


@triton.jit
def portion(x, y, spec: tl.constexpr):
    """Compute x / reach + y, clamped to [0, 1]; 0 for -inf and NaN."""
    if INTERPRETED:
        x = x * (1.0 / reach(spec)) + y
        return tl.where(x > 0.0, tl.minimum(x, 1.0), 0.0)
    else:
        return tl.inline_asm_elementwise(portion_code(spec), "=f,f,f", [x, y], tl.float32, is_pure=True, pack=1)


@triton.constexpr_function
def num_steps(columns):
    """Return the number of steps in the reach of packed keys, limited by the column's bits and a float's mantissa."""
    return min(1 << 23, (1 << 31) // columns)


@triton.jit
def pack_keys(key, largest, columns, spec: tl.constexpr):
    """Pack keys into uint32 in the same order: steps above the end of the reach, then the inverted column.

    Below key.shape[1] for -inf, and for keys out of reach.
    """
    low: tl.constexpr = key.shape[1] - 1
    steps: tl.constexpr = num_steps(key.shape[1])
    # The lowest bits of a float from 2^23 on are its integer part; subtracting the others removes them.
    counted = portion(key, (1.0 - largest * (1.0 / reach(spec)))[:, None], spec) * steps + 8388608.0
    return ((counted.to(tl.int32, bitcast=True) - 0x4B000000) * (low + 1) + (low - columns)).to(tl.uint32, bitcast=True)


@triton.jit
def gap_below(packed, best):
    """Return the distance from best - 1 down to each row's next packed key below `best`."""
    # Keys not below `best` wrap around to greater distances.
    return tl.min((best - 1)[:, None] - packed, 1)


@triton.jit
def choose_packed(key, largest, columns, slots, k, tolerance: tl.constexpr, spec: tl.constexpr):
    """Choose the k best packed keys: Chosen, which rows [R] are certain of their choice and its order, and the Packed.

    A row is certain if no two of its k best keys and the next are so near that packed keys may err.

    A count of steps errs by a quarter of a step for the portion and half of one for the sum: two of them by 1.5. The
    rounding of a row's largest key shifts all of its keys alike. Keys out of reach, or above it, are farther apart
    than their counts.
    """
    low: tl.constexpr = key.shape[1] - 1
    largest = tl.where(largest == -INF, 0.0, largest)
    packed = pack_keys(key, largest, columns, spec)
    none = (largest > largest).to(tl.int32)
    found = slots + as_in(none, tl.max(slots, 1), spec)[:, None]
    bests = found * 0
    best = (none - 1).to(tl.uint32, bitcast=True)
    nearest = best
    for r in range(k):
        gap = gap_below(packed, best)
        nearest = tl.minimum(nearest, gap)
        best -= gap + 1
        bests = tl.where(found == r, as_in(best.to(tl.int32, bitcast=True), tl.max(found, 1), spec)[:, None], bests)
    gap = gap_below(packed, best)  # without another key, it wraps around to the first
    err = (1.0 + 0.2 * tl.abs(largest)) * (tolerance * num_steps(key.shape[1]) / reach(spec)) + 2.0
    margin = tl.minimum(err, 1.0 * num_steps(key.shape[1])).to(tl.int32) * (low + 1) + low
    margin = margin.to(tl.uint32, bitcast=True)
    certain = (best > low) & (tl.minimum(nearest, gap) >= margin)
    return Chosen((bests & low) ^ low, found), certain, Packed(packed, best, gap, margin)


@triton.jit
def settle(ids, logits, softmax, packed, positions, tables, k, spec: tl.constexpr):
    """Choose among the k best packed keys and the next by their exact keys: ids [R, slots], and which rows are certain.

    Certain are rows of which all other keys are so far below that none can be one of the k best. ids: of the k best.
    """
    low: tl.constexpr = logits.shape[1] - 1
    slots = positions.contenders
    next = packed.best - 1 - packed.gap
    certain = (packed.best > low) & (gap_below(packed.keys, next) >= packed.margin)
    next = as_in(((next & low) ^ low).to(tl.int32), tl.max(slots, 1), spec)[:, None]
    found = slots + next * 0
    among = pick(ids.to(tl.float32, bitcast=True), tl.minimum(found, spec.k - 1), positions.slots, found, spec)
    among = tl.where(found < spec.k, among.to(tl.int32, bitcast=True), next)  # the next one in all slots that are left
    x = pick(logits, among, positions.columns, found, spec)
    if spec.whole_softmax:
        softmax = Softmax(as_in(softmax.largest, tl.max(found, 1), spec), as_in(softmax.total, tl.max(found, 1), spec))
    key = selection_key(x, softmax, load_biases(tables, among, spec).key, False, spec)
    usable = is_finite(x) & is_finite(key) & (among < spec.num_experts)
    ids = choose_best(tl.where(usable, order(key), LOWEST), among, ids * 0 + positions.slots, k, spec)
    return ids, certain


@triton.jit
def choose_best(ranks, columns, found, k, spec: tl.constexpr):
    """Choose the ids [R, slots] of the k best ranks (integers), best first, the smaller id in a tie; -1 for none."""
    ids = found * 0 - 1
    for r in range(k):
        best, id = best_of(ranks, columns)
        ranks = tl.where(columns == id[:, None], LOWEST, ranks)
        id = as_in(tl.where(best > LOWEST, id, -1), tl.max(found, 1), spec)
        ids = tl.where(found == r, id[:, None], ids)
    return ids


@triton.jit
def choose_fast(logits, softmax, live, positions, expert_bias, args, SETTLE: tl.constexpr, spec: tl.constexpr):
    """Choose each row's experts by packed keys: Chosen, which rows [R] are certain, and 0 if all were at first.

    SETTLE: rows that have near ties are settled among the few experts that matter. live [R]: rows that exist.
    """
    columns = positions.columns
    tolerance: tl.constexpr = tolerance_of(spec)
    key = selection_key(logits, softmax, expert_bias, True, spec)
    key = barred(key, logits)
    if not spec.has_expert_bias:
        key = tl.where(columns < spec.num_experts, key, -INF)
    if spec.rule.num_groups > 1:
        key, largest, sure = best_groups(key, columns, positions.groups, tolerance, spec)
    else:
        largest = tl.max(key, 1)
        sure = largest == largest
    if spec.by_score and spec.rule.score == "sqrt_softplus":
        sure &= tl.max(tl.where(columns < spec.num_experts, logits, 0.0), 1) <= MOST_ROOTED
    k = args.scalars.k
    chosen, certain, packed = choose_packed(key, largest, columns, positions.slots, k, tolerance, spec)
    certain &= sure
    ids = chosen.ids
    doubt = 1
    if SETTLE:
        doubt = tl.max((live & (certain == 0)).to(tl.int32), 0)
    if SETTLE and doubt > 0:
        settled, known = settle(ids, logits, softmax, packed, positions, args.tables, k, spec)
        keep = as_in(certain.to(tl.int32), tl.max(ids, 1), spec)[:, None] > 0
        ids = tl.where(keep, ids, settled)
        certain |= known & sure
    return Chosen(ids, chosen.slots), certain, doubt


@triton.jit
def choose_exactly(logits, usable, softmax, positions, expert_bias, k, spec: tl.constexpr):
    """Choose each row's experts by exact keys: Chosen. usable [R, C]: experts whose logit is finite."""
    columns = positions.columns
    key = selection_key(logits, softmax, expert_bias, False, spec)
    key = tl.where(usable & is_finite(key), key, -INF)
    if spec.rule.num_groups > 1:
        key, _largest, _sure = best_groups(key, columns, positions.groups, 0.0, spec)
    none = tl.max((key > key).to(tl.int32), 1)
    found = positions.slots + as_in(none, tl.max(positions.slots, 1), spec)[:, None]
    return Chosen(choose_best(tl.where(key > -INF, order(key), LOWEST), columns, found, k, spec), found)

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
"""Choice of each row's experts as its logits come by, a chunk of columns at a time, in Triton; for Blackwell.

    kept = the best groups, by keys of all chunks                          only of a rule with groups
    places = k empty ones: key -inf, expert -1
    for each chunk of columns, in order:
        key = logit, or score (+ expert_bias); only finite keys compete, and only those of groups that are kept
        for each column, in order:
            put it before the first place whose key is smaller; the places from there on move down, the last falls out
    weights = scores of the chosen; renormalised, scaled

A thread has whole rows, so threads exchange nothing: places and columns are vectors, an element a row. Keys are those
of `envoi.ops.moe.router.reference` bit for bit, and are compared as they are; in a tie the smaller id wins, as it
comes first. So no row has to be chosen again.

LOAD: function of `products` and a chunk's number i that returns the products [R, C] of columns i * C on.
"""

import triton
import triton.language as tl

from envoi.epilogues.device import INF, rounded_product
from envoi.ops.moe.router.choose_experts import EPS, rounded, weigh
from envoi.ops.moe.router.device_types import Places, Softmax
from envoi.ops.moe.router.selection import as_in, is_finite, load_biases, merge_two, score_of, selection_key


@triton.jit
def choose_running(
    products, rows, live, positions, args, LOAD: tl.constexpr, NUM_CHUNKS: tl.constexpr, spec: tl.constexpr
):
    """Choose the experts of rows [R]; store all outputs but counts, and count experts if wanted.

    live [R]: rows that exist. positions: columns [1, C] of a chunk, slots [1, slots]. Rows and columns have the layout
    of a chunk's products.
    """
    softmax = Softmax(0.0, 1.0)
    if spec.whole_softmax:
        softmax = softmax_of_rows(products, rows, positions.columns, args, LOAD, NUM_CHUNKS, spec)
    if spec.rule.num_groups > 1:
        kept = kept_groups(products, rows, positions.columns, softmax, args, LOAD, NUM_CHUNKS, spec)
    places = empty_places(rows, spec)
    for i in range(NUM_CHUNKS):
        columns = positions.columns + i * positions.columns.shape[1]
        logits, key = load_keys(products, i, columns, softmax, args, LOAD, spec)
        if spec.want_logits:
            store_logits(logits, columns, rows, live, args, spec)
        if spec.rule.num_groups > 1:
            key = tl.where((kept[:, None] >> (columns // spec.group_size)) & 1 != 0, key, -INF)
        places = put_chunk(places, key, logits, i * columns.shape[1], spec)
    weights = store_places(places, rows, live, softmax, positions.slots, args, spec)
    if spec.want_dense:
        weights = split_columns(weights, rows, spec)
        for i in range(NUM_CHUNKS):
            columns = positions.columns + i * positions.columns.shape[1]
            store_dense_chunk(places.ids, weights, rows, live, columns, args, spec)


@triton.jit
def load_chunk(products, i, columns, args, LOAD: tl.constexpr, spec: tl.constexpr):
    """Return a chunk's logits [R, C], the mask of finite ones of real experts, and the bias of its keys."""
    logits = rounded_product(LOAD(products, i), args.scalars.alpha)
    biases = load_biases(args.tables, columns, spec)
    if spec.has_logit_bias:
        logits += biases.logit
    return logits, (columns < spec.num_experts) & is_finite(logits), biases.key


@triton.jit
def load_keys(products, i, columns, softmax, args, LOAD: tl.constexpr, spec: tl.constexpr):
    """Return a chunk's logits and keys [R, C]; -inf for an expert that can't be chosen."""
    logits, usable, expert_bias = load_chunk(products, i, columns, args, LOAD, spec)
    key = selection_key(logits, softmax, expert_bias, False, spec)
    return logits, tl.where(usable & is_finite(key), key, -INF)


@triton.jit
def softmax_of_rows(products, rows, columns, args, LOAD: tl.constexpr, NUM_CHUNKS: tl.constexpr, spec: tl.constexpr):
    """Return the Softmax of each row over all chunks: 0 and EPS where no logit is usable."""
    largest = rows.to(tl.float32) * 0.0 - INF
    for i in range(NUM_CHUNKS):
        logits, usable, _bias = load_chunk(products, i, columns + i * columns.shape[1], args, LOAD, spec)
        largest = tl.maximum(largest, tl.max(tl.where(usable, logits, -INF), 1))
    largest = tl.where(largest == -INF, 0.0, largest)
    total = largest * 0.0
    for i in range(NUM_CHUNKS):
        logits, usable, _bias = load_chunk(products, i, columns + i * columns.shape[1], args, LOAD, spec)
        total += tl.sum(tl.where(usable, score_of(logits - largest[:, None], spec), 0.0), 1)
    return Softmax(largest, tl.maximum(total, EPS))


@triton.jit
def kept_groups(
    products, rows, columns, softmax, args, LOAD: tl.constexpr, NUM_CHUNKS: tl.constexpr, spec: tl.constexpr
):
    """Return the numbers of each row's best groups, as bits [R]; a tie between groups goes to the smaller number."""
    num_groups: tl.constexpr = spec.rule.num_groups
    bests, seconds = (), ()
    for _ in tl.static_range(num_groups):
        bests += (rows.to(tl.float32) * 0.0 - INF,)
        seconds += (rows.to(tl.float32) * 0.0 - INF,)
    for i in range(NUM_CHUNKS):
        of_chunk = columns + i * columns.shape[1]
        _logits, key = load_keys(products, i, of_chunk, softmax, args, LOAD, spec)
        bests, seconds = merge_groups(bests, seconds, key, of_chunk // spec.group_size, spec)
    scores = ()
    for g in tl.static_range(num_groups):
        if spec.rule.group_score == "max":
            scores += (bests[g],)
        else:
            scores += (bests[g] + tl.where(seconds[g] == -INF, 0.0, seconds[g]),)
    kept = rows * 0
    for g in tl.static_range(num_groups):
        better = (
            rows.to(tl.float32) * 0.0
        )  # counted in float32: of integers the compiler makes bytes of bits, in memory
        for other in tl.static_range(num_groups):
            if other < g:
                better += tl.where(scores[other] >= scores[g], 1.0, 0.0)
            else:
                better += tl.where(scores[other] > scores[g], 1.0, 0.0)
        kept |= tl.where(better < spec.rule.num_topk_groups, 1 << g, 0)
    return kept


@triton.jit
def merge_groups(bests, seconds, key, groups, spec: tl.constexpr):
    """Return the largest and the second largest key of each group, of a chunk [R, C] and of the chunks before."""
    num_groups: tl.constexpr = spec.rule.num_groups
    best, second = (), ()
    for g in tl.static_range(num_groups):
        mine = tl.where(groups == g, key, -INF)
        if spec.rule.group_score == "max":
            best += (tl.maximum(bests[g], tl.max(mine, 1)),)
            second += (seconds[g],)
        else:
            first, next = tl.reduce((mine, tl.where(mine > mine, 0.0, -INF)), 1, merge_two)
            first, next = merge_two(bests[g], seconds[g], first, next)
            best += (first,)
            second += (next,)
    return best, second


@triton.jit
def store_logits(logits, columns, rows, live, args, spec: tl.constexpr):
    """Store a chunk's logits: [M, N]."""
    at = rows.to(tl.int64)[:, None] * spec.num_experts + columns
    tl.store(args.outputs.logits + at, logits, mask=live[:, None] & (columns < spec.num_experts))


@triton.jit
def empty_places(rows, spec: tl.constexpr):
    """Return k empty Places for each of `rows` [R]."""
    k: tl.constexpr = spec.k
    keys, ids, logits = (), (), ()
    for _ in tl.static_range(k):
        keys += (rows.to(tl.float32) * 0.0 - INF,)
        ids += (rows * 0 - 1,)
        logits += (rows.to(tl.float32) * 0.0,)
    return Places(keys, ids, logits)


@triton.jit
def put_chunk(places, key, logits, first, spec: tl.constexpr):
    """Return the Places after a chunk of columns from `first` on: keys and logits [R, C]."""
    keys = split_columns(key, places.ids[0], spec)
    of_keys = split_columns(logits, places.ids[0], spec)
    count: tl.constexpr = key.shape[1]
    for c in tl.static_range(count):
        places = put(places, keys[c], first + c, of_keys[c], spec)
    return places


@triton.jit
def put(places, key, id, logit, spec: tl.constexpr):
    """Return the Places after one more expert, with a greater id than all before: its keys and logits [R]."""
    k: tl.constexpr = spec.k
    keys, ids, logits = (), (), ()
    falling_key, falling_id, falling_logit = key, places.ids[0] * 0 + id, logit
    for r in tl.static_range(k):
        wins = key > places.keys[r]  # and so it does against all places after this one
        keys += (tl.where(wins, falling_key, places.keys[r]),)
        ids += (tl.where(wins, falling_id, places.ids[r]),)
        falling_key = tl.where(wins, places.keys[r], falling_key)
        falling_id = tl.where(wins, places.ids[r], falling_id)
        if spec.by_score or spec.has_expert_bias:
            logits += (tl.where(wins, falling_logit, places.logits[r]),)
            falling_logit = tl.where(wins, places.logits[r], falling_logit)
        else:
            logits += (keys[r],)
    return Places(keys, ids, logits)


@triton.jit
def split_columns(x, like, spec: tl.constexpr):
    """Return the columns of x [R, C] in order, a tuple of vectors in the layout of `like` [R]."""
    count: tl.constexpr = x.shape[1]
    if count == 1:
        return (as_in(tl.reshape(x, (x.shape[0],)), like, spec),)
    else:
        left, right = tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, count // 2)), (0, 2, 1)))
        return split_columns(left, like, spec) + split_columns(right, like, spec)


@triton.jit
def join_columns(vectors, FIRST: tl.constexpr, STEP: tl.constexpr, COUNT: tl.constexpr):
    """Return vectors FIRST, FIRST + STEP, .. as [R, COUNT], a power of two; the last stands for those after it, too."""
    if COUNT == 1:
        return tl.expand_dims(vectors[min(FIRST, len(vectors) - 1)], 1)
    else:
        evens = join_columns(vectors, FIRST, 2 * STEP, COUNT // 2)
        odds = join_columns(vectors, FIRST + STEP, 2 * STEP, COUNT // 2)
        return tl.reshape(tl.join(evens, odds), (evens.shape[0], COUNT))


@triton.jit
def store_places(places, rows, live, softmax, slots, args, spec: tl.constexpr):
    """Store experts and weights of rows [R] that are live, and count their experts; return the weights [R, slots].

    slots: 0, 1, 2, .. [1, slots].
    """
    outputs = args.outputs
    found = slots + as_in(rows * 0, tl.max(slots, 1), spec)[:, None]
    of_rows = tl.max(found, 1)
    ids = as_in(join_columns(places.ids, 0, 1, spec.slots), found, spec)
    ids = tl.where(found < spec.k, ids, -1)
    logits = as_in(join_columns(places.logits, 0, 1, spec.slots), found, spec)
    if spec.whole_softmax:
        softmax = Softmax(as_in(softmax.largest, of_rows, spec), as_in(softmax.total, of_rows, spec))
    weights = weigh(ids, logits, softmax, args.scalars.routed_scale, spec)
    mask = as_in(live, of_rows, spec)[:, None] & (found < spec.k)
    at = as_in(rows, of_rows, spec).to(tl.int64)[:, None] * spec.k + found
    tl.store(outputs.ids + at, ids, mask=mask)
    tl.store(outputs.weights + at, rounded(weights, outputs.weights), mask=mask)
    if spec.want_counts:
        tl.atomic_add(outputs.histogram + ids, ids * 0 + 1, mask=mask & (ids >= 0), sem="relaxed")
    return weights


@triton.jit
def store_dense_chunk(ids, weights, rows, live, columns, args, spec: tl.constexpr):
    """Store a chunk of dense weights: those of ids, k vectors [R], at their columns, zeros elsewhere."""
    k: tl.constexpr = spec.k
    all = (columns + rows[:, None] * 0).to(tl.float32) * 0.0
    for r in tl.static_range(k):
        all = tl.where(columns == ids[r][:, None], weights[r][:, None], all)
    dense = args.outputs.dense
    at = dense + rows.to(tl.int64)[:, None] * spec.num_experts + columns
    tl.store(at, rounded(all, dense), mask=live[:, None] & (columns < spec.num_experts))

"""Fast mode on a device: scores by tensor cores, then the k best of them. The host never waits for the device."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import gcd
from typing import Any, Literal

import torch

from envoi import env
from envoi.ops.indexer import (
    kernel_best,
    kernel_candidates,
    kernel_rank,
    kernel_scores,
    kernel_select,
    kernel_set,
    room,
)
from envoi.ops.indexer.layout import HEAD_DIM, PAGE_SIZE, is_fp4
from envoi.runtime import workspace as workspace_of
from envoi.runtime.devices import implementation, num_sms
from envoi.runtime.launch import launch
from envoi.runtime.math import next_power_of_2
from envoi.runtime.tma import descriptor, unswizzled_descriptor

MANY_ROWS = kernel_set.MOST_ROWS.value  # a call of more is a prefill
SHARED_ROWS, SHARED_KEYS = 128, 1 << 20  # least rows, and keys of all of them, of smaller calls whose rows share tiles
# Most scratch memory of a call: by radix or among candidates; by clusters, and in a prefill.
WORKSPACE_BYTES, LARGE_BYTES = 16 << 20, 128 << 20
MAX_ROWS, MAX_BLOCKS = 256, 512  # most rows of a launch, or blocks of them: a program finds its tiles in a sum over all
MAX_LENGTH = 1 << 29  # positions are sorted in 29 bits
LIST_WORDS = 2 * kernel_select.MOST.value + 1  # of a program's list, and their number
NUM_GROUPS, TOP_LEVEL = kernel_scores.NUM_GROUPS.value, kernel_scores.TOP_LEVEL.value
SCORE_BINS, NUM_COUNTERS = kernel_scores.SCORE_BINS.value, kernel_scores.NUM_COUNTERS.value
CAPACITY = kernel_candidates.CAPACITY.value

# As measured: notes/2026-11-indexer.md, notes/2026-11-indexer-select.md.
TILE = 128  # tokens that are scored at a time
PROGRAMS_PER_SM, FP4_PROGRAMS_PER_SM = 3, 2
HOPPER_WARPS = 4
PREFILL_REGISTERS = 168  # a thread, of which two roles of HOPPER_WARPS get what the producer leaves
HOPPER_HEADS, PREFILL_HEADS, TRITON_HEADS = 8, 16, 16  # least widths of products, or of a row in them
STAGES, PREFILL_STAGES = 3, {1: 10, 2: 8}  # tiles in a program's pipeline; of a prefill's, by its sets
SETS, COLUMNS = 2, 256  # of a prefill's products of a tile of keys: most of them, and heads of a set's rows
CHUNKS = (4096, 8192, 16384)  # scores that a program holds: the least that all of the longest row fits into,
LONG_CHUNK = 8192  # or, of longer ones, these at a time
SELECT_WARPS, ORDER_WARPS = 16, 8  # of a program of selection; of one that also puts the best first
PREFILL_CHUNK = 4096  # scores that a program of a prefill's selection holds
SELECT_REGISTERS, ORDER_REGISTERS = 64, 128  # a thread of those, so that several programs run on an SM
MOST_PROGRAMS = kernel_set.MOST_PROGRAMS.value  # of a cluster that selects a set
MOST_CLUSTERED = MOST_PROGRAMS * CHUNKS[-1]  # scores that a cluster holds
SET_WARPS = 32  # of a program of such a cluster, where LONG_CHUNK scores are too few
SPREAD = {2: 64, 4: 31, 8: 16}  # clusters of so many programs that get an SM for each; of more, two share one, or wait
SHARING = 1.25  # times as many clusters: of more, short rows share some
BEST_WARPS = 16  # of the program that puts a cluster's set in order
PARTS = 4  # programs that select from a longer row
FEW_ROWS, FEW_RANKED, MOST_CANDIDATES = 2, 4, 1 << 18  # see `by_candidates`
BLOCKS = (1024, 2048, 4096)  # scores of a program that lists candidates: the least with no more programs than SMs
EARLY = True  # selection's launch overlaps with the end of the scores'


@dataclass(frozen=True)
class Problem:
    """Tensors of a call, contiguous, and its numbers; shapes as in `envoi.indexer_topk`."""

    q: torch.Tensor
    k_cache: torch.Tensor
    weights: torch.Tensor
    seq_lens: torch.Tensor
    table: torch.Tensor
    k: int
    next_n: int
    shares_tiles: bool = True  # False where the scores' kernel, other than Hopper's, takes rows one by one

    @property
    def num_rows(self) -> int:
        """Number of query rows."""
        return self.q.shape[0]

    @property
    def is_prefill(self) -> bool:
        """Whether rows are so many that programs of one row each fill the GPU."""
        return self.num_rows > MANY_ROWS

    @property
    def outgrows_clusters(self) -> bool:
        """Whether the table has room for rows that are longer than what a cluster holds."""
        return self.max_length > MOST_CLUSTERED

    @property
    def width(self) -> int:
        """Number of columns of the block table."""
        return self.table.shape[1]

    @property
    def max_length(self) -> int:
        """Most tokens that a request can have."""
        return self.width * PAGE_SIZE


@dataclass(frozen=True)
class Order:
    """Outputs' form. slots: of the cache, else positions. by_score: best first, else ascending positions.

    any: either will do. as_torch: NaN beats all numbers, and short rows by score are in the order of torch's sort.
    """

    slots: bool
    by_score: bool
    any: bool = False
    as_torch: bool = False

    def least(self, k: int) -> int:
        """Return up to how many tokens a row needs no scores."""
        return 0 if self.by_score else k


@dataclass(frozen=True)
class Workspace:
    """Scratch memory for the rows that are processed at a time, written anew for the next.

    logits [rows, max_length] float32; groups [rows, NUM_GROUPS] int32: the best keys of groups of neighbours;
    lists [rows, parts * (2 * MOST + 1)] int32: what each program of a row hands to the last.
    A prefill has neither groups nor lists, nor has a call whose rows clusters can all hold. In another call rows of at
    most `grouped` tokens have no groups: clusters select from these. block: `rows_of_block`.
    Where the best are found among candidates, groups are int16, upper halves of keys, and in place of lists there are
    listed [rows, max_length] and bins [rows, SCORE_BINS, CAPACITY] int64, composites, counters [rows, NUM_COUNTERS]
    int32.
    """

    logits: torch.Tensor
    block: int = 1
    groups: torch.Tensor | None = None
    lists: torch.Tensor | None = None
    listed: torch.Tensor | None = None
    bins: torch.Tensor | None = None
    counters: torch.Tensor | None = None
    grouped: int = 0


# How the best are chosen: by a program a row, or PARTS; among candidates; by clusters of programs, or one program, that
# hold a row (`kernel_set`, `kernel_best`), and of rows too long for that by PARTS programs.
Way = Literal["radix", "candidates", "clusters"]


def num_parts(p: Problem) -> int:
    """Return the number of programs that select from a long row; 1 if no row is long, or if rows fill the GPU."""
    return PARTS if p.max_length > CHUNKS[-1] and not p.is_prefill else 1


def list_words(p: Problem) -> int:
    """Return the words of a row's lists; none where one program has all of a row."""
    return num_parts(p) * LIST_WORDS if num_parts(p) > 1 else 0


def way_of(p: Problem, order: Order, early: bool) -> Way:
    """Return the way of a call. early: selection is launched before the scores' end, in the fast mode on Hopper."""
    if by_candidates(p, order) and (p.outgrows_clusters or not early):
        return "candidates"
    return "clusters" if early and not p.is_prefill else "radix"


def by_candidates(p: Problem, order: Order) -> bool:
    """Tell whether candidates for the best, ranked by many programs a row, are faster than PARTS programs a row.

    They are where the best come first in long rows, if rows too long for clusters are few, and where any order will do
    in a row or two that are very long. Rows are those that clusters don't take: too long, or not of the fast mode on
    Hopper. Not in a prefill, whose rows fill the GPU.
    """
    if p.max_length > MOST_CANDIDATES or p.is_prefill:
        return False
    if order.any:
        return p.num_rows <= FEW_ROWS and p.max_length > CHUNKS[-1]
    few = p.num_rows <= FEW_RANKED or p.max_length <= MOST_CLUSTERED
    return order.by_score and few and p.max_length > LONG_CHUNK


def at_once(p: Problem, order: Order, early: bool, has_groups: bool) -> bool:
    """Tell whether `select_kernel` is compiled without code for long rows, where that was measured to be faster.

    early: it is launched before the scores' end, as it was measured; if not, the code is left out wherever rows have no
    groups.
    """
    if p.max_length > chunk_of(p):
        return False
    return p.is_prefill and not order.by_score if early else not has_groups


def chunk_of(p: Problem) -> int:
    """Return how many scores a program of `select_kernel` holds: all of the longest row's, or so many at a time."""
    if p.is_prefill:
        return PREFILL_CHUNK
    return next((size for size in CHUNKS if p.max_length <= size), LONG_CHUNK)


def rows_that_fit(p: Problem, way: Way = "radix") -> int:
    """Return the number of rows for whose workspace there is room."""
    beside = 0  # words of a row, beside its scores
    if way == "candidates":
        beside = NUM_GROUPS + 2 * (p.max_length + SCORE_BINS * CAPACITY) + NUM_COUNTERS
    elif has_lists(p, way):
        beside = NUM_GROUPS + list_words(p)
    num_bytes = LARGE_BYTES if p.is_prefill or way == "clusters" else WORKSPACE_BYTES
    return num_bytes // max(1, 4 * (p.max_length + beside))


def padded_heads(p: Problem) -> int:
    """Return the width of a row in a prefill's products."""
    return max(PREFILL_HEADS, next_power_of_2(p.q.shape[1]))


def most_shared(p: Problem) -> int:
    """Return how many rows of a request share a tile of keys at most: in two sets where that is faster, and fits."""
    sets = 1 if is_fp4(p.k_cache) or p.q.shape[1] <= 32 else SETS
    return sets * COLUMNS // padded_heads(p)


def in_turns(p: Problem) -> bool:
    """Tell whether each request gets its own launches: it has many rows, of which the last block is smaller."""
    return p.shares_tiles and p.next_n > MANY_ROWS and p.next_n % most_shared(p) != 0


def has_lists(p: Problem, way: Way) -> bool:
    """Tell whether rows have groups, and lists of what each of their programs hands to the last."""
    return not p.is_prefill and (way == "radix" or (way == "clusters" and p.outgrows_clusters))


def reads_groups(p: Problem, way: Way) -> bool:
    """Tell whether selection reads groups' best keys, which rows that share tiles don't have."""
    return way == "candidates" or (has_lists(p, way) and p.max_length > CHUNKS[-1])


def rows_of_block(p: Problem, way: Way = "radix") -> int:
    """Return the number of neighbouring rows, all of one request, that share tiles of keys; 1 in a small call."""
    is_large = p.num_rows >= SHARED_ROWS and p.num_rows * p.max_length >= SHARED_KEYS
    if not (p.shares_tiles and (p.is_prefill or is_large)) or reads_groups(p, way):
        return 1
    return most_shared(p) if in_turns(p) else gcd(p.next_n, most_shared(p))


def rows_at_once(p: Problem, way: Way = "radix") -> int:
    """Return the number of rows of a launch, in whole blocks if that isn't all rows; at least one row."""
    block = rows_of_block(p, way)
    most = MAX_BLOCKS * block if block > 1 else MAX_ROWS
    return max(1, min(p.num_rows, most, rows_that_fit(p, way) // block * block))


def workspace(p: Problem, way: Way = "radix") -> Workspace:
    """Allocate the Workspace of `rows_at_once` rows."""
    rows, block, device = rows_at_once(p, way), rows_of_block(p, way), p.q.device

    def empty(columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=dtype, device=device)

    logits = empty(p.max_length, torch.float32)
    if has_lists(p, way):
        groups, lists = empty(NUM_GROUPS, torch.int32), empty(list_words(p), torch.int32)
        return Workspace(logits, block, groups, lists, grouped=MOST_CLUSTERED if way == "clusters" else 0)
    if way != "candidates":
        return Workspace(logits, block)
    groups = empty(NUM_GROUPS, torch.int16)
    lists = empty(p.max_length, torch.int64), empty(SCORE_BINS * CAPACITY, torch.int64)
    return Workspace(logits, block, groups, None, *lists, empty(NUM_COUNTERS, torch.int32))


def launches(p: Problem, step: int) -> Iterator[tuple[int, int]]:
    """Yield (first row, number of rows), at most `step`, of the rows that are processed at a time."""
    together = p.next_n if in_turns(p) else max(1, p.num_rows)
    for begin in range(0, p.num_rows, together):
        end = begin + together
        yield from ((first, min(step, end - first)) for first in range(begin, end, step))


def topk(p: Problem, order: Order) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose [rows, k] int32 as `envoi.indexer_topk` describes, and return errors [rows] int32: 0 = no error."""
    early = EARLY and implementation(p.q.device) == "hopper"
    return in_blocks(p, score, order, early)


def empty_outputs(p: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate a call's outputs [rows, k] and errors [rows], int32."""
    out = torch.empty(p.num_rows, p.k, dtype=torch.int32, device=p.q.device)
    return out, torch.empty(p.num_rows, dtype=torch.int32, device=p.q.device)


def in_blocks(
    p: Problem, score: Callable[[Problem, Workspace, int, int, int], None], order: Order, early: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Score and choose some rows at a time. Returns outputs [rows, k] and errors [rows], int32.

    score: takes the first row, the number of rows, and up to how many tokens a row needs no scores.
    """
    out, errors = empty_outputs(p)
    if p.num_rows:
        way = way_of(p, order, early)
        space = workspace(p, way)
        least = 0 if way == "candidates" else order.least(p.k)
        for first, num_rows in launches(p, len(space.logits)):
            if p.max_length > least:
                score(p, space, first, num_rows, least)
            rest = first, num_rows, out, errors, order
            if way == "clusters":
                launch(kernel_set.set_kernel, *set_arguments(p, space, *rest))
                if best_follows(p, order):
                    launch(kernel_best.best_kernel, *best_arguments(p, space, first, num_rows, out, order))
                if p.outgrows_clusters:
                    launch(kernel_select.select_kernel, *select_arguments(p, space, *rest, early, MOST_CLUSTERED))
            elif way == "candidates":
                launch(kernel_candidates.candidates_kernel, *candidates_arguments(p, space, first, num_rows, order))
                launch(kernel_rank.rank_kernel, *rank_arguments(p, space, *rest))
            else:
                launch(kernel_select.select_kernel, *select_arguments(p, space, *rest, early))
    return out, errors


def score(p: Problem, space: Workspace, first: int, num_rows: int, least: int = 0) -> None:
    """Fill the logits and the groups of those of these rows that have more than `least` tokens."""
    if p.k_cache.shape[0] and implementation(p.q.device) == "hopper":
        from envoi.ops.indexer import kernel_hopper, kernel_prefill

        if space.block > 1:
            launch(kernel_prefill.prefill_scores_kernel, *prefill_arguments(p, space, first, num_rows, least))
        else:
            launch(kernel_hopper.scores_kernel, *hopper_arguments(p, space, first, num_rows, least))
    else:
        launch(kernel_scores.scores_kernel, *scores_arguments(p, space, first, num_rows, least))


def hopper_arguments(
    p: Problem, space: Workspace, first: int, num_rows: int, least: int
) -> tuple[tuple[int], tuple, dict]:
    """Return grid, arguments and options of Hopper's `scores_kernel`."""
    values, scales = _descriptors(p.k_cache)
    early = EARLY and space.counters is None  # `set_kernel` and `select_kernel` start before this one's end
    heads = p.q.shape[1]
    return (_programs(p, num_rows),), (
        values, scales, p.q, p.weights, p.seq_lens, p.table, space.logits, space.groups, space.counters,
        first, num_rows, p.width, p.k_cache.shape[0], p.next_n,
        max(HOPPER_HEADS, next_power_of_2(heads)), heads, least, max(32, next_power_of_2(len(space.logits))),
        STAGES, early, space.grouped,
    ), {"num_warps": HOPPER_WARPS, "maxnreg": _registers(_programs_per_sm(p))}  # fmt: skip


def prefill_arguments(
    p: Problem, space: Workspace, first: int, num_rows: int, least: int
) -> tuple[tuple[int], tuple, dict]:
    """Return grid, arguments and options of `prefill_scores_kernel`."""
    from envoi.ops.indexer import kernel_prefill

    values, scales = _descriptors(p.k_cache)
    block = space.block
    columns = block * padded_heads(p)
    sets = -(-columns // COLUMNS)
    programs = min(-(-num_rows // block) * -(-p.max_length // TILE), num_sms(p.q.device))
    return (programs,), (
        values, scales, p.q, p.weights, p.seq_lens, p.table, space.logits,
        first, num_rows, p.width, p.k_cache.shape[0], p.next_n,
        p.q.shape[1], least, max(32, next_power_of_2(-(-len(space.logits) // block))), block, sets,
        columns // (kernel_prefill.CONSUMERS.value * sets), PREFILL_STAGES[sets], EARLY,
    ), {"num_warps": HOPPER_WARPS, "maxnreg": PREFILL_REGISTERS, "launch_pdl": EARLY}  # fmt: skip


def _descriptors(k_cache: torch.Tensor) -> tuple[Any, Any]:
    """Return the TMA descriptors of a cache's values and scales, or of values in FP4 and factors."""
    flat = k_cache.view(-1)
    if is_fp4(k_cache):
        words = flat.view(torch.int32)
        values = descriptor(words.view(-1, HEAD_DIM // 8), PAGE_SIZE, HEAD_DIM // 8)
        return values, unswizzled_descriptor(words.view(-1, PAGE_SIZE), 1, PAGE_SIZE)
    values = descriptor(flat.view(torch.float8_e4m3fn).view(-1, HEAD_DIM), PAGE_SIZE, HEAD_DIM)
    return values, unswizzled_descriptor(flat.view(torch.float32).view(-1, PAGE_SIZE), 1, PAGE_SIZE)


def _programs_per_sm(p: Problem) -> int:
    """Return the number of programs that run at a time on an SM; fewer where 64 products and a key are in registers."""
    return FP4_PROGRAMS_PER_SM if is_fp4(p.k_cache) and p.q.shape[1] > 32 else PROGRAMS_PER_SM


def _registers(programs: int) -> int:
    """Return the registers per thread of Hopper's kernel with which so many programs fit an SM."""
    return 65536 // (32 * (HOPPER_WARPS + 4) * programs) // 8 * 8  # the producer's warp takes up four


def scores_arguments(
    p: Problem, space: Workspace, first: int, num_rows: int, least: int
) -> tuple[tuple[int], tuple, dict]:
    """Return grid, arguments and options of `scores_kernel`."""
    bytes_, heads = p.k_cache.view(torch.uint8), p.q.shape[1]
    return (_programs(p, num_rows),), (
        p.q.view(torch.uint8), bytes_, bytes_.view(-1).view(torch.float32), p.weights, p.seq_lens, p.table,
        space.logits, space.groups, space.counters, first, num_rows, p.width, p.k_cache.shape[0], p.next_n,
        max(TRITON_HEADS, next_power_of_2(heads)), heads, is_fp4(p.k_cache), least,
        next_power_of_2(len(space.logits)), TILE,
    ), {"num_warps": 4, "num_stages": 1}  # fmt: skip


def select_arguments(
    p: Problem, space: Workspace, first: int, num_rows: int, out: torch.Tensor, errors: torch.Tensor, order: Order,
    early: bool, above: int = 0,
) -> tuple[tuple[int, int], tuple, dict]:  # fmt: skip
    """Return grid, arguments and options of `select_kernel`, for rows of more than `above` tokens, or all."""
    early = early and is_scored(p, order)
    levels = TOP_LEVEL - 1 if order.as_torch else TOP_LEVEL  # tiles of the exact mode are of 64 tokens
    parts = num_parts(p)
    if space.groups is None:
        parts, levels = 1, 0
    once = at_once(p, order, early, space.groups is not None)
    options = {"num_warps": ORDER_WARPS if order.by_score or (p.is_prefill and once) else SELECT_WARPS}
    if p.is_prefill:
        options["maxnreg"] = ORDER_REGISTERS if order.by_score else SELECT_REGISTERS
    counters = workspace_of.counters(num_rows, p.q.device)
    words = torch.empty(num_rows * parts, room.NUM_WORDS.value, dtype=torch.int32) if env.interpreting() else None
    return (num_rows, parts), (
        space.logits, space.groups, space.lists, counters, p.seq_lens, p.table, out, errors, words,
        first, num_rows, p.width, p.k_cache.shape[0], p.next_n,
        p.k, next_power_of_2(p.k), order.slots, order.by_score, order.as_torch, levels, chunk_of(p), parts, early,
        once, above,
    ), options | ({"launch_pdl": True} if early else {})  # fmt: skip


def is_scored(p: Problem, order: Order) -> bool:
    """Tell whether the scores' kernel is launched: else selection may not start before the end of what was before."""
    return p.max_length > order.least(p.k)


def best_follows(p: Problem, order: Order) -> bool:
    """Tell whether `best_kernel` follows `set_kernel`: the best come first, in rows that have a cluster."""
    return order.by_score and p.max_length > LONG_CHUNK


def set_arguments(
    p: Problem, space: Workspace, first: int, num_rows: int, out: torch.Tensor, errors: torch.Tensor, order: Order
) -> tuple[tuple[int], tuple, dict]:
    """Return grid, arguments and options of `set_kernel`."""
    programs, words = 1, None
    options = {"num_warps": SELECT_WARPS, "launch_pdl": is_scored(p, order)}
    if env.interpreting():
        words = torch.empty(num_rows, room.NUM_WORDS.value, dtype=torch.int32)
    else:
        programs = min(MOST_PROGRAMS, next_power_of_2(max(1, -(-p.max_length // LONG_CHUNK))))
    chunk = CHUNKS[-1] if p.outgrows_clusters else next(size for size in CHUNKS if p.max_length <= programs * size)
    crowded = programs > 1 and num_rows > SPREAD[programs]
    if chunk > LONG_CHUNK:
        options["num_warps"] = SET_WARPS
    elif crowded:
        options["maxnreg"] = SELECT_REGISTERS
    shared = crowded and num_rows > SHARING * SPREAD[programs]
    follows = best_follows(p, order)
    return (num_rows * programs,), (
        space.logits, p.seq_lens, p.table, out, errors, words, first, num_rows, p.width, p.k_cache.shape[0], p.next_n,
        p.k, order.slots and not follows, order.as_torch, chunk, programs, shared, p.outgrows_clusters,
        programs == 1 and num_rows <= num_sms(p.q.device), follows, order.by_score and not follows,
    ), options  # fmt: skip


def best_arguments(
    p: Problem, space: Workspace, first: int, num_rows: int, out: torch.Tensor, order: Order
) -> tuple[tuple[int], tuple, dict]:
    """Return grid, arguments and options of `best_kernel`."""
    words = torch.empty(num_rows, room.NUM_WORDS.value, dtype=torch.int32) if env.interpreting() else None
    return (num_rows,), (
        space.logits, p.seq_lens, p.table, out, words, first, num_rows, p.width, p.next_n,
        p.k, order.slots, order.as_torch, MOST_CLUSTERED if p.outgrows_clusters else 0,
    ), {"num_warps": BEST_WARPS, "launch_pdl": True}  # fmt: skip


def candidates_arguments(
    p: Problem, space: Workspace, first: int, num_rows: int, order: Order
) -> tuple[tuple[int, int], tuple, dict]:
    """Return grid, arguments and options of `candidates_kernel`."""
    most = num_sms(p.q.device)  # programs: one on each
    block = next((size for size in BLOCKS if num_rows * -(-p.max_length // size) <= most), BLOCKS[-1])
    return (-(-p.max_length // block), num_rows), (
        space.logits, space.groups, space.counters, space.listed, space.bins, p.seq_lens, p.table,
        first, num_rows, p.width, p.k_cache.shape[0], p.next_n,
        p.k, order.as_torch, block,
    ), {"num_warps": 16}  # fmt: skip


def rank_arguments(
    p: Problem, space: Workspace, first: int, num_rows: int, out: torch.Tensor, errors: torch.Tensor, order: Order
) -> tuple[tuple[int, int], tuple, dict]:
    """Return grid, arguments and options of `rank_kernel`."""
    return (SCORE_BINS, num_rows), (
        space.listed, space.bins, space.counters, space.logits if order.as_torch else None, p.seq_lens, p.table, out,
        errors, first, num_rows, p.width, p.next_n,
        p.k, order.slots,
    ), {"num_warps": 2}  # fmt: skip


def _programs(p: Problem, num_rows: int) -> int:
    """Return the number of programs: of the most tiles there can be, or of those that run at a time, if fewer."""
    return min(num_rows * -(-p.max_length // TILE), _programs_per_sm(p) * num_sms(p.q.device))

"""Fast mode on a device: scores by tensor cores, then the k best of them. The host never waits for the device."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from envoi.ops.indexer import kernel_candidates, kernel_rank, kernel_scores
from envoi.ops.indexer.layout import HEAD_DIM, PAGE_SIZE
from envoi.runtime.devices import implementation, num_sms
from envoi.runtime.launch import launch
from envoi.runtime.math import next_power_of_2
from envoi.runtime.tma import descriptor, unswizzled_descriptor

WORKSPACE_BYTES = 16 << 20
MAX_ROWS = 256  # most rows of a launch: a program finds its tiles in a sum over all of them
MAX_LENGTH = 1 << kernel_candidates.POSITION_BITS.value
NUM_GROUPS = kernel_scores.NUM_GROUPS.value
SCORE_BINS, NUM_COUNTERS = kernel_scores.SCORE_BINS.value, kernel_scores.NUM_COUNTERS.value
CAPACITY = kernel_candidates.CAPACITY.value

# As measured: notes/2026-11-indexer.md.
TILE = 128  # tokens that are scored at a time
PROGRAMS_PER_SM = 3
HOPPER_WARPS = 4
STAGES = 3  # tiles in a program's pipeline
BLOCKS = (1024, 2048, 4096)  # scores of a program: the least with no more than so many programs an SM
CANDIDATES_PROGRAMS_PER_SM = 1


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

    @property
    def num_rows(self) -> int:
        """Number of query rows."""
        return self.q.shape[0]

    @property
    def width(self) -> int:
        """Number of columns of the block table."""
        return self.table.shape[1]

    @property
    def max_length(self) -> int:
        """Most tokens that a request can have."""
        return self.width * PAGE_SIZE


@dataclass(frozen=True)
class Workspace:
    """Scratch memory for the rows that are processed at a time, written anew for each block of rows.

    listed [rows, max_length], bins [rows, SCORE_BINS, CAPACITY]: composites; logits [rows, max_length];
    groups [rows, NUM_GROUPS]: upper halves of keys; counters [rows, NUM_COUNTERS].
    """

    listed: torch.Tensor
    bins: torch.Tensor
    logits: torch.Tensor
    groups: torch.Tensor
    counters: torch.Tensor


def rows_at_once(p: Problem) -> int:
    """Return the number of rows whose workspace fits into WORKSPACE_BYTES, at least one."""
    each = 12 * p.max_length + 8 * SCORE_BINS * CAPACITY + 2 * NUM_GROUPS + 4 * NUM_COUNTERS
    return max(1, min(MAX_ROWS, p.num_rows, WORKSPACE_BYTES // each))


def workspace(p: Problem) -> Workspace:
    """Allocate the Workspace of `rows_at_once` rows."""
    rows, device = rows_at_once(p), p.q.device

    def empty(columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=dtype, device=device)

    return Workspace(
        empty(p.max_length, torch.int64), empty(SCORE_BINS * CAPACITY, torch.int64), empty(p.max_length, torch.float32),
        empty(NUM_GROUPS, torch.int16), empty(NUM_COUNTERS, torch.int32),
    )  # fmt: skip


def blocks(p: Problem) -> Iterator[tuple[int, int]]:
    """Yield (first row, number of rows) of each block of rows that are processed at a time."""
    step = rows_at_once(p)
    for first in range(0, p.num_rows, step):
        yield first, min(step, p.num_rows - first)


def topk(p: Problem, slots: bool, ordered: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose [rows, k] int32 as `envoi.indexer_topk` describes, and return errors [rows] int32: 0 = no error."""
    return in_blocks(p, score, slots, ordered)


def in_blocks(
    p: Problem, score: Callable[[Problem, Workspace, int, int], None], slots: bool, ordered: bool,
    as_torch: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Score and choose block after block of rows. Returns outputs [rows, k] and errors [rows], int32.

    score: takes the first row of a block and its number of rows. as_torch: NaN beats all numbers, and short rows are in
    the order of torch's sort.
    """
    out = torch.empty(p.num_rows, p.k, dtype=torch.int32, device=p.q.device)
    errors = torch.empty(p.num_rows, dtype=torch.int32, device=p.q.device)
    if p.num_rows:
        space = workspace(p)
        for first, num_rows in blocks(p):
            score(p, space, first, num_rows)
            write_topk(p, space, first, num_rows, out, errors, slots, ordered, as_torch)
    return out, errors


def score(p: Problem, space: Workspace, first: int, num_rows: int) -> None:
    """Fill the logits and the groups of these rows."""
    if not p.max_length:
        return
    if p.k_cache.shape[0] and implementation(p.q.device) == "hopper":
        from envoi.ops.indexer import kernel_hopper

        launch(kernel_hopper.scores_kernel, *hopper_arguments(p, space, first, num_rows))
    else:
        launch(kernel_scores.scores_kernel, *scores_arguments(p, space, first, num_rows))


def hopper_arguments(p: Problem, space: Workspace, first: int, num_rows: int) -> tuple[tuple[int], tuple, dict]:
    """Return grid, arguments and options of Hopper's `scores_kernel`."""
    flat = p.k_cache.view(-1)
    values = descriptor(flat.view(torch.float8_e4m3fn).view(-1, HEAD_DIM), PAGE_SIZE, HEAD_DIM)
    scales = unswizzled_descriptor(flat.view(torch.float32).view(-1, PAGE_SIZE), 1, PAGE_SIZE)
    return (_programs(p, num_rows),), (
        values, scales, p.q, p.weights, p.seq_lens, p.table,
        space.logits, space.groups, space.counters,
        first, num_rows, p.width, p.k_cache.shape[0],
        p.next_n, p.q.shape[1], max(32, next_power_of_2(rows_at_once(p))), STAGES,
    ), {"num_warps": HOPPER_WARPS, "maxnreg": _registers()}  # fmt: skip


def _registers() -> int:
    """Return the registers per thread of Hopper's kernel with which PROGRAMS_PER_SM programs fit an SM."""
    return 65536 // (32 * (HOPPER_WARPS + 4) * PROGRAMS_PER_SM) // 8 * 8  # the producer's warp takes up four


def scores_arguments(p: Problem, space: Workspace, first: int, num_rows: int) -> tuple[tuple[int], tuple, dict]:
    """Return grid, arguments and options of `scores_kernel`."""
    bytes_ = p.k_cache.view(torch.uint8)
    return (_programs(p, num_rows),), (
        p.q.view(torch.uint8), bytes_, bytes_.view(-1).view(torch.float32), p.weights, p.seq_lens, p.table,
        space.logits, space.groups, space.counters,
        first, num_rows, p.width, p.k_cache.shape[0],
        p.next_n, p.q.shape[1], next_power_of_2(rows_at_once(p)), TILE,
    ), {"num_warps": 4, "num_stages": 1}  # fmt: skip


def write_topk(
    p: Problem, space: Workspace, first: int, num_rows: int, out: torch.Tensor, errors: torch.Tensor, slots: bool,
    ordered: bool, as_torch: bool,
) -> None:  # fmt: skip
    """Write these rows' outputs from their logits and groups."""
    if p.max_length:
        launch(kernel_candidates.candidates_kernel, *candidates_arguments(p, space, first, num_rows, as_torch))
    launch(kernel_rank.rank_kernel, *rank_arguments(p, space, first, num_rows, out, errors, slots, ordered, as_torch))


def candidates_arguments(
    p: Problem, space: Workspace, first: int, num_rows: int, nan_first: bool
) -> tuple[tuple[int, int], tuple, dict]:
    """Return grid, arguments and options of `candidates_kernel`."""
    most = CANDIDATES_PROGRAMS_PER_SM * num_sms(p.q.device)
    block = next((size for size in BLOCKS if num_rows * -(-p.max_length // size) <= most), BLOCKS[-1])
    return (-(-p.max_length // block), num_rows), (
        space.logits, space.groups, space.counters, space.listed, space.bins, p.seq_lens, p.table,
        first, num_rows, p.width, p.k_cache.shape[0],
        p.next_n, p.k, nan_first, block,
    ), {"num_warps": 16}  # fmt: skip


def rank_arguments(
    p: Problem, space: Workspace, first: int, num_rows: int, out: torch.Tensor, errors: torch.Tensor, slots: bool,
    ordered: bool, as_torch: bool,
) -> tuple[tuple[int, int], tuple, dict]:  # fmt: skip
    """Return grid, arguments and options of `rank_kernel`."""
    return (SCORE_BINS, num_rows), (
        space.listed, space.bins, space.counters, space.logits if as_torch else None, p.seq_lens, p.table, out, errors,
        first, num_rows, p.width,
        p.next_n, p.k, slots, ordered,
    ), {"num_warps": 2}  # fmt: skip


def _programs(p: Problem, num_rows: int) -> int:
    """Return the number of programs: of the most tiles there can be, or of those that run at a time, if fewer."""
    return min(num_rows * -(-p.max_length // TILE), PROGRAMS_PER_SM * num_sms(p.q.device))

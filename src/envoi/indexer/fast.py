"""The fast mode on a device: scores by tensor cores, then the k best of them. Nothing here waits for the device."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from envoi.gemm import sm90
from envoi.gemm.config import power_of_two
from envoi.gemm.select import implementation
from envoi.gemm.workspace import counters
from envoi.indexer import kernel_scores, kernel_select
from envoi.indexer.layout import HEAD_DIM, PAGE_SIZE

scores: Any = kernel_scores  # constants arrive in its parameters as plain values
select: Any = kernel_select

WORKSPACE_BYTES = 16 << 20
MAX_ROWS = 256  # whose tiles one program can tell apart
MAX_LENGTH = 1 << kernel_select.POSITION_BITS.value
BINS = kernel_scores.BINS.value
MAX_COPIES = 4  # histograms of a lone row

# As measured: notes/2026-11-indexer.md.
TILE = 128  # tokens that are scored at a time
PROGRAMS_PER_SM = 3
HOPPER_WARPS = 4
STAGES = 3  # tiles on their way to a program
BLOCK = 1024  # scores that a program sifts
MOST = 1024  # candidates that are ranked without being narrowed down
RANKED, RANKED_BESIDE = 16, 64


@dataclass(frozen=True)
class Problem:
    """The tensors of a call, contiguous, and its numbers."""

    q: torch.Tensor
    k_cache: torch.Tensor
    weights: torch.Tensor
    seq_lens: torch.Tensor
    table: torch.Tensor
    k: int
    next_n: int

    @property
    def num_rows(self) -> int:
        """Query rows."""
        return self.q.shape[0]

    @property
    def width(self) -> int:
        """Columns of the block table."""
        return self.table.shape[1]

    @property
    def max_length(self) -> int:
        """Tokens that a request can have."""
        return self.width * PAGE_SIZE


@dataclass(frozen=True)
class Workspace:
    """Memory of the rows that are worked on at a time.

    logits [rows, max_length]; listed [rows, max_length]: composites; cursors [rows, bins]; plan [rows, 8]. The rest are
    zeros that the kernels leave as zeros: histograms, and four counters a row.
    """

    logits: torch.Tensor
    listed: torch.Tensor
    cursors: torch.Tensor
    plan: torch.Tensor
    histogram: torch.Tensor
    counters: torch.Tensor


def rows_at_once(p: Problem) -> int:
    """How many rows' workspace fits into WORKSPACE_BYTES; at least one."""
    each = 12 * p.max_length + 4 * BINS * 2
    return max(1, min(MAX_ROWS, p.num_rows, WORKSPACE_BYTES // each))


def copies(p: Problem) -> int:
    """Histograms of a row: several if there are few rows, since programs that add to one address wait in line."""
    return max(1, MAX_COPIES // power_of_two(rows_at_once(p)))


def workspace(p: Problem) -> Workspace:
    """For `rows_at_once` rows."""
    rows, device = rows_at_once(p), p.q.device
    of_histogram, of_cursors = rows * copies(p) * BINS, rows * BINS
    zeros = counters(of_histogram + rows * kernel_scores.NUM_COUNTERS.value, device)
    ints = torch.empty(of_cursors + rows * kernel_select.PLAN.value, dtype=torch.int32, device=device)
    return Workspace(
        torch.empty(rows, p.max_length, dtype=torch.float32, device=device),
        torch.empty(rows, p.max_length, dtype=torch.int64, device=device),
        ints,
        ints[of_cursors:],
        zeros,
        zeros[of_histogram:],
    )


def blocks(p: Problem) -> Iterator[tuple[int, int]]:
    """(first row, number of rows) of the rows that are worked on at a time."""
    step = rows_at_once(p)
    for first in range(0, p.num_rows, step):
        yield first, min(step, p.num_rows - first)


def topk(p: Problem, slots: bool, ordered: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, k] int32 as `envoi.indexer_topk` describes them, and [rows] int32: 0, or what is wrong with the row."""
    return in_blocks(p, score, slots, ordered)


def in_blocks(
    p: Problem, score: Callable[[Problem, Workspace, int, int], None], slots: bool, ordered: bool,
    nan_first: bool = False, finish: Callable[[Workspace, torch.Tensor, int, int], None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Scores and then choices of the rows that are worked on at a time, and what is left to do to their outputs."""
    out = torch.empty(p.num_rows, p.k, dtype=torch.int32, device=p.q.device)
    errors = torch.empty(p.num_rows, dtype=torch.int32, device=p.q.device)
    if p.num_rows:
        space = workspace(p)
        for first, num_rows in blocks(p):
            score(p, space, first, num_rows)
            choose(p, space, first, num_rows, out, errors, slots, ordered, nan_first)
            if finish is not None:
                finish(space, out, first, num_rows)
    return out, errors


def score(p: Problem, space: Workspace, first: int, num_rows: int) -> None:
    """Fill the logits and histograms of these rows."""
    if not p.max_length:
        return
    if p.k_cache.shape[0] and implementation(p.q.device) == "hopper":
        from envoi.indexer import kernel_sm90

        hopper: Any = kernel_sm90
        grid, arguments, options = hopper_arguments(p, space, first, num_rows)
        hopper.scores_kernel[grid](*arguments, **options)
    else:
        grid, arguments, options = scores_arguments(p, space, first, num_rows)
        scores.scores_kernel[grid](*arguments, **options)


def hopper_arguments(p: Problem, space: Workspace, first: int, num_rows: int) -> tuple[tuple[int], tuple, dict]:
    """The grid of Hopper's `scores_kernel`, its arguments, its options."""
    flat = p.k_cache.view(-1)
    values = sm90.descriptor(flat.view(torch.float8_e4m3fn).view(-1, HEAD_DIM), PAGE_SIZE, HEAD_DIM)
    scales = sm90.plain_descriptor(flat.view(torch.float32).view(-1, PAGE_SIZE), 1, PAGE_SIZE)
    return (_programs(p, num_rows),), (
        values, scales, p.q, p.weights, p.seq_lens, p.table,
        space.logits, space.histogram, space.counters,
        first, num_rows, p.next_n, p.width, p.k_cache.shape[0],
        p.q.shape[1], max(32, power_of_two(rows_at_once(p))), copies(p), STAGES,
    ), {"num_warps": HOPPER_WARPS, "maxnreg": _registers()}  # fmt: skip


def _registers() -> int:
    """Of each thread of a program of Hopper's kernel, so that as many programs fit an SM as are wanted."""
    return 65536 // (32 * (HOPPER_WARPS + 4) * PROGRAMS_PER_SM) // 8 * 8  # the producer's warp comes with three more


def scores_arguments(p: Problem, space: Workspace, first: int, num_rows: int) -> tuple[tuple[int], tuple, dict]:
    """The grid of `scores_kernel`, its arguments, its options."""
    bytes_ = p.k_cache.view(torch.uint8)
    return (_programs(p, num_rows),), (
        p.q.view(torch.uint8), bytes_, bytes_.view(-1).view(torch.float32), p.weights, p.seq_lens, p.table,
        space.logits, space.histogram, space.counters,
        first, num_rows, p.next_n, p.width, p.k_cache.shape[0],
        p.q.shape[1], power_of_two(rows_at_once(p)), copies(p), TILE,
    ), {"num_warps": 4, "num_stages": 1}  # fmt: skip


def choose(
    p: Problem, space: Workspace, first: int, num_rows: int, out: torch.Tensor, errors: torch.Tensor, slots: bool,
    ordered: bool, nan_first: bool,
) -> None:  # fmt: skip
    """Write these rows' outputs from their logits and histograms."""
    grid, arguments, options = threshold_arguments(p, space, first, num_rows, errors, ordered)
    select.threshold_kernel[grid](*arguments, **options)
    if p.max_length:
        grid, arguments, options = sift_arguments(p, space, num_rows, ordered, nan_first)
        select.sift_kernel[grid](*arguments, **options)
    grid, arguments, options = rank_arguments(p, space, first, num_rows, out, slots, ordered)
    select.rank_kernel[grid](*arguments, **options)


def most_candidates(ordered: bool) -> int:
    """How many may be left for `rank_kernel`, which drops those that aren't among the k best if it orders them."""
    return MOST if ordered else 0


def threshold_arguments(
    p: Problem, space: Workspace, first: int, num_rows: int, errors: torch.Tensor, ordered: bool
) -> tuple[tuple[int], tuple, dict]:
    """The grid of `threshold_kernel`, its arguments, its options."""
    return (num_rows,), (
        space.histogram, space.counters, space.cursors, space.plan, p.seq_lens, errors,
        first, num_rows, p.next_n, p.width,
        p.k, most_candidates(ordered), copies(p),
    ), {"num_warps": 16}  # fmt: skip


def sift_arguments(
    p: Problem, space: Workspace, num_rows: int, ordered: bool, nan_first: bool
) -> tuple[tuple[int, int], tuple, dict]:
    """The grid of `sift_kernel`, its arguments, its options."""
    return (-(-p.max_length // BLOCK), num_rows), (
        space.logits, space.cursors, space.plan, space.listed, p.width,
        p.k, most_candidates(ordered), nan_first, BLOCK,
    ), {"num_warps": 8}  # fmt: skip


def rank_arguments(
    p: Problem, space: Workspace, first: int, num_rows: int, out: torch.Tensor, slots: bool, ordered: bool
) -> tuple[tuple[int, int], tuple, dict]:
    """The grid of `rank_kernel`, its arguments, its options."""
    return (-(-(p.k + most_candidates(ordered)) // RANKED), num_rows), (
        space.listed, space.plan, space.cursors, p.table, out,
        first, p.next_n, p.width,
        p.k, slots, ordered, RANKED, RANKED_BESIDE,
    ), {"num_warps": 4}  # fmt: skip


def _programs(p: Problem, num_rows: int) -> int:
    """As many as there can be tiles, or as run at a time."""
    return min(num_rows * -(-p.max_length // TILE), PROGRAMS_PER_SM * num_sms(p.q.device))


def num_sms(device: torch.device) -> int:
    """Multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1

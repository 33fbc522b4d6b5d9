"""Rows of scores on which a selection by radix may fail, and its kernel run on them."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from envoi.ops.indexer import fast, kernel_best, kernel_candidates, kernel_rank, kernel_select, kernel_set, reference
from envoi.runtime.launch import launch

GROUPS = fast.NUM_GROUPS
INF, NAN = float("inf"), float("nan")


def groups_of(scores: torch.Tensor, nan_first: bool, halves: bool) -> torch.Tensor:
    """Return the best key of each group of neighbours, as the kernels of the scores do.

    Whole keys, none for a short row; or halves: int16, the upper halves of keys.
    """
    level = 0
    while len(scores) > GROUPS << level:
        level += 1
    bits = (scores + 0.0).view(torch.int32)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = keys.masked_fill(scores.isnan(), 0x7FFFFFFF if nan_first else -0x7F800001)
    keys = torch.cat([keys, keys.new_full((-len(keys) % (1 << level),), -(2**31))])
    best = keys.view(-1, 1 << level).amax(1)
    if halves:
        return (best >> 16).to(torch.int16)
    return best if 0 < level <= fast.TOP_LEVEL else best[:0]


def wrong_rows(rows: list[torch.Tensor], k: int, order: fast.Order, way: fast.Way = "radix") -> list[int]:
    """Select from rows of scores by the kernels; return the lengths of those that aren't right, in any order."""
    device, lengths = rows[0].device, [len(row) for row in rows]
    width = max(1, -(-max(lengths) // 64))
    logits = torch.full((len(rows), width * 64), NAN, device=device)
    for own, row in enumerate(rows):
        logits[own, : len(row)] = row
    pages = torch.rand(len(rows), width + 3, generator=torch.Generator().manual_seed(1)).argsort(1)
    table = pages[:, :width].int().to(device)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    cache = torch.empty(width + 3, 64, 1, 132, dtype=torch.int8, device=device)
    p = fast.Problem(torch.empty(len(rows), 64, 128, device=device), cache, logits, seq_lens, table, k, 1)
    out, errors = (torch.full(n, -7, dtype=torch.int32, device=device) for n in ((len(rows), k), (len(rows),)))
    space = fast.workspace(p, way)
    if len(space.logits) < len(rows):
        half = len(rows) // 2
        halves = rows[:half], rows[half:]
        return [n for some in halves for n in wrong_rows(some, k, order, way)]
    groups = space.groups
    if groups is not None:
        groups = torch.full((len(rows), groups.shape[1]), 0x7F7F, dtype=groups.dtype, device=device)
        for own, row in enumerate(rows):
            best = groups_of(row, order.as_torch, way == "candidates")
            groups[own, : len(best)] = best
    space = replace(space, logits=logits, groups=groups)
    if way == "candidates":
        assert space.counters is not None
        space.counters.zero_()
        launch(kernel_candidates.candidates_kernel, *fast.candidates_arguments(p, space, 0, len(rows), order))
        launch(kernel_rank.rank_kernel, *fast.rank_arguments(p, space, 0, len(rows), out, errors, order))
    elif way == "clusters":
        launch(kernel_set.set_kernel, *fast.set_arguments(p, space, 0, len(rows), out, errors, order))
        if fast.best_follows(p, order):
            launch(kernel_best.best_kernel, *fast.best_arguments(p, space, 0, len(rows), out, order))
    else:
        launch(kernel_select.select_kernel, *fast.select_arguments(p, space, 0, len(rows), out, errors, order, False))
    found = []
    for own, row in enumerate(rows):
        want = best_of(row, k, order)
        want = table[own][want // 64] * 64 + want % 64 if order.slots else want
        right = out[own, : len(want)].tolist() == want.tolist() and bool((out[own, len(want) :] == -1).all())
        if not right or int(errors[own]):
            found.append(len(row))
    return found


def best_of(row: torch.Tensor, k: int, order: fast.Order) -> torch.Tensor:
    """Return the positions of the k best: NaN counts as -inf, or, as torch does, is the best."""
    want = row.sort(descending=True, stable=True).indices[:k] if order.as_torch else reference.best(row, k)
    return want if order.by_score else want.sort().values


def hostile_rows(source: torch.Generator, lengths: tuple[int, ...]) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yield (name, rows) of kinds of scores, on the device of source."""
    device = source.device

    def normal(n: int) -> torch.Tensor:
        return torch.randn(n, generator=source, device=device)

    def full(n: int, x: float) -> torch.Tensor:
        return torch.full((n,), x, device=device)

    def some(n: int, above: float, x: float) -> torch.Tensor:
        return normal(n).masked_fill(normal(n) > above, x)

    yield "normal", [normal(n) for n in lengths]
    yield "equal", [full(n, -3.5) for n in lengths]
    yield "NaN", [some(n, above, NAN) for n in lengths for above in (-2.0, 2.0)]
    yield "inf", [some(n, 2.5, x) for n in lengths for x in (INF, -INF)]
    yield "mostly -inf", [some(n, -3.0, -INF) for n in lengths]
    yield "one bucket", [100 + 1e-4 * normal(n) for n in lengths]
    yield "few values", [(10 * normal(n)).round() for n in lengths]
    yield "a sixteenth zero", [some(n, 1.534, 0.0) for n in lengths]
    yield "a sixteenth best", [-some(n, 1.534, 0.0).abs() for n in lengths]
    yield "ties at the boundary", [torch.where(normal(n) > 2, 2.0, full(n, 1.0)) for n in lengths]
    yield "rising and falling", [s * torch.arange(n, device=device) for n in lengths for s in (1.0, -1.0)]
    yield "neighbours alike", [normal(n // 16 + 1).repeat_interleave(16)[:n] + 1e-3 * normal(n) for n in lengths]
    yield "huge and tiny", [torch.exp(20 * normal(n)) for n in lengths] + [1e-41 * normal(n) for n in lengths]
    yield "zeros of both signs", [torch.where(normal(n) > 0, 0.0, full(n, -0.0)) for n in lengths]

"""Recipes of the indexer's kernels, of tensors without memory: one request of 131072 tokens, 64 heads."""

from collections.abc import Callable
from typing import Any

import torch

from envoi.indexer import (
    certificate,
    exact,
    fast,
    kernel_candidates,
    kernel_exact,
    kernel_hopper,
    kernel_rank,
    kernel_scores,
)
from tools.machine_code.compile import Recipe, recipe_of_call

NUM_PAGES, WIDTH, HEADS, K = 4096, 2048, 64, 2048


def recipe(kernel: str, arch: str) -> Recipe:
    """Return the recipe of a kernel. kernel: a key of `KERNELS`."""
    function, arguments = KERNELS[kernel]
    _, values, options = arguments(_problem(1))
    return recipe_of_call(function, values, arch, **options)


def _problem(num_rows: int) -> fast.Problem:
    return fast.Problem(
        _empty(num_rows, HEADS, 128, dtype=torch.float8_e4m3fn), _empty(NUM_PAGES, 64, 1, 132, dtype=torch.int8),
        _empty(num_rows, HEADS, dtype=torch.float32), _empty(num_rows, dtype=torch.int32),
        _empty(num_rows, WIDTH, dtype=torch.int32), K, 1,
    )  # fmt: skip


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _scores(p: fast.Problem) -> tuple:
    return fast.scores_arguments(p, fast.workspace(p), 0, p.num_rows)


def _scores_sm90(p: fast.Problem) -> tuple:
    return fast.hopper_arguments(p, fast.workspace(p), 0, p.num_rows)


def _sift(p: fast.Problem) -> tuple:
    return fast.sift_arguments(p, fast.workspace(p), 0, p.num_rows, False)


def _rank(p: fast.Problem) -> tuple:
    out, errors = _empty(p.num_rows, p.k, dtype=torch.int32), _empty(p.num_rows, dtype=torch.int32)
    return fast.rank_arguments(p, fast.workspace(p), 0, p.num_rows, out, errors, True, True)


def _exact(p: fast.Problem) -> tuple:
    orders = _empty(certificate.NUM_ORDERS + 4, dtype=torch.int32)
    return exact.scores_arguments(orders, p, fast.workspace(p), 0, p.num_rows)


def _short(p: fast.Problem) -> tuple:
    out = _empty(p.num_rows, p.k, dtype=torch.int32)
    return exact.short_arguments(p, fast.workspace(p), 0, p.num_rows, out, True, True)


KERNELS: dict[str, tuple[Any, Callable[[fast.Problem], tuple]]] = {
    "scores": (kernel_scores.scores_kernel, _scores),
    "scores-sm90": (kernel_hopper.scores_kernel, _scores_sm90),
    "sift": (kernel_candidates.sift_kernel, _sift),
    "rank": (kernel_rank.rank_kernel, _rank),
    "exact": (kernel_exact.exact_kernel, _exact),
    "short": (kernel_exact.short_kernel, _short),
}

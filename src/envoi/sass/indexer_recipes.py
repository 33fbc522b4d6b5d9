"""Recipes of the indexer's kernels, of tensors without memory: one request of 131072 tokens, 64 heads."""

from collections.abc import Callable
from unittest import mock

import torch

from envoi.indexer import exact, fast, kernel_exact, kernel_scores, kernel_select, kernel_sm90
from envoi.sass.compile import Recipe, recipe_of_call

NUM_SMS = 132
NUM_PAGES, WIDTH, HEADS, K = 4096, 2048, 64, 2048


def recipe(kernel: str, arch: str, num_rows: int = 1) -> Recipe:
    """kernel: of `KERNELS`."""
    with mock.patch.object(fast, "num_sms", lambda device: NUM_SMS):
        function, arguments = KERNELS[kernel]
        _, values, options = arguments(_problem(num_rows))
    return recipe_of_call(function, values, arch, **options)


def _problem(num_rows: int) -> fast.Problem:
    return fast.Problem(
        _empty(num_rows, HEADS, 128, dtype=torch.float8_e4m3fn), _empty(NUM_PAGES, 64, 1, 132, dtype=torch.int8),
        _empty(num_rows, HEADS, dtype=torch.float32), _empty(num_rows, dtype=torch.int32),
        _empty(num_rows, WIDTH, dtype=torch.int32), K, 1,
    )  # fmt: skip


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _scoring(arguments: Callable) -> Callable[[fast.Problem], tuple]:
    return lambda p: arguments(p, fast.workspace(p), 0, p.num_rows)


def _select(p: fast.Problem) -> tuple:
    return fast.select_arguments(p, fast.workspace(p), 0, p.num_rows, *_outputs(p), (True, True, False, False))


def _sort(p: fast.Problem) -> tuple:
    return fast.select_arguments(p, fast.workspace(p), 0, p.num_rows, *_outputs(p), (True, True, False, True))


def _rank(p: fast.Problem) -> tuple:
    return fast.rank_arguments(p, fast.workspace(p), 0, p.num_rows, *_outputs(p), (True, True))


def _outputs(p: fast.Problem) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty(p.num_rows, p.k, dtype=torch.int32), _empty(p.num_rows, dtype=torch.int32)


KERNELS = {
    "scores": (kernel_scores.scores_kernel, _scoring(fast.scores_arguments)),
    "scores-sm90": (kernel_sm90.scores_kernel, _scoring(fast.hopper_arguments)),
    "select": (kernel_select.select_kernel, _select),
    "select-sort": (kernel_select.select_kernel, _sort),
    "rank": (kernel_select.rank_kernel, _rank),
    "exact": (kernel_exact.exact_kernel, _scoring(exact.arguments_of)),
}

"""Launches of the indexer's kernels: one request of 131072 tokens, 64 heads."""

import torch

from envoi.ops.indexer import (
    certificate,
    exact,
    fast,
    kernel_exact,
    kernel_hopper,
    kernel_scores,
    kernel_select,
)
from envoi.runtime.kernel_case import EVERY_ARCH, HOPPER, case_of, without_memory

NUM_PAGES, HEADS, K = 4096, 64, 2048
FP32, INT32 = torch.float32, torch.int32


def problem(width: int) -> fast.Problem:
    """Return a request whose table has room for `width` pages."""
    return fast.Problem(
        without_memory((1, HEADS, 128), torch.float8_e4m3fn), without_memory((NUM_PAGES, 64, 1, 132), torch.int8),
        without_memory((1, HEADS), FP32), without_memory((1,), INT32), without_memory((1, width), INT32), K, 1,
    )  # fmt: skip


PROBLEM = problem(2048)
OUT, ERRORS = without_memory((1, K), INT32), without_memory((1,), INT32)
ORDERS = without_memory((certificate.NUM_ORDERS + 4,), INT32)


def select(p: fast.Problem, order: fast.Order, early: bool) -> tuple[tuple[int, int], tuple, dict]:
    """Return grid, arguments and options of the selection."""
    return fast.select_arguments(p, fast.workspace(p), 0, 1, OUT, ERRORS, order, early)


KERNELS = tuple(
    case_of(f"indexer-{name}", about, arches, kernel, arguments, PROBLEM, fast.workspace(PROBLEM))
    for name, about, arches, kernel, arguments in (
        (
            "scores-sm90", "scores on Hopper: FP8 tensor cores, pages by TMA", HOPPER, kernel_hopper.scores_kernel,
            lambda p, room: fast.hopper_arguments(p, room, 0, 1, 0),
        ),
        (
            "scores", "scores in plain Triton", EVERY_ARCH, kernel_scores.scores_kernel,
            lambda p, room: fast.scores_arguments(p, room, 0, 1, 0),
        ),
        (
            "select", "the k best by position, by radix; launched before the scores' kernel ends", HOPPER,
            kernel_select.select_kernel, lambda p, room: select(p, fast.Order(True, False), True),
        ),
        (
            "select-short", "the same, of rows of 4096 tokens at most", HOPPER, kernel_select.select_kernel,
            lambda p, room: select(problem(64), fast.Order(True, False), True),
        ),
        (
            "select-best-first", "the k best, best first", HOPPER, kernel_select.select_kernel,
            lambda p, room: select(p, fast.Order(True, True), True),
        ),
        (
            "select-portable", "the k best, best first, launched after the scores", EVERY_ARCH,
            kernel_select.select_kernel, lambda p, room: select(p, fast.Order(True, True), False),
        ),
        (
            "select-as-torch", "the k best, best first, short rows in the order of torch's sort", EVERY_ARCH,
            kernel_select.select_kernel, lambda p, room: select(p, fast.Order(True, True, True), False),
        ),
        (
            "exact", "scores in float32, every rounding in torch's order", EVERY_ARCH, kernel_exact.exact_kernel,
            lambda p, room: exact.scores_arguments(ORDERS, p, room, 0, 1, 0),
        ),
    )
)  # fmt: skip

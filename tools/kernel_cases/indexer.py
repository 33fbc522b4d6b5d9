"""Launches of the indexer's kernels: one request of 131072 tokens, 64 heads."""

import torch

from envoi.ops.indexer import (
    certificate,
    exact,
    fast,
    kernel_candidates,
    kernel_exact,
    kernel_hopper,
    kernel_rank,
    kernel_scores,
)
from envoi.runtime.kernel_case import EVERY_ARCH, HOPPER, case_of
from envoi.runtime.program import without_memory

NUM_PAGES, WIDTH, HEADS, K = 4096, 2048, 64, 2048
FP32, INT32 = torch.float32, torch.int32
PROBLEM = fast.Problem(
    without_memory((1, HEADS, 128), torch.float8_e4m3fn), without_memory((NUM_PAGES, 64, 1, 132), torch.int8),
    without_memory((1, HEADS), FP32), without_memory((1,), INT32), without_memory((1, WIDTH), INT32), K, 1,
)  # fmt: skip
OUT, ERRORS = without_memory((1, K), INT32), without_memory((1,), INT32)
ORDERS = without_memory((certificate.NUM_ORDERS + 4,), INT32)

KERNELS = tuple(
    case_of(f"indexer-{name}", about, arches, kernel, arguments, PROBLEM, fast.workspace(PROBLEM))
    for name, about, arches, kernel, arguments in (
        (
            "scores-sm90", "scores on Hopper: FP8 tensor cores, pages by TMA", HOPPER, kernel_hopper.scores_kernel,
            lambda p, room: fast.hopper_arguments(p, room, 0, 1),
        ),
        (
            "scores", "scores in plain Triton", EVERY_ARCH, kernel_scores.scores_kernel,
            lambda p, room: fast.scores_arguments(p, room, 0, 1),
        ),
        (
            "candidates", "candidates for the k best, in one pass over the scores", EVERY_ARCH,
            kernel_candidates.candidates_kernel,
            lambda p, room: fast.candidates_arguments(p, room, 0, 1, False),
        ),
        (
            "rank", "output places of the candidates", EVERY_ARCH, kernel_rank.rank_kernel,
            lambda p, room: fast.rank_arguments(p, room, 0, 1, OUT, ERRORS, True, True, False),
        ),
        (
            "rank-as-torch", "output places, short rows in the order of torch's sort", EVERY_ARCH,
            kernel_rank.rank_kernel,
            lambda p, room: fast.rank_arguments(p, room, 0, 1, OUT, ERRORS, True, True, True),
        ),
        (
            "exact", "scores in float32, every rounding in torch's order", EVERY_ARCH, kernel_exact.exact_kernel,
            lambda p, room: exact.scores_arguments(ORDERS, p, room, 0, 1),
        ),
    )
)  # fmt: skip

"""Launches of the indexer's kernels: one request of 131072 tokens, 64 heads."""

from typing import Any

import torch

import envoi
from envoi.ops.indexer import certificate, exact, fast
from envoi.runtime.kernel_case import BLACKWELL, EVERY_ARCH, HOPPER
from envoi.runtime.program import without_memory
from tools.kernel_cases.planning import case_of

NUM_PAGES, WIDTH, HEADS, K = 4096, 2048, 64, 2048
FP32, INT32 = torch.float32, torch.int32


def _problem() -> fast.Problem:
    return fast.Problem(
        without_memory((1, HEADS, 128), torch.float8_e4m3fn), without_memory((NUM_PAGES, 64, 1, 132), torch.int8),
        without_memory((1, HEADS), FP32), without_memory((1,), INT32), without_memory((1, WIDTH), INT32), K, 1,
    )  # fmt: skip


def _fast() -> Any:
    p = _problem()
    return envoi.indexer_topk(p.q, p.k_cache, p.weights, p.seq_lens, p.table, p.k, "fast")


def _exact() -> Any:
    orders = without_memory((certificate.NUM_ORDERS + 4,), INT32)  # of a GPU that is certified
    return exact.topk(_problem(), orders, True, True)


KERNELS = (
    case_of("indexer-scores-sm90", "scores on Hopper: FP8 tensor cores, pages by TMA", HOPPER, _fast, "scores_kernel"),
    case_of("indexer-scores", "scores in plain Triton", EVERY_ARCH, _fast, "scores_kernel", arch=BLACKWELL[0]),
    *(
        case_of(f"indexer-{name}", about, EVERY_ARCH, call, kernel)
        for name, about, call, kernel in (
            ("candidates", "candidates for the k best, in one pass over the scores", _fast, "candidates_kernel"),
            ("rank", "output places of the candidates", _fast, "rank_kernel"),
            ("rank-as-torch", "output places, short rows in the order of torch's sort", _exact, "rank_kernel"),
            ("exact", "scores in float32, every rounding in torch's order", _exact, "exact_kernel"),
        )
    ),
)

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


def _tensors() -> tuple[torch.Tensor, ...]:
    return (
        without_memory((1, HEADS, 128), torch.float8_e4m3fn), without_memory((NUM_PAGES, 64, 1, 132), torch.int8),
        without_memory((1, HEADS), FP32), without_memory((1,), INT32), without_memory((1, WIDTH), INT32),
    )  # fmt: skip


def _fast() -> Any:
    return envoi.indexer_topk(*_tensors(), K, "fast")


def _exact() -> Any:
    orders = without_memory((certificate.NUM_ORDERS + 4,), INT32)  # of a GPU that is certified
    return exact.topk(fast.Problem(*_tensors(), K, 1), orders, True, True)


KERNELS = tuple(
    case_of(f"indexer-{name}", *rest)
    for name, *rest in (
        ("scores-sm90", "scores on Hopper: FP8 tensor cores, pages by TMA", HOPPER, _fast, "scores_kernel"),
        ("scores", "scores in plain Triton", EVERY_ARCH, _fast, "scores_kernel", 0, BLACKWELL[0]),
        (
            "candidates",
            "candidates for the k best, in one pass over the scores",
            EVERY_ARCH,
            _fast,
            "candidates_kernel",
        ),
        ("rank", "output places of the candidates", EVERY_ARCH, _fast, "rank_kernel"),
        ("rank-as-torch", "output places, short rows in the order of torch's sort", EVERY_ARCH, _exact, "rank_kernel"),
        ("exact", "scores in float32, every rounding in torch's order", EVERY_ARCH, _exact, "exact_kernel"),
    )
)

"""Kernels of the indexer to compile ahead."""

from functools import partial
from typing import Any

import torch

import envoi
from envoi.ops.indexer import certificate, exact, fast
from envoi.runtime.program import without_memory
from tools.kernel_cases import BLACKWELL, EVERY_ARCH, HOPPER
from tools.kernel_cases.planning import case_of

NUM_PAGES, HEADS, K = 4096, 64, 2048
FP32, INT32 = torch.float32, torch.int32
LONGER, LISTED, LONG, SHORT = 8192, 4096, 2048, 64  # pages in a row of the table


def _problem(
    width: int, next_n: int = 1, heads: int = HEADS, k: int = K, key: int = 132, requests: int = 1
) -> fast.Problem:
    rows = requests * next_n
    return fast.Problem(
        without_memory((rows, heads, 128), torch.float8_e4m3fn), without_memory((NUM_PAGES, 64, 1, key), torch.int8),
        without_memory((rows, heads), FP32), without_memory((requests,), INT32),
        without_memory((requests, width), INT32), k, next_n,
    )  # fmt: skip


def call_of_fast(order: str, width: int = LONG, next_n: int = 1, **others: int) -> Any:
    """Call `envoi.indexer_topk` for requests whose rows of the table have `width` pages; others: of `_problem`."""
    p = _problem(width, next_n, **others)
    return envoi.indexer_topk(p.q, p.k_cache, p.weights, p.seq_lens, p.table, p.k, "fast", next_n, order=order)


def _blocks() -> Any:
    p = _problem(LONG, heads=32, key=68)
    return envoi.indexer_blocks(p.q, p.k_cache, p.weights, p.seq_lens, p.table, 2048)


def _in_blocks() -> Any:
    p = _problem(LONG, heads=32, key=68)
    blocks = without_memory((1, 2048), INT32)
    return envoi.indexer_topk_in_blocks(p.q, p.k_cache, p.weights, p.seq_lens, p.table, blocks, order="any")


def _exact(width: int) -> Any:
    orders = without_memory((certificate.NUM_ORDERS + 4,), INT32)  # of a GPU that is certified
    return exact.topk(_problem(width), orders, fast.Order(slots=True, by_score=True))


SET, BEST = partial(call_of_fast, "position"), partial(call_of_fast, "score")
LISTING = partial(call_of_fast, "score", LISTED)
KERNELS = (
    case_of("indexer-scores-sm90", "scores on Hopper: FP8 tensor cores, pages by TMA", HOPPER, SET, "scores_kernel"),
    case_of(
        "indexer-scores-sm90-groups", "the same, with the best of groups of neighbours", HOPPER,
        partial(call_of_fast, "position", LONGER), "scores_kernel",
    ),
    case_of("indexer-scores-listed", "the same, before candidates are listed", HOPPER, LISTING, "scores_kernel"),
    *(
        case_of(f"indexer-scores-sm90-{name}", about, HOPPER, call, "scores_kernel")
        for name, about, call in (
            ("4-heads", "scores of 4 heads, as many as half of the products' width", partial(SET, heads=4)),
            ("16-heads", "scores of 16 heads", partial(SET, heads=16)),
            ("fp4", "scores of keys in FP4", partial(SET, heads=32, key=68)),
            ("fp4-64-heads", "the same, of 64 heads", partial(SET, key=68)),
        )
    ),
    *(
        case_of(f"indexer-scores-prefill-{name}", about, HOPPER, call, "prefill_scores_kernel")
        for name, about, call in (
            ("short", "scores of a prefill, two rows of 64 heads a product", partial(call_of_fast, "any", 256, 2048)),
            ("long", "the same, of long rows", partial(SET, next_n=2048)),
            ("32-heads", "the same, four rows of 32 heads", partial(SET, next_n=2048, heads=32)),
            ("4-heads", "the same, eight rows of 4 heads", partial(SET, next_n=2048, heads=4)),
            ("fp4", "the same, keys in FP4, four rows of 32 heads", partial(SET, next_n=2048, heads=32, key=68)),
            ("fp4-64-heads", "the same, two rows of 64 heads", partial(SET, next_n=2048, key=68)),
            ("4-rows", "the same, of requests of 4 rows of 64 heads", partial(SET, next_n=4, requests=256)),
            ("2-rows", "the same, of 2 rows: a row a role", partial(SET, next_n=2, requests=300)),
            ("4-heads-2-rows", "the same, of 4 heads", partial(SET, next_n=2, requests=300, heads=4)),
            ("fp4-2-rows", "the same, of 64 heads, keys in FP4", partial(SET, next_n=2, requests=300, key=68)),
        )
    ),
    case_of("indexer-scores", "scores in plain Triton", EVERY_ARCH, SET, "scores_kernel", arch=BLACKWELL[0]),
    case_of(
        "indexer-scores-fp4", "the same, of keys in FP4, as bf16", EVERY_ARCH, partial(SET, heads=32, key=68),
        "scores_kernel", arch=BLACKWELL[0],
    ),
    case_of(
        "indexer-scores-4-heads", "the same, of 4 heads", EVERY_ARCH, partial(SET, heads=4), "scores_kernel",
        arch=BLACKWELL[0],
    ),
    *(
        case_of(f"indexer-set{name}", about, HOPPER, call, "set_kernel")
        for name, about, call in (
            ("", "the k best by position, of rows of 131072 tokens at most, by clusters", SET),
            ("-4096", "the same, of rows of 4096 tokens, by a program a row", partial(call_of_fast, "any", SHORT)),
            ("-8192", "the same, of rows of 8192 tokens", partial(call_of_fast, "position", 128)),
            ("-128", "the 128 best, of rows of 131072 tokens at most", partial(SET, k=128)),
            ("-65536", "the k best, of rows of 65536 tokens at most", partial(call_of_fast, "position", 1024)),
            ("-many", "the same, of more rows than clusters run at a time", partial(call_of_fast, "position", 512, 64)),
            ("-many-131072", "the same, of rows of 131072 tokens at most", partial(SET, requests=32)),
            ("-longer", "the same, before longer rows", partial(call_of_fast, "position", LONGER)),
            ("-many-longer", "the same, of many rows", partial(call_of_fast, "position", LONGER, requests=32)),
            ("-first", "the k best by position, before they are put in order", BEST),
            ("-first-4096", "the k best, best first, of rows of 4096 tokens", partial(call_of_fast, "score", SHORT)),
            ("-first-8192", "the same, of rows of 8192 tokens", partial(call_of_fast, "score", 128)),
            ("-first-many", "the same, of more rows than SMs", partial(call_of_fast, "score", SHORT, requests=256)),
        )
    ),
    case_of("indexer-best", "the k best of a set, best first", HOPPER, BEST, "best_kernel"),
    case_of(
        "indexer-best-longer", "the same, beside longer rows", HOPPER, partial(call_of_fast, "score", LONGER),
        "best_kernel",
    ),
    case_of("indexer-best-201", "the 201 best, whose rows aren't aligned", HOPPER, partial(BEST, k=201), "best_kernel"),
    case_of(
        "indexer-select", "the k best by position, of longer rows; launched before the scores' kernel ends", HOPPER,
        partial(call_of_fast, "position", LONGER), "select_kernel",
    ),
    case_of(
        "indexer-select-short-prefill", "the same, of the rows of a prefill", HOPPER,
        partial(call_of_fast, "position", SHORT, 2048), "select_kernel",
    ),
    case_of(
        "indexer-select-long-prefill", "the same, of a prefill's long rows, each by one program", HOPPER,
        partial(SET, next_n=2048), "select_kernel",
    ),
    case_of(
        "indexer-select-best-first-prefill", "the k best, best first, of a prefill's long rows", HOPPER,
        partial(BEST, next_n=2048), "select_kernel",
    ),
    case_of(
        "indexer-select-1000", "the 1000 best by position, whose places aren't a power of two", HOPPER,
        partial(call_of_fast, "position", LONGER, k=1000), "select_kernel",
    ),
    case_of(
        "indexer-select-of-blocks", "the 2048 best blocks, the newest among them", EVERY_ARCH, _blocks, "select_kernel",
    ),
    *(
        case_of(f"indexer-{name}", about, EVERY_ARCH, call, kernel)
        for name, about, call, kernel in (
            ("pool", "the best scores of blocks of tokens", _blocks, "pool_kernel"),
            ("gather", "the scores of the tokens of some blocks", _in_blocks, "gather_kernel"),
            ("place", "slots of tokens that were chosen in blocks", _in_blocks, "place_kernel"),
        )
    ),
    case_of(
        "indexer-select-best-first", "the k best, best first, of longer rows than candidates are listed of", HOPPER,
        partial(call_of_fast, "score", LONGER), "select_kernel",
    ),
    case_of(
        "indexer-select-portable", "the k best, best first, launched after the scores", EVERY_ARCH,
        partial(call_of_fast, "score", SHORT), "select_kernel", arch=BLACKWELL[0],
    ),
    case_of(
        "indexer-select-as-torch", "the k best, best first, short rows in the order of torch's sort", EVERY_ARCH,
        partial(_exact, SHORT), "select_kernel",
    ),
    *(
        case_of(f"indexer-{name}", about, EVERY_ARCH, call, kernel)
        for name, about, call, kernel in (
            ("candidates", "candidates for the k best, in one pass over the scores", LISTING, "candidates_kernel"),
            ("rank", "output places of the candidates", LISTING, "rank_kernel"),
            ("rank-as-torch", "output places, short rows as torch sorts them", partial(_exact, LONG), "rank_kernel"),
            ("exact", "scores in float32, every rounding in torch's order", partial(_exact, LONG), "exact_kernel"),
        )
    ),
)  # fmt: skip

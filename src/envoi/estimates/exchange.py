"""Choices of the exchange between ranks, from the sizes of a layer alone.

Choice between two ways of sending tokens to the ranks of their experts by collectives.

    gathered   every token to every rank, and back one row from every rank for each slot     no size on the host
    counted    a token to each rank that needs it, and back its slots' rows                  a copy of counts first

For R ranks with M tokens of h bytes each, k slots a token, rows of 2H bytes, links of B bytes/s, S for the counts:

    gathered   ((R - 1) M h             + (R - 1) M k 2H)     / B         2H in place of k 2H if ranks sum their rows
    counted    ((R - 1) M h p           + (R - 1) M k 2H / R) / B + S     p = 1 - (1 - 1/R)^k: a rank has one of the k

S is what it costs that kernels can't be queued before the host knows the counts: a collective, a copy, new launches.

Choice whether a token's rows on the same rank are summed there before they are sent back.

    off: rows cross NVLink during L2's products         max(products, wire), then k rows per token are read and summed
    on:  products, then fewer rows cross NVLink         products + wire * met, then one row for each rank that has any

met: the fraction of rows that remains if each slot's rank is drawn at random: R (1 - (1 - 1/R)^k) / k for R ranks.
"""

from dataclasses import dataclass

from envoi.estimates.machines import H200

ROW_BYTES = 2  # bf16, one column
TILE = 128  # tokens of a tile, for the rate of products


@dataclass(frozen=True)
class Link:
    """Connection between ranks, by one collective at a time.

    gb_per_s: sent by a rank. counts_us: S above.
    """

    gb_per_s: float
    counts_us: float


# NCCL within a host: from suite `moe` on two H200s, its rate from rows and their sums, its counts from both exchanges
# at 64 tokens. Before rows are sent, counting launches some 45 operators of torch one by one and waits once; a gathered
# call launches nothing anew. Between hosts is an estimate: a network of 400 Gb/s a GPU.
WITHIN_A_HOST, BETWEEN_HOSTS = Link(330.0, 1700.0), Link(45.0, 1700.0)


def gathering_pays(
    link: Link, num_ranks: int, max_tokens: int, num_topk: int, hidden: int, token_bytes: int, presum: bool
) -> bool:
    """Return True if gathering takes no longer than counting, for max_tokens tokens on every rank.

    token_bytes: of a token as it is sent, with its scale factors, ids and weights. presum: ranks that gather sum the
    rows of a token before they send them back.
    """
    others, needed = num_ranks - 1, 1 - (1 - 1 / num_ranks) ** num_topk
    row = ROW_BYTES * hidden
    gathered = others * max_tokens * (token_bytes + row * (1 if presum else num_topk))
    counted = others * max_tokens * (token_bytes * needed + row * num_topk / num_ranks)
    return (gathered - counted) / (link.gb_per_s * 1e3) <= link.counts_us


def presum_pays(hidden: int, intermediate: int, num_topk: int, max_tokens: int, num_ranks: int, format: str) -> bool:
    """Return whether presum saves more time than its kernel costs, for max_tokens tokens per rank. Any num_ranks."""
    met = num_ranks * (1 - (1 - 1 / num_ranks) ** num_topk) / num_topk
    products = 2 * intermediate / (H200.gemm_tflops(format, TILE) * 1e6)  # us per row and column, like every time below
    wire = ROW_BYTES * (num_ranks - 1) / num_ranks / (H200.push_gb_per_s * 1e3)
    read = ROW_BYTES / (H200.hbm_gb_per_s * 1e3)
    off = max(products, wire) + read
    on = products + max(wire * met, read) + read * met
    return (off - on) * hidden * max_tokens * num_topk > H200.launch_us

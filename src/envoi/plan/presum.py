"""Choice whether a token's rows on the same rank are summed there before they are sent back.

    off: rows cross NVLink during L2's products         max(products, wire), then k rows per token are read and summed
    on:  products, then fewer rows cross NVLink         products + wire * met, then one row for each rank that has any

met: the fraction of rows that remains if each slot's rank is drawn at random: R (1 - (1 - 1/R)^k) / k for R ranks.
"""

from envoi.plan.machines import H200

ROW_BYTES = 2  # bf16, one column
TILE = 128  # tokens


def pays(hidden: int, intermediate: int, num_topk: int, max_tokens: int, num_ranks: int, format: str) -> bool:
    """Return whether presum saves more time than its kernel costs, for max_tokens tokens per rank. Any num_ranks."""
    met = num_ranks * (1 - (1 - 1 / num_ranks) ** num_topk) / num_topk
    products = 2 * intermediate / (H200.gemm_tflops(format, TILE) * 1e6)  # us per row and column, like every time below
    wire = ROW_BYTES * (num_ranks - 1) / num_ranks / (H200.push_gb_per_s * 1e3)
    read = ROW_BYTES / (H200.hbm_gb_per_s * 1e3)
    off = max(products, wire) + read
    on = products + max(wire * met, read) + read * met
    return (off - on) * hidden * max_tokens * num_topk > H200.launch_us

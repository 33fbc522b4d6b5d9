"""Combine over NVLink: wait until peers have sent all rows of this rank's tokens, and sum them.

L2 stores each row straight into the memory of its token's rank. With presum, L2's rows stay here, and
`send_partial_sums` sends one sum for each token and rank instead.
"""

import torch

from envoi.ops.moe.launches import Launch, launch_kernel, warps_for
from envoi.ops.moe.parallel.dispatch import PROGRAMS_PER_SM, WARPS
from envoi.ops.moe.parallel.symmetric_memory import Domain
from envoi.ops.moe.permute import MAX_SUM_COLUMNS
from envoi.runtime.devices import num_sms
from envoi.runtime.math import next_power_of_2
from envoi.runtime.timeline import UNTRACED

KERNELS = "envoi.ops.moe.parallel.combine_kernels"
MAX_SENT_COLUMNS = 2048  # columns of a partial sum that are sent at a time


def combine(domain: Domain, rows: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
    """Return this rank's tokens [M, H] bf16. rows: the experts' result, which with presum is still here."""
    if domain.layout.presum:
        send_partial_sums(domain, rows)
    combine_barrier(domain)
    return sum_rows(domain, topk_ids)


def send_partial_sums(domain: Domain, rows: torch.Tensor) -> None:
    """Sum each token's rows on this rank and send the sum to the token's rank; only with presum."""
    launch_kernel(KERNELS, "send_partial_sums_kernel", send_partial_sums_arguments(domain, rows))


def combine_barrier(domain: Domain) -> None:
    """Signal to all peers that their rows have been sent, and wait for their signals."""
    launch_kernel(KERNELS, "combine_barrier_kernel", combine_barrier_arguments(domain))


def sum_rows(domain: Domain, topk_ids: torch.Tensor) -> torch.Tensor:
    """Sum the rows sent back for each of this rank's tokens: [M, H] bf16; NaN if the call failed."""
    out = torch.empty(len(topk_ids), domain.layout.hidden, dtype=torch.bfloat16, device=topk_ids.device)
    if not len(out):
        return out
    if domain.layout.presum:
        launch_kernel(KERNELS, "sum_ranks_kernel", sum_ranks_arguments(domain, topk_ids, out))
    else:
        launch_kernel(KERNELS, "sum_kernel", sum_arguments(domain, topk_ids, out))
    return out


def send_partial_sums_arguments(domain: Domain, rows: torch.Tensor) -> Launch:
    """Build the launch of `send_partial_sums_kernel`. rows: L2's output, sorted by expert."""
    layout = domain.layout
    arguments = (
        domain.peers, layout.regions, domain.row_shift, domain.state, rows, domain.results, layout.hidden, domain.rank,
        layout.num_ranks, layout.slot_stride, domain.first_expert, domain.num_local, next_power_of_2(layout.num_topk),
        min(MAX_SENT_COLUMNS, next_power_of_2(layout.hidden)), UNTRACED,
    )  # fmt: skip
    return Launch((PROGRAMS_PER_SM * num_sms(rows.device),), arguments, WARPS)


def combine_barrier_arguments(domain: Domain) -> Launch:
    """Build the launch of `combine_barrier_kernel`."""
    arguments = (
        domain.peers, domain.layout.regions, domain.state, domain.report, domain.rank, int(domain.timeout_s * 1e6),
        domain.on_gpu, UNTRACED,
    )  # fmt: skip
    return Launch((domain.layout.num_ranks,), arguments, WARPS)


def sum_arguments(domain: Domain, topk_ids: torch.Tensor, out: torch.Tensor) -> Launch:
    """Build the launch of `sum_kernel`."""
    (M, k), width = topk_ids.shape, out.shape[1]
    block = min(MAX_SUM_COLUMNS, next_power_of_2(width))
    slots = domain.layout.returned_rows_in(domain.memory)
    arguments = slots, topk_ids.contiguous(), out, domain.state, width, k, block, UNTRACED
    return Launch((M, -(-width // block)), arguments, warps_for(block))


def sum_ranks_arguments(domain: Domain, topk_ids: torch.Tensor, out: torch.Tensor) -> Launch:
    """Build the launch of `sum_ranks_kernel`."""
    (M, k), width = topk_ids.shape, out.shape[1]
    block = min(MAX_SUM_COLUMNS, next_power_of_2(width))
    arguments = (
        domain.layout.returned_rows_in(domain.memory), topk_ids.contiguous(), domain.rank_ends, out, domain.state,
        width, k, domain.layout.num_ranks, next_power_of_2(k), block, UNTRACED,
    )  # fmt: skip
    return Launch((M, -(-width // block)), arguments, warps_for(block))

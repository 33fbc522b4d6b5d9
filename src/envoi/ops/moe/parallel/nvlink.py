"""MoE layer over the ranks of one NVLink domain: kernels read and write peers' memory. A CUDA graph can hold a call.

    dispatch    stage_tokens   tokens, quantised, to where peers read them; slots counted and ranked
                send_routing   slots to every peer, wait for theirs, compute where rows go
                pull_rows      peers' tokens -> domain.rows, sorted by (expert, source rank, slot)
    experts     L1 -> L2, as on one rank; L2 stores each row in the memory of its token's rank
    combine     wait until peers have sent all rows of this rank's tokens, and sum them

With presum L2's rows stay here, and `send_partial_sums` sends one sum for each token and rank instead. Rows of experts
that aren't Envoi's are here too, until `send_rows`.

The next call reuses the memory without a further barrier: a rank stages its next tokens only after all ranks have
passed the combine barrier, so after all have pulled; and it runs its next L2 only after all have sent their next
routing, so after all have summed. Within a rank the order of one stream keeps calls apart.
"""

from dataclasses import dataclass

import torch

from envoi.ops.gemm.grouping import Grouping
from envoi.ops.moe.choose import has_kernels
from envoi.ops.moe.experts import run_experts
from envoi.ops.moe.launches import Launch, launch_kernel, warps_for
from envoi.ops.moe.parallel.symmetric_memory import Domain, SharedLayout
from envoi.ops.moe.permute import MAX_SUM_COLUMNS, RowBuffers
from envoi.runtime.devices import num_sms
from envoi.runtime.math import next_power_of_2
from envoi.runtime.timeline import UNTRACED
from envoi.types import ExpertWeights, Matrix

LATE_STEPS = {1: "dispatch", 2: "combine"}  # codes in the first row of `report`, and the step that timed out
DISPATCH_KERNELS = "envoi.ops.moe.parallel.dispatch_kernels"
REFUSED_ON_HOST = 3  # in `report`, as in shared_device
COMBINE_KERNELS = "envoi.ops.moe.parallel.combine_kernels"
MAX_SENT_COLUMNS = 2048  # columns of a partial sum that are sent at a time
PIECE, RANKED = 1024, 16  # slots, as in dispatch_kernels
MAX_CHUNKS = 32  # programs that send slots to one peer
PROGRAMS_PER_SM = 8  # programs that pull or send rows, 4 warps each
WARPS = {"num_warps": 4}


@dataclass(frozen=True)
class RankedSlots:
    """Slots of a rank, counted and ranked in pieces of PIECE.

    slot_ranks [M, k] int32: earlier slots of the slot's piece with the same expert; -1 = masked.
    counts [pieces, num_experts + 1] int32: slots of each expert in each piece.
    """

    slot_ranks: torch.Tensor
    counts: torch.Tensor


def dispatch(domain: Domain, tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> None:
    """Send this rank's tokens [M, H] bf16 to their experts' ranks; fill domain.rows with the tokens for its own."""
    ranked = stage_tokens(domain, tokens, topk_ids)
    send_routing(domain, topk_ids.contiguous(), topk_weights.contiguous(), ranked)
    pull_rows(domain)


def refuse(domain: Domain) -> None:
    """Take part in a call with no tokens, telling all peers that this rank's arguments are wrong."""
    none = torch.empty(0, 1, dtype=torch.int32, device=domain.memory.device)
    ranked = stage_tokens(domain, none.to(torch.bfloat16).view(0, 1).expand(0, domain.layout.hidden), none)
    send_routing(domain, none, none.float(), ranked, REFUSED_ON_HOST)
    combine_barrier(domain)


def stage_tokens(domain: Domain, tokens: torch.Tensor, topk_ids: torch.Tensor) -> RankedSlots:
    """Store this rank's tokens, quantised, where peers read them; count and rank its slots."""
    ranked = empty_ranked(topk_ids, domain.layout.num_experts)
    mine = domain.layout.tokens_in(domain.memory)
    launch_kernel(DISPATCH_KERNELS, "stage_tokens_kernel", stage_tokens_arguments(tokens, topk_ids, ranked, mine))
    return ranked


def send_routing(
    domain: Domain, topk_ids: torch.Tensor, topk_weights: torch.Tensor, ranked: RankedSlots, error_code: int = 0
) -> None:
    """Send experts, positions and weights of this rank's slots to every peer, and wait for theirs."""
    given = send_routing_arguments(domain, topk_ids, topk_weights, ranked, error_code)
    launch_kernel(DISPATCH_KERNELS, "send_routing_kernel", given)


def pull_rows(domain: Domain) -> None:
    """Read the peers' tokens for this rank's experts into domain.rows."""
    launch_kernel(DISPATCH_KERNELS, "pull_kernel", pull_arguments(domain))


def empty_ranked(topk_ids: torch.Tensor, num_experts: int) -> RankedSlots:
    """Allocate the RankedSlots of these slots."""
    shape = (-(-topk_ids.numel() // PIECE), num_experts + 1)
    return RankedSlots(
        torch.empty(topk_ids.shape, dtype=torch.int32, device=topk_ids.device),
        torch.empty(shape, dtype=torch.int32, device=topk_ids.device),
    )


def stage_tokens_arguments(tokens: torch.Tensor, topk_ids: torch.Tensor, ranked: RankedSlots, mine: Matrix) -> Launch:
    """Build the launch of `stage_tokens_kernel`. mine: this rank's tokens, as peers read them."""
    tokens = tokens if tokens.stride(1) == 1 else tokens.contiguous()
    (num_pieces, width_of_counts), (M, width) = ranked.counts.shape, tokens.shape
    out = RowBuffers.of(mine, width)
    arguments = (
        tokens, tokens.stride(0), out.values, out.sf, width, topk_ids.contiguous(), ranked.counts, ranked.slot_ranks,
        topk_ids.numel(), width_of_counts - 1, out.block, *out.form, next_power_of_2(width_of_counts), UNTRACED,
    )  # fmt: skip
    grid = (num_pieces * (PIECE // RANKED + 1) + M, -(-width // out.block))
    return Launch(grid, arguments, warps_for(out.block))


def num_chunks(layout: SharedLayout) -> int:
    """Number of programs that send slots to one peer, the same on all ranks, since a flag counts them."""
    return min(MAX_CHUNKS, max(1, -(-layout.slot_capacity // PIECE)))


def send_routing_arguments(
    domain: Domain, topk_ids: torch.Tensor, topk_weights: torch.Tensor, ranked: RankedSlots, error_code: int = 0
) -> Launch:
    """Build the launch of `send_routing_kernel`."""
    layout = domain.layout
    chunks = num_chunks(layout)
    arguments = (
        topk_ids, ranked.slot_ranks, ranked.counts, topk_weights, domain.peers, layout.regions, domain.row_shift,
        domain.offsets, domain.state, domain.report, domain.rank, layout.num_ranks, *topk_ids.shape,
        layout.slot_capacity, layout.num_experts, domain.first_expert, domain.num_local, error_code,
        int(domain.timeout_s * 1e6), chunks, next_power_of_2(layout.num_experts + 1), next_power_of_2(domain.num_local),
        next_power_of_2(layout.num_ranks), domain.on_gpu, UNTRACED,
    )  # fmt: skip
    return Launch((layout.num_ranks, chunks), arguments, WARPS)


def pull_arguments(domain: Domain) -> Launch:
    """Build the launch of `pull_kernel`."""
    layout, rows = domain.layout, domain.rows
    values, sf = (rows, None) if isinstance(rows, torch.Tensor) else (rows.values, rows.sf)
    if sf is not None:
        sf = sf.view(torch.uint8) if sf.itemsize == 1 else sf.view(torch.int32)
    num_words = layout.row_bytes // 4
    arguments = (
        domain.peers, layout.regions, domain.row_shift, domain.state, domain.history, values.view(torch.int32), sf,
        domain.row_weights, domain.row_destinations, None, domain.rank, layout.num_ranks, layout.slot_capacity,
        layout.num_experts, domain.first_expert, domain.num_local, num_words, layout.num_sf, layout.slot_bytes,
        next_power_of_2(layout.num_topk), next_power_of_2(num_words),
        next_power_of_2(layout.num_sf) if layout.num_sf else 0, next_power_of_2(layout.num_experts), UNTRACED,
    )  # fmt: skip
    return Launch((PROGRAMS_PER_SM * num_sms(values.device),), arguments, WARPS)


def why_not_kernels(experts: ExpertWeights) -> str:
    """Return the reason why the kernels can't be used with these experts, "" if they can."""
    if not has_kernels(experts.device):
        return f"no kernels on {experts.device}"
    return "" if experts.hidden % 16 == 0 else f"hidden {experts.hidden} isn't a multiple of 16"


def run_local_experts(domain: Domain, experts: ExpertWeights, num_slots: int) -> torch.Tensor:
    """Run this rank's experts on domain.rows. L2 sends rows to their slots; with presum they are returned.

    num_slots: this rank's slots, an estimate of the others'; only the choice of a config depends on it.
    """
    layout = domain.layout
    expected = layout.num_ranks * (num_slots or layout.slot_capacity) * domain.num_local // layout.num_experts
    to = None if layout.presum else domain.row_destinations
    grouping = Grouping(write_tail=False, expected=expected, to=to)
    return run_experts(domain.rows, domain.row_weights, domain.offsets, experts, grouping, domain.progress)


def combine(domain: Domain, rows: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
    """Return this rank's tokens [M, H] bf16. rows: the experts' result, which with presum is still here."""
    if domain.layout.presum:
        send_partial_sums(domain, rows)
    combine_barrier(domain)
    return sum_rows(domain, topk_ids)


def send_partial_sums(domain: Domain, rows: torch.Tensor) -> None:
    """Sum each token's rows on this rank and send the sum to the token's rank; only with presum."""
    launch_kernel(COMBINE_KERNELS, "send_partial_sums_kernel", send_partial_sums_arguments(domain, rows))


def send_rows(domain: Domain, rows: torch.Tensor) -> None:
    """Send rows [P, H] bf16, which L2 hasn't sent, to the ranks of their tokens; without presum."""
    launch_kernel(COMBINE_KERNELS, "send_rows_kernel", send_rows_arguments(domain, rows))


def combine_barrier(domain: Domain) -> None:
    """Signal to all peers that their rows have been sent, and wait for their signals."""
    launch_kernel(COMBINE_KERNELS, "combine_barrier_kernel", combine_barrier_arguments(domain))


def sum_rows(domain: Domain, topk_ids: torch.Tensor) -> torch.Tensor:
    """Sum the rows sent back for each of this rank's tokens: [M, H] bf16; NaN if the call failed."""
    out = torch.empty(len(topk_ids), domain.layout.hidden, dtype=torch.bfloat16, device=topk_ids.device)
    if not len(out):
        return out
    if domain.layout.presum:
        launch_kernel(COMBINE_KERNELS, "sum_ranks_kernel", sum_ranks_arguments(domain, topk_ids, out))
    else:
        launch_kernel(COMBINE_KERNELS, "sum_kernel", sum_arguments(domain, topk_ids, out))
    return out


def send_partial_sums_arguments(domain: Domain, rows: torch.Tensor) -> Launch:
    """Build the launch of `send_partial_sums_kernel`. rows: L2's output, sorted by expert."""
    layout = domain.layout
    arguments = (
        domain.peers, layout.regions, domain.row_shift, domain.state, rows, None, layout.hidden, domain.rank,
        layout.num_ranks, layout.slot_capacity, domain.first_expert, domain.num_local, next_power_of_2(layout.num_topk),
        min(MAX_SENT_COLUMNS, next_power_of_2(layout.hidden)), UNTRACED,
    )  # fmt: skip
    return Launch((PROGRAMS_PER_SM * num_sms(rows.device),), arguments, WARPS)


def send_rows_arguments(domain: Domain, rows: torch.Tensor) -> Launch:
    """Build the launch of `send_rows_kernel`."""
    width = domain.layout.hidden
    block = min(MAX_SENT_COLUMNS, next_power_of_2(width))
    arguments = rows, domain.row_destinations, domain.offsets, width, domain.num_local, block
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

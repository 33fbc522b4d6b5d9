"""Dispatch over NVLink: tokens to the ranks that own their experts, by three kernels.

stage_tokens   this rank's tokens, quantised, to where peers read them; slots counted and ranked
send_routing   slots to every peer, wait for theirs, compute where rows go
pull_rows      peers' tokens -> domain.rows, sorted by (expert, source rank, slot)
"""

from dataclasses import dataclass

import torch

from envoi.ops.moe.launches import Launch, launch_kernel, warps_for
from envoi.ops.moe.parallel.symmetric_memory import Domain, SharedLayout
from envoi.ops.moe.permute import RowBuffers
from envoi.runtime.devices import num_sms
from envoi.runtime.math import next_power_of_2
from envoi.runtime.timeline import UNTRACED
from envoi.types import Matrix

KERNELS = "envoi.ops.moe.parallel.dispatch_kernels"
REFUSED_ON_HOST = 3  # in `report`, as in shared_device
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
    """Take part in dispatch with no tokens, telling all peers that this rank's arguments are wrong."""
    none = torch.empty(0, 1, dtype=torch.int32, device=domain.memory.device)
    ranked = stage_tokens(domain, none.to(torch.bfloat16).view(0, 1).expand(0, domain.layout.hidden), none)
    send_routing(domain, none, none.float(), ranked, REFUSED_ON_HOST)


def stage_tokens(domain: Domain, tokens: torch.Tensor, topk_ids: torch.Tensor) -> RankedSlots:
    """Store this rank's tokens, quantised, where peers read them; count and rank its slots."""
    ranked = empty_ranked(topk_ids, domain.layout.num_experts)
    mine = domain.layout.tokens_in(domain.memory)
    launch_kernel(KERNELS, "stage_tokens_kernel", stage_tokens_arguments(tokens, topk_ids, ranked, mine))
    return ranked


def send_routing(
    domain: Domain, topk_ids: torch.Tensor, topk_weights: torch.Tensor, ranked: RankedSlots, error_code: int = 0
) -> None:
    """Send experts, positions and weights of this rank's slots to every peer, and wait for theirs."""
    given = send_routing_arguments(domain, topk_ids, topk_weights, ranked, error_code)
    launch_kernel(KERNELS, "send_routing_kernel", given)


def pull_rows(domain: Domain) -> None:
    """Read the peers' tokens for this rank's experts into domain.rows."""
    launch_kernel(KERNELS, "pull_kernel", pull_arguments(domain))


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
        domain.row_weights, domain.row_destinations, domain.results, domain.rank, layout.num_ranks, layout.slot_stride,
        layout.num_experts, domain.first_expert, domain.num_local, num_words, layout.num_sf, layout.slot_bytes,
        next_power_of_2(layout.num_topk), next_power_of_2(num_words),
        next_power_of_2(layout.num_sf) if layout.num_sf else 0, next_power_of_2(layout.num_experts), UNTRACED,
    )  # fmt: skip
    return Launch((PROGRAMS_PER_SM * num_sms(values.device),), arguments, WARPS)

"""MoE layer over the ranks of one NVLink domain: kernels read and write peers' memory. A CUDA graph can hold a call.

    dispatch    stage tokens, send routing, pull rows                     `envoi.ops.moe.parallel.dispatch`
    experts     L1 -> L2, as on one rank; L2 sends each row to its slot   `envoi.ops.moe.experts`
    combine     wait for the peers' rows, sum them                        `envoi.ops.moe.parallel.combine`

The next call reuses the memory without a further barrier: a rank stages its next tokens only after all ranks have
passed the combine barrier, so after all have pulled; and it runs its next L2 only after all have sent their next
routing, so after all have summed. Within a rank the order of one stream keeps calls apart.
"""

import torch

from envoi.ops.gemm.grouping import Grouping
from envoi.ops.moe.choose import has_kernels
from envoi.ops.moe.experts import run_experts
from envoi.ops.moe.parallel import dispatch as dispatch_step
from envoi.ops.moe.parallel.combine import combine, combine_barrier
from envoi.ops.moe.parallel.dispatch import dispatch
from envoi.ops.moe.parallel.symmetric_memory import Domain
from envoi.spans import span
from envoi.types import ExpertWeights

LATE_STEPS = {1: "dispatch", 2: "combine"}  # codes in the first row of `report`, and the step that timed out


def why_not_kernels(experts: ExpertWeights) -> str:
    """Return the reason why the kernels can't be used with these experts, "" if they can."""
    if not has_kernels(experts.device):
        return f"no kernels on {experts.device}"
    return "" if experts.hidden % 16 == 0 else f"hidden {experts.hidden} isn't a multiple of 16"


def run_layer(
    domain: Domain, tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, experts: ExpertWeights
) -> torch.Tensor:
    """Run the layer: tokens [M, H] bf16 of this rank -> [M, H] bf16; NaN if a rank was late or was refused."""
    with span("dispatch"):
        dispatch(domain, tokens, topk_weights, topk_ids)
    rows = run_local_experts(domain, experts, topk_ids.numel())
    with span("combine"):
        return combine(domain, rows, topk_ids)


def run_local_experts(domain: Domain, experts: ExpertWeights, num_slots: int) -> torch.Tensor:
    """Run this rank's experts on domain.rows. L2 sends rows to their slots; with presum they are returned.

    num_slots: this rank's slots, an estimate of the others'; only the choice of a config depends on it.
    """
    layout = domain.layout
    expected = layout.num_ranks * (num_slots or layout.slot_capacity) * domain.num_local // layout.num_experts
    to = None if layout.presum else domain.row_destinations
    grouping = Grouping(write_tail=False, expected=expected, to=to)
    return run_experts(domain.rows, domain.row_weights, domain.offsets, experts, grouping, domain.progress)


def refuse(domain: Domain) -> None:
    """Tell all peers that this rank's arguments are wrong, instead of a call."""
    dispatch_step.refuse(domain)
    combine_barrier(domain)

"""Pull of this rank's tokens and its experts in one launch: what it can run, and the call."""

from typing import cast

import torch

from envoi.gemm.grouping import Grouping
from envoi.moe.launches import Launch
from envoi.moe.one_launch import host
from envoi.moe.one_launch.config import FORMAT, MAX_HIDDEN, MAX_SLOTS, PullConfig, Pulled
from envoi.moe.parallel.load import HISTORY
from envoi.moe.parallel.symmetric_memory import Domain
from envoi.runtime.devices import implementation, num_sms
from envoi.types import ExpertWeights, QuantTensor


def supports_fused(experts: ExpertWeights, num_topk: int) -> str:
    """Return why one launch can't pull these experts' tokens and run them, "" if it can."""
    if experts.format == FORMAT and implementation(experts.device) == "hopper":
        if num_topk > MAX_SLOTS:
            return f"num_topk {num_topk}, more than {MAX_SLOTS}"
        if experts.hidden > MAX_HIDDEN:
            return f"hidden {experts.hidden}, more than {MAX_HIDDEN}"
        if not experts.num_local_experts:
            return ""  # this rank has no rows, and launches no experts
    return host.supports_one_launch(experts)


def run_fused(domain: Domain, experts: ExpertWeights, grouping: Grouping) -> torch.Tensor:
    """Pull the tokens of this rank's experts and run them, on the current stream; the bits of pull and `run_experts`.

    grouping: as `run_experts` takes it; with `to`, L2 stores each row at its address and returns `to`.
    """
    count = num_sms(experts.device)
    planned = plan_fused(domain, experts, grouping, count)
    return host.run(planned, cast(torch.Tensor, domain.progress), count, pull_of(domain))


def plan_fused(domain: Domain, experts: ExpertWeights, grouping: Grouping, num_sms: int) -> host.Planned:
    """Return the calls on domain.rows and their configs, by the rows that an expert is likely to have."""
    rows = cast(QuantTensor, domain.rows)
    return host.plan(rows, domain.row_weights, domain.offsets, experts, grouping, num_sms)


def fused_arguments(domain: Domain, planned: host.Planned, num_sms: int) -> Launch:
    """Build the launch."""
    return host.arguments(planned, cast(torch.Tensor, domain.progress), num_sms, pull_of(domain))


def pull_of(domain: Domain) -> host.Pull:
    """Return the pull of all ranks' tokens into domain.rows."""
    layout, rows = domain.layout, cast(QuantTensor, domain.rows)
    to = Pulled(
        domain.peers, domain.row_shift, domain.state, domain.history, rows.values.view(torch.int32),
        rows.sf.view(torch.int32), domain.row_weights, domain.row_destinations, layout.num_ranks, layout.slot_stride,
        domain.num_local,
    )  # fmt: skip
    from envoi.moe.parallel.shared_device import FINE, MAX_TOKENS, OUTCOME  # not at the top: it imports Triton

    config = PullConfig(
        layout.row_bytes // 4, layout.num_sf, layout.num_topk, layout.num_experts, layout.slot_bytes, MAX_TOKENS.value,
        OUTCOME.value, FINE.value, HISTORY,
    )  # fmt: skip
    return host.Pull(to, layout.regions, domain.rank, domain.first_expert, config)

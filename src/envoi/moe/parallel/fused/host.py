"""Host side of the fused L1: supported experts, the launch that orders rows, the launch of L1."""

from collections.abc import Callable
from functools import partial
from typing import cast

import torch

from envoi.gemm.grouping import Grouping
from envoi.gemm.hopper import host as hopper
from envoi.gemm.hopper.config import Config
from envoi.moe.experts import l1_epilogues, run_l1
from envoi.moe.launches import Launch, launch_kernel
from envoi.moe.parallel.fused.config import FORMAT, LANES, MOVERS, MoverConfig, RowMap
from envoi.moe.parallel.fused.memory import FusedMemory, token_bits
from envoi.moe.parallel.symmetric_memory import Domain
from envoi.moe.permute import empty_rows
from envoi.quant.formats import format_named
from envoi.runtime.devices import implementation, num_sms
from envoi.runtime.math import next_power_of_2
from envoi.runtime.timeline import UNTRACED
from envoi.types import ExpertWeights, Matrix, QuantTensor

MAX_SLOTS = LANES  # of a token: a lane each
ORDERED = 16, 64  # tokens that a program orders at once: at least, and at most
WARPS = {"num_warps": 4}


def supports_fused(experts: ExpertWeights, num_topk: int) -> str:
    """Return why L1 can't pull these experts' rows itself, "" if it can."""
    if experts.format != FORMAT:
        return f"experts in {experts.format}, not {FORMAT}"
    if implementation(experts.device) != "hopper":
        return f"experts on {experts.device}, which is no Hopper GPU"
    if num_topk > MAX_SLOTS:
        return f"num_topk {num_topk}, more than {MAX_SLOTS}"
    if not experts.num_local_experts:
        return ""  # this rank has no rows to pull, and launches no fused L1
    rows = empty_rows(1, experts.hidden, format_named(FORMAT).activations, torch.device("meta"))
    return hopper.supports_hopper(rows, experts.gate_up, l1_epilogues(experts)[0].ir)


def order_rows(domain: Domain) -> None:
    """Find the token of each of this rank's rows, and reset the counters of their arrival; after `send_routing`."""
    launch_kernel("envoi.moe.parallel.fused.order_kernels", "order_rows_kernel", order_arguments(domain))


def order_arguments(domain: Domain) -> Launch:
    """Build the launch of `order_rows_kernel`, which may start before `send_routing` ends."""
    layout, memory, count = domain.layout, cast(FusedMemory, domain.fused), num_sms(domain.peers.device)
    # Few tokens are spread over all multiprocessors.
    least, most = ORDERED
    ordered = min(most, max(least, next_power_of_2(-(-layout.num_ranks * layout.max_tokens // count))))
    arguments = (
        domain.peers, layout.regions, domain.row_shift, domain.offsets, domain.state, domain.history, *memory.tensors,
        domain.row_weights, domain.row_destinations, domain.rank, layout.num_ranks, layout.slot_stride,
        layout.num_experts, domain.first_expert, domain.num_local, layout.slot_bytes, token_bits(layout.max_tokens),
        ordered, next_power_of_2(layout.num_topk), next_power_of_2(layout.num_experts),
        domain.on_gpu, UNTRACED,
    )  # fmt: skip
    programs = layout.num_ranks * -(-layout.max_tokens // ordered)
    return Launch((min(programs, count) + 1,), arguments, {**WARPS, "launch_pdl": domain.on_gpu})


def run_fused_l1(domain: Domain, experts: ExpertWeights, grouping: Grouping) -> Matrix:
    """Pull the tokens of this rank's experts into domain.rows and run L1 on them; the bits of `run_l1` after a pull."""
    return run_l1(domain.rows, domain.row_weights, domain.offsets, experts, grouping, pulling_gemm(domain))


def pulling_gemm(domain: Domain) -> Callable[..., list[torch.Tensor] | None]:
    """Return what runs a GEMM on domain.rows that pulls them first, with the arguments of `run_kernels`."""
    return partial(hopper.run_gemm, launch=partial(launch_l1, domain))


def launch_l1(domain: Domain, call: hopper.Call, config: Config, num_sms: int) -> None:
    """Launch the GEMM with movers on the current stream."""
    from envoi.moe.parallel.fused.kernel import fused_l1_kernel
    from envoi.runtime.launch import launch

    grid, arguments, options = l1_arguments(domain, call, config, num_sms)
    launch(fused_l1_kernel, grid, arguments, options)


def l1_arguments(domain: Domain, call: hopper.Call, config: Config, num_sms: int) -> Launch:
    """Build the launch of `fused_l1_kernel` for a call of the GEMM on domain.rows.

    It may start before `order_rows` ends. A launch between the two would start once `order_rows` has ended, and do no
    harm.
    """
    layout, memory, rows = domain.layout, cast(FusedMemory, domain.fused), cast(QuantTensor, domain.rows)
    grid, (*gemm, _no_rest, cfg, code, _, row_mode, max_experts, untraced) = hopper.arguments(call, config, num_sms)
    row_map = RowMap(
        domain.peers, memory.row_tokens, memory.token_rows, memory.tickets, memory.arrivals,
        rows.values.view(torch.int32), rows.sf.view(torch.int32),
    )  # fmt: skip
    moving = MoverConfig(layout.row_bytes // 4, layout.num_sf, memory.token_rows.shape[1], **MOVERS)
    arguments = (
        *gemm, row_map, layout.regions, domain.state, domain.report, token_bits(layout.max_tokens), domain.rank,
        int(domain.timeout_s * 1e6), cfg, code, row_mode, max_experts, moving, untraced,
    )  # fmt: skip
    return Launch(grid, arguments, {"num_warps": config.num_warps, "launch_pdl": True})

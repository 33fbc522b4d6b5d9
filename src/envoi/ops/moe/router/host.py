"""Launches of the router's kernels: choice of the kernel by device and dtype, arguments, outputs, workspace."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from envoi.ops.moe.router import tiling_blackwell
from envoi.ops.moe.router.choose_tiling import Share, choose_shares
from envoi.ops.moe.router.device_types import Outputs, Scalars, Tables
from envoi.ops.moe.router.spec import RANKED_BY_LOGITS, Rule, Spec
from envoi.ops.moe.router.tiling import RouterTiling, choice_of, rest_of
from envoi.ops.moe.router.tiling_blackwell import MOST_REGISTERS, ROWS, tiling_of, why_not
from envoi.runtime import workspace
from envoi.runtime.devices import has_tcgen05, implementation, num_sms
from envoi.runtime.math import cdiv
from envoi.runtime.tma import descriptor, tma_ready

MAX_GROUPS = 32


@dataclass(frozen=True)
class Call:
    """Inputs of a launch. tokens [M, hidden], gate [N, hidden]; hashing: token_ids [M], hash_table [vocabulary, k].

    weights_dtype: dtype of the outputs weights and dense. batch_invariant: a row's bits don't depend on other rows.
    """

    tokens: torch.Tensor
    gate: torch.Tensor
    spec: Spec
    alpha: float
    routed_scale: float
    logit_bias: torch.Tensor | None
    expert_bias: torch.Tensor | None
    token_ids: torch.Tensor | None
    hash_table: torch.Tensor | None
    weights_dtype: torch.dtype = torch.float32
    batch_invariant: bool = True


def spec_of(
    num_experts: int, k: int, rule: Rule, logit_bias: Any, expert_bias: Any, hashed: bool, wanted: tuple[bool, ...]
) -> Spec:
    """Return the constants that the kernels are compiled for. wanted: logits, dense, counts."""
    sums = rule.num_groups > 1 and rule.group_score == "top2_sum"
    by_score = not hashed and rule.score not in RANKED_BY_LOGITS and (expert_bias is not None or sums)
    return Spec(
        num_experts, k, replace(rule, routed_scale=1.0), by_score, logit_bias is not None,
        expert_bias is not None and not hashed, hashed, *wanted,
    )  # fmt: skip


def supported(device: torch.device, rule: Rule) -> bool:
    """Tell whether a kernel can run this rule on this device; else the torch reference computes it."""
    return implementation(device) != "torch" and rule.num_groups <= MAX_GROUPS


def run_router(call: Call) -> list[torch.Tensor]:
    """Launch the router; return the operator's outputs: weights, ids, then logits, dense, counts, offsets if wanted."""
    outputs = empty_outputs(call)
    if call.tokens.shape[0] == 0:
        for counts in outputs["counts"] or ():
            counts.zero_()
    elif implementation(call.tokens.device) == "hopper" and takes_hopper(call):
        _run_hopper(call, outputs)
    elif tiling_blackwell.IS_USED and has_tcgen05(call.tokens.device) and not why_not_blackwell(call):
        _run_blackwell(call, outputs)
    else:
        _run_portable(call, outputs)
    found = [outputs["weights"], outputs["ids"], outputs["logits"], outputs["dense"], *(outputs["counts"] or ())]
    return [x for x in found if x is not None]


def takes_hopper(call: Call) -> bool:
    """Tell whether the Hopper kernel takes the dtypes: tokens and gate both bf16, or both fp16."""
    return call.tokens.dtype == call.gate.dtype and call.tokens.dtype != torch.float32


def why_not_blackwell(call: Call) -> str:
    """Return why the Blackwell kernel doesn't take a call, which then runs on the Triton kernel; "" if it does."""
    return why_not((call.tokens.dtype, call.gate.dtype), call.spec)


def empty_outputs(call: Call) -> dict[str, Any]:
    """Allocate the kernels' outputs; None for outputs that aren't wanted."""
    M, spec, new = call.tokens.shape[0], call.spec, call.tokens.new_empty
    N = spec.num_experts
    return {
        "weights": new(M, spec.k, dtype=call.weights_dtype),
        "ids": new(M, spec.k, dtype=torch.int32),
        "logits": new(M, N, dtype=torch.float32) if spec.want_logits else None,
        "dense": new(M, N, dtype=call.weights_dtype) if spec.want_dense else None,
        "counts": (new(N, dtype=torch.int32), new(N + 1, dtype=torch.int32)) if spec.want_counts else None,
    }


def _tables(call: Call) -> Tables:
    """Collect the inputs besides tokens and gate, contiguous."""
    ids, table = call.token_ids, call.hash_table
    logit_bias, expert_bias = (None if x is None else x.contiguous() for x in (call.logit_bias, call.expert_bias))
    if ids is None or table is None:
        return Tables(logit_bias, expert_bias, None, None, 0)
    return Tables(logit_bias, expert_bias, ids.contiguous(), table.contiguous(), table.shape[0])


def _run_portable(call: Call, outputs: dict[str, Any]) -> None:
    """Launch the Triton kernel.

    The tile depends only on the experts and dtypes, so that a token's bits don't depend on the number of tokens.
    """
    from envoi.ops.moe.router import kernel_triton
    from envoi.runtime.launch import launch

    spec = call.spec
    wide = call.tokens.dtype != call.gate.dtype or call.tokens.dtype == torch.float32
    block_m = 16
    block_k = (16 if wide else 32) if spec.columns > 512 else 32 if spec.columns > 256 or wide else 64
    tokens, gate = (x if x.stride(1) == 1 else x.contiguous() for x in (call.tokens, call.gate))
    counters = workspace.counters(spec.num_experts + 1, tokens.device) if spec.want_counts else None
    written = Outputs(outputs["weights"], outputs["ids"], outputs["logits"], outputs["dense"], _from(counters, 1))
    arguments = (
        tokens, tokens.stride(0), gate, gate.stride(0), *tokens.shape,
        Scalars(call.alpha, call.routed_scale, spec.k), _tables(call), written,
        outputs["counts"], counters, spec, wide, block_m, block_k,
    )  # fmt: skip
    warps = 16 if spec.columns > 512 else 8 if spec.columns > 128 else 4
    grid, options = (-(-tokens.shape[0] // block_m),), {"num_warps": warps, "num_stages": 3}
    launch(kernel_triton.router_kernel, grid, arguments, options)


def _run_blackwell(call: Call, outputs: dict[str, Any]) -> None:
    from envoi.ops.moe.router import kernel_blackwell
    from envoi.runtime.launch import launch

    spec, (M, hidden) = replace(call.spec, gluon=True), call.tokens.shape
    tiling = tiling_of(hidden, spec)
    counters = workspace.counters(spec.num_experts + 1, call.tokens.device) if spec.want_counts else None
    counts, offsets = outputs["counts"] or (None, None)
    logit_bias, expert_bias, *_ = _tables(call)
    arguments = (
        descriptor(tma_ready(call.tokens), ROWS, tiling.block_k),
        descriptor(tma_ready(call.gate), tiling.width, tiling.block_k),
        M, hidden, call.alpha, call.routed_scale, logit_bias, expert_bias, outputs["weights"], outputs["ids"],
        outputs["logits"], outputs["dense"], _from(counters, 1), counts, offsets, counters, tiling, spec,
    )  # fmt: skip
    options = {"num_warps": ROWS // 32, "maxnreg": MOST_REGISTERS}
    launch(kernel_blackwell.router_kernel, (cdiv(M, ROWS),), arguments, options)


def _from(x: torch.Tensor | None, first: int) -> torch.Tensor | None:
    return None if x is None else x[first:]


def _run_hopper(call: Call, outputs: dict[str, Any], tiling: RouterTiling | None = None) -> None:
    from envoi.runtime.launch import launch

    for given in hopper_launches(call, outputs, num_sms(call.tokens.device), tiling):
        launch(*given)


def hopper_launches(
    call: Call, outputs: dict[str, Any], num_sms: int, tiling: RouterTiling | None = None
) -> list[tuple[Any, tuple[int], tuple, dict[str, Any]]]:
    """Return kernel, grid, arguments and options of the launches: usually one; each has some of the rows.

    Of rows that are only multiplied, a second launch chooses the experts. Launches run one after the other and share
    the workspace. All add to one histogram; the last stores the counts.
    """
    spec, device = replace(call.spec, gluon=True), call.tokens.device
    M, hidden = call.tokens.shape
    shares = choose_shares(M, hidden, spec, num_sms, call.batch_invariant) if tiling is None else (Share(M, tiling),)
    call = replace(call, spec=spec, tokens=tma_ready(call.tokens), gate=tma_ready(call.gate))
    num_met = max(_num_met(share) for share in shares)
    num_counted = spec.num_experts + 1 if spec.want_counts else 0
    counters = workspace.counters(num_met + num_counted, device) if num_met + num_counted else None
    counted = _from(counters, num_met) if num_counted else None
    found, first = [], 0
    for share in shares:
        rows, first = slice(first, first + share.num_rows), first + share.num_rows
        some = (call, outputs) if len(shares) == 1 else _of_rows(call, outputs, rows)
        met = counters if _num_met(share) else None
        found += _launches_of(*some, share.tiling, met, counted, num_sms)
    return found


def _num_met(share: Share) -> int:
    """Return the number of counters by which the parts of the same rows wait for each other."""
    tiling = share.tiling
    counted = tiling.apart or (tiling.parts > 1 and not tiling.polls_sums)
    return 2 * -(-share.num_rows // tiling.rows_per_cta) if counted else 0


def _of_rows(call: Call, outputs: dict[str, Any], rows: slice) -> tuple[Call, dict[str, Any]]:
    """Return the call and its outputs for some of the rows; counts only for the last rows."""
    ids = call.token_ids
    some = replace(call, tokens=call.tokens[rows], token_ids=None if ids is None else ids[rows])
    parts = {x: None if outputs[x] is None else outputs[x][rows] for x in ("weights", "ids", "logits", "dense")}
    return some, {**parts, "counts": outputs["counts"] if rows.stop == call.tokens.shape[0] else None}


def _launches_of(
    call: Call, outputs: dict[str, Any], tiling: RouterTiling, met: torch.Tensor | None, counted: torch.Tensor | None,
    num_sms: int,
) -> list[tuple[Any, tuple[int], tuple, dict[str, Any]]]:  # fmt: skip
    """Return the launches of some rows. met: their counters. counted: one more, and the histogram."""
    from envoi.ops.moe.router import kernel_hopper, kernel_hopper_choice

    spec, (M, hidden), device = call.spec, call.tokens.shape, call.tokens.device
    row_blocks = -(-M // tiling.rows_per_cta)
    sums = None
    if tiling.polls_sums:
        sums = workspace.blanks(tiling.num_sets * M * tiling.columns, device)
    elif tiling.apart:
        rest = rest_of(M, hidden, tiling, num_sms)
        rest_row = min(rest.first // tiling.parts * tiling.rows_per_cta, M)
        num_sums = (M + (rest.sets - 1) * (M - rest_row)) * tiling.columns
        sums = torch.empty(num_sums, dtype=torch.float32, device=device)
    elif tiling.parts > 1:
        num_sums = tiling.num_sets * row_blocks * tiling.tile * tiling.columns
        sums = torch.empty(num_sums, dtype=torch.float32, device=device)
    counts, offsets = outputs["counts"] or (None, None)
    counter = None if counts is None else counted
    operands = (
        descriptor(call.tokens, tiling.box_m, tiling.block_k),
        descriptor(call.gate, tiling.box_n, tiling.block_k),
    )
    routing = (
        call.alpha, call.routed_scale, spec.k, *_tables(call), outputs["weights"], outputs["ids"], outputs["logits"],
        outputs["dense"], _from(counted, 1), counts, offsets, counter,
    )  # fmt: skip
    grid = (row_blocks * tiling.parts,)
    options = tiling.options
    if tiling.apart:
        choice, nothing = choice_of(spec, rest.sets > 1, M / num_sms), (1.0, 1.0, 1, *(None,) * 4, 0, *(None,) * 8)
        cut = (rest.first, rest.parts, rest.steps) if rest.sets > 1 else (None, None, None)
        plain = Spec(spec.num_experts, 1, Rule(), gluon=True)
        products = *operands, M, hidden, *nothing, sums, met, *cut, tiling, plain
        num_parts = rest.first + (grid[0] - rest.first) * rest.parts
        if not tiling.single_fill:  # a CTA takes one tile after the other
            grid = (min(num_parts, num_sms),)
        return [
            (kernel_hopper.router_kernel, grid, products, options),
            (kernel_hopper_choice.choice_kernel, (-(-M // choice.rows_per_pass),),
             (sums, met, M, tiling.rows_per_cta, tiling.parts, rest_row, rest.parts, rest.sets, *routing, choice, spec),
             choice.options),
        ]  # fmt: skip
    if tiling.all_parts_wait:
        options["launch_cooperative_grid"] = True
    arguments = *operands, M, hidden, *routing, sums, met, None, None, None, tiling, spec
    return [(kernel_hopper.router_kernel, grid, arguments, options)]

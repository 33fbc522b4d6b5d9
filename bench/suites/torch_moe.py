"""MoE layer in plain torch operators, and the inputs that it shares with Envoi's."""

from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch.nn import functional

from bench.timing import Run
from envoi.quant.bits import as_bytes
from envoi.quant.formats import SCHEMES
from envoi.tune.problems import in_scheme
from envoi.types import ExpertWeights, QuantTensor, Routing


@dataclass(frozen=True)
class Layer:
    """Rank's share: tokens [M, H], routing over all experts, gate_up [E, 2I, H] (concat), down [E, H, I], all bf16.

    first: the id of this rank's first expert; packed: the same weights in the case's format.
    """

    tokens: torch.Tensor
    routing: Routing
    gate_up: torch.Tensor
    down: torch.Tensor
    packed: ExpertWeights
    first: int

    @property
    def num_experts(self) -> int:
        """Number of experts over all ranks."""
        return self.routing.num_experts


def eager_moe(layer: Layer) -> torch.Tensor:
    """Compute in bf16, one expert after the other."""
    out = torch.zeros(layer.tokens.shape, dtype=torch.float32, device=layer.tokens.device)
    for expert in range(layer.num_experts):
        token, slot = (layer.routing.topk_ids == expert).nonzero(as_tuple=True)
        gate, up = functional.linear(layer.tokens[token], layer.gate_up[expert]).chunk(2, dim=-1)
        rows = functional.linear(functional.silu(gate) * up, layer.down[expert])
        out.index_add_(0, token, rows.float() * layer.routing.topk_weights[token, slot].unsqueeze(1))
    return out.to(layer.tokens.dtype)


def grouped_moe(layer: Layer) -> torch.Tensor:
    """Compute in bf16 by torch's grouped matmul on sorted rows."""
    order, tokens, ends = _sorted(layer)
    return _sum_slots(layer, _grouped_mlp(layer.tokens[tokens], ends, layer), order)


def _sorted(layer: Layer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the slots by expert, the token of each, and the experts' ends."""
    ranked, order = layer.routing.topk_ids.flatten().sort(stable=True)
    ends = torch.bincount(ranked, minlength=layer.num_experts).cumsum(0).to(torch.int32)
    return order, order // layer.routing.topk_ids.shape[1], ends


def grouped_moe_fp8(layer: Layer) -> Run:
    """Return a call in FP8 with row scales, all that torch's grouped matmul has; weights are quantised outside it."""
    weights = [cast(QuantTensor, in_scheme(w, SCHEMES["fp8_row"])) for w in (layer.gate_up, layer.down)]

    def run() -> torch.Tensor:
        order, chosen, ends = _sorted(layer)
        values, sf = _quantise(layer.tokens)
        values = as_bytes(values)[chosen].view(values.dtype)
        gate, up = _scaled_product(values, sf[chosen], weights[0], ends).chunk(2, dim=-1)
        rows = _scaled_product(*_quantise(functional.silu(gate) * up), weights[1], ends)
        return _sum_slots(layer, rows, order)

    return run


def _quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    sf = x.abs().amax(-1).float().clamp(min=1e-30) / 448.0
    return (x / sf.unsqueeze(1)).to(torch.float8_e4m3fn), sf


def _scaled_product(values: torch.Tensor, sf: torch.Tensor, b: QuantTensor, ends: torch.Tensor) -> torch.Tensor:
    return torch._scaled_grouped_mm(  # pyright: ignore[reportPrivateImportUsage]
        values, b.values.transpose(1, 2), sf, b.sf.squeeze(2), offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def parallel_moe(layer: Layer, num_ranks: int) -> torch.Tensor:
    """Compute in bf16 over ranks: counts, rows there, torch's grouped matmul, rows back. Collective."""
    k, num_local = layer.routing.topk_ids.shape[1], layer.packed.num_local_experts
    flat = layer.routing.topk_ids.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=layer.num_experts)
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts)
    by_source = received.view(num_ranks, num_local)
    send, receive = torch.stack((counts.view(num_ranks, num_local).sum(1), by_source.sum(1))).tolist()
    rows = _exchange(layer.tokens[order // k], receive, send)
    expert = torch.arange(num_local, device=flat.device).repeat(num_ranks)
    by_expert = expert.repeat_interleave(received, output_size=sum(receive)).argsort(stable=True)
    done = _grouped_mlp(rows[by_expert], by_source.sum(0).cumsum(0).to(torch.int32), layer)
    back = torch.empty_like(done)
    back[by_expert] = done
    return _sum_slots(layer, _exchange(back, send, receive), order)


def _exchange(rows: torch.Tensor, receive: list[int], send: list[int]) -> torch.Tensor:
    got = rows.new_empty(sum(receive), rows.shape[1])
    dist.all_to_all_single(got, rows.contiguous(), receive, send)
    return got


def _grouped_mlp(rows: torch.Tensor, ends: torch.Tensor, layer: Layer) -> torch.Tensor:
    gate, up = functional.grouped_mm(rows, layer.gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    return functional.grouped_mm(functional.silu(gate) * up, layer.down.transpose(1, 2), offs=ends)


def _sum_slots(layer: Layer, rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(layer.tokens.shape, dtype=torch.float32, device=rows.device)
    weights = layer.routing.topk_weights.flatten()[order].unsqueeze(1)
    return out.index_add_(0, order // layer.routing.topk_ids.shape[1], rows.float() * weights).to(rows.dtype)

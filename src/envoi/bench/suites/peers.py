"""Baselines from other libraries, if they are installed."""

import importlib
from typing import Any

import torch
import torch.distributed as dist

from envoi.bench.shapes import MoeShape
from envoi.bench.timing import Run
from envoi.runtime.devices import num_sms
from envoi.types import Routing


def deep_gemm_moe(shape: MoeShape, tokens: torch.Tensor, routing: Routing) -> Run:
    """Return a call of sgl-deep-gemm's one-launch FP8 MoE over the ranks of the default group, on weights of its own.

    Inputs are staged here, outside the call. Collective. Raises ModuleNotFoundError if the library isn't installed.
    """
    deep_gemm: Any = importlib.import_module("deep_gemm")
    num_local, device = shape.num_experts // dist.get_world_size(), tokens.device
    buffer = deep_gemm.get_symm_buffer_for_sm90_mega_moe(
        dist.group.WORLD, shape.num_experts, shape.num_tokens, shape.num_topk, shape.hidden, shape.intermediate
    )
    values, sf = deep_gemm.utils.math.per_token_cast_to_fp8(tokens, False, 128)
    weights = (
        _fp8_weights(num_local, 2 * shape.intermediate, shape.hidden, device),
        _fp8_weights(num_local, shape.hidden, shape.intermediate, device),
    )
    l1, l2 = deep_gemm.transform_weights_for_mega_moe_sm90(*weights)
    for target, source in (
        (buffer.x, values),
        (buffer.x_sf, sf),
        (buffer.topk_idx, routing.topk_ids),
        (buffer.topk_weights, routing.topk_weights),
    ):
        target[: shape.num_tokens].copy_(source)
    out = torch.empty_like(tokens)
    return lambda: deep_gemm.fp8_mega_moe(out, l1, l2, buffer)


def deep_gemm_topk(
    q: torch.Tensor, k_cache: torch.Tensor, weights: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor,
    k: int,
) -> Run:  # fmt: skip
    """Return a call of sgl-deep-gemm's FP8 scores over a paged cache and torch.topk: positions, ties in any order.

    Its launch is planned here, outside the call. Raises ModuleNotFoundError if the library isn't installed.
    """
    deep_gemm: Any = importlib.import_module("deep_gemm")
    page_size, width = k_cache.shape[1], block_table.shape[1]
    table = block_table.clamp(max=k_cache.shape[0] - 1)  # it also reads columns past a request's last page
    cache = k_cache.view(torch.uint8)
    lengths = seq_lens.unsqueeze(1)  # [requests, queries of each]
    behind = torch.arange(width * page_size, device=q.device) >= lengths  # scores that it doesn't write
    plan = deep_gemm.get_paged_mqa_logits_metadata(lengths, page_size, num_sms(q.device))
    num_chosen = min(k, width * page_size)

    def run() -> torch.Tensor:
        scores = deep_gemm.fp8_paged_mqa_logits(
            q.unsqueeze(1), cache, weights, lengths, table, plan, width * page_size, False
        )
        return scores.masked_fill_(behind, -torch.inf).topk(num_chosen).indices

    return run


def _fp8_weights(num_experts: int, rows: int, columns: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.randn(num_experts, rows, columns, device=device, dtype=torch.bfloat16).to(torch.float8_e4m3fn)
    return values, torch.full((num_experts, rows // 128, columns // 128), 0.02, device=device)

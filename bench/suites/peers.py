"""Other libraries over ranks and for the indexer and the router, where they are installed: none is a dependency."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from bench.shapes import MoeShape
from bench.suites.peer_humming import blocks_of, import_operators
from envoi.ops.moe.router import Rule
from envoi.runtime.devices import num_sms
from envoi.types import Routing

BLOCK = 128
FEW_TOKENS = 16  # of FlashInfer's router GEMM
WORKSPACE_BYTES = 1 << 20  # of vLLM's top-k operators

Weight = tuple[torch.Tensor, torch.Tensor]  # FP8 values, and scales per 128x128


# Over ranks


def deep_gemm_moe(
    shape: MoeShape, tokens: torch.Tensor, routing: Routing, gate_up: torch.Tensor, down: torch.Tensor
) -> tuple[Callable[[], torch.Tensor], Callable[[], None], tuple[Weight, Weight]]:
    """Return a call of sgl-deep-gemm's one-launch FP8 MoE over the ranks of the default group.

    Its own kernel quantises the tokens and stages them in each call. gate_up [E, 2I, H]: gate, then up; down [E, H, I],
    of this rank's experts, in bf16. Returns also what frees the memory that ranks share, and the weights as quantised.
    Collective. Raises ModuleNotFoundError if the library isn't installed.
    """
    deep_gemm: Any = importlib.import_module("deep_gemm")
    buffer = deep_gemm.get_symm_buffer_for_sm90_mega_moe(
        dist.group.WORLD, shape.num_experts, shape.num_tokens, shape.num_topk, shape.hidden, shape.intermediate
    )
    quantised = blocks_of(gate_up), blocks_of(down)
    l1, l2 = deep_gemm.transform_weights_for_mega_moe_sm90(*quantised)
    out, ids, weights = torch.empty_like(tokens), routing.topk_ids, routing.topk_weights

    def run() -> torch.Tensor:
        deep_gemm.mega_moe_pre_dispatch_sm90(
            tokens, ids, weights, buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights,
            num_tokens=shape.num_tokens, group_size=BLOCK,
        )  # fmt: skip
        deep_gemm.fp8_mega_moe(out, l1, l2, buffer)
        return out

    return run, buffer.destroy, quantised


# The indexer


def vllm_topk(
    select: str, q: torch.Tensor, k_cache: torch.Tensor, weights: torch.Tensor, seq_lens: torch.Tensor,
    block_table: torch.Tensor, k: int, longest: int,
) -> Callable[[], torch.Tensor]:  # fmt: skip
    """Return a call of FP8 scores over a paged cache by the DeepGEMM that vLLM bundles, and of a top-k of them.

    select: "torch_topk" (best first, ties in any order), or vLLM's "cooperative_topk" or "persistent_topk", which give
    a set: positions int32 [B, k] in any order, -1 for those that a shorter row doesn't have. longest: of seq_lens. The
    launch of the scores is planned here, outside the call. Raises ModuleNotFoundError if vLLM isn't installed.
    """
    deep_gemm: Any = importlib.import_module("vllm.third_party.deep_gemm")
    import_operators()
    page_size, width = k_cache.shape[1], block_table.shape[1]
    table = block_table.clamp(max=k_cache.shape[0] - 1)  # it also reads columns past a request's last page
    cache, lengths = k_cache.view(torch.uint8), seq_lens.unsqueeze(1)  # lengths: [requests, queries of each]
    behind = torch.arange(width * page_size, device=q.device) >= lengths  # scores that it doesn't write
    plan = deep_gemm.get_paged_mqa_logits_metadata(lengths, page_size, num_sms(q.device))
    chosen = torch.empty(len(q), k, dtype=torch.int32, device=q.device)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)

    def scores() -> torch.Tensor:
        return deep_gemm.fp8_fp4_paged_mqa_logits(
            (q.unsqueeze(1), None), cache, weights, lengths, table, plan, width * page_size
        )

    def by_torch() -> torch.Tensor:
        return scores().masked_fill_(behind, -torch.inf).topk(min(k, width * page_size)).indices

    def by_vllm() -> torch.Tensor:
        getattr(torch.ops._C, select)(scores(), seq_lens, chosen, workspace, k, longest)
        return chosen

    return by_torch if select == "torch_topk" else by_vllm


def vllm_prefill(
    select: str, q: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor, weights: torch.Tensor, seen: torch.Tensor,
    k: int,
) -> Callable[[], torch.Tensor]:  # fmt: skip
    """Return a call of FP8 scores of many queries by the DeepGEMM that vLLM bundles, and of a top-k of them.

    q [M, H, 128]; keys [N, 128] and scales [N] in one piece, not in pages; seen [M] int32: how many keys a query sees.
    select: as in `vllm_topk`, or "top_k_per_row_prefill". Raises ModuleNotFoundError if vLLM isn't installed.
    """
    deep_gemm: Any = importlib.import_module("vllm.third_party.deep_gemm")
    import_operators()
    num_rows, num_keys, begins = len(q), len(keys), torch.zeros_like(seen)
    chosen = torch.empty(num_rows, k, dtype=torch.int32, device=q.device)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)

    def scores() -> torch.Tensor:
        return deep_gemm.fp8_fp4_mqa_logits((q, None), (keys, scales), weights, begins, seen, num_keys)

    def by_torch() -> torch.Tensor:
        found = scores()[:, :num_keys]
        behind = torch.arange(num_keys, device=q.device) >= seen.unsqueeze(1)
        return found.masked_fill_(behind, -torch.inf).topk(min(k, num_keys)).indices

    def by_vllm() -> torch.Tensor:
        found = scores()
        if select == "top_k_per_row_prefill":
            torch.ops._C.top_k_per_row_prefill(found, begins, seen, chosen, num_rows, *found.stride(), k)
        else:
            getattr(torch.ops._C, select)(found, seen, chosen, workspace, k, num_keys)
        return chosen

    return by_torch if select == "torch_topk" else by_vllm


# The router


def vllm_route(rule: Rule, k: int) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Return a router of torch's matmul and vLLM's operator of (tokens, gate, expert_bias): weights and ids [M, k].

    Raises ModuleNotFoundError if vLLM isn't installed, ValueError for a rule that its operators don't have.
    """
    import_operators()
    ops: Any = torch.ops._moe_C
    if rule == Rule():

        def softmax(tokens: torch.Tensor, gate: torch.Tensor, _: torch.Tensor | None):
            weights = tokens.new_empty(len(tokens), k, dtype=torch.float32)
            ids, rows = (tokens.new_empty(len(tokens), k, dtype=torch.int32) for _ in range(2))
            ops.topk_softmax(weights, ids, rows, functional.linear(tokens, gate), True, None, None)
            return weights, ids

        return softmax
    _expect_groups(rule)

    def grouped(tokens: torch.Tensor, gate: torch.Tensor, expert_bias: torch.Tensor | None):
        logits = torch.mm(tokens, gate.T, out_dtype=torch.float32)
        return ops.grouped_topk(
            logits, rule.num_groups, rule.num_topk_groups, k, rule.renormalize, rule.routed_scale, expert_bias, 1
        )

    return grouped


def flashinfer_route(rule: Rule, k: int) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Return a router of FlashInfer's operators, see `vllm_route`: its GEMM to 16 tokens of 7168, then torch's."""
    gemm: Any = importlib.import_module("flashinfer.gemm")
    moe: Any = importlib.import_module("flashinfer.fused_moe")
    _expect_groups(rule)

    def run(tokens: torch.Tensor, gate: torch.Tensor, expert_bias: torch.Tensor | None):
        if len(tokens) <= FEW_TOKENS and gate.shape == (256, 7168):
            logits = tokens.new_empty(len(tokens), len(gate), dtype=torch.float32)
            gemm.mm_M1_16_K7168_N256(tokens, gate.T, logits)
        else:
            logits = torch.mm(tokens, gate.T, out_dtype=torch.float32)
        weights = torch.empty(len(tokens), k, device=tokens.device)
        ids = tokens.new_empty(len(tokens), k, dtype=torch.int32)
        moe.fused_topk_deepseek(
            logits, expert_bias, rule.num_groups, rule.num_topk_groups, k, rule.routed_scale, weights, ids
        )
        return weights, ids

    return run


def _expect_groups(rule: Rule) -> None:
    """Raise ValueError unless the rule is DeepSeek-V3's: sigmoid, renormalised, groups by their two best."""
    if (rule.score, rule.renormalize, rule.group_score if rule.num_groups > 1 else "top2_sum") != (
        "sigmoid", True, "top2_sum",
    ):  # fmt: skip
        raise ValueError(f"its operators don't have {rule}")

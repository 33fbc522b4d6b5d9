"""Gates of vLLM's MoE layers on `envoi.route`, in vLLM's own runner and routers.

    python -m tools.engines.vllm_routes      with a vLLM and its dependencies importable

A runner is made as vLLM makes one, with a gate and a router of each kind; its ids and weights are held to float64.
Padding gets experts where vLLM's router gives it some.
Without a GPU torch computes, and the process stands for one with a Hopper GPU.
"""
# pyright: reportMissingImports=false

import dataclasses
import os

os.environ |= {"ENVOI_VLLM": "1", "ENVOI_VLLM_ROUTE": "1", "VLLM_MOE_SKIP_PADDING": "1"}
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
from types import SimpleNamespace
from typing import Any

import torch

from tools.engines.checks import Checks

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if GPU else "cpu")
COUNTS = (1, 16, 300, 2000) if GPU else (5, 40)
NUM_PADDED = 3  # tokens of a step that are padding


def routers(bias: torch.Tensor) -> dict[str, tuple[Any, int, int]]:
    """Return a function that makes a router, hidden size and number of experts, by model. bias [256]: of experts."""
    from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import FusedTopKBiasRouter
    from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
    from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter

    groups = {"num_expert_group": 8, "topk_group": 4, "scoring_func": "sigmoid", "routed_scaling_factor": 2.5}
    biased = {"scoring_func": "sigmoid", "routed_scaling_factor": 2.827, "e_score_correction_bias": bias}
    return {
        "qwen3-moe": (lambda: FusedTopKRouter(8, 128), 2048, 128),
        "olmoe": (lambda: FusedTopKRouter(8, 64, renormalize=False), 2048, 64),
        "deepseek-v3": (lambda: GroupedTopKRouter(8, 256, e_score_correction_bias=bias, **groups), 7168, 256),
        "kimi-k2": (lambda: FusedTopKBiasRouter(8, 256, **biased), 7168, 256),
    }


def expected(x: torch.Tensor, weight: torch.Tensor, router: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights of all experts [M, N], 0 where they aren't chosen, and the gap to the first that isn't [M]."""
    logits = x.double() @ weight.double().T
    scores = logits.softmax(1) if router.scoring_func == "softmax" else logits.sigmoid()
    bias = getattr(router, "e_score_correction_bias", None)
    keys = scores if bias is None else scores + bias.double()
    groups = getattr(router, "num_expert_group", 1)
    gap = torch.full((len(x),), torch.inf, dtype=torch.float64, device=x.device)
    if groups > 1:
        best = keys.view(len(x), groups, -1).topk(2).values.sum(2)
        top = best.topk(router.topk_group + 1).values
        gap = top[:, -2] - top[:, -1]
        kept = best >= top[:, -2:-1]
        keys = keys.masked_fill(~kept.repeat_interleave(keys.shape[1] // groups, 1), -torch.inf)
    top = keys.topk(router.top_k + 1).values
    chosen = keys >= top[:, -2:-1]
    weights = torch.where(chosen, scores, 0)
    if router.renormalize:
        weights = weights / weights.sum(1, keepdim=True)
    return weights * getattr(router, "routed_scaling_factor", 1.0), torch.minimum(gap, top[:, -2] - top[:, -1])


def error(found: tuple[torch.Tensor, torch.Tensor], want: torch.Tensor, gap: torch.Tensor) -> float:
    """Return the largest error of a weight, of tokens whose choice float32 can tell."""
    weights, ids = found
    dense = torch.zeros_like(want).scatter_(1, ids.long(), weights.double())
    sure = gap > 1e-5
    return float((dense - want)[sure].abs().max())


def padded_ids(router: Any, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return the ids that a router gives in a step whose last tokens are padding."""
    from vllm.forward_context import ForwardContext, override_forward_context

    is_padding = torch.arange(len(x), device=DEVICE) >= len(x) - NUM_PADDED
    fields = {field.name: None for field in dataclasses.fields(ForwardContext) if field.default is dataclasses.MISSING}
    with override_forward_context(ForwardContext(**fields | {"is_padding": is_padding})):
        return router.select_experts(x, logits, topk_indices_dtype=torch.int32)[1]


def prepare() -> type:
    """Switch Envoi on and return vLLM's class of runners."""
    from envoi.integrations import engines
    from envoi.integrations.vllm import route

    if not GPU:
        engines._why_not_here = lambda: ""
        engines._remembered = lambda key, build: ""
        torch.cuda.current_device = lambda: 0
    route.install()
    from vllm.model_executor.layers.fused_moe.runner import moe_runner

    moe_runner.get_current_vllm_config = lambda: None
    moe_runner.register_layer_for_moe_forward_op = lambda *given: None
    moe_runner.MoERunner._select_forward = lambda self: None  # which asks for vLLM's compiled operators
    return moe_runner.MoERunner


def main() -> None:
    """Run all checks, print a line for each; exit with 1 if one fails."""
    import vllm
    from vllm import envs

    from envoi.integrations import lines
    from envoi.integrations.vllm.experts import Experts

    kind, checks = prepare(), Checks()
    print(f"vLLM {vllm.__version__}, torch {torch.__version__}")
    source = torch.Generator(DEVICE).manual_seed(0)
    bias = torch.randn(256, generator=source, device=DEVICE) * 0.05
    config = SimpleNamespace(
        dp_size=1, pcp_size=1, is_sequence_parallel=False, moe_parallel_config=SimpleNamespace(dp_size=1)
    )
    for model, (make, hidden, num_experts) in routers(bias).items():
        gate, router = Gate(hidden, num_experts, source), make()
        experts = SimpleNamespace(quant_method=SimpleNamespace(experts_cls=Experts))
        runner: Any = kind("layer", config, router, experts, gate=gate)
        errors = []
        for count in COUNTS:
            x = torch.randn(count, hidden, generator=source, device=DEVICE).bfloat16()
            logits, _ = runner.gate(x)
            found = router.select_experts(x, logits, topk_indices_dtype=torch.int32)
            errors.append(error(found, *expected(x, gate.weight, router)))
        masks = len(x) - int((padded_ids(router, x, logits) >= 0).all(1).sum())
        good = type(runner).__name__ == "EnvoiRunner" and logits is x and max(errors) < 1e-4
        good = good and masks == (NUM_PADDED if envs.VLLM_MOE_SKIP_PADDING else 0)
        checks.judge(model, good, f"{', '.join(f'{e:.1e}' for e in errors)}, {masks} tokens without experts")
    print("\n".join(lines._said))
    checks.end()


class Gate(torch.nn.Module):
    """Gate of a model, in bf16."""

    def __init__(self, hidden: int, num_experts: int, source: torch.Generator) -> None:
        super().__init__()
        weight = torch.randn(num_experts, hidden, generator=source, device=DEVICE) / hidden**0.5
        self.weight = torch.nn.Parameter(weight.bfloat16(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the logits."""
        return x @ self.weight.T, None


if __name__ == "__main__":
    main()

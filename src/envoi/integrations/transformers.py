"""transformers models through Envoi: `from_pretrained(..., experts_implementation="envoi")`.

    import envoi.integrations.transformers
    envoi.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, experts_implementation="envoi")

"envoi" runs the experts in bf16, "envoi_fp8_row", "envoi_fp8_block128", "envoi_mxfp8", "envoi_mxfp4" (4-bit weights
beside bf16 activations) and "envoi_mxfp4_mxfp8" in those formats; `model.set_experts_implementation(...)` switches.
Weights are packed at a module's first call and kept beside the original.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from envoi.experts import moe, pack
from envoi.experts.oracle import activate
from envoi.quant.formats import FORMATS
from envoi.types import ExpertWeights, Routing

_packed: "weakref.WeakKeyDictionary[torch.nn.Module, dict[str, tuple[Any, ExpertWeights]]]" = (
    weakref.WeakKeyDictionary()
)


def implementation_name(format: str) -> str:
    """The name that selects a format: "bf16" -> "envoi", "mxfp4" -> "envoi_mxfp4"."""
    return "envoi" if format == "bf16" else f"envoi_{format}"


def register() -> None:
    """Make Envoi's names known to transformers (5.17). Calling it again changes nothing."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    for format in FORMATS:
        ALL_EXPERTS_FUNCTIONS.register(implementation_name(format), partial(experts_forward, format=format))


def experts_forward(
    module: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    format: str = "bf16",
) -> torch.Tensor:
    """What transformers calls in place of an experts module's forward.

    hidden_states [M, H] bf16, top_k_index [M, k] int64 (num_experts = not on this rank), top_k_weights [M, k] float
    -> [M, H] bf16.
    Raises ValueError for a module without a gate, an activation that Envoi doesn't have, or a dtype other than bf16.
    """
    if hidden_states.dtype != torch.bfloat16:
        raise ValueError(
            f"hidden_states: expected bfloat16, got {hidden_states.dtype}; load the model with dtype=torch.bfloat16"
        )
    experts = packed_experts(module, format)
    ids = top_k_index.to(torch.int32)
    ids = ids.masked_fill(ids >= experts.num_local_experts, -1)
    routing = Routing(top_k_weights.float().contiguous(), ids.contiguous(), experts.num_local_experts)
    return moe(hidden_states.detach().contiguous(), routing, experts)


def packed_experts(module: torch.nn.Module, format: str = "bf16") -> ExpertWeights:
    """The module's weights packed in a format; kept until the module goes or its weights change."""
    kept = _packed.setdefault(module, {})
    mark = _fingerprint(module)
    if format not in kept or kept[format][0] != mark:
        kept[format] = (mark, _pack(module, format))
    return kept[format][1]


def _fingerprint(module: torch.nn.Module) -> tuple:
    return tuple((p.data_ptr(), -1 if p.is_inference() else p._version) for p in module.parameters())


@torch.no_grad()
def _pack(module: Any, format: str) -> ExpertWeights:
    if not module.has_gate:
        raise ValueError(f"{type(module).__name__}: expected gated experts (gate_up_proj), got a plain up_proj")
    gate_up, down = module.gate_up_proj.detach(), module.down_proj.detach()
    if module.is_transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    activation, limit = recognise_activation(module)
    return pack(
        gate_up, down, format,
        gate_up_layout="concat" if module.is_concatenated else "interleaved",
        gate_up_bias=module.gate_up_proj_bias.detach() if module.has_bias else None,
        down_bias=module.down_proj_bias.detach() if module.has_bias else None,
        activation=activation, swiglu_limit=limit,
    )  # fmt: skip


def recognise_activation(module: Any) -> tuple[str, float | None]:
    """Which of Envoi's activations the module computes, found by trying it on numbers that reach past its clamps."""
    apply_gate: Callable[[torch.Tensor], torch.Tensor] = module._apply_gate
    interleaved = torch.linspace(-12.0, 12.0, 128).view(4, 32)
    interleaved = interleaved[:, torch.randperm(32, generator=torch.Generator().manual_seed(0))]
    theirs = interleaved
    if module.is_concatenated:
        theirs = torch.cat((interleaved[:, 0::2], interleaved[:, 1::2]), dim=1)
    want = apply_gate(theirs)
    limits = dict.fromkeys((None, getattr(module, "limit", None), getattr(module, "swiglu_limit", None)))
    for activation in ("swiglu", "swiglu_oai"):
        for limit in limits:
            if torch.allclose(activate(interleaved, activation, limit), want, rtol=1e-4, atol=1e-5):
                return activation, limit
    raise ValueError(
        f"{type(module).__name__}: expected the activation swiglu (silu(gate) * up) or swiglu_oai, "
        "with or without a clamp; got another"
    )

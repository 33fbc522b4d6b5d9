"""Envoi's core of a runner of SGLang: tokens [M, H] with ids in, the sum over a token's slots out.

SGLang's methods hand weights over as its Triton kernels read them: as they were loaded. Nothing of them is changed, so
that SGLang's own function runs a layer that turns out not to be one of Envoi's. What SGLang does around a runner stays
its own: the router, dispatch and combine, all-reduce, the shared experts.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

import envoi
from envoi.integrations import engines
from envoi.integrations.engines import Layer
from envoi.integrations.lines import say
from envoi.runtime.devices import capturing
from envoi.types import ExpertWeights

logger = logging.getLogger("sglang.envoi")
# Activation of SGLang and whether it has a gate -> ours. Those with numbers of their own: `layer_of`.
ACTIVATIONS = {
    ("silu", True): "swiglu",
    ("gelu", True): "geglu",
    ("gelu_tanh", True): "geglu_tanh",
    ("silu", False): "silu",
    ("relu2", False): "relu2",
}
NOT_BF16 = ("use_mxfp8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16")
STEP = 8192  # tokens, where SGLang names none
_warm: set[tuple[Layer, int]] = set()


class Core:
    """Methods of SGLang's class for a core that takes tokens as they are dispatched; `core_class` adds the base."""

    names: Mapping[str, Any]  # of SGLang
    backend: Any  # Envoi's among SGLang's backends
    config: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # pyright: ignore[reportCallIssue]
        self.own = self.names["FusedOpPool"].get_fused_func("none", "triton")
        self.packed: ExpertWeights | None = None
        self.places: tuple[int, int] | None = None  # where the weights were when they were packed
        self.refused = False

    @property
    def runner_backend(self) -> Any:
        """Return Envoi's backend."""
        return self.backend

    @property
    def is_batch_invariant(self) -> bool:
        """Tell whether SGLang asks for bits that don't depend on the number of tokens."""
        return bool(self.names["is_batch_invariant_mode_enabled"]())

    def run_from_dispatch(self, dispatch_output: Any, quant_info: Any, runner_config: Any, hooks: Any = None) -> Any:
        """Run a layer. quant_info: its weights, None if they are packed already (`mxfp4.take`)."""
        if quant_info is not None and not self._is_ready(dispatch_output, quant_info):
            return self.own(dispatch_output, quant_info, runner_config)
        packed, x = self.packed, dispatch_output.hidden_states
        if packed is None:
            raise RuntimeError("a layer in MXFP4 was called before its weights were packed")
        ids, weights = dispatch_output.topk_output.topk_ids, dispatch_output.topk_output.topk_weights
        if runner_config.apply_router_weight_on_input:
            x, weights = (x * weights).to(x.dtype), torch.ones_like(weights)
        if runner_config.routed_scaling_factor not in (None, 1.0):
            weights = weights * runner_config.routed_scaling_factor
        found = envoi.moe(
            x, envoi.Routing(weights, ids, packed.num_local_experts), packed,
            batch_invariant=self.is_batch_invariant,
        )  # fmt: skip
        return self.names["StandardCombineInput"](hidden_states=found)

    def _is_ready(self, dispatch_output: Any, quant_info: Any) -> bool:
        """Tell whether Envoi runs the layer; pack at the first call, which says so or why not."""
        if self.refused or torch.compiler.is_compiling():
            return False
        places = quant_info.w13_weight.data_ptr(), quant_info.w2_weight.data_ptr()
        if self.places == places:
            return True
        if capturing(quant_info.w13_weight.device):
            return False  # packing would be captured too
        try:
            self._take(dispatch_output, quant_info)
        except Exception as error:  # SGLang's own function reads the same weights
            self.refused = True
            say(logger, logging.WARNING, f"SGLang's kernels run the MoE layers: {reason(error)}")
            return False
        self.places = places
        return True

    def _take(self, dispatch_output: Any, quant_info: Any) -> None:
        """Pack a layer. Raises RefusedError with the reason why Envoi doesn't run it."""
        why = "their weights have moved" if self.places else why_not_now(dispatch_output, quant_info, self.config)
        if why:
            raise RefusedError(why)
        layer = layer_of(self.config, format_of(quant_info), quant_info)
        top_k = dispatch_output.topk_output.topk_ids.shape[1]
        layer = replace(layer, top_k=top_k, batch_invariant=self.is_batch_invariant)
        self.check(layer)
        self.pack(layer, *tensors_of(quant_info))
        self.get_ready(layer)

    def check(self, layer: Layer) -> None:
        """Compile a layer's kernels. Raises RefusedError with the reason why Envoi doesn't run it."""
        why = engines.why_not(layer)
        if not why and self.names["get_exec"]().moe.enable_eplb and not layer.is_viewed:
            why = "expert load balancing moves weights, and Envoi keeps copies of these layers' factors or biases"
        why = why or engines.why_unbuilt(layer, max_tokens(self.names))
        if why:
            raise RefusedError(f"{layer}: {why}")

    def pack(self, layer: Layer, gate_up: torch.Tensor, down: torch.Tensor, more: dict[str, Any]) -> None:
        """Pack a layer's tensors, at first or again in the same memory."""
        self.packed = engines.pack_layer(layer, gate_up, down, into=self.packed, **more)

    def get_ready(self, layer: Layer) -> None:
        """Prepare calls with few tokens of a layer that is packed, and say that Envoi runs it."""
        limit = max_tokens(self.names)
        if self.packed is not None and (layer, limit) not in _warm:
            _warm.add((layer, limit))
            engines.warm_up(layer, self.packed, limit)
        say(logger, logging.INFO, f"Envoi runs the MoE layers in {layer}")


class RefusedError(Exception):
    """Why a layer isn't one that Envoi runs."""


def reason(error: Exception) -> str:
    """Return an error as text for the log."""
    return str(error) if isinstance(error, RefusedError) else f"{type(error).__name__}: {error}"


def core_class(names: Mapping[str, Any], backend: Any) -> type:
    """Return SGLang's kind of class for a core."""
    body = {"names": names, "backend": backend, "__module__": __name__}
    return type("EnvoiRunnerCore", (Core, names["DispatchMoeRunnerCore"]), body)


def why_not_activation(config: Any) -> str:
    """Return why Envoi has no activation as a MoeRunnerConfig says, "" if it has."""
    kind = config.activation, config.is_gated
    if kind not in ACTIVATIONS:
        return f"Envoi has no activation {config.activation}{'' if config.is_gated else ' without a gate'}"
    if kind != ("silu", True):
        return ""
    if config.gemm1_alpha is None:
        return "" if config.gemm1_clamp_limit is None else "their limit follows SiLU"
    if config.gemm1_clamp_limit is None or config.gemm1_beta not in (None, 1):
        return (
            f"the activation adds {config.gemm1_beta} to up, clamped at {config.gemm1_clamp_limit}; Envoi's adds 1 to "
            "what is clamped"
        )
    return ""


def why_not_now(dispatch_output: Any, quant: Any, config: Any) -> str:
    """Return why Envoi doesn't run a layer with such tensors, "" if nothing of them is in its way."""
    given, topk = dispatch_output.hidden_states, dispatch_output.topk_output
    ids = getattr(topk, "topk_ids", None)
    if ids is None or getattr(dispatch_output, "hidden_states_scale", None) is not None:
        return "tokens come quantised, or without the ids of their experts"
    if given.dtype != torch.bfloat16:
        return f"activations are in {given.dtype}, and Envoi's are in bfloat16"
    if quant.a13_scale is not None or quant.a2_scale is not None:
        return "activations have a scale from the checkpoint, which Envoi would ignore"
    if format_of(quant) is None:
        return "weights are quantised as Envoi's formats aren't"
    if quant.fuse_swiglu_interleaved:
        return "SGLang has put gate's and up's rows in turn"
    return why_not_on_input(config, ids.shape[1], quant.b13 is not None)


def why_not_on_input(config: Any, top_k: int | None, bias: bool) -> str:
    """Return why Envoi doesn't multiply tokens by the router's weights as a MoeRunnerConfig asks, "" if it does."""
    if config.apply_router_weight_on_input and (top_k != 1 or bias):
        return "the router's weights multiply what several experts read, or biases are added after"
    return ""


def format_of(quant: Any) -> str | None:
    """Return the format of a TritonMoeQuantInfo's weights, None if it is none of Envoi's.

    Where SGLang makes a scale for all tokens of a call, each token has its own.
    """
    if any(getattr(quant, name) for name in NOT_BF16):
        return None
    if not quant.use_fp8_w8a8:
        return "bf16" if quant.w13_weight.dtype == torch.bfloat16 else None
    if quant.w13_weight.dtype != torch.float8_e4m3fn:
        return None
    blocks = None if quant.block_shape is None else tuple(quant.block_shape)
    return {None: "fp8_row", (128, 128): "fp8_block128"}.get(blocks)


def layer_of(config: Any, format: str | None, quant: Any = None) -> Layer:
    """Return the layer of a MoeRunnerConfig, with the sizes of its weights where there are any."""
    kind, layout, limit, alpha = ACTIVATIONS[config.activation, config.is_gated], "concat", None, None
    if kind == "swiglu" and config.gemm1_alpha is not None:
        kind, layout = "swiglu_oai", "interleaved" if config.gate_up_interleaved else "concat"
        limit, alpha = float(config.gemm1_clamp_limit), float(config.gemm1_alpha)
    elif kind == "swiglu":
        limit = config.swiglu_limit
    sizes = config.hidden_size, config.intermediate_size_per_partition, config.num_local_experts
    if quant is not None:
        sizes = quant.w2_weight.shape[1], quant.w2_weight.shape[2], quant.w2_weight.shape[0]
    bias = quant is not None and quant.b13 is not None
    return Layer(str(format), *sizes, config.top_k or 1, kind, layout, bias, limit, alpha)


def tensors_of(quant: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return gate_up, down and the rest of a TritonMoeQuantInfo as `pack_layer` takes them."""
    more = {"gate_up_bias": quant.b13, "down_bias": quant.b2}
    if quant.use_fp8_w8a8:
        more |= {"gate_up_sf": quant.w13_scale, "down_sf": quant.w2_scale}
    return quant.w13_weight, quant.w2_weight, more


def max_tokens(names: Mapping[str, Any]) -> int:
    """Return how many tokens a call can have: those of a step, of all ranks whose tokens are gathered."""
    schedule = names["get_schedule"]()
    chunk = schedule.chunked_prefill_size
    step = chunk if chunk is not None and chunk > 0 else schedule.max_prefill_tokens
    return (step or STEP) * max(1, names["get_parallel"]().attn_dp_size or 1)

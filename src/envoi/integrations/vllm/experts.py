"""Envoi's experts as vLLM's classes have a kernel: tokens [M, H] and ids in, the sum over a token's slots out.

What vLLM does around them stays its own: the router, prepare and finalize (all-reduce, all-gather and reduce-scatter),
load balancing, the shared experts. Where packing or a layer's first call fails, vLLM's own kernel runs the layer if it
can: the weights of formats in `engines.VIEWED` are as they were loaded.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch

import envoi
from envoi import env
from envoi.integrations import engines
from envoi.integrations.engines import Layer
from envoi.integrations.lines import say
from envoi.integrations.names import found_names
from envoi.integrations.vllm.used import ALL
from envoi.types import ExpertWeights

logger = logging.getLogger("vllm.envoi")
OAI_ALPHA, OAI_LIMIT = 1.702, 7.0  # of vLLM's SWIGLUOAI where a layer names none
# Activation of vLLM -> ours, and the order of gate and up rows.
ACTIVATIONS = {
    "SILU": ("swiglu", "concat"),
    "GELU": ("geglu", "concat"),
    "GELU_TANH": ("geglu_tanh", "concat"),
    "SWIGLUOAI": ("swiglu_oai", "interleaved"),
    "SWIGLUOAI_UNINTERLEAVE": ("swiglu_oai", "concat"),
    "SILU_NO_MUL": ("silu", "concat"),
    "RELU2_NO_MUL": ("relu2", "concat"),
}
# Keys of weights and activations -> format. Where vLLM makes a scale for all tokens of a call, each token has its own.
SCHEMES = {
    (None, None): "bf16",
    ("kFp8Static128BlockSym", "kFp8Dynamic128Sym"): "fp8_block128",
    ("kFp8StaticChannelSym", "kFp8DynamicTokenSym"): "fp8_row",
    ("kFp8StaticTensorSym", "kFp8DynamicTensorSym"): "fp8_row",
    ("kFp8StaticTensorSym", "kFp8DynamicTokenSym"): "fp8_row",
    ("kFp8StaticTensorSym", "kFp8Dynamic128Sym"): "fp8_row",
    ("kMxfp8Static", "kMxfp8Dynamic"): "mxfp8",
    ("kMxfp4Static", None): "mxfp4",
    ("kNvfp4Static", None): "nvfp4",
    ("kNvfp4Static", "kNvfp4Dynamic"): "nvfp4",
}
# Argument of `pack` -> vLLM's parameters of a layer, of which it has one.
HELD = {
    "gate_up_bias": ("w13_bias",), "down_bias": ("w2_bias",),
    "gate_up_sf": ("w13_weight_scale", "w13_weight_scale_inv"), "down_sf": ("w2_weight_scale", "w2_weight_scale_inv"),
}  # fmt: skip
STEP = 8192  # tokens, where vLLM has no config
# vLLM's layer -> what was packed of it: weights loaded anew go into the same memory, which captured graphs read.
_packed: WeakKeyDictionary[Any, ExpertWeights] = WeakKeyDictionary()
_warm: set[tuple[Layer, int]] = set()


class Experts:
    """Methods of vLLM's class for a kernel in the standard format, without vLLM's base, which `experts_class` adds."""

    names: Mapping[str, Any]  # of vLLM
    format: str
    moe_config: Any
    quant_config: Any
    w1_scale: Any
    w2_scale: Any
    w1_bias: Any
    w2_bias: Any
    g1_alphas: Any
    g2_alphas: Any

    def __init__(self, moe_config: Any, quant_config: Any, *rest: Any) -> None:
        super().__init__(moe_config, quant_config, *rest)  # pyright: ignore[reportCallIssue]
        self.packed: ExpertWeights | None = None
        self.works = False  # whether a call has come back
        self.own: Any = None  # vLLM's kernel, if it has taken over
        self.exchange: Any = None  # Envoi's between ranks, in the place of vLLM's: `exchange.join`
        self.max_tokens = max_tokens(self.names, moe_config)

    @property
    def expects_unquantized_inputs(self) -> bool:
        """Tell vLLM to hand tokens over in bf16: they are quantised while they are gathered by expert."""
        return self.own is None or self.own.expects_unquantized_inputs

    @classmethod
    def activation_format(cls) -> Any:
        """Return vLLM's name for tokens [M, H]."""
        return cls.names["FusedMoEActivationFormat"].Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return True  # `engines.why_not` says so, with a reason

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @classmethod
    def _supports_quant_scheme(cls, weight_key: Any, activation_key: Any) -> bool:
        return format_of(cls.names, weight_key, activation_key) is not None

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return activation.name in ACTIVATIONS

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return True  # `select.why_not` says so, with a reason

    @staticmethod
    def _supports_batch_invariance() -> bool:
        return True  # asked for in `apply`

    def workspace_shapes(
        self, M, N, K, topk, global_num_experts, local_num_experts, expert_tokens_meta, activation
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:  # fmt: skip
        """Return the shapes of vLLM's memory for a call: none but the output's; Envoi has its own."""
        if self.own is not None:
            return self.own.workspace_shapes(
                M, N, K, topk, global_num_experts, local_num_experts, expert_tokens_meta, activation
            )
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self) -> Any:
        """Return vLLM's step for outputs whose slots are weighted and summed already."""
        return self.names["TopKWeightAndReduceNoOP"]()

    def take(self, layer: Any) -> None:
        """Pack a layer of vLLM's whose weights are loaded and processed, anew into the memory of an earlier packing.

        Raises RuntimeError if that fails and vLLM has no kernel for the weights either. A kernel of vLLM's that has
        taken over runs what is loaded anew too.
        """
        if self.own is not None:
            return
        before = _packed.get(layer)  # perhaps by another object: vLLM makes its kernels anew
        try:
            self.packed = _packed[layer] = self._pack(layer.w13_weight, layer.w2_weight, layer, before)
        except Exception as error:
            if before is not None:
                raise
            self._give_way(error)

    @property
    def is_moved(self) -> bool:
        """Tell whether experts change their places, while Envoi has more of them than views."""
        parallel = self.moe_config.moe_parallel_config
        return parallel.enable_eplb and not layer_of(self.moe_config, self.format, self.moe_config.activation).is_viewed

    def apply(
        self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map,
        a1q_scale, a2_scale, workspace13, workspace2, expert_tokens_meta, apply_router_weight_on_input,
    ) -> None:  # fmt: skip
        """Run the layer into output [M, H]."""
        if self.own is None:
            try:
                weights = torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights
                self._run(output, hidden_states, w1, w2, weights, topk_ids, expert_map)
                return
            except Exception as error:
                if self.works or self.exchange is not None:
                    raise
                self._give_way(error)
        own = cast(Any, self.own)
        if hidden_states.dtype == output.dtype and own.quant_dtype is not None:  # this call was prepared for Envoi
            hidden_states, a1q_scale = self.names["moe_kernel_quantize_input"](
                hidden_states, own.a1_scale, own.quant_dtype, own.per_act_token_quant, own.block_shape
            )
        if not workspace13.numel():
            shapes = own.workspace_shapes(
                len(output), w1.shape[1], output.shape[1], topk_ids.shape[1], global_num_experts, len(w1),
                expert_tokens_meta, activation,
            )  # fmt: skip
            workspace13, workspace2 = (output.new_empty(shape) for shape in shapes[:2])
        own.apply(
            output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map,
            a1q_scale, a2_scale, workspace13, workspace2, expert_tokens_meta, apply_router_weight_on_input,
        )  # fmt: skip

    def _run(self, output, hidden_states, w1, w2, weights, topk_ids, expert_map) -> None:
        """Call Envoi's kernels; weights: 1 where vLLM has multiplied the tokens by the router's."""
        if self.packed is None:
            self.packed = self._pack(w1, w2)
        if not self.works:
            self._warm_up(w1, w2)
        if self.exchange is not None:
            routing = envoi.Routing(weights, topk_ids, self.exchange.num_experts)
            self.exchange.moe(hidden_states, routing, out=output)
        else:
            num_experts = self.packed.num_local_experts if expert_map is None else len(expert_map)
            envoi.moe(
                hidden_states, envoi.Routing(weights, topk_ids, num_experts), self.packed, expert_map=expert_map,
                batch_invariant=env.is_on("VLLM_BATCH_INVARIANT"), out=output,
            )  # fmt: skip
        self.works = True

    def _give_way(self, error: Exception) -> None:
        """Let vLLM's own kernel run the layer from now on, which reads weights as they were loaded; say why."""
        why = f"{type(error).__name__}: {error}"
        if self.format not in engines.VIEWED or self.is_moved:
            reason = "whose weights are in an order that vLLM's kernels don't read"
            if self.format in engines.VIEWED:
                reason = "and load balancing would move them as those of the other layers"
            raise RuntimeError(
                f"Envoi can't run the MoE layers in {self.format}, {reason}: start with ENVOI_VLLM=0; {why}"
            ) from error
        say(
            logger, logging.WARNING, f"vLLM's kernels run the MoE layers in {self.format} that Envoi's failed in: {why}"
        )
        self.own, self.packed = self.names["TritonExperts"](self.moe_config, self.quant_config), None

    def _layer(self, w1: torch.Tensor, w2: torch.Tensor) -> Layer:
        layer = layer_of(self.moe_config, self.format, self.moe_config.activation, self.quant_config)
        packed = 2 if w2.dtype == torch.uint8 else 1
        sizes = {"num_experts": len(w2), "hidden": w2.shape[1], "intermediate": w2.shape[2] * packed}
        return replace(layer, **sizes, bias=self.w1_bias is not None)

    def _pack(
        self, w1: torch.Tensor, w2: torch.Tensor, layer: Any = None, into: ExpertWeights | None = None
    ) -> ExpertWeights:  # fmt: skip
        """Pack weights. layer: vLLM's, which has their other tensors; None: those that the kernel's config names."""
        more = {"gate_up_bias": self.w1_bias, "down_bias": self.w2_bias}
        if self.format != "bf16":
            more |= {"gate_up_sf": self.w1_scale, "down_sf": self.w2_scale}
        for name in [name for name, x in more.items() if x is not None]:
            # vLLM may keep a kernel and its config while it loads into new tensors.
            held = (getattr(layer, theirs, None) for theirs in HELD[name])
            more[name] = next((x for x in held if x is not None), more[name])
        if self.format == "nvfp4":
            more |= {"gate_up_scale": self.g1_alphas, "down_scale": self.g2_alphas}
        return engines.pack_layer(self._layer(w1, w2), w1, w2, into=into, **more)

    def _warm_up(self, w1: torch.Tensor, w2: torch.Tensor) -> None:
        """Prepare calls with few tokens, once for layers of a kind: in memory that outlives vLLM's sleep."""
        layer = self._layer(w1, w2)
        if self.packed is None or (layer, self.max_tokens) in _warm:
            return
        _warm.add((layer, self.max_tokens))
        if self.exchange is None:
            engines.warm_up(layer, self.packed, self.max_tokens)
        else:  # ranks compile together
            self.exchange.warm_up(progress=False)


@cache
def experts_class(format: str) -> type:
    """Return vLLM's kind of class for a format. Raises MovedError if this vLLM isn't a known one."""
    names = found_names(ALL)
    return type(
        "EnvoiExperts",
        (Experts, names["FusedMoEExpertsModular"]),
        {"names": names, "format": format, "__module__": __name__},
    )


def format_of(names: Mapping[str, Any], weight_key: Any, activation_key: Any) -> str | None:
    """Return the format in which Envoi computes what vLLM's keys of weights and activations say, None if in none."""
    known = [name for name in names if name.startswith("k")]

    def named(key: Any) -> str | None:
        return None if key is None else next((name for name in known if names[name] == key), "")

    return SCHEMES.get((named(weight_key), named(activation_key)))


def layer_of(config: Any, format: str, activation: Any, quant: Any = None) -> Layer:
    """Return the layer of a FusedMoEConfig, whose numbers for the activation a FusedMoEQuantConfig may replace."""
    kind, layout = ACTIVATIONS[activation.name]
    limit, alpha = config.swiglu_limit, config.swiglu_alpha
    if quant is not None:
        limit = limit if quant.gemm1_clamp_limit is None else quant.gemm1_clamp_limit
        alpha = alpha if quant.gemm1_alpha is None else quant.gemm1_alpha
    if kind == "swiglu_oai":
        fixed = activation.name == "SWIGLUOAI"
        limit = OAI_LIMIT if limit is None else float(limit)
        alpha = (OAI_ALPHA if fixed else 1.0) if alpha is None else float(alpha)
    else:
        limit, alpha = (limit if kind == "swiglu" else None), None  # vLLM's others have none
    return Layer(
        format, config.hidden_dim, config.intermediate_size_per_partition, config.num_local_experts,
        config.experts_per_token, kind, layout, config.has_bias, limit, alpha, env.is_on("VLLM_BATCH_INVARIANT"),
    )  # fmt: skip


def max_tokens(names: Mapping[str, Any], moe_config: Any) -> int:
    """Return how many tokens a call can have: those of a step, of all ranks whose tokens are gathered."""
    config = names["get_current_vllm_config_or_none"]()
    step = STEP if config is None else config.scheduler_config.max_num_batched_tokens
    return step * max(1, moe_config.moe_parallel_config.dp_size)

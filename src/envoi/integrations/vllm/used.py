"""Names of vLLM that are relied on; supported releases have all of them: 0.26 (torch 2.11) and 0.33 (torch 2.14)."""

from envoi.integrations.names import Used

MOE = "vllm.model_executor.layers.fused_moe"
DONE = "_already_called_process_weights_after_loading"  # of vLLM's layers whose methods do nothing a second time
# Attributes that vLLM's objects get while it runs, which no class shows: `python -m tools.engines` reads its sources.
ATTRIBUTES = {
    f"{MOE}.fused_moe_method_base": ("moe_kernel",),
    f"{MOE}.unquantized_fused_moe_method": ("w13_weight", "w2_weight"),
    "vllm.model_executor.model_loader.reload.layerwise": (DONE,),
}
KEYS = "vllm.model_executor.layers.quantization.utils.quant_utils"
APPLY = (
    "output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "activation", "global_num_experts", "expert_map",
    "a1q_scale", "a2_scale", "workspace13", "workspace2", "expert_tokens_meta", "apply_router_weight_on_input",
)  # fmt: skip
SHAPES = (
    "M", "N", "K", "topk", "global_num_experts", "local_num_experts", "expert_tokens_meta", "activation"
)  # fmt: skip
SUPPORTED = ("moe_config", "weight_key", "activation_key", "activation_format")
IMPLEMENTED = (
    "activation_format", "apply", "finalize_weight_and_reduce_impl", "workspace_shapes", "_supports_activation",
    "_supports_current_device", "_supports_no_act_and_mul", "_supports_parallel_config", "_supports_quant_scheme",
)  # fmt: skip

EXPERTS = Used(
    f"{MOE}.modular_kernel", "FusedMoEExpertsModular",
    methods={
        "__init__": ("moe_config", "quant_config", "max_num_tokens", "num_dispatchers"),
        "apply": APPLY, "workspace_shapes": SHAPES, "finalize_weight_and_reduce_impl": (),
        "is_supported_config": SUPPORTED, "_supports_activation": ("activation",),
        "_supports_parallel_config": ("moe_parallel_config",), "_supports_current_device": (),
        "_supports_no_act_and_mul": (), "_supports_batch_invariance": (), "activation_format": (),
        "_supports_quant_scheme": ("weight_key", "activation_key"),
    },
    members=(
        "expects_unquantized_inputs", "w1_scale", "w2_scale", "w1_bias", "w2_bias", "g1_alphas", "g2_alphas",
        "quant_dtype", "a1_scale", "per_act_token_quant", "block_shape",
    ),
    abstract=IMPLEMENTED,
)  # fmt: skip
# vLLM's own kernel for weights as they were loaded, if Envoi's fail.
OWN = Used(
    f"{MOE}.experts.triton_moe", "TritonExperts",
    methods={"__init__": ("moe_config", "quant_config"), "apply": APPLY, "workspace_shapes": SHAPES},
    members=("expects_unquantized_inputs",),
)  # fmt: skip
SELECTORS = {
    "unquantized": Used(f"{MOE}.oracle.unquantized", "select_unquantized_moe_backend", takes=("moe_config",)),
    "fp8": Used(
        f"{MOE}.oracle.fp8", "select_fp8_moe_backend", takes=("config", "weight_key", "activation_key")
    ),
    "mxfp8": Used(f"{MOE}.oracle.mxfp8", "select_mxfp8_moe_backend", takes=("config",)),
    "mxfp4": Used(f"{MOE}.oracle.mxfp4", "select_mxfp4_moe_backend", takes=("config", "activation_key")),
    "mxfp4 of DeepSeek-V4": Used(f"{MOE}.oracle.mxfp4", "select_deepseek_v4_mxfp4_moe_backend", takes=("config",)),
    "nvfp4": Used(
        f"{MOE}.oracle.nvfp4", "select_nvfp4_moe_backend", takes=("config", "weight_key", "activation_key")
    ),
}  # fmt: skip
# Members under which vLLM hands weights over as they were loaded.
BACKENDS = {
    "unquantized": Used(f"{MOE}.oracle.unquantized", "UnquantizedMoeBackend", members=("TRITON",)),
    "fp8": Used(f"{MOE}.oracle.fp8", "Fp8MoeBackend", members=("TRITON", "TRITON_MXFP8")),
    "mxfp4": Used(f"{MOE}.oracle.mxfp4", "Mxfp4MoeBackend", members=("XPU",)),
    "nvfp4": Used(f"{MOE}.oracle.nvfp4", "NvFp4MoeBackend", members=("EMULATION",)),
}
# Pads an MXFP4 layer's sizes as the chosen name asks; weights are created in the padded sizes.
PADDED = "mxfp4_round_up_hidden_size_and_intermediate_size"
ALL = (
    EXPERTS,
    Used(f"{MOE}.modular_kernel", "FusedMoEActivationFormat", members=("Standard", "BatchedExperts")),
    Used(f"{MOE}.modular_kernel", "FusedMoEKernel", members=("fused_experts",)),
    Used(f"{MOE}.routed_experts", "RoutedExperts", methods={"get_expert_weights": ()}),
    OWN,
    Used(
        f"{MOE}.utils", "moe_kernel_quantize_input",
        takes=("A", "A_scale", "quant_dtype", "per_act_token_quant", "block_shape"),
    ),
    Used(f"{MOE}.topk_weight_and_reduce", "TopKWeightAndReduceNoOP"),
    Used(
        f"{MOE}.activation", "MoEActivation",
        members=("SILU", "GELU", "GELU_TANH", "SWIGLUOAI", "SWIGLUOAI_UNINTERLEAVE", "SILU_NO_MUL", "RELU2_NO_MUL"),
    ),
    Used(
        f"{MOE}.config", "FusedMoEConfig",
        members=(
            "moe_backend", "moe_parallel_config", "activation", "hidden_dim", "intermediate_size_per_partition",
            "num_experts", "num_local_experts", "experts_per_token", "in_dtype", "has_bias", "is_lora_enabled",
            "swiglu_limit", "swiglu_alpha", "swiglu_beta", "dp_size", "pcp_size", "is_sequence_parallel",
        ),
    ),
    Used(
        f"{MOE}.config", "FusedMoEParallelConfig",
        members=(
            "use_all2all_kernels", "all2all_backend", "dp_size", "ep_size", "enable_eplb",
            "use_batched_activation_format", "is_sequence_parallel",
        ),
    ),
    Used(
        f"{MOE}.config", "FusedMoEQuantConfig",
        members=("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit"),
    ),
    Used("vllm.config", "get_current_vllm_config_or_none"),
    Used("vllm.distributed.parallel_state", "get_ep_group"),
    *(
        Used(KEYS, name)
        for name in (
            "kFp8StaticTensorSym", "kFp8DynamicTensorSym", "kFp8StaticChannelSym", "kFp8DynamicTokenSym",
            "kFp8Static128BlockSym", "kFp8Dynamic128Sym", "kMxfp8Static", "kMxfp8Dynamic", "kMxfp4Static",
            "kNvfp4Static", "kNvfp4Dynamic",
        )
    ),
    *SELECTORS.values(),
    *BACKENDS.values(),
    Used(
        f"{MOE}.oracle.mxfp4", PADDED,
        takes=("backend", "hidden_size", "intermediate_size"),
    ),
)  # fmt: skip
ROUTERS = f"{MOE}.router"
ROUTE = (
    Used(
        f"{MOE}.runner.moe_runner", "MoERunner",
        methods={"_forward_impl": ("hidden_states", "router_logits", "shared_experts_input", "input_ids")},
    ),
    Used("vllm.model_executor.custom_op", "PluggableLayer", methods={"register_oot": ("_decorated_layer_cls", "name")}),
    Used(
        f"{ROUTERS}.base_router", "BaseRouter",
        methods={"_compute_routing": ("hidden_states", "router_logits", "indices_type", "input_ids")},
    ),
    Used(f"{ROUTERS}.fused_topk_router", "FusedTopKRouter"),
    Used(f"{ROUTERS}.fused_topk_bias_router", "FusedTopKBiasRouter"),
    Used(f"{ROUTERS}.grouped_topk_router", "GroupedTopKRouter"),
    Used("vllm.config", "get_current_vllm_config_or_none"),
    Used("vllm.envs", "environment_variables"),
    Used("vllm.forward_context", "get_forward_context"),
    Used("vllm.forward_context", "is_forward_context_available"),
    Used("vllm.forward_context", "ForwardContext", members=("is_padding",)),
)  # fmt: skip
EXCHANGE = (
    Used("vllm.distributed.parallel_state", "get_ep_group"),
    Used("vllm.config", "get_current_vllm_config_or_none"),
    Used(f"{MOE}.prepare_finalize.no_dp_ep", "make_moe_prepare_and_finalize_no_dp_ep", takes=("use_monolithic",)),
    Used(
        f"{MOE}.modular_kernel", "FusedMoEKernelModularImpl",
        methods={"__init__": ("prepare_finalize", "fused_experts")},
    ),
    Used("vllm.config.parallel", "ParallelConfig", members=("expert_placement_strategy",)),
)  # fmt: skip

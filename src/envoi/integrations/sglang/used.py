"""Names of SGLang that are relied on; supported releases have all of them: 0.5.23 (torch 2.14)."""

from envoi.integrations.names import Used

MOE = "sglang.srt.layers.moe"
RUNNER = Used(
    f"{MOE}.moe_runner.runner", "MoeRunner",
    methods={
        "__init__": ("runner_backend", "config", "lora_enabled"),
        "run": ("dispatch_output", "quant_info", "lora_info"),
    },
)  # fmt: skip
MXFP4 = Used(
    "sglang.srt.layers.quantization.mxfp4", "Mxfp4MoEMethod",
    methods={"process_weights_after_loading": ("layer",), "apply": ("layer", "dispatch_output")},
)  # fmt: skip
RESOLVE = Used(f"{MOE}.utils", "resolve_moe_runner_backend", takes=("backend",))
ALL = (
    Used("sglang.srt.server_args", "add_moe_runner_backend_choices"),
    Used("sglang.srt.plugins.hook_registry", "HookType", members=("AROUND",)),
    Used(
        "sglang.srt.plugins.hook_registry", "HookRegistry",
        methods={"register": ("target", "hook", "hook_type", "source")},
    ),
    RESOLVE,
    Used(f"{MOE}.utils", "MoeRunnerBackend", members=("TRITON",)),
    Used(
        f"{MOE}.utils", "RegisteredMoeRunnerBackend",
        methods={"is_triton": (), "is_auto": ()}, members=("value",),
    ),
    Used(f"{MOE}.utils", "get_moe_runner_backend"),
    Used(f"{MOE}.utils", "get_moe_a2a_backend"),
    Used(f"{MOE}.moe_runner.runner", "register_moe_runner_core", takes=("backend_name", "factory")),
    RUNNER,
    Used(
        f"{MOE}.moe_runner.base", "DispatchMoeRunnerCore",
        methods={
            "__init__": ("config",),
            "run_from_dispatch": ("dispatch_output", "quant_info", "runner_config", "hooks"),
        },
        abstract=("run_from_dispatch", "runner_backend"),
    ),
    Used(f"{MOE}.moe_runner.base", "FusedOpPool", methods={"get_fused_func": ("dispatch_name", "runner_name")}),
    Used(
        f"{MOE}.moe_runner.base", "MoeRunnerConfig",
        members=(
            "num_local_experts", "hidden_size", "intermediate_size_per_partition", "top_k", "params_dtype",
            "activation", "is_gated", "apply_router_weight_on_input", "no_combine", "routed_scaling_factor",
            "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "swiglu_limit", "gate_up_interleaved",
        ),
    ),
    Used(
        f"{MOE}.moe_runner.triton", "TritonMoeQuantInfo",
        members=(
            "w13_weight", "w2_weight", "b13", "b2", "use_mxfp8", "use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16",
            "use_int4_w4a16", "w13_scale", "w2_scale", "a13_scale", "a2_scale", "block_shape",
            "fuse_swiglu_interleaved",
        ),
    ),
    Used(
        f"{MOE}.token_dispatcher.standard", "StandardDispatchOutput",
        members=("hidden_states", "hidden_states_scale", "topk_output"),
    ),
    Used(f"{MOE}.token_dispatcher.standard", "StandardCombineInput", members=("hidden_states",)),
    Used(f"{MOE}.topk", "StandardTopKOutput", members=("topk_weights", "topk_ids")),
    MXFP4,
    Used("sglang.srt.batch_invariant_ops", "is_batch_invariant_mode_enabled"),
    Used("sglang.srt.arg_groups.fields.exec_", "ExecMoe", members=("enable_eplb",)),
    Used(
        "sglang.srt.arg_groups.fields.schedule", "Schedule", members=("chunked_prefill_size", "max_prefill_tokens")
    ),
    *(Used("sglang.srt.runtime_context", name) for name in ("get_exec", "get_schedule", "get_parallel")),
)  # fmt: skip

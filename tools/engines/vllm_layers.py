"""Envoi's experts in vLLM's own classes: numbers of each format, what is chosen and what is refused.

    python -m tools.engines.vllm_layers [CASE | "loaded anew" | failures | asleep | moved ..]

with vLLM's Python files importable, on a GPU with all of vLLM and its dependencies.

Weights go the way that a server's go: vLLM's method for a layer makes parameters and chooses a kernel; parameters are
filled, processed as loaded weights are, and the layer is called. The result is held to the layer in float64. Some are
loaded anew as into a running server, and in some Envoi's kernels fail, so that vLLM's take over. Without a GPU torch
computes the layers, the process stands for one with a Hopper GPU, and packages that a layer doesn't need are stood for
by empty ones; with one, layers are of practical sizes, and vLLM's own kernels run beside.
"""
# pyright: reportMissingImports=false

import contextlib
import functools
import inspect
import os

os.environ |= {"ENVOI_VLLM": "1", "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR")}
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from tools.engines import empty_packages
from tools.engines.checks import Checks, said
from tools.engines.weights import fill, widened

GPU = torch.cuda.is_available()
DEVICE = torch.device(f"cuda:{os.environ.get('RANK', 0)}" if GPU else "cpu")
E, H, I, K = (32, 2048, 768, 4) if GPU else (8, 512, 256, 2)  # noqa: E741
COUNTS = (1, 16, 64, 300, 2000) if GPU else (5,)
WHOLE = ("weight_name", "shard_id", "expert_id")  # of which part a weight is, for vLLM's loaders
MOE = "vllm.model_executor.layers.fused_moe"
# Packages that vLLM imports and no layer needs.
NEEDLESS = (
    "aiohttp", "cachetools", "cbor2", "cloudpickle", "cpuinfo", "einops", "msgspec", "openai", "openai_harmony",
    "pybase64", "uvloop", "zmq", "vllm.v1.structured_output",
)  # fmt: skip
FORM = {  # error against float64 that each format's rounding of tokens allows
    "bf16": 0.006, "fp8_block128": 0.06, "fp8_row": 0.06, "mxfp8": 0.06, "mxfp4": 0.006, "nvfp4": 0.006
}  # fmt: skip


def config(**changed: Any) -> Any:
    """Return vLLM's config of a layer on one rank."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType

    parallel = FusedMoEParallelConfig(
        tp_size=1, pcp_size=1, dp_size=1, ep_size=1, tp_rank=0, pcp_rank=0, dp_rank=0, ep_rank=0, sp_size=1,
        use_ep=False, all2all_backend="naive", enable_eplb=False,
    )  # fmt: skip
    parallel = replace(parallel, **changed.pop("parallel", {}))
    changed["activation"] = MoEActivation[changed.get("activation", "SILU")]
    given = {
        "num_experts": E, "experts_per_token": K, "hidden_dim": H, "intermediate_size": I, "num_local_experts": E,
        "num_logical_experts": E, "device": DEVICE.type, "routing_method": RoutingMethodType.Default,
        "moe_parallel_config": parallel, "in_dtype": torch.bfloat16,
    }  # fmt: skip
    return FusedMoEConfig(**given | changed)


class FakeLayer(torch.nn.Module):
    """Layer that holds a method's parameters and what the method reads of it."""

    def __init__(self, moe_config: Any) -> None:
        super().__init__()
        self.moe_config, self.activation = moe_config, moe_config.activation
        self.expert_map: torch.Tensor | None = None
        self.apply_router_weight_on_input = False
        self.global_num_experts = self.local_num_experts = moe_config.num_experts
        self.hidden_size = moe_config.hidden_dim
        self.intermediate_size_per_partition = moe_config.intermediate_size_per_partition
        for name in ("swiglu_limit", "swiglu_alpha", "swiglu_beta"):
            setattr(self, name, getattr(moe_config, name))
        self.num_expert_group = self.topk_group = self.e_score_correction_bias = None
        self.routed_scaling_factor, self.renormalize, self.top_k = 1.0, True, K

    def _expert_routing_tables(self) -> None:
        return None

    def get_expert_weights(self) -> Any:
        """Return what vLLM's load balancer moves."""
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

        return RoutedExperts.get_expert_weights(self)


def expected(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, layer: Any, w: dict[str, Any]) -> torch.Tensor:
    """Compute the layer in float64, expert by expert."""
    name, limit = layer.activation.name, layer.swiglu_limit
    out = torch.zeros(len(x), H, dtype=torch.float64, device=x.device)
    for e in range(len(w["w13"])):
        tokens, slots = (ids == e).nonzero(as_tuple=True)
        h = x[tokens].double() @ w["w13"][e].T + (0 if w["b13"] is None else w["b13"][e].double())
        if name == "SWIGLUOAI":
            gate, up = h[:, 0::2].clamp(max=7), h[:, 1::2].clamp(-7, 7)
            h = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        elif name == "RELU2_NO_MUL":
            h = h.clamp(min=0) ** 2
        else:
            gate, up = h.chunk(2, 1)
            if limit:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            h = torch.nn.functional.silu(gate) * up
        y = h @ w["w2"][e].T + (0 if w["b2"] is None else w["b2"][e].double())
        out.index_add_(0, tokens, weights[tokens, slots, None].double() * y)
    return out


def weights_of(layer: Any) -> dict[str, Any]:
    """Return the layer's weights in float64, as they were loaded."""
    found: dict[str, Any] = {}
    given = dict(layer.named_parameters())

    def first(side: str, *names: str) -> torch.Tensor | None:
        return next((given[f"{side}_{name}"].data for name in names if f"{side}_{name}" in given), None)

    for side in ("w13", "w2"):
        scale = first(side, "weight_scale_2")
        found[side] = widened(
            given[f"{side}_weight"].data, first(side, "weight_scale", "weight_scale_inv"), scale
        )  # fmt: skip
    return found | {"b13": first("w13", "bias"), "b2": first("w2", "bias")}


def made(
    method: Any, moe_config: Any, expert_map: torch.Tensor | None = None, seed: int = 0
) -> tuple[Any, dict[str, Any]]:  # fmt: skip
    """Return a layer with random weights that vLLM has processed, and what they mean in float64."""
    from vllm.model_executor.model_loader.reload import layerwise

    from envoi.integrations.names import found_names
    from envoi.integrations.vllm import loading
    from envoi.integrations.vllm.used import ALL

    sizes = method.maybe_roundup_sizes(
        H, moe_config.intermediate_size_per_partition, torch.bfloat16, moe_config.moe_parallel_config
    )
    moe_config.hidden_dim, moe_config.intermediate_size_per_partition = sizes
    layer = FakeLayer(moe_config)
    layer.quant_method = method
    loading.follow(layer, found_names(ALL))
    local = E if expert_map is None else int((expert_map >= 0).sum())
    layer.expert_map, layer.local_num_experts = expert_map, local
    with torch.device(DEVICE):
        method.create_weights(layer, local, *sizes, torch.bfloat16, weight_loader=load_whole, global_num_experts=E)
        layerwise.record_metadata_for_reloading(layer)
    fill(layer, seed)
    loaded = weights_of(layer)
    method.process_weights_after_loading(layer)
    return layer, loaded


def run(method: Any, moe_config: Any, expert_map: torch.Tensor | None = None) -> tuple[Any, dict[int, float]]:
    """Load, process and call a layer; return its experts, and for each number of tokens the error of its result."""
    layer, loaded = made(method, moe_config, expert_map)
    return method.moe_kernel.fused_experts, errors_of(layer, loaded)


def errors_of(layer: Any, loaded: dict[str, Any]) -> dict[int, float]:
    """Call a layer twice with each number of tokens; return the error of its result."""
    source, errors, method = torch.Generator().manual_seed(1), {}, layer.quant_method
    for count in COUNTS:
        x = torch.randn(count, H, generator=source).bfloat16().to(DEVICE)
        logits = torch.randn(count, E, generator=source).bfloat16().to(DEVICE)
        top, ids = logits.float().topk(K, dim=1)
        weights, ids = top.softmax(1), ids.int()
        here = ids if layer.expert_map is None else layer.expert_map[ids.long()]
        want = expected(x, weights, here, layer, loaded)
        out, again = (called(method, layer, x, logits, weights, ids) for _ in range(2))
        if not (torch.equal(out, again) or layer.moe_config.moe_backend != "auto"):
            raise AssertionError(f"a second call with {count} tokens has other bits")
        errors[count] = float((out.double() - want).norm() / want.norm())
    return errors


def called(method: Any, layer: Any, x: torch.Tensor, logits: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor):
    """Call a layer as vLLM's runner does."""
    if method.is_monolithic:
        return method.apply_monolithic(layer, x.clone(), logits).clone()
    shared = {"shared_experts": None, "shared_experts_input": None}
    return method.apply(layer=layer, x=x.clone(), topk_weights=weights, topk_ids=ids, **shared).clone()


def load_whole(param: torch.Tensor, loaded_weight: torch.Tensor, *rest: Any, **more: Any) -> None:
    """Load a parameter of all experts at once; param is named as vLLM calls it."""
    param.data.copy_(loaded_weight)


def loaded_anew(layer: Any) -> dict[str, Any]:
    """Load other weights into a layer as vLLM does into a running server; return what they mean in float64."""
    from vllm.model_executor.model_loader.reload import layerwise

    layerwise.initialize_layerwise_reload(layer)
    other = torch.nn.Module()
    for name, parameter in layer.named_parameters():  # on meta, as they were before they were processed
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=DEVICE)
        other.register_parameter(name, torch.nn.Parameter(empty, requires_grad=False))
    fill(other, seed=1)
    means = weights_of(other)
    for name, new in other.named_parameters():
        parameter = getattr(layer, name)
        more = list(inspect.signature(parameter.weight_loader).parameters)[2:]  # of weights cut by experts and shards
        parameter.weight_loader(parameter, new.data, **{name: None for name in more if name in WHOLE})
    layerwise.finalize_layerwise_reload(layer, None)
    return means


def check_loading(judge: Any) -> None:
    """Check that weights that are loaded anew reach the memory that captured graphs read, in each format."""
    for name in ANEW:
        format, make, changed = CASES[name]
        try:
            layer, _ = made(make(config(**changed)), config(**changed))
            packed = layer.quant_method.moe_kernel.fused_experts.packed
            errors = errors_of(layer, loaded_anew(layer))
            same = layer.quant_method.moe_kernel.fused_experts.packed is packed
            good = packed is not None and same and max(errors.values()) < FORM[format]
            judge(f"loaded anew: {name}", good, said(errors))
        except Exception as problem:
            judge(f"loaded anew: {name}", False, f"{type(problem).__name__}: {problem}")


def check_failures(judge: Any) -> None:
    """Check that vLLM's own kernel runs a layer in which Envoi's fail: in packing, or in its first call."""
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

    import envoi
    from envoi.integrations import engines, lines

    own, seen = TritonExperts.apply, []

    @functools.wraps(own)
    def see(self: Any, output: torch.Tensor, x: torch.Tensor, *given: Any) -> None:
        seen.append((x.dtype == torch.bfloat16, given[9].numel(), given[10].numel()))
        output.zero_()

    if not GPU:  # neither Triton's kernels run there, nor those that round tokens for them
        TritonExperts.apply = see
        for name in ("per_token_group_fp8_quant", "dynamic_per_token_scaled_fp8_quant"):
            setattr(torch.ops._C, name, lambda *given, **named: None)
    for place, (module, name) in {"packing": (engines, "pack"), "a first call": (envoi, "moe")}.items():
        for case in ("bf16", "fp8 in blocks", "fp8 a row"):
            format, make, changed = CASES[case]
            kept, method = getattr(module, name), make(config(**changed))
            lines._said.clear()
            setattr(module, name, _fail)
            try:
                layer, loaded = made(method, config(**changed))
                errors = errors_of(layer, loaded)
            finally:
                setattr(module, name, kept)
            kernel = layer.quant_method.moe_kernel.fused_experts
            right = max(errors.values()) < FORM[format]
            if not GPU:
                right = all(wide == (format == "bf16") and x and y for wide, x, y in seen)
                seen.clear()
            said_so = any("vLLM's kernels run" in line and "injected" in line for line in lines._said)
            judge(f"failed in {place}: {case}", type(kernel.own) is TritonExperts and right and said_so, said(errors))
    TritonExperts.apply = own


def _fail(*arguments: Any, **named: Any) -> None:
    raise RuntimeError("injected")


def fp8_method(moe_config: Any, block: list[int] | None) -> Any:
    """Return vLLM's method for FP8 checkpoints, with factors for blocks, or for matrices and dynamic activations."""
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod

    return Fp8MoEMethod(
        Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=block),
        FakeLayer(moe_config),
    )  # fmt: skip


def channel_method(moe_config: Any) -> Any:
    """Return vLLM's method for compressed-tensors FP8 with a factor a row."""
    from compressed_tensors.quantization import QuantizationArgs
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w8a8_fp8 as module,
    )

    kind: dict[str, Any] = {"num_bits": 8, "type": "float"}
    weights = QuantizationArgs(**kind | {"strategy": "channel", "dynamic": False})
    tokens = QuantizationArgs(**kind | {"strategy": "token", "dynamic": True})
    return module.CompressedTensorsW8A8Fp8MoEMethod(weights, tokens, moe_config)


def modelopt_method(moe_config: Any, kind: str) -> Any:
    """Return vLLM's method for ModelOpt's MXFP8 or NVFP4 checkpoints."""
    from vllm.model_executor.layers.quantization import modelopt

    if kind == "mxfp8":
        return modelopt.ModelOptMxFp8FusedMoE(modelopt.ModelOptMxFp8Config(True, None, []), moe_config)
    given = modelopt.ModelOptNvFp4Config(kind, is_checkpoint_nvfp4_serialized=True)
    return modelopt.ModelOptNvFp4FusedMoE(given, moe_config)


def oss_method(moe_config: Any) -> Any:
    """Return vLLM's method for gpt-oss."""
    from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4MoEMethod

    return GptOssMxfp4MoEMethod(moe_config)


def v4_method(moe_config: Any) -> Any:
    """Return vLLM's method for MXFP4 experts of DeepSeek-V4 and others but gpt-oss."""
    from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4MoEMethod

    return Mxfp4MoEMethod(moe_config)


def plain_method(moe_config: Any) -> Any:
    """Return vLLM's method for weights that aren't quantised."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    return UnquantizedFusedMoEMethod(moe_config)


OSS = {"activation": "SWIGLUOAI", "has_bias": True}
CASES: dict[str, tuple[str, Callable, dict[str, Any]]] = {
    "bf16": ("bf16", plain_method, {}),
    "bf16, relu2 without a gate": ("bf16", plain_method, {"activation": "RELU2_NO_MUL"}),
    "bf16, clamped": ("bf16", plain_method, {"swiglu_limit": 0.5}),
    "bf16, biases, gpt-oss": ("bf16", plain_method, OSS),
    "fp8 in blocks": ("fp8_block128", lambda c: fp8_method(c, [128, 128]), {}),
    "fp8 a matrix": ("fp8_row", lambda c: fp8_method(c, None), {}),
    "fp8 a row": ("fp8_row", channel_method, {}),
    "mxfp8": ("mxfp8", lambda c: modelopt_method(c, "mxfp8"), {}),
    "mxfp4 of gpt-oss": ("mxfp4", oss_method, OSS),
    "mxfp4 of gpt-oss, padded": ("mxfp4", oss_method, OSS | {"intermediate_size": I - I // 16}),  # as with -tp 4
    "mxfp4 of DeepSeek-V4": ("mxfp4", v4_method, {"swiglu_limit": 10.0}),
    "nvfp4, W4A16": ("nvfp4", lambda c: modelopt_method(c, "W4A16_NVFP4"), {}),
    "nvfp4, W4A4": ("nvfp4", lambda c: modelopt_method(c, "NVFP4"), {}),
}
ANEW = (
    "bf16, biases, gpt-oss", "fp8 in blocks", "fp8 a row", "mxfp8", "mxfp4 of gpt-oss", "mxfp4 of DeepSeek-V4",
    "nvfp4, W4A16",
)  # fmt: skip
# vLLM's own kernels for a format on Hopper, by the names of --moe-backend.
OWN = {"bf16": ("triton",), "fp8_block128": ("triton",), "fp8_row": ("triton",), "mxfp4": ("triton",)}
REFUSED: dict[str, dict[str, Any]] = {
    "--moe-backend triton names them": {"moe_backend": "triton"},
    "LoRA is on": {"is_lora_enabled": True},
    "activations are in torch.float16": {"in_dtype": torch.float16},
    "Envoi has no activation SWIGLUSTEP": {"activation": "SWIGLUSTEP"},
    "intermediate: expected a positive multiple of 8": {"intermediate_size": 252},
    "tokens come by deepep_high_throughput": {
        "parallel": {"use_ep": True, "dp_size": 2, "ep_size": 2, "all2all_backend": "deepep_high_throughput"}
    },
    "tokens come batched by expert": {
        "parallel": {"use_ep": True, "dp_size": 2, "ep_size": 2, "all2all_backend": "deepep_low_latency"}
    },
}  # fmt: skip


def prepare_envoi() -> None:
    """Switch Envoi on, on a machine that stands for one with a Hopper GPU but computes in torch."""
    from vllm.platforms import current_platform
    from vllm.v1.worker.workspace import init_workspace_manager

    from envoi.integrations import engines
    from envoi.integrations.vllm import register
    from envoi.ops.moe import packing

    if not GPU:
        packing.implementation = lambda device: "hopper"
        engines._why_not_here = lambda: ""
        engines.why_unbuilt = lambda layer, max_tokens: ""
        kind: Any = type(current_platform)
        kind.fp8_dtype = classmethod(lambda cls: torch.float8_e4m3fn)
        kind.is_cuda_alike = lambda self: True
        setattr(torch.ops._C, "static_scaled_fp8_quant", _rounded_to_fp8)  # noqa: B010
    else:
        torch.cuda.set_device(DEVICE)
    register()
    init_workspace_manager(DEVICE)


def prepare(stack: contextlib.ExitStack) -> None:
    """Switch Envoi on, and make this process vLLM's only rank."""
    if not GPU:
        empty_packages.stand_for(NEEDLESS)
    from vllm import distributed
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config

    prepare_envoi()
    given = VllmConfig(device_config=DeviceConfig(device=DEVICE.type))
    given.scheduler_config.max_num_batched_tokens = max(COUNTS)
    stack.enter_context(set_current_vllm_config(given))
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    distributed.init_distributed_environment(1, 0, f"file://{folder}/ranks", 0, "nccl" if GPU else "gloo")
    distributed.ensure_model_parallel_initialized(1, 1)
    given.model_config = SimpleNamespace(quantization_config=None)  # read by the choice among MXFP4's kernels


def _rounded_to_fp8(output: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, *rest: Any) -> None:
    """Stand for the CUDA function by which vLLM rounds gate's and up's weights to one factor."""
    output.copy_((x.float() / scale).clamp(-448, 448).to(output.dtype))


def main() -> None:
    """Run all checks, print a line for each; exit with 1 if one fails."""
    import vllm

    from envoi.integrations import lines

    stack = contextlib.ExitStack()
    prepare(stack)
    checks = Checks()
    print(f"vLLM {vllm.__version__}, torch {torch.__version__}")
    for name, (format, make, changed) in CASES.items():
        if not checks.wants(name):
            continue
        for backend in ("auto", *(OWN.get(format, ()) if GPU else ())):
            begun = time.time()
            try:
                moe_config = config(**changed, moe_backend=backend)
                experts, errors = run(make(moe_config), moe_config)
                mine = getattr(experts, "format", None) == format
                good = mine == (backend == "auto") and (not mine or max(errors.values()) < FORM[format])
                title = f"{name}, {'Envoi' if mine else backend}"
                checks.judge(title, good, f"{said(errors)} {time.time() - begun:.0f} s")
            except Exception as problem:
                checks.judge(f"{name}, {backend}", backend != "auto", f"{type(problem).__name__}: {problem}")
                if checks.raises:
                    raise
    from tools.engines.vllm_memory import check_moves, check_sleep

    more = {"loaded anew": check_loading, "failures": check_failures, "moved": check_moves, "asleep": check_sleep}
    for name, check in more.items():
        if checks.wants(name):
            check(checks.judge)
    if checks.wanted:
        stack.close()
        checks.end(at_once=GPU)
    expert_map = torch.full((E,), -1, dtype=torch.int32, device=DEVICE)
    expert_map[[6, 1, 3]] = torch.arange(3, dtype=torch.int32, device=DEVICE)
    moe_config = config(num_local_experts=3)
    _, errors = run(plain_method(moe_config), moe_config, expert_map)
    checks.judge("bf16, experts of other ranks", max(errors.values()) < FORM["bf16"], said(errors))
    for reason, changed in REFUSED.items():
        lines._said.clear()
        try:
            chosen: Any = plain_method(config(**changed)).experts_cls
        except Exception as problem:  # vLLM has no kernels for a CPU
            chosen = problem
        told = " / ".join(lines._said)
        checks.judge(f"refused: {reason}", reason in told and "EnvoiExperts" not in repr(chosen), told)
    stack.close()
    checks.end(at_once=GPU)


if __name__ == "__main__":
    main()

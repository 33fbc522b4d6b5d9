"""Envoi's core in SGLang's own classes: numbers of each format, what is chosen and what is refused.

    python -m tools.engines.sglang_layers [CASE | more ..]    with SGLang's Python files, msgspec and dill importable

Layers are SGLang's FusedMoE, made as a server's process makes them: its plug-ins loaded, its configuration published.
Weights are filled, processed as loaded weights are, and the layer is called through SGLang's dispatcher. The result is
held to the layer in float64. Without a GPU torch computes the layers, and the process stands for one with a Hopper GPU.
Unless the whole of SGLang is there, sgl-kernel too, packages that a layer doesn't need are stood for by empty ones. So
are always SGLang's own kernels, of which is only asked whether they were called.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import contextlib
import importlib.util
import time
from types import SimpleNamespace
from typing import Any

import torch

from tools.engines import empty_packages
from tools.engines.checks import Checks, said
from tools.engines.weights import fill, widened

GPU = torch.cuda.is_available()
WHOLE = GPU and importlib.util.find_spec("sgl_kernel") is not None
DEVICE = torch.device("cuda:0" if GPU else "cpu")
E, H, I, K = (32, 2048, 768, 4) if GPU else (8, 512, 256, 2)  # noqa: E741
COUNTS = (1, 16, 64, 300, 2000) if GPU else (5,)
MOE = "sglang.srt.layers.moe"
QUANTIZATION = "sglang.srt.layers.quantization"
# Packages that SGLang imports and no layer needs.
NEEDLESS = (
    "IPython", "aiohttp", "einops", "gguf", "openai", "orjson", "pybase64", "sentencepiece", "starlette",
    "torchvision", "tvm_ffi", "zmq", "sglang.srt.managers.schedule_batch",
    "deep_gemm", "flashinfer", "sgl_kernel", "sglang.jit_kernel",
)  # fmt: skip
FORM = {  # error against float64 that each format's rounding of tokens allows
    "bf16": 0.006, "fp8_block128": 0.06, "fp8_row": 0.06, "mxfp4": 0.006
}  # fmt: skip


def fp8(**more: Any) -> Any:
    """Return SGLang's config of FP8 checkpoints with dynamic activations."""
    from sglang.srt.layers.quantization.fp8 import Fp8Config

    return Fp8Config(**{"is_checkpoint_fp8_serialized": True, "activation_scheme": "dynamic"} | more)


def channels() -> Any:
    """Return SGLang's config of FP8 checkpoints with a factor a row."""
    from sglang.srt.layers.quantization.w8a8_fp8 import W8A8Fp8Config

    return W8A8Fp8Config(is_checkpoint_fp8_serialized=True)


def mxfp4() -> Any:
    """Return SGLang's config of gpt-oss."""
    from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config

    return Mxfp4Config(is_checkpoint_mxfp4_serialized=True)


OSS = {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0, "with_bias": True}
# Name -> format, config of weights, arguments of the layer.
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "bf16": ("bf16", None, {}),
    "bf16, clamped": ("bf16", None, {"swiglu_limit": 10.0}),
    "bf16, relu2 without a gate": ("bf16", None, {"activation": "relu2", "is_gated": False}),
    "bf16, gelu by tanh": ("bf16", None, {"activation": "gelu_tanh"}),
    "bf16, scaled": ("bf16", None, {"routed_scaling_factor": 2.5}),
    "bf16, weights on input": ("bf16", None, {"apply_router_weight_on_input": True, "top_k": 1}),
    "bf16, biases, gpt-oss": ("bf16", None, OSS),
    "bf16, biases, gpt-oss in halves": ("bf16", None, OSS | {"gate_up_interleaved": False}),
    "fp8 in blocks": ("fp8_block128", lambda: fp8(weight_block_size=[128, 128]), {}),
    "fp8 a matrix": ("fp8_row", fp8, {}),
    "fp8 a row": ("fp8_row", channels, {}),
    "mxfp4 of gpt-oss": ("mxfp4", mxfp4, OSS),
}
# Formats of which everything that Envoi packs is a view of what SGLang loads, and follows it.
ANEW = ("bf16", "bf16, biases, gpt-oss", "fp8 in blocks", "fp8 a row")
PARTS = 2  # ranks of an expert-parallel layer, of which this process is the last
# Reason -> arguments of the server, config of weights, arguments of the layer.
REFUSED: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    "Envoi has no activation situ": ({}, None, {"activation": "situ"}),
    "their limit follows SiLU": ({}, None, {"gemm1_clamp_limit": 7.0}),
    "intermediate: expected a positive multiple of 8": ({}, None, {"intermediate_size": 252}),
    "activations are in torch.float16": ({}, None, {"params_dtype": torch.float16}),
    "the model sums a token's slots itself": ({}, None, {"no_combine": True, "inplace": False}),
    "weights are quantised as Envoi's formats aren't": ({}, lambda: fp8(weight_block_size=[64, 128]), {}),
    "activations have a scale from the checkpoint": ({}, lambda: fp8(activation_scheme="static"), {}),
    "expert load balancing moves weights": ({"enable_eplb": True}, channels, {}),
}


def stand_for_packages() -> None:
    """Let SGLang's modules be imported without packages that no layer needs."""
    import transformers.utils.import_utils as seen  # which asks for some of those packages, and keeps the answer

    for name in ("torchvision", "sentencepiece", "gguf"):
        getattr(seen, f"is_{name}_available")()
    empty_packages.stand_for(NEEDLESS)


def stand_for_hopper() -> None:
    """Let SGLang's and Envoi's code take the paths of a Hopper GPU, on tensors in the host's memory."""
    from sglang.srt.layers.moe.token_dispatcher import standard
    from sglang.srt.layers.quantization import fp8 as module

    from envoi.integrations import engines

    engines._why_not_here = lambda: ""
    engines.why_unbuilt = lambda layer, max_tokens: ""
    standard.get_device = lambda: DEVICE.type
    module._is_cpu, module._is_cuda = False, True


def stand_for_kernels() -> None:
    """Put `own` in the place of SGLang's own kernels for experts, and torch in that of what rounds weights to FP8."""
    from sglang.srt.layers.moe.moe_runner.base import FusedOpPool
    from sglang.srt.layers.quantization import fp8 as module

    FusedOpPool._fused_funcs["none", "triton"] = own
    module.scaled_fp8_quant = lambda x, scale: ((x.float() / scale).clamp(-448, 448).to(module.fp8_dtype), scale)


def prepare(stack: contextlib.ExitStack) -> None:
    """Load plug-ins as SGLang does, with Envoi as the only one."""
    if not WHOLE:
        stand_for_packages()
    import sglang.srt.plugins as plugins

    from envoi.integrations.sglang import register

    plugins.load_plugins_by_group = lambda *group, **more: {"envoi": (register, "envoi")}
    plugins.load_plugins()
    stack.enter_context(ranks())
    if not GPU:
        stand_for_hopper()
    stand_for_kernels()


def ranks(**changed: Any) -> Any:
    """Return a context in which SGLang takes this process for a rank."""
    from sglang.srt import runtime_context

    here = {"moe_ep_rank": 0, "moe_ep_size": 1, "moe_tp_rank": 0, "moe_tp_size": 1, "tp_rank": 0, "attn_dp_size": 1}
    return runtime_context.get_parallel().override(**here | changed)


def own(dispatch_output: Any, quant_info: Any, config: Any) -> Any:
    """Stand for SGLang's own kernels: say that they were called."""
    return SimpleNamespace(hidden_states=None)


@contextlib.contextmanager
def server(**arguments: Any) -> Any:
    """Publish a server's arguments."""
    from sglang.srt import runtime_context
    from sglang.srt.layers.moe.utils import initialize_moe_config

    from envoi.integrations import lines

    lines._said.clear()
    with runtime_context.get_context().override_server_args(**{"moe_runner_backend": "envoi"} | arguments):
        initialize_moe_config()
        yield


def made(make_config: Any, **given: Any) -> Any:
    """Return SGLang's layer with random weights, processed as loaded ones are, and what they mean in float64."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    arguments = {
        "num_experts": E, "hidden_size": H, "intermediate_size": I, "layer_id": 0, "top_k": K,
        "params_dtype": torch.bfloat16, "quant_config": None if make_config is None else make_config(),
    }  # fmt: skip
    with torch.device(DEVICE):
        layer = FusedMoE(**arguments | given)
    fill(layer)
    loaded = weights_of(layer)
    layer.quant_method.process_weights_after_loading(layer)
    return layer, loaded


def weights_of(layer: Any) -> dict[str, Any]:
    """Return the layer's weights in float64, as they were loaded."""
    given = {name: x.data for name, x in layer.named_parameters()}
    found: dict[str, Any] = {}
    for side in ("w13", "w2"):
        scale = given.get(f"{side}_weight_scale", given.get(f"{side}_weight_scale_inv"))
        found[side] = widened(given[f"{side}_weight"], scale, None)
        found[f"b{side[1:]}"] = given.get(f"{side}_weight_bias")
    return found


def expected(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, config: Any, w: dict[str, Any]) -> Any:
    """Compute the layer in float64, expert by expert."""
    out = torch.zeros(len(x), H, dtype=torch.float64, device=x.device)
    for e in range(len(w["w13"])):
        tokens, slots = (ids == e).nonzero(as_tuple=True)
        weight = weights[tokens, slots, None].double()
        before, after = (weight, 1) if config.apply_router_weight_on_input else (1, weight)
        h = before * x[tokens].double() @ w["w13"][e].T + (0 if w["b13"] is None else w["b13"][e].double())
        if not config.is_gated:
            h = h.clamp(min=0) ** 2
        else:
            two = h[:, 0::2], h[:, 1::2]
            gate, up = two if config.gemm1_alpha and config.gate_up_interleaved else h.chunk(2, 1)
            h = activated(gate, up, config)
        y = h @ w["w2"][e].T + (0 if w["b2"] is None else w["b2"][e].double())
        out.index_add_(0, tokens, after * y)
    return out * (config.routed_scaling_factor or 1)


def activated(gate: torch.Tensor, up: torch.Tensor, config: Any) -> torch.Tensor:
    """Return the activation of a layer with a gate."""
    limit = config.gemm1_clamp_limit or config.swiglu_limit
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if config.gemm1_alpha:
        return gate * torch.sigmoid(config.gemm1_alpha * gate) * (up + 1)
    if config.activation == "gelu_tanh":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    return torch.nn.functional.silu(gate) * up


def called(layer: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor | None:
    """Call a layer through SGLang's dispatcher; None if SGLang's own kernels were called."""
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    routed = layer.dispatcher.dispatch(x.clone(), StandardTopKOutput(weights, ids, torch.zeros(0)))
    method = layer.quant_method
    apply = getattr(method, "forward_cuda", method.apply)
    found = apply(layer=layer, dispatch_output=routed).hidden_states
    return None if found is None else found.clone()


def routing(count: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, weights and ids, the last slot masked as SGLang masks tokens that fill a batch up."""
    source = torch.Generator().manual_seed(count)
    x = torch.randn(count, H, generator=source).bfloat16().to(DEVICE)
    top, ids = torch.randn(count, E, generator=source).to(DEVICE).topk(top_k, dim=1)
    ids[-1:] = -1 if count > 1 else ids[-1:]
    return x, top.softmax(1) * 0.8, ids.int()


def run(layer: Any, loaded: dict[str, Any]) -> dict[int, float]:
    """Call a layer; return for each number of tokens the error of its result."""
    errors = {}
    for count in COUNTS:
        x, weights, ids = routing(count, layer.top_k)
        out = called(layer, x, weights, ids)
        if out is None:
            raise AssertionError("SGLang's own kernels ran it")
        want = expected(x, weights, ids, layer.moe_runner_config, loaded)
        errors[count] = float((out.double() - want).norm() / want.norm())
    return errors


def check_more(judge: Any) -> None:
    """Check what needs more than a layer and a call."""
    from argparse import ArgumentParser

    from sglang.srt.server_args import ServerArgs

    parser = ArgumentParser()
    ServerArgs.add_cli_args(parser)
    found = parser.parse_args(["--model-path", "x", "--moe-runner-backend", "envoi"]).moe_runner_backend
    judge("the name on the command line", found == "envoi", found)
    with ranks(moe_ep_size=PARTS, moe_ep_rank=PARTS - 1), server():
        layer, loaded = made(None)
        x, weights, ids = routing(5, K)
        first = E - layer.num_local_experts
        here = torch.where(ids >= first, ids - first, -1)
        out, want = called(layer, x, weights, ids), expected(x, weights, here, layer.moe_runner_config, loaded)
    error = torch.inf if out is None else float((out.double() - want).norm() / want.norm())
    judge("experts of other ranks", error < FORM["bf16"] and 0 < first == E // PARTS, f"{error:.1e}")
    with server():
        layer, _ = made(mxfp4, **OSS)
        call = x, weights, ids
        before, place = called(layer, *call), layer.quant_method.runner.runner_core.packed.gate_up.values.data_ptr()
        fill(layer)
        layer.quant_method.process_weights_after_loading(layer)
        after, now = called(layer, *call), layer.quant_method.runner.runner_core.packed.gate_up.values.data_ptr()
    same = before is not None and after is not None and torch.equal(before, after) and place == now
    judge("mxfp4 loaded again", same, "the same memory and numbers" if same else "something else")
    for name in ANEW:
        format, make_config, given = CASES[name]
        with server():
            layer, loaded = made(make_config, **given)
            run(layer, loaded)
            fill(layer, seed=1)
            loaded = weights_of(layer)
            layer.quant_method.process_weights_after_loading(layer)
            errors = run(layer, loaded)
        judge(f"{name}, loaded anew", max(errors.values()) < FORM[format], said(errors))


def main() -> None:
    """Run all checks, print a line for each; exit with 1 if one fails."""
    stack = contextlib.ExitStack()
    prepare(stack)
    from importlib.metadata import version

    from envoi.integrations import lines

    checks = Checks()
    print(f"SGLang {version('sglang')}, torch {torch.__version__}")
    for name, (format, make_config, given) in CASES.items():
        if not checks.wants(name):
            continue
        begun = time.time()
        try:
            with server():
                layer, loaded = made(make_config, **given)
                errors = run(layer, loaded)
            core = layer.quant_method.runner.runner_core
            good = core.packed.format == format and max(errors.values()) < FORM[format]
            checks.judge(name, good, f"{core.packed.format}, {said(errors)}, {time.time() - begun:.0f} s")
        except Exception as problem:
            checks.judge(name, False, f"{type(problem).__name__}: {problem}")
            if checks.raises:
                raise
    if checks.wants("more"):
        check_more(checks.judge)
    if checks.wanted:
        checks.end()
    for reason, (arguments, make_config, given) in REFUSED.items():
        with server(**arguments):
            layer, _ = made(make_config, **given)
            out = called(layer, *routing(5, layer.top_k)) if given.get("params_dtype") is None else None
        told = " / ".join(lines._said)
        checks.judge(f"refused: {reason}", out is None and reason in told and "Envoi runs" not in told, told)
    for name, arguments in {"triton named": {"moe_runner_backend": "triton"}, "nothing named": {}}.items():
        with server(**{"moe_runner_backend": "auto"} | arguments):
            layer, _ = made(None)
        backend = layer.quant_method.runner.runner_backend
        checks.judge(f"off: {name}", backend.value == "triton" and not lines._said, repr(backend))
    checks.end()


if __name__ == "__main__":
    main()

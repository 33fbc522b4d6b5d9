"""Modules that stand for SGLang's: of its names only those that are relied on, doing what the integration needs."""

import pkgutil
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from functools import wraps
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from envoi.integrations.sglang.used import ALL

OWN = "SGLang's own"  # what its function returns as tokens


class Predicates:
    value: str

    def is_auto(self):
        return self.value == "auto"

    def is_triton(self):
        return self.value == "triton"


class Backends(Predicates, Enum):
    AUTO = "auto"
    TRITON = "triton"
    DEEP_GEMM = "deep_gemm"


@dataclass(frozen=True)
class RegisteredMoeRunnerBackend(Predicates):
    value: str


@dataclass
class MoeRunnerConfig:
    num_local_experts: int = 4
    hidden_size: int = 256
    intermediate_size_per_partition: int = 128
    top_k: int | None = 2
    params_dtype: torch.dtype | None = torch.bfloat16
    activation: str = "silu"
    is_gated: bool = True
    apply_router_weight_on_input: bool = False
    no_combine: bool = False
    routed_scaling_factor: float | None = None
    gemm1_alpha: float | None = None
    gemm1_beta: float | None = None
    gemm1_clamp_limit: float | None = None
    swiglu_limit: float | None = None
    gate_up_interleaved: bool = True


@dataclass
class TritonMoeQuantInfo:
    w13_weight: Any
    w2_weight: Any
    b13: Any = None
    b2: Any = None
    use_mxfp8: bool = False
    use_fp8_w8a8: bool = False
    use_int8_w8a8: bool = False
    use_int8_w8a16: bool = False
    use_int4_w4a16: bool = False
    w13_scale: Any = None
    w2_scale: Any = None
    a13_scale: Any = None
    a2_scale: Any = None
    block_shape: list[int] | None = None
    fuse_swiglu_interleaved: bool = False


class StandardTopKOutput(NamedTuple):
    topk_weights: Any
    topk_ids: Any


class StandardDispatchOutput(NamedTuple):
    hidden_states: Any
    hidden_states_scale: Any
    topk_output: Any


class StandardCombineInput(NamedTuple):
    hidden_states: Any


class DispatchMoeRunnerCore(ABC):
    def __init__(self, config):
        self.config = config

    @property
    @abstractmethod
    def runner_backend(self): ...

    @abstractmethod
    def run_from_dispatch(self, dispatch_output, quant_info, runner_config, hooks=None): ...


class HookType(Enum):
    AROUND = "around"


def modules() -> dict[str, ModuleType]:
    """Return SGLang's modules by name, with packages above them; `sglang` has its state, `flags`, `hooks`, `cores`."""
    flags = SimpleNamespace(
        backend=Backends.AUTO, transport=SimpleNamespace(value="none"), eplb=False, chunk=64, most=128, dp=1,
        choices=[], invariant=False,
    )  # fmt: skip
    hooks, cores = {}, {}

    class HookRegistry:
        @classmethod
        def register(cls, target, hook, hook_type=None, *, source=None):
            hooks[target] = hook

    def resolve_moe_runner_backend(backend):
        if backend in cores:
            return RegisteredMoeRunnerBackend(backend)
        return Backends(backend)

    def register_moe_runner_core(backend_name, factory):
        cores[backend_name] = factory

    def own(dispatch_output, quant_info, config):
        return StandardCombineInput(OWN)

    class FusedOpPool:
        @classmethod
        def get_fused_func(cls, dispatch_name, runner_name):
            return {("none", "triton"): own}.get((dispatch_name, runner_name))

    class MoeRunner:
        def __init__(self, runner_backend, config, lora_enabled=False):
            self.runner_backend, self.config, self.lora_enabled = runner_backend, config, lora_enabled
            made = cores.get(runner_backend.value)
            self.runner_core = None if made is None else made(config)

        def run(self, dispatch_output, quant_info, lora_info=None):
            if self.runner_core is None:
                return own(dispatch_output, quant_info, self.config)
            return self.runner_core.run_from_dispatch(dispatch_output, quant_info, self.config, hooks=None)

    class Mxfp4MoEMethod:
        widened = False

        def process_weights_after_loading(self, layer):
            self.widened = True

        def apply(self, layer, dispatch_output):
            return StandardCombineInput(OWN)

    values = {
        "add_moe_runner_backend_choices": flags.choices.extend, "HookType": HookType, "MoeRunnerBackend": Backends,
        "get_moe_runner_backend": lambda: flags.backend, "get_moe_a2a_backend": lambda: flags.transport,
        "is_batch_invariant_mode_enabled": lambda: flags.invariant,
        "ExecMoe": type("ExecMoe", (), {"enable_eplb": False}),
        "Schedule": type("Schedule", (), {"chunked_prefill_size": None, "max_prefill_tokens": None}),
        "get_exec": lambda: SimpleNamespace(moe=SimpleNamespace(enable_eplb=flags.eplb)),
        "get_schedule": lambda: SimpleNamespace(chunked_prefill_size=flags.chunk, max_prefill_tokens=flags.most),
        "get_parallel": lambda: SimpleNamespace(attn_dp_size=flags.dp),
    } | {x.__name__: x for x in (
        HookRegistry, resolve_moe_runner_backend, register_moe_runner_core, FusedOpPool, MoeRunner, Mxfp4MoEMethod,
        RegisteredMoeRunnerBackend, MoeRunnerConfig, TritonMoeQuantInfo, StandardTopKOutput, StandardDispatchOutput,
        StandardCombineInput, DispatchMoeRunnerCore,
    )}  # fmt: skip
    found: dict[str, ModuleType] = {}
    for used in ALL:
        parts = used.module.split(".")
        for end in range(1, len(parts) + 1):
            found.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end]))).__path__ = []
        setattr(found[used.module], used.name, values[used.name])
    vars(found["sglang"]).update(flags=flags, hooks=hooks, cores=cores)
    return found


def apply_hooks(hooks: dict[str, Any]) -> None:
    """Wrap what the hooks name, as SGLang does once its plug-ins are loaded."""
    for target, hook in hooks.items():
        place, _, name = target.rpartition(".")
        holder = pkgutil.resolve_name(place)
        setattr(holder, name, _around(getattr(holder, name), hook))
    hooks.clear()


def _around(original: Any, hook: Any) -> Any:
    return wraps(original)(lambda *given, **named: hook(original, *given, **named))

"""gpt-oss's MXFP4 experts in transformers, loaded as the checkpoint stores them.

transformers widens them to bf16, or with its `kernels` package puts them into the order of those kernels. Where one of
Envoi's names is chosen, `Mxfp4Experts` takes the module's place before weights are read, and its parameters have the
checkpoint's names, dtypes and shapes, so that loading converts nothing.
"""

import functools
from typing import Any

import torch
from transformers.integrations.moe import use_experts_implementation
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer

from envoi.integrations.transformers_checks import loads_as, refusal

# In whose names these weights are kept; they are widened for others.
FORMATS = ("bf16", "mxfp4", "mxfp4_fp8", "mxfp4_mxfp8")
BLOCK, BYTES = 32, 16  # elements of a block, and its bytes


@use_experts_implementation(is_concatenated=False, is_transposed=False, has_bias=True)
class Mxfp4Experts(torch.nn.Module):
    """Experts of gpt-oss in MXFP4: gate and up rows in turn, two elements a byte, UE8M0 factors as bytes, biases."""

    config: Any

    def __init__(self, config: Any):
        super().__init__()
        self.envoi_alone = True
        self.num_experts, self.alpha = config.num_local_experts, 1.702
        self.limit = getattr(config, "swiglu_limit", 7.0)
        sizes = {"gate_up_proj": (2 * config.intermediate_size, config.hidden_size),
                 "down_proj": (config.hidden_size, config.intermediate_size)}  # fmt: skip
        for name, (rows, columns) in sizes.items():
            shape = self.num_experts, rows, columns // BLOCK
            self._add(f"{name}_blocks", torch.empty(*shape, BYTES, dtype=torch.uint8))
            self._add(f"{name}_scales", torch.empty(shape, dtype=torch.uint8))
            self._add(f"{name}_bias", torch.empty(self.num_experts, rows))

    def _add(self, name: str, x: torch.Tensor) -> None:
        self.register_parameter(name, torch.nn.Parameter(x, requires_grad=False))

    _apply_gate = GptOssExperts._apply_gate

    def forward(self, *arguments: Any, **options: Any) -> torch.Tensor:
        """Raise ValueError: there is no code for these weights but that of the chosen implementation."""
        raise ValueError(f"experts_implementation: {refusal(self.config._experts_implementation)}")


def install() -> None:
    """Wrap three methods of transformers' MXFP4 quantiser; later calls do nothing."""
    kind = Mxfp4HfQuantizer
    if hasattr(kind.get_weight_conversions, "envoi"):
        return
    kind.validate_environment = noting_the_wish(kind.validate_environment)
    kind._process_model_before_weight_loading = _in_place_of_transformers(kind._process_model_before_weight_loading)
    kind.get_weight_conversions = _without_conversions(kind.get_weight_conversions)


def noting_the_wish(original: Any) -> Any:
    """Wrap a quantiser's check of the machine: envoi_may_load says that the user hasn't asked for widened weights."""

    @functools.wraps(original)
    def validate_environment(self, *args, **kwargs):
        # The original sets dequantize by itself where it finds no kernels or no GPU.
        self.envoi_may_load = self.pre_quantized and not self.quantization_config.dequantize
        return original(self, *args, **kwargs)

    return validate_environment


def _in_place_of_transformers(original: Any) -> Any:
    @functools.wraps(original)
    def _process_model_before_weight_loading(self, model, *args, **kwargs):
        self.envoi_loads = getattr(self, "envoi_may_load", False) and loads_as(model, FORMATS)
        if not self.envoi_loads:
            return original(self, model, *args, **kwargs)
        self.quantization_config.dequantize = False
        for path, module in list(model.named_modules()):
            if type(module) is GptOssExperts:
                with torch.device("meta"):
                    model.set_submodule(path, Mxfp4Experts(module.config).to(module.gate_up_proj_bias.dtype))
        return None

    return _process_model_before_weight_loading


def _without_conversions(original: Any) -> Any:
    @functools.wraps(original)
    def get_weight_conversions(self):
        return [] if getattr(self, "envoi_loads", False) else original(self)

    get_weight_conversions.envoi = True  # pyright: ignore[reportAttributeAccessIssue]
    return get_weight_conversions

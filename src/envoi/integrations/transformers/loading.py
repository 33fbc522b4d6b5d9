"""Experts loaded as their checkpoint stores them where one of Envoi's names is chosen.

MXFP4 (gpt-oss): transformers widens to bf16, or reorders for its `kernels` package. `Mxfp4Experts` takes the modules'
places, and its parameters have the checkpoint's names, dtypes and shapes, so that loading converts nothing.
FP8 and FP4: transformers widens where there is no GPU. Loaded as on a GPU if nothing but experts is quantised: it has
no code that runs FP8 linear layers on a CPU.
compressed-tensors: transformers widens FP8 to bf16. The modules get parameters in FP8 and for the factors, and the
conversions that merge experts are used without the one that widens.

Parameters are put in place before weights are read.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.integrations.finegrained_fp8 import FP8Experts
from transformers.integrations.moe import use_experts_implementation
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from envoi.checkpoints.config import read_quantisation
from envoi.checkpoints.names import Separate, find
from envoi.checkpoints.quantisation import Quantisation
from envoi.checkpoints.schemes import POWERS
from envoi.checkpoints.separate import SeparateExperts, block_of
from envoi.checkpoints.shards import Shards
from envoi.integrations.transformers.modules import FORMAT_OF, LAYER, STORED_FACTORS, is_experts, loads_as, refusal

# In whose names weights are kept as they are stored; they are widened for others. Of "fp8" all: a format that doesn't
# hold the stored numbers is refused, as it is on a GPU.
MXFP4_FORMATS = ("bf16", "mxfp4", "mxfp4_fp8", "mxfp4_mxfp8")
FP8_FORMATS = tuple(FORMAT_OF.values())
COMPRESSED_FORMATS = ("bf16", "fp8_row", "fp8_block128")
BLOCK, BYTES = 32, 16  # elements of an MXFP4 block, and its bytes
FACTOR = "weight_scale"  # of compressed-tensors


BEFORE_WEIGHTS = "_process_model_before_weight_loading"


def install() -> None:
    """Wrap methods of three of transformers' quantisers; later calls do nothing."""
    _wrap(Mxfp4HfQuantizer, "validate_environment", _note_the_wish)
    _wrap(Mxfp4HfQuantizer, BEFORE_WEIGHTS, _put_mxfp4_experts)
    _wrap(Mxfp4HfQuantizer, "get_weight_conversions", _convert_nothing)
    _wrap(FineGrainedFP8HfQuantizer, "validate_environment", _note_the_wish)
    _wrap(FineGrainedFP8HfQuantizer, BEFORE_WEIGHTS, _keep_fp8_experts)
    _wrap(CompressedTensorsHfQuantizer, BEFORE_WEIGHTS, _keep_compressed_experts)
    _wrap(CompressedTensorsHfQuantizer, "update_weight_conversions", _merge_without_widening)


def _wrap(kind: Any, name: str, around: Callable) -> None:
    """Call `around` in a method's place, with the method as its first argument."""
    original = getattr(kind, name)
    if hasattr(original, "envoi"):
        return

    @functools.wraps(original)
    def method(self, *args, **kwargs):
        return around(original, self, *args, **kwargs)

    method.envoi = True  # pyright: ignore[reportAttributeAccessIssue]
    setattr(kind, name, method)


def _note_the_wish(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Note in envoi_may_load whether the user hasn't asked for widened weights."""
    # The original sets dequantize by itself where it finds no kernels or no GPU.
    self.envoi_may_load = self.pre_quantized and not self.quantization_config.dequantize
    return original(self, *args, **kwargs)


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


def _put_mxfp4_experts(original: Callable, self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    self.envoi_loads = getattr(self, "envoi_may_load", False) and loads_as(model, MXFP4_FORMATS)
    if not self.envoi_loads:
        return original(self, model, *args, **kwargs)
    self.quantization_config.dequantize = False
    for path, module in list(model.named_modules()):
        if type(module) is GptOssExperts:
            with torch.device("meta"):
                model.set_submodule(path, Mxfp4Experts(module.config).to(module.gate_up_proj_bias.dtype))
    return None


def _convert_nothing(original: Callable, self: Any) -> list:
    return [] if getattr(self, "envoi_loads", False) else original(self)


def _keep_fp8_experts(original: Callable, self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    original(self, model, *args, **kwargs)
    widened = self.quantization_config.dequantize and getattr(self, "envoi_may_load", False)
    if not (widened and loads_as(model, FP8_FORMATS) and only_experts(model, self.modules_to_not_convert)):
        return
    self.quantization_config.dequantize = False
    original(self, model, *args, **kwargs)
    quantised: list[Any] = [module for module in model.modules() if isinstance(module, FP8Experts)]
    for module in quantised:
        module.envoi_alone = True  # transformers' own code for it needs a GPU


def only_experts(model: torch.nn.Module, left_out: list[str] | None) -> bool:
    """Return True if a checkpoint that leaves these modules as they are has experts in FP8 or FP4 and nothing else."""
    chosen = [module for path, module in model.named_modules() if should_convert_module(path, left_out)]
    return any(map(is_experts, chosen)) and not any(isinstance(module, torch.nn.Linear) for module in chosen)


def _keep_compressed_experts(
    original: Callable, self: Any, model: Any, *args: Any, checkpoint_files: Sequence[str] | None = None, **kwargs: Any
) -> Any:
    result = original(self, model, *args, checkpoint_files=checkpoint_files, **kwargs)
    if checkpoint_files and not self.quantization_config.dequantize and loads_as(model, COMPRESSED_FORMATS):
        self.envoi_loads = keep_stored(model, checkpoint_files)
    return result


def _merge_without_widening(original: Callable, self: Any, weight_conversions: Any, *more: Any) -> Any:
    # more: newer releases also give the model
    if getattr(self, "envoi_loads", False) and not more:  # else the original finds the parameters of the factors
        # A pattern of weights also finds their factors, which are merged alike, under the name with "_scale".
        return [*weight_conversions, *self.get_weight_conversions()]
    return original(self, weight_conversions, *more)


def keep_stored(model: torch.nn.Module, files: Sequence[str]) -> bool:
    """Give FP8 parameters to the experts modules that the files have in FP8; return whether all are.

    Changes nothing if it returns False: the conversions are the same for all layers. Reads headers only. Raises
    ValueError that names the file and the tensor if one of theirs is missing or has another dtype or shape.
    """
    modules: list[tuple[str, Any]] = [(path, module) for path, module in model.named_modules() if is_experts(module)]
    try:
        way = read_quantisation(Path(files[0]).parent)
    except ValueError:
        return False  # for transformers to know
    with Shards(files) as shards:
        plans = [_plan(shards, way, path, module) for path, module in modules]
        found = [plan and _factors(plan, module) for plan, (_, module) in zip(plans, modules, strict=True)]
    if not found or None in found:
        return False
    for (_, module), plan, factors in zip(modules, plans, found, strict=True):
        module.envoi_alone, module.block_size = True, block_of(plan.group if plan else None)
        for name, sf in (factors or {}).items():
            weight = module._parameters[name]
            _put(module, name, torch.empty_like(weight, dtype=torch.float8_e4m3fn, device="meta"))
            _put(module, name + STORED_FACTORS, sf)
    return True


def _put(module: torch.nn.Module, name: str, x: torch.Tensor) -> None:
    module.register_parameter(name, torch.nn.Parameter(x, requires_grad=False))


def _plan(shards: Shards, way: Quantisation | None, path: str, module: Any) -> SeparateExperts | None:
    """Return where a module's tensors are if its layer is stored in FP8 with the factors of compressed-tensors."""
    layer = LAYER.search(path)
    named = find(shards.file_of, int(layer[1])) if layer else None
    if not isinstance(named, Separate) or not module.has_gate:
        return None
    count = module._parameters["down_proj"].shape[0]
    plan = SeparateExperts(shards, way, named, range(count), count)
    whole = plan.dtype == torch.float8_e4m3fn and plan.factor(0, named.gate).endswith(f".{FACTOR}")
    return plan if whole else None


def _factors(plan: SeparateExperts, module: Any) -> dict[str, torch.Tensor]:
    """Return empty factors as transformers will have merged them, by the weights' names."""
    factors = {}
    for name, projection, parts in (("gate_up_proj", plan.named.gate, 2), ("down_proj", plan.named.down, 1)):
        dtype, shape = plan.shards.header(plan.factor(0, projection))
        rows, *columns = shape or (1,)
        dtype = torch.uint8 if dtype in POWERS else torch.float32  # bytes of powers of two aren't converted
        sizes = module._parameters[name].shape[0], parts * rows, *columns
        factors[name] = torch.empty(sizes, dtype=dtype, device="meta")
    return factors

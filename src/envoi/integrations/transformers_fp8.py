"""FP8 experts of compressed-tensors checkpoints in transformers, loaded as the checkpoint stores them.

transformers widens them to bf16. Where one of Envoi's names is chosen, the experts modules get parameters in FP8 and
for the factors before weights are read, and the conversions that merge experts are used without the one that widens.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer

from envoi.checkpoints.config import read_quantisation
from envoi.checkpoints.names import Separate, find
from envoi.checkpoints.quantisation import Quantisation
from envoi.checkpoints.schemes import POWERS
from envoi.checkpoints.separate import Plan, block_of
from envoi.checkpoints.shards import Shards
from envoi.integrations.transformers import STORED_FACTORS, is_experts
from envoi.integrations.transformers_checks import LAYER, loads_as

FACTOR = "weight_scale"
FORMATS = ("bf16", "fp8_row", "fp8_block128")  # in whose names these weights are kept; they are widened for others


def install() -> None:
    """Wrap two methods of transformers' quantiser for compressed-tensors; later calls do nothing."""
    kind = CompressedTensorsHfQuantizer
    if hasattr(kind.update_weight_conversions, "envoi"):
        return
    kind._process_model_before_weight_loading = _before(kind._process_model_before_weight_loading)
    kind.update_weight_conversions = _without_widening(kind.update_weight_conversions)


def _before(original: Any) -> Any:
    @functools.wraps(original)
    def _process_model_before_weight_loading(self, model, *args, checkpoint_files=None, **kwargs):
        result = original(self, model, *args, checkpoint_files=checkpoint_files, **kwargs)
        if checkpoint_files and not self.quantization_config.dequantize and loads_as(model, FORMATS):
            self.envoi_loads = keep_stored(model, checkpoint_files)
        return result

    return _process_model_before_weight_loading


def _without_widening(original: Any) -> Any:
    @functools.wraps(original)
    def update_weight_conversions(self, weight_conversions, *more):  # more: newer releases also give the model
        if getattr(self, "envoi_loads", False) and not more:  # else the original finds the parameters of the factors
            # A pattern of weights also finds their factors, which are merged alike, under the name with "_scale".
            return [*weight_conversions, *self.get_weight_conversions()]
        return original(self, weight_conversions, *more)

    update_weight_conversions.envoi = True  # pyright: ignore[reportAttributeAccessIssue]
    return update_weight_conversions


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


def _plan(shards: Shards, way: Quantisation | None, path: str, module: Any) -> Plan | None:
    """Return where a module's tensors are if its layer is stored in FP8 with the factors of compressed-tensors."""
    layer = LAYER.search(path)
    named = find(shards.file_of, int(layer[1])) if layer else None
    if not isinstance(named, Separate) or not module.has_gate:
        return None
    count = module._parameters["down_proj"].shape[0]
    plan = Plan(shards, way, named, range(count), count)
    whole = plan.dtype == torch.float8_e4m3fn and plan.factor(0, named.gate).endswith(f".{FACTOR}")
    return plan if whole else None


def _factors(plan: Plan, module: Any) -> dict[str, torch.Tensor]:
    """Return empty factors as transformers will have merged them, by the weights' names."""
    factors = {}
    for name, projection, parts in (("gate_up_proj", plan.named.gate, 2), ("down_proj", plan.named.down, 1)):
        dtype, shape = plan.shards.header(plan.factor(0, projection))
        rows, *columns = shape or (1,)
        dtype = torch.uint8 if dtype in POWERS else torch.float32  # bytes of powers of two aren't converted
        sizes = module._parameters[name].shape[0], parts * rows, *columns
        factors[name] = torch.empty(sizes, dtype=dtype, device="meta")
    return factors

"""FP8 experts of compressed-tensors checkpoints in transformers, loaded as the checkpoint stores them.

transformers widens them to bf16. Where one of Envoi's names is chosen, the experts modules get parameters in FP8 and
for the factors before weights are read, and the conversions that merge experts are used without the one that widens.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer

from envoi.checkpoints.names import Separate, find
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

    Changes nothing if it returns False: the conversions are the same for all layers. Reads headers only.
    """
    modules: list[tuple[str, Any]] = [(path, module) for path, module in model.named_modules() if is_experts(module)]
    with Shards(files) as shards:
        found = [_stored(shards, path, module) for path, module in modules]
    if not found or None in found:
        return False
    for (_, module), shapes in zip(modules, found, strict=True):
        module.envoi_alone = True
        for name, shape in (shapes or {}).items():
            weight = module._parameters[name]
            _put(module, name, torch.empty_like(weight, dtype=torch.float8_e4m3fn, device="meta"))
            _put(module, name + STORED_FACTORS, torch.empty(shape, dtype=torch.float32, device="meta"))
    return True


def _put(module: torch.nn.Module, name: str, x: torch.Tensor) -> None:
    module.register_parameter(name, torch.nn.Parameter(x, requires_grad=False))


def _stored(shards: Shards, path: str, module: Any) -> dict[str, tuple[int, ...]] | None:
    """Return the shapes of a module's factors, by the weights' names, if its layer is stored in FP8."""
    layer = LAYER.search(path)
    named = find(shards.file_of, int(layer[1])) if layer else None
    if not isinstance(named, Separate) or not module.has_gate:
        return None
    shapes = {}
    for name, projection, parts in (("gate_up_proj", named.gate, 2), ("down_proj", named.down, 1)):
        weight, factor = (named.name(named.ids[0], projection, part) for part in ("weight", FACTOR))
        if not {weight, factor} <= set(shards.file_of) or shards.header(weight)[0] != torch.float8_e4m3fn:
            return None
        rows, *columns = shards.header(factor)[1] or (1,)
        shapes[name] = (module._parameters[name].shape[0], parts * rows, *columns)
    return shapes

"""Checks made when a model chooses Envoi, before and after weights are loaded: refuse models that it can't run.

transformers itself only checks that a name is registered. Families that don't look implementations up would silently
run their own code under Envoi's name. Tensors that are missing or have another shape it reports in a log, and
initialises them or keeps them as they came; of quantised experts that would be numbers that mean nothing. So headers of
files are looked at before, and the loaded parameters after.
"""

import functools
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from envoi.checkpoints.activation import read_activation
from envoi.checkpoints.config import read_quantisation
from envoi.checkpoints.keys import unknown
from envoi.checkpoints.names import Separate, check_beside, find
from envoi.checkpoints.quantisation import Quantisation
from envoi.checkpoints.separate import SeparateExperts
from envoi.checkpoints.shards import Shards
from envoi.checkpoints.stacked import plan_stacked
from envoi.integrations.transformers.activation import recognise_activation
from envoi.integrations.transformers.modules import FORMAT_OF, IMPLEMENTATIONS, LAYER, refusal, served, unserved

Shapes = dict[tuple[str, str], tuple[int, ...]]  # of parameters, by the path of their module and their name


def install() -> None:
    """Wrap the three methods of PreTrainedModel through which an implementation is chosen; later calls do nothing."""
    if hasattr(PreTrainedModel.set_experts_implementation, "envoi"):
        return
    own = vars(PreTrainedModel)
    wrapped = {
        "_from_config": classmethod(_after_config(own["_from_config"].__func__)),
        "_load_pretrained_model": staticmethod(_before_weights(own["_load_pretrained_model"].__func__)),
        "set_experts_implementation": _when_set(own["set_experts_implementation"]),
    }
    for name, method in wrapped.items():
        setattr(PreTrainedModel, name, method)


def _after_config(original: Callable) -> Callable:
    @functools.wraps(original)
    def from_config(cls, config, **kwargs):
        model = original(cls, config, **kwargs)
        if not _part_of_another():
            check_model(model, model.get_experts_implementation())
        return model

    return from_config


def _before_weights(original: Callable) -> Callable:
    @functools.wraps(original)
    def load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args, **kwargs):
        check_model(model, model.get_experts_implementation())
        files = checkpoint_files if state_dict is None and checkpoint_files else []
        way = check_files(model, files, load_config.hf_quantizer is not None)
        shapes = shapes_of(model)
        found = original(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
        where = str(load_config.pretrained_model_name_or_path or "state_dict")
        if not load_config.ignore_mismatched_sizes:
            check_loaded(model, shapes, found[0], files, way, where)
        return found

    return load_pretrained_model


def _when_set(original: Callable) -> Callable:
    @functools.wraps(original)
    def set_experts_implementation(self, experts_implementation):
        before = self.get_experts_implementation()
        original(self, experts_implementation)
        chosen = experts_implementation
        try:
            check_model(self, chosen if isinstance(chosen, dict) else {"": chosen})
            check_stored(self)
        except ValueError:
            original(self, before)
            raise

    set_experts_implementation.envoi = True  # pyright: ignore[reportAttributeAccessIssue]
    return set_experts_implementation


def _part_of_another() -> bool:
    """Return True while a model builds a part of itself, for instance a vision tower, which needn't have experts."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), PreTrainedModel):
            return True
        frame = frame.f_back
    return False


def check_model(model: Any, chosen: dict[str, str | None]) -> None:
    """Raise ValueError unless Envoi runs all experts modules for which it was chosen, and at least one.

    chosen: implementations by the name of a part of the model, as `model.get_experts_implementation()` returns them.
    """
    names = [name for name in chosen.values() if name in IMPLEMENTATIONS]
    if not names:
        return
    ours = dict(served(model))
    for path, module in ours.items():
        reason = unserved(module, FORMAT_OF[module.config._experts_implementation])
        if reason is not None:
            raise ValueError(f"experts_implementation={names[0]!r}: {path} ({type(module).__name__}): {reason}")
    if not ours:
        raise ValueError(f"experts_implementation={names[0]!r}: {type(model).__name__}: {_without_experts(model)}")
    for doubt in dict.fromkeys(filter(None, (_doubt(path, module) for path, module in ours.items()))):
        warnings.warn(doubt, stacklevel=2)


def _doubt(path: str, module: Any) -> str:
    """Return what a module's configuration says of the experts' arithmetic that transformers' code doesn't do, or may
    not do, in one sentence; "" if there is nothing."""
    config = module.config.to_dict()
    for key in unknown(config):
        return f"config: {key} {config[key]!r} is unknown to Envoi, which computes what {type(module).__name__} does"
    layer, family = LAYER.search(path), str(config.get("model_type", "")).removesuffix("_text")
    try:
        said = read_activation(Path("config"), family, config, int(layer[1]) if layer else 0)
    except ValueError:
        return ""  # for checkpoints alone: transformers' code is the one to follow, and its activation was recognised
    found = recognise_activation(module)
    if said == found:
        return ""
    name = type(module).__name__
    return f"config: it says that experts compute {_named(*said)}, but {name}, and so Envoi, {_named(*found)}"


def _named(activation: str, limit: float | None) -> str:
    return activation if limit is None else f"{activation}, clamped at {limit:g}"


def check_stored(model: Any) -> None:
    """Raise ValueError if a module that Envoi has loaded as it is stored is to run by another implementation."""
    for path, module in model.named_modules():
        if getattr(module, "envoi_alone", False) and module.config._experts_implementation not in IMPLEMENTATIONS:
            raise ValueError(f"experts_implementation: {path}: {refusal(module.config._experts_implementation)}")


def _without_experts(model: Any) -> str:
    if any(type(module).__name__ == "Mxfp4GptOssExperts" for module in model.modules()):
        return (
            "expected experts as their checkpoint stores them, got MXFP4 ones in the order of transformers' own "
            "kernels; choose experts_implementation in from_pretrained"
        )
    return (
        "expected experts that transformers looks up by experts_implementation, got none: what experts this model has "
        "always run transformers' own code; choose experts_implementation='eager'"
    )


def check_files(model: torch.nn.Module, files: Sequence[str], quantised: bool) -> Quantisation | None:
    """Return how the experts in the files are quantised, None where Envoi doesn't look at that. Reads headers only.

    quantised: transformers has found a way of quantising that it knows.
    Raises ValueError that names the file and the tensor if a file is truncated, or if one of the tensors of quantised
    experts is missing or has another dtype or shape than it should have.
    """
    modules = list(served(model))
    if not modules or not files or not all(file.endswith(".safetensors") for file in files):
        return None
    with Shards(files) as shards:
        shards.check()
        way = _way(Path(files[0]).parent, quantised)
        for path, module in modules:
            if way is not None:
                _check_layer(shards, way, path, module)
            elif not quantised:
                _check_names(shards, path, module)
    return way


def _check_names(shards: Shards, path: str, module: Any) -> None:
    """Raise ValueError for a tensor beside a layer's float weights that may change what they mean."""
    layer = LAYER.search(path)
    named = find(shards.file_of, int(layer[1])) if layer else None
    biases = ["bias"] * module.has_bias
    if isinstance(named, Separate):
        check_beside(shards.file_of, named, ["weight", *biases])
    elif named is not None:
        weights = named.gate_up, named.down
        check_beside(shards.file_of, named, [*weights, *(f"{name}_{bias}" for name in weights for bias in biases)])


def _way(folder: Path, quantised: bool) -> Quantisation | None:
    """Return how the experts in the files are quantised; None if they aren't, or if it is for transformers to know."""
    if not (folder / "config.json").is_file():
        return None
    try:
        way = read_quantisation(folder)
    except ValueError:
        if quantised:
            return None
        raise
    if way is not None and not quantised:
        raise ValueError(
            f"{folder / 'config.json'}: quantization_config.quant_method: expected one that this release of "
            f"transformers loads, got {way.method!r}"
        )
    return way


def _check_layer(shards: Shards, way: Quantisation | None, path: str, module: Any) -> None:
    layer = LAYER.search(path)
    named = find(shards.file_of, int(layer[1])) if layer and module.has_gate else None
    if named is None:
        return  # a layout that only transformers knows: its parameters are looked at when they are loaded
    count = next(iter(module.parameters())).shape[0]
    if isinstance(named, Separate):
        plan = SeparateExperts(shards, way, named, range(count), count)
        scale = plan.scale(0, named.inputs[0])
        if scale:
            raise ValueError(
                f"{shards.file_of[scale]}: {scale}: expected experts without a scale on top of their factors, since "
                "transformers leaves it out, got NVFP4; envoi.experts.from_checkpoint loads them"
            )
    else:
        plan_stacked(shards, way, named, count)


def shapes_of(model: torch.nn.Module) -> Shapes:
    """Return the shapes that the parameters of experts run by Envoi have before they are loaded."""
    return {(path, name): tuple(x.shape) for path, module in served(model) for name, x in module.named_parameters()}


def check_loaded(
    model: torch.nn.Module, shapes: Shapes, info: Any, files: Sequence[str], way: Quantisation | None, where: str
) -> None:
    """Raise ValueError that names a parameter which no file had, or which has come in another shape, and if headers
    show it the tensor.

    info: what transformers says of the loading. where: what to name in place of a file.
    """
    modules = dict(served(model))
    others = {key: came for key, came, _ in info.mismatched_keys}
    for (path, name), shape in shapes.items():
        key = f"{path}.{name}"
        came = tuple(others.get(key, modules[path]._parameters[name].shape))
        if key not in info.missing_keys and came == shape:
            continue
        if files and all(file.endswith(".safetensors") for file in files):
            with Shards(files) as shards:
                _check_layer(shards, way, path, modules[path])
        got = "none, or not of all experts" if key in info.missing_keys else str(list(came))
        raise ValueError(f"{where}: {key}: expected {list(shape)}, got {got}")

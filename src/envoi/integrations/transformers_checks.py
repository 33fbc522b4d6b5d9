"""Checks made when a model chooses Envoi, before weights are loaded: refuse models whose experts it can't run.

transformers itself only checks that a name is registered. Families that don't look implementations up would silently
run their own code under Envoi's name.
"""

import functools
import re
import sys
import warnings
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

from envoi.checkpoints.activation import read_activation
from envoi.checkpoints.keys import unknown
from envoi.integrations.transformers import FORMAT_OF, IMPLEMENTATIONS, is_experts, recognise_activation, unserved

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def install() -> None:
    """Wrap the three methods of PreTrainedModel through which an implementation is chosen; later calls do nothing."""
    from transformers import PreTrainedModel

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


def check_model(model: Any, chosen: dict[str, str | None]) -> None:
    """Raise ValueError unless Envoi runs all experts modules for which it was chosen, and at least one.

    chosen: implementations by the name of a part of the model, as `model.get_experts_implementation()` returns them.
    """
    names = [name for name in chosen.values() if name in IMPLEMENTATIONS]
    if not names:
        return
    ours = {
        path: module
        for path, module in model.named_modules()
        if is_experts(module) and module.config._experts_implementation in IMPLEMENTATIONS
    }
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


def loads_as(model: Any, formats: Container[str]) -> bool:
    """Tell whether Envoi's names are chosen for all parts of a model, and only those of these formats."""
    chosen = [name for name in model.get_experts_implementation().values() if name is not None]
    return bool(chosen) and all(name in FORMAT_OF and FORMAT_OF[name] in formats for name in chosen)


def refusal(chosen: str | None) -> str:
    """Return why an implementation can't run experts that Envoi has loaded as they are stored."""
    return (
        f"expected one of {', '.join(map(repr, IMPLEMENTATIONS))} for experts that Envoi has loaded as they are "
        f"stored, got {chosen!r}: load the model again to choose that"
    )


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
        from envoi.integrations import transformers_files

        check_model(model, model.get_experts_implementation())
        files = checkpoint_files if state_dict is None and checkpoint_files else []
        way = transformers_files.check_files(model, files, load_config.hf_quantizer is not None)
        shapes = transformers_files.shapes_of(model)
        found = original(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
        where = str(load_config.pretrained_model_name_or_path or "state_dict")
        if not load_config.ignore_mismatched_sizes:
            transformers_files.check_loaded(model, shapes, found[0], files, way, where)
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
    from transformers import PreTrainedModel

    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), PreTrainedModel):
            return True
        frame = frame.f_back
    return False

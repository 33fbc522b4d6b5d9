"""Checks of the files that transformers loads a model from, where Envoi runs its experts.

transformers reports tensors that are missing, or have another shape, in a log, and initialises them or keeps them as
they came; of quantised experts that would be numbers that mean nothing. So headers are looked at before, and the loaded
parameters after.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from envoi.checkpoints.config import read_quantisation
from envoi.checkpoints.names import Separate, check_beside, find
from envoi.checkpoints.quantisation import Quantisation
from envoi.checkpoints.separate import Plan
from envoi.checkpoints.shards import Shards
from envoi.checkpoints.stacked import plan_stacked
from envoi.integrations.transformers import IMPLEMENTATIONS, is_experts
from envoi.integrations.transformers_checks import LAYER

Shapes = dict[tuple[str, str], tuple[int, ...]]  # of parameters, by the path of their module and their name


def served(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield path and module of the experts for which Envoi is chosen."""
    for path, module in model.named_modules():
        if is_experts(module) and module.config._experts_implementation in IMPLEMENTATIONS:  # pyright: ignore
            yield path, module


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
        plan = Plan(shards, way, named, range(count), count)
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

"""Reading of config.json: how many experts a checkpoint has, how they are quantised; with keys.py and activation.py,
what they compute."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from envoi.checkpoints.activation import INTERLEAVED, read_activation
from envoi.checkpoints.keys import LATENT

ALL = 0  # in a group: all rows, or all columns
MX, NV = (1, 32), (1, 16)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
COUNTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
OTHERS = {
    "llama4": "its tokens are multiplied by their weights before the experts, which Envoi does after them",
    "muse_spark": "each expert's output is normalised before it is weighted, which Envoi doesn't do",
}
METHODS = ("fp8", "mxfp4", "compressed-tensors", "modelopt")
NVFP4_ALGORITHMS = ("NVFP4", "W4A16_NVFP4")


@dataclass(frozen=True)
class Quantisation:
    """Layout of quantised experts: rows and columns that share a factor, by the weights' dtype; and names.

    weight: the last part of the weights' names. factors: the last parts that a factor's name may have instead.
    scale: the last part of the name of a matrix's scale, float32, on top of its factors; "" if there is none.
    inverse: the scale divides, instead of being multiplied.
    """

    method: str
    groups: dict[torch.dtype, tuple[int, int]]
    weight: str = "weight"
    factors: tuple[str, ...] = ()
    scale: str = ""
    inverse: bool = False


@dataclass(frozen=True)
class Config:
    """Experts of a layer: see the module. num_experts: None if config.json doesn't say. latent: the key that gives the
    experts a hidden size of their own, and the size; None if they have the model's."""

    file: Path
    family: str
    num_experts: int | None
    latent: tuple[str, int] | None
    activation: str
    swiglu_limit: float | None
    quantisation: Quantisation | None

    @property
    def gate_up_layout(self) -> str:
        """Order of rows where gate and up are in one tensor."""
        return "interleaved" if self.family in INTERLEAVED else "concat"


def read_config(folder: Path, layer: int) -> Config:
    """Read config.json, of a model or of one that has the model as its text_config, for the experts of a layer.

    Raises ValueError that names the file and the key for what Envoi can't run or doesn't know.
    """
    file, config, given = _read(folder)
    family = str(config.get("model_type", "")).removesuffix("_text")
    if family in OTHERS:
        raise ValueError(f"{file}: model_type: expected a family that Envoi runs, got {family!r}: {OTHERS[family]}")
    activation, limit = read_activation(file, family, config, layer)
    counts = [config[key] for key in COUNTS if type(config.get(key)) is int]
    latents = [(key, config[key]) for key in LATENT if config.get(key) is not None]
    return Config(
        file, family, counts[0] if counts else None, latents[0] if latents else None, activation, limit,
        _quantisation(file, given),
    )  # fmt: skip


def read_quantisation(folder: Path) -> Quantisation | None:
    """Read how config.json says that experts are quantised; None if they aren't. Raises ValueError as `read_config`."""
    file, _, given = _read(folder)
    return _quantisation(file, given)


def _read(folder: Path) -> tuple[Path, dict[str, Any], Any]:
    """Return the file, the configuration of the text model, and what it says of quantisation."""
    file = folder / "config.json"
    try:
        whole = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{file}: expected the checkpoint's configuration, got no such file") from None
    except ValueError as error:
        raise ValueError(f"{file}: expected JSON, got {error}") from None
    if not isinstance(whole, dict):
        raise ValueError(f"{file}: expected a configuration, got {type(whole).__name__}")
    parts = [whole[key] for key in ("text_config", "llm_config", "language_config") if isinstance(whole.get(key), dict)]
    config = {**whole, **(parts[0] if parts else {})}
    given = config.get("quantization_config") or config.get("compression_config") or whole.get("quantization_config")
    return file, config, given or _beside(folder / "hf_quant_config.json")


def _beside(file: Path) -> dict[str, Any] | None:
    """Read what ModelOpt says in a file of its own, which may be all that says it."""
    if not file.is_file():
        return None
    try:
        return {"quant_method": "modelopt", **json.loads(file.read_text(encoding="utf-8"))["quantization"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: expected JSON with a quantization, got {error!r}") from None


def _block(file: Path, key: str, sides: Any) -> tuple[int, int]:
    if not (isinstance(sides, list) and len(sides) == 2 and all(type(side) is int and side > 0 for side in sides)):
        raise ValueError(f"{file}: quantization_config.{key}: expected rows and columns of a block, got {sides!r}")
    return sides[0], sides[1]


def _quantisation(file: Path, given: Any) -> Quantisation | None:
    if not given:
        return None
    if not isinstance(given, dict):
        raise ValueError(f"{file}: quantization_config: expected an object with quant_method, got {given!r}")
    method = given.get("quant_method")
    if method == "fp8":
        block = given.get("weight_block_size")
        group = (ALL, ALL) if block is None else _block(file, "weight_block_size", block)
        groups = {torch.float8_e4m3fn: group, torch.int8: MX, torch.uint8: MX}
        # Without a block, "weight_scale" is what the first FP8 checkpoints call a matrix's factor.
        names = (*(("weight_scale",) if block is None else ()), "weight_scale_inv", "scale")
        return Quantisation(method, groups, factors=names)
    if method == "mxfp4":
        return Quantisation(method, {torch.uint8: MX})
    if method == "compressed-tensors":
        return _compressed_tensors(file, given)
    if method == "modelopt":
        return _modelopt(file, given)
    raise ValueError(
        f"{file}: quantization_config.quant_method: expected one of {', '.join(map(repr, METHODS))}, got {method!r}"
    )


def _modelopt(file: Path, given: dict[str, Any]) -> Quantisation:
    algorithm, columns = given.get("quant_algo"), given.get("group_size", NV[1])
    if algorithm == "FP8":
        return Quantisation("modelopt", {torch.float8_e4m3fn: (ALL, ALL)}, factors=("weight_scale",))
    if algorithm in NVFP4_ALGORITHMS and columns == NV[1]:
        return Quantisation("modelopt", {torch.uint8: NV}, factors=("weight_scale",), scale="weight_scale_2")
    known = " or ".join(map(repr, NVFP4_ALGORITHMS))
    raise ValueError(
        f"{file}: quantization_config.quant_algo: expected 'FP8', or {known} with groups of {NV[1]}, got {algorithm!r} "
        f"with groups of {columns}"
    )


def _compressed_tensors(file: Path, given: dict[str, Any]) -> Quantisation:
    """Read the scheme of the experts: the group of targets that mentions them, else the first."""
    groups = list((given.get("config_groups") or {}).values())
    ours = [group for group in groups if any("experts" in target for target in group.get("targets", ()))] or groups
    weights = (ours[0].get("weights") if ours else None) or {}
    bits, kind, strategy = (weights.get(key) for key in ("num_bits", "type", "strategy"))
    format = (ours[0].get("format") if ours else None) or given.get("format")
    if (bits, kind) == (8, "float") and strategy in ("channel", "tensor", "block"):
        block = _block(file, "config_groups.weights.block_structure", weights.get("block_structure") or [128, 128])
        group = {"channel": (1, ALL), "tensor": (ALL, ALL), "block": block}[strategy]
        return Quantisation("compressed-tensors", {torch.float8_e4m3fn: group}, factors=("weight_scale",))
    if (bits, kind, format) == (4, "float", "mxfp4-pack-quantized"):
        return Quantisation("compressed-tensors", {torch.uint8: MX}, "weight_packed", ("weight_scale",))
    if (bits, kind, format) == (4, "float", "nvfp4-pack-quantized"):
        return Quantisation(
            "compressed-tensors", {torch.uint8: NV}, "weight_packed", ("weight_scale",), "weight_global_scale", True
        )
    raise ValueError(
        f"{file}: quantization_config.config_groups: expected 8-bit float weights with a factor a channel, a tensor or "
        f"a block, 'mxfp4-pack-quantized' or 'nvfp4-pack-quantized', got {bits}-bit {kind} by {strategy} in {format!r}"
    )

"""Reading of config.json: how many experts a checkpoint has, how they are quantised; with keys.py and activation.py,
what they compute."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envoi.checkpoints.activation import INTERLEAVED, read_activation
from envoi.checkpoints.keys import LATENT
from envoi.checkpoints.quantisation import Quantisation, read_entries

COUNTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
OTHERS = {
    "llama4": "its tokens are multiplied by their weights before the experts, which Envoi does after them",
    "muse_spark": "each expert's output is normalised before it is weighted, which Envoi doesn't do",
}
# The experts' alone: intermediate_size is theirs in some families, and that of dense layers in others.
INTERMEDIATE = "moe_intermediate_size"
W13_IN_TURN = ("inkling", "inkling2")  # families with gate and up rows in turn in w13_weight


@dataclass(frozen=True)
class Config:
    """Experts of a layer: see the module. num_experts: None if config.json doesn't say. hidden, intermediate: the key
    that gives the experts' size, and the size; None if no key is known to be theirs."""

    file: Path
    family: str
    num_experts: int | None
    hidden: tuple[str, int] | None
    intermediate: tuple[str, int] | None
    activation: str
    swiglu_limit: float | None
    quantisation: Quantisation | None

    def gate_up_layout(self, name: str) -> str:
        """Return the order of rows in a tensor of gate and up, by its name. Raises ValueError if it isn't known."""
        last = name.rpartition(".")[2]
        if last == "w13_weight" and self.family not in W13_IN_TURN:
            raise ValueError(
                f"{self.file}: model_type: expected one of {', '.join(map(repr, W13_IN_TURN))}, whose order of rows in "
                f"{name} is known, got {self.family!r}"
            )
        return "interleaved" if last == "w13_weight" or self.family in INTERLEAVED else "concat"


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
    hidden, intermediate = _size(config, (*LATENT, "hidden_size")), _size(config, (INTERMEDIATE,))
    return Config(
        file, family, counts[0] if counts else None, hidden, intermediate, activation, limit, read_entries(file, given)
    )


def _size(config: dict[str, Any], keys: Iterable[str]) -> tuple[str, int] | None:
    return next(((key, config[key]) for key in keys if type(config.get(key)) is int), None)


def read_quantisation(folder: Path) -> Quantisation | None:
    """Read how config.json says that experts are quantised; None if they aren't. Raises ValueError as `read_config`."""
    file, _, given = _read(folder)
    return read_entries(file, given)


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

"""Reading of config.json: how many experts a checkpoint has, their activation, how they are quantised."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envoi.checkpoints.quantisation import Quantisation, read_entries
from envoi.epilogue.library import swiglu_oai_with
from envoi.moe.pack import SWIGLU_OAI_LIMIT

COUNTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
GATES = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "gelu_new": "geglu_tanh",
}
ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
FIXED = {"lfm2_moe": "silu"}  # families whose activation config.json doesn't name
INTERLEAVED = ("gpt_oss",)  # gate and up rows in turn, gate times sigmoid(1.702 * gate), up + 1
OTHERS = {"llama4": "its tokens are multiplied by their weights before the experts, which Envoi does after them"}


@dataclass(frozen=True)
class Config:
    """Experts of a checkpoint: see the module. num_experts: None if config.json doesn't say."""

    file: Path
    family: str
    num_experts: int | None
    activation: str
    swiglu_limit: float | None
    quantisation: Quantisation | None

    @property
    def gate_up_layout(self) -> str:
        """Order of rows where gate and up are in one tensor."""
        return "interleaved" if self.family in INTERLEAVED else "concat"


def read_config(folder: Path) -> Config:
    """Read config.json, of a model or of one that has the model as its text_config.

    Raises ValueError that names the file and the key for what Envoi can't run or doesn't know.
    """
    file, config, given = _read(folder)
    family = str(config.get("model_type", "")).removesuffix("_text")
    if family in OTHERS:
        raise ValueError(f"{file}: model_type: expected a family that Envoi runs, got {family!r}: {OTHERS[family]}")
    activation, limit = _activation(file, family, config)
    counts = [config[key] for key in COUNTS if type(config.get(key)) is int]
    return Config(file, family, counts[0] if counts else None, activation, limit, read_entries(file, given))


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


def _activation(file: Path, family: str, config: dict[str, Any]) -> tuple[str, float | None]:
    named = [config[key] for key in ACTIVATIONS if config.get(key) is not None]
    named = named or [FIXED[family]] if family in FIXED else named
    limit, alpha = _number(file, config, "swiglu_limit"), _number(file, config, "swiglu_alpha")
    if named and (not isinstance(named[0], str) or named[0] not in GATES):
        raise ValueError(f"{file}: {ACTIVATIONS[0]}: expected one of {', '.join(map(repr, GATES))}, got {named[0]!r}")
    if family in INTERLEAVED or alpha is not None:
        activation = "swiglu_oai" if alpha is None else swiglu_oai_with(alpha)
        return activation, SWIGLU_OAI_LIMIT if limit is None else limit
    if not named:
        raise ValueError(f"{file}: {ACTIVATIONS[0]}: expected the experts' activation, got none of {ACTIVATIONS}")
    return GATES[named[0]], limit


def _number(file: Path, config: dict[str, Any], key: str) -> float | None:
    value = config.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ValueError(f"{file}: {key}: expected a number, got {value!r}")
    return None if value is None else float(value)

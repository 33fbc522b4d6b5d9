"""Activation of a layer's experts, read from config.json: by name, or as the text of a function.

Formulas are those of the families' published code: min(silu(gate), limit) * clip(up, -limit, limit) of Step-3.5 and
Ling-3.0, which clamp after SiLU; the soft-caps of Inkling-2; SiTU of Kimi-K3, which is the same formula.
"""

import math
from pathlib import Path
from typing import Any

from envoi.checkpoints.keys import (
    ACTIVATIONS,
    ALPHA,
    BETA,
    LIMIT,
    LIMITS_AFTER,
    SITU,
    SOFTCAPS,
    check_keys,
)
from envoi.epilogues.library import softcapped_swiglu, swiglu_clamped_after, swiglu_oai_with
from envoi.ops.moe.packing import SWIGLU_OAI_LIMIT

GATES = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "gelu_new": "geglu_tanh",
}
UNGATED = {"relu2": "relu2"}  # of up alone: Nemotron-3
OAI, SITU_NAME = "swigluoai", "situ"
# Families whose routed experts have SiLU whatever config.json names, if it names any.
ALWAYS_SILU = ("aria", "glm5_next", "hy_v4", "lfm2_moe", "longcat_flash")
OAI_FAMILIES = ("gpt_oss", "openai_privacy_filter")  # gate times sigmoid(1.702 * gate), up + 1, clamped at 7
INTERLEAVED = ("gpt_oss",)  # gate and up rows in turn where they are in one tensor
# Families whose experts always have these numbers, so that a config.json without them doesn't say what they compute.
NEEDED = {
    "deepseek_v4": (LIMIT,), "glm5_next": (LIMIT,), "hy_v4": (LIMIT,), "inkling2": SOFTCAPS,
    "minimax_m3_vl": (ALPHA, LIMIT),
}  # fmt: skip


def read_activation(file: Path, family: str, config: dict[str, Any], layer: int) -> tuple[str, float | None]:
    """Return the activation of a layer's experts, by name or as text, and the limit that clamps gate and up before it.

    file: what errors name. Raises ValueError that names the key for what Envoi can't run or doesn't know.
    """
    check_keys(file, config)
    for key in NEEDED.get(family, ()):
        if config.get(key) is None:
            raise ValueError(f"{file}: {key}: expected a number, as the experts of {family!r} have one, got none")
    key, name = _named(file, config)
    if family in ALWAYS_SILU and GATES.get(name or "silu") != "swiglu":
        raise ValueError(f"{file}: {key}: expected 'silu', as all experts of {family!r} have it, got {name!r}")
    name = "silu" if family in ALWAYS_SILU else name
    alpha, caps, after = _number(file, config, ALPHA), _softcaps(file, config), _limit_after(file, config, layer)
    oai = alpha is not None or family in OAI_FAMILIES or name == OAI
    if name is None and not oai:
        raise ValueError(f"{file}: {ACTIVATIONS[0]}: expected the experts' activation, got none of {ACTIVATIONS}")
    _check_together(file, config, name, {ALPHA: oai, SOFTCAPS[0]: bool(caps), after[0]: after[1] is not None})
    limit = _number(file, config, LIMIT)
    if limit is not None and (limit < 0 or (oai and limit == 0)):
        raise ValueError(f"{file}: {LIMIT}: expected a positive number, got {config[LIMIT]!r}")
    if oai and name in (None, OAI, "silu", "swish"):
        return "swiglu_oai" if alpha is None else swiglu_oai_with(alpha), SWIGLU_OAI_LIMIT if limit is None else limit
    if name in UNGATED and not (oai or caps or after[1] is not None or limit):
        return UNGATED[name], None
    if name == SITU_NAME:
        return softcapped_swiglu(*_situ(file, config)), None
    if name not in GATES or (GATES[name] != "swiglu" and (oai or caps or after[1] is not None)):
        known = (
            [*GATES, *UNGATED, OAI, SITU_NAME]
            if name not in GATES
            else [gate for gate in GATES if GATES[gate] == "swiglu"]
        )
        raise ValueError(f"{file}: {key}: expected one of {', '.join(map(repr, known))}, got {name!r}")
    if caps:
        return softcapped_swiglu(*caps), None
    if after[1] is not None:
        return swiglu_clamped_after(after[1]), None
    return GATES[name], limit or None  # 0 is none, in DeepSeek-V4's code


def _named(file: Path, config: dict[str, Any]) -> tuple[str, Any]:
    """Return the key that names the activation, and the name; None if no key does."""
    named = {key: config[key] for key in ACTIVATIONS if config.get(key) is not None}
    for key, name in named.items():
        if not isinstance(name, str):
            raise ValueError(f"{file}: {key}: expected one of {', '.join(map(repr, GATES))}, got {name!r}")
    if len({GATES.get(name, name) for name in named.values()}) > 1:
        said = " and ".join(f"{key} {name!r}" for key, name in named.items())
        raise ValueError(f"{file}: {next(iter(named))}: expected one activation, got {said}")
    return next(iter(named.items()), (ACTIVATIONS[0], None))


def _check_together(file: Path, config: dict[str, Any], name: str | None, forms: dict[str, bool]) -> None:
    """Raise ValueError for keys of several formulas, or of one that isn't this model's."""
    found = [key for key, there in forms.items() if there]
    found += [ACTIVATIONS[0]] * (name == SITU_NAME)
    found += [LIMIT] * (bool(config.get(LIMIT)) and found != [ALPHA])
    if len(found) > 1:
        raise ValueError(f"{file}: {found[0]}: expected no other formula of the activation, got {found[1]} too")
    if config.get(BETA) is not None and (ALPHA not in found or _number(file, config, BETA) != 1):
        raise ValueError(f"{file}: {BETA}: expected 1, what is added to up beside {ALPHA}, got {config[BETA]!r}")
    for key in SITU:
        if name != SITU_NAME and config.get(key) is not None:
            raise ValueError(f"{file}: {key}: expected none where the activation is {name!r}, got {config[key]!r}")


def _softcaps(file: Path, config: dict[str, Any]) -> tuple[float, float] | None:
    caps = [_number(file, config, key) for key in SOFTCAPS]
    if caps == [None, None]:
        return None
    return _positive(file, config, SOFTCAPS[0]), _positive(file, config, SOFTCAPS[1])


def _situ(file: Path, config: dict[str, Any]) -> tuple[float, float | None]:
    """Return the caps of SiTU; its cap of up may be null, but must be there."""
    if SITU[1] not in config:
        raise ValueError(f"{file}: {SITU[1]}: expected a number or null beside the activation 'situ', got none")
    return _positive(file, config, SITU[0]), None if config[SITU[1]] is None else _positive(file, config, SITU[1])


def _limit_after(file: Path, config: dict[str, Any], layer: int) -> tuple[str, float | None]:
    """Return the key of a layer's limit after SiLU, and the limit; None if it has none."""
    found = (LIMITS_AFTER[0], None)
    for key in LIMITS_AFTER:
        numbers = config.get(key)
        if not numbers and not isinstance(numbers, (int, float, str)):
            continue  # null or an empty list
        if not isinstance(numbers, list) or layer >= len(numbers):
            got = f"{len(numbers)} of them" if isinstance(numbers, list) else repr(numbers)
            raise ValueError(f"{file}: {key}: expected a list with a number for layer {layer}, got {got}")
        if numbers[layer] not in (None, 0):
            if found[1] is not None:
                raise ValueError(f"{file}: {key}: expected no other limits, got {found[0]} too")
            found = key, _positive(file, {key: numbers[layer]}, key)
    return found


def _positive(file: Path, config: dict[str, Any], key: str) -> float:
    number = _number(file, config, key)
    if number is None or number <= 0:
        raise ValueError(f"{file}: {key}: expected a positive number, got {config.get(key)!r}")
    return number


def _number(file: Path, config: dict[str, Any], key: str) -> float | None:
    value = config.get(key)
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if value is not None and not number:
        raise ValueError(f"{file}: {key}: expected a number, got {value!r}")
    return None if value is None else float(value)

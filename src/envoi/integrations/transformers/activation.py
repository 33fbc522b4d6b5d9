"""Recognition of the activation that an experts module of transformers computes, by trying it on numbers."""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch

from envoi.epilogues.activation import GATED, written
from envoi.epilogues.library import activated, softcapped_swiglu, swiglu_clamped_after, swiglu_oai_with
from envoi.epilogues.vocabulary import gelu, hardswish, relu, sigmoid, softplus, tanh
from envoi.types import UNGATED

CURVES: dict[str, Callable] = {
    "relu": relu, "relu2": lambda x: relu(x) * relu(x), "quick_gelu": lambda x: x * sigmoid(1.702 * x),
    "sigmoid": sigmoid, "tanh": tanh, "hardswish": hardswish, "softplus": softplus,
    "gelu": gelu, "gelu_tanh": lambda x: gelu(x, "tanh"),
}  # fmt: skip


@torch.no_grad()
def recognise_activation(module: Any) -> tuple[str, float | None]:
    """Find the activation that a module computes, by name or as text, and its clamp, by trying it on numbers.

    Any clamp is found, before SiLU or after it: it is read off the output for a huge `up`. The slope of gpt-oss's
    activation, and caps by tanh, are read from the module. Raises ValueError if it computes something else.
    """
    if not getattr(module, "has_gate", True):
        return _recognise_ungated(module), None
    apply_gate: Callable[[torch.Tensor], torch.Tensor] = module._apply_gate

    def theirs(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if module.is_concatenated:
            return apply_gate(torch.cat((gate, up), dim=1))
        return apply_gate(torch.stack((gate, up), dim=2).flatten(1))

    # A gate below every clamp, with ups of 0, 1 and above every clamp: up to its clamp the activation is linear in up.
    up = torch.tensor([[0.0, 1.0, 1e30]], dtype=torch.float64, device="cpu")
    gate = torch.full_like(up, 2.0**-10)
    huge = float(theirs(gate, up)[0, 2])
    for activation in (*GATED, *_of_attributes(module), *_of_curves()):
        zero, one, _ = activated(activation, None, gate, up).flatten().tolist()
        limit = _rounded((huge - zero) / (one - zero), module) if one != zero else None
        tried: dict[tuple[str, float | None], None] = {(activation, limit): None, (activation, None): None}
        if activation == "swiglu" and limit is not None:
            tried[swiglu_clamped_after(limit), None] = None
        for name, clamp in tried:  # a tanh of up looks like a clamp, far away
            probe = _gates_and_ups(limit or 12.0)
            if torch.allclose(activated(name, clamp, *probe), theirs(*probe).double(), rtol=1e-4, atol=1e-5):
                return name, clamp
    raise ValueError(
        f"{type(module).__name__}: expected the activation swiglu (silu(gate) * up), swiglu_oai, or up times one of "
        f"{', '.join(CURVES)} of gate, with or without a clamp, of columns in the order that is_concatenated="
        f"{module.is_concatenated} says; got another"
    )


def _of_attributes(module: Any) -> Iterable[str]:
    """Yield the activations with numbers that the module itself has: a slope, or caps."""
    for name in ("alpha", "swiglu_alpha"):
        alpha = getattr(module, name, None)
        if isinstance(alpha, int | float):
            yield swiglu_oai_with(float(alpha))
    for owner in (module, getattr(module, "act_fn", None)):
        caps = [getattr(owner, name, None) for name in ("gate_softcap", "up_softcap")]
        caps = [getattr(cap, "softcap", cap) for cap in caps]
        if all(isinstance(cap, int | float) for cap in caps):
            yield softcapped_swiglu(*map(float, caps))  # pyright: ignore[reportArgumentType]


@cache
def _of_curves() -> tuple[str, ...]:
    return tuple(_named(f"{name}_gate", lambda gate, up, f=f: f(gate) * up) for name, f in CURVES.items())


@cache
def _curves() -> tuple[str, ...]:
    return tuple(_named(name, lambda up, f=f: f(up)) for name, f in CURVES.items())


def _named(name: str, function: Callable) -> str:
    function.__name__ = name
    return written(function)


def _recognise_ungated(module: Any) -> str:
    side = torch.linspace(-12.0, 12.0, 97, dtype=torch.float64, device="cpu").unsqueeze(0)
    for activation in (*UNGATED, *_curves()):
        if torch.allclose(activated(activation, None, side), module.act_fn(side).double(), rtol=1e-4, atol=1e-5):
            return activation
    raise ValueError(
        f"{type(module).__name__}: expected the activation silu or one of {', '.join(CURVES)} of a plain up_proj, got "
        "another"
    )


def _rounded(limit: float, module: Any) -> float | None:
    """Return the clamp measured as `limit`: the module's own number if that is near, None if there is no clamp."""
    if not 0 < limit < 1e29:
        return None
    for own in (getattr(module, name, None) for name in ("limit", "swiglu_limit")):
        if isinstance(own, (int, float)) and abs(own - limit) <= 1e-4 * limit:
            return float(own)
    return float(f"{limit:.5g}")


def _gates_and_ups(limit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Make float64 gates and ups [n, n], every gate with every up, from far below a clamp to far above it."""
    side = torch.linspace(0.0, 4.0, 41, dtype=torch.float64, device="cpu") * limit
    side = torch.cat((side, torch.linspace(0.01, 12.0, 40, dtype=torch.float64, device="cpu")))
    side = torch.cat((side, -side))
    gate, up = torch.meshgrid(side, side, indexing="ij")
    return gate, up

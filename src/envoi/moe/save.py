"""Packed experts as named tensors, and as files of safetensors."""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from envoi.check import expect_tensor
from envoi.epilogue.activation import expect_activation
from envoi.quant.formats import Format, Scheme, format_named
from envoi.types import ExpertWeights, Matrix, QuantTensor

VERSION = 1
META = "envoi"  # name of the description, among the tensors and in a file's header
MATRICES = ("gate_up", "down")


def state_dict(experts: ExpertWeights, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return packed experts as tensors by name, for a module's state dict: `from_state_dict` inverts it.

    Tensors are shared: gate_up and down, or their .values and .sf; gate_up_bias and down_bias if there are any; and
    "envoi", uint8 [n], the rest as JSON. prefix: put before each name.
    """
    tensors, meta = _split(experts)
    tensors[META] = torch.frombuffer(bytearray(json.dumps(meta).encode()), dtype=torch.uint8)
    return {prefix + name: x for name, x in tensors.items()}


def from_state_dict(state: Mapping[str, torch.Tensor], prefix: str = "") -> ExpertWeights:
    """Return the experts that `state_dict` wrote under a prefix, sharing the tensors; other names are ignored.

    Raises ValueError that names a tensor which is missing or has another dtype or shape than was described.
    """
    description = state.get(prefix + META)
    if description is None:
        raise ValueError(f"state: expected a tensor {prefix + META!r} of envoi.experts.state_dict, got none")
    meta = json.loads(bytes(description.cpu().tolist()))
    return _join({name[len(prefix) :]: x for name, x in state.items() if name.startswith(prefix)}, meta, "state")


def save(experts: ExpertWeights, path: str | Path) -> None:
    """Write packed experts to a file of safetensors, to be read by `load` and by anything else that reads those."""
    from safetensors.torch import save_file

    tensors, meta = _split(experts)
    seen: set[int] = set()
    for name, x in tensors.items():  # safetensors refuses tensors that share memory
        start = x.untyped_storage().data_ptr()
        tensors[name] = x.clone() if start in seen else x.contiguous()
        seen.add(start)
    save_file(tensors, path, {"format": "pt", META: json.dumps(meta)})


def load(path: str | Path, device: torch.device | str = "cpu") -> ExpertWeights:
    """Read packed experts that `save` wrote, onto a device and in the order of its kernels.

    Raises ValueError for a file that `save` didn't write or that is incomplete.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            description = (file.metadata() or {}).get(META)
            if description is None:
                raise ValueError(f"{path}: expected a file that envoi.experts.save wrote, got other tensors")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path}: expected a whole file of safetensors, got one that can't be read: {error}") from None
    return ExpertWeights.arrange(_join(tensors, json.loads(description), str(path)))


def _split(experts: ExpertWeights) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors by name, and the other fields as what JSON can hold."""
    tensors: dict[str, torch.Tensor] = {}
    plain: dict[str, Any] = {}

    def visit(x: Any, prefix: str) -> None:
        for field in fields(x):
            value, name = getattr(x, field.name), prefix + field.name
            if isinstance(value, QuantTensor):
                visit(value, f"{name}.")
            elif isinstance(value, torch.Tensor):
                tensors[name] = value
            elif value is not None:
                plain[name] = list(value) if isinstance(value, tuple) else value

    visit(experts, "")
    return tensors, {"version": VERSION, "fields": plain}


def _join(tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any], source: str) -> ExpertWeights:
    if meta.get("version") != VERSION:
        raise ValueError(f"{source}: expected experts written as version {VERSION}, got {meta.get('version')!r}")
    everything: dict[str, Any] = {**meta["fields"], **{name: x for name, x in tensors.items() if name != META}}
    known = {field.name for field in fields(ExpertWeights)}
    given = {name: value for name, value in everything.items() if name in known}
    for name in MATRICES:
        own = {key[len(name) + 1 :]: value for key, value in everything.items() if key.startswith(f"{name}.")}
        if own:
            missing = [f"{name}.{part}" for part in ("values", "sf") if part not in own]
            if missing:
                raise ValueError(f"{source}: expected a tensor {missing[0]}, got none")
            given[name] = QuantTensor(**{**own, "group": tuple(own["group"])})
        elif name not in given:
            raise ValueError(f"{source}: expected a tensor {name}, got none")
    expect_activation(given.get("activation", "swiglu"), f"{source}: activation")
    experts = ExpertWeights(**given)
    _check(experts, format_named(experts.format, f"{source}: format"), source)
    return experts


def _check(experts: ExpertWeights, format: Format, source: str) -> None:
    """Raise ValueError unless all tensors have the dtypes and shapes that go with gate_up and the format."""
    num_experts, rows, hidden = experts.gate_up.shape
    shapes = {"gate_up": (num_experts, rows, hidden), "down": (num_experts, hidden, experts.intermediate)}
    for name, shape in shapes.items():
        _check_matrix(f"{source}: {name}", getattr(experts, name), shape, format.weights)
    for name, size in (("gate_up_bias", rows), ("down_bias", hidden)):
        bias = getattr(experts, name)
        if bias is not None:
            expect_tensor(f"{source}: {name}", bias, torch.float32, (num_experts, size))


def _check_matrix(name: str, weight: Matrix, shape: tuple[int, int, int], scheme: Scheme | None) -> None:
    if scheme is None or isinstance(weight, torch.Tensor):
        expect_tensor(name, weight, torch.bfloat16 if scheme is None else scheme.values, shape)
        return
    columns = shape[2] // 2 if scheme.values == torch.uint8 else shape[2]
    group = scheme.group_for(shape)
    factors = (shape[0], *(-(-size // side) for size, side in zip(shape[1:], group, strict=True)))
    expect_tensor(f"{name}.values", weight.values, scheme.values, (*shape[:2], columns))
    expect_tensor(f"{name}.sf", weight.sf, scheme.sf, factors)
    if weight.group != group:
        raise ValueError(f"{name}.group: expected {group}, got {weight.group}")

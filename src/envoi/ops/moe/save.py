"""Packed experts as named tensors, and as files of safetensors."""

import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from envoi.check import describe, expect_choice, expect_device, expect_int, expect_number, expect_tensor
from envoi.epilogues.activation import expect_activation
from envoi.quant import fp8_fragments
from envoi.quant.formats import INT4, Format, Scheme, format_named
from envoi.quant.int4 import FACTORS
from envoi.quant.pack import with_checked_scales
from envoi.types import ExpertWeights, Matrix, QuantTensor, expect_experts

VERSION = 1
META = "envoi"  # name of the description, among the tensors and in a file's header
MATRICES = ("gate_up", "down")
BIASES = ("gate_up_bias", "down_bias")
ORDERS = ("rows", "fragments", fp8_fragments.ORDER)
PLAIN = (
    "format", "activation", "swiglu_limit", "gate_up_layout", "group", "order", "scales_at_most_2", "padding",
    "num_shared",
)  # fmt: skip


def state_dict(experts: ExpertWeights, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return packed experts as tensors by name, for a module's state dict: `from_state_dict` inverts it.

    Tensors are shared: gate_up and down, or their .values, .sf and .scale; gate_up_bias and down_bias if any; and
    "envoi", uint8 [n], the rest as JSON. prefix: put before each name.
    """
    tensors, meta = _split(experts)
    tensors[META] = torch.frombuffer(bytearray(json.dumps(meta).encode()), dtype=torch.uint8)
    return {prefix + name: x for name, x in tensors.items()}


def from_state_dict(state: Mapping[str, torch.Tensor], prefix: str = "") -> ExpertWeights:
    """Return the experts that `state_dict` wrote under a prefix, sharing the tensors; other names are ignored.

    Waits for the tensors' device, to see how large MX factors are. Raises ValueError that names a tensor or field which
    is missing or isn't as it was described.
    """
    if not isinstance(state, Mapping):
        raise ValueError(
            f"state: expected a dict of tensors, as envoi.experts.state_dict returns, got {describe(state)}"
        )
    description = state.get(prefix + META)
    if description is None:
        raise ValueError(f"state: expected a tensor {prefix + META!r} of envoi.experts.state_dict, got none")
    if description.is_meta:
        raise ValueError(f"state: expected tensors with memory, got {describe(description)} as {prefix + META!r}")
    meta = bytes(description.cpu().tolist())
    return _join({name[len(prefix) :]: x for name, x in state.items() if name.startswith(prefix)}, meta, "state")


def save(experts: ExpertWeights, path: str | Path) -> None:
    """Write packed experts to a file of safetensors, to be read by `load` and by anything else that reads those.

    Raises ValueError for other experts, and for a path whose folder isn't there or that is a folder.
    """
    from safetensors.torch import save_file

    if not isinstance(path, str | os.PathLike) or Path(path).is_dir() or not Path(path).parent.is_dir():
        raise ValueError(f"path: expected a file in a folder that exists, got {path}")
    tensors, meta = _split(experts)
    if experts.device.type == "meta":
        raise ValueError("experts: expected weights with memory, got some on meta")
    seen: set[int] = set()
    for name, x in tensors.items():  # safetensors refuses tensors that share memory
        start = x.untyped_storage().data_ptr()
        tensors[name] = x.clone() if start in seen else x.contiguous()
        seen.add(start)
    save_file(tensors, path, {"format": "pt", META: json.dumps(meta)})


def load(path: str | Path, device: torch.device | str = "cpu") -> ExpertWeights:
    """Read packed experts that `save` wrote, onto a device and in the order of its kernels.

    Raises ValueError for a path that isn't there, and for a file that `save` didn't write or that is incomplete.
    """
    from safetensors import SafetensorError, safe_open

    device = expect_device("device", device)  # else safetensors calls a name that it doesn't know a broken file
    if not (isinstance(path, str | Path) and Path(path).exists()):
        raise ValueError(f"path: expected a file that envoi.experts.save wrote, on this machine, got {path!r}")
    if Path(path).is_dir():
        raise ValueError(f"{path}: expected a file that envoi.experts.save wrote, got a folder")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            description = (file.metadata() or {}).get(META)
            if description is None:
                raise ValueError(f"{path}: expected a file that envoi.experts.save wrote, got other tensors")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path}: expected a whole file of safetensors, got one that can't be read: {error}") from None
    return ExpertWeights.arrange(_join(tensors, description, str(path)))


def _split(experts: ExpertWeights) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors by name, and their names and the other fields as what JSON can hold."""
    expect_experts(experts)
    tensors: dict[str, torch.Tensor] = {}
    plain: dict[str, Any] = {}

    def visit(x: Any, prefix: str) -> None:
        for field in fields(x):
            value, name = getattr(x, field.name), prefix + field.name
            if isinstance(value, QuantTensor):
                visit(value, f"{name}.")
            elif isinstance(value, torch.Tensor):
                tensors[name] = value
            elif field.name in ("padding", "num_shared") and not value:
                continue  # so that earlier releases read it too
            elif value is not None or field.name == "swiglu_limit":
                plain[name] = list(value) if isinstance(value, tuple) else value

    visit(experts, "")
    return tensors, {"version": VERSION, "fields": plain, "tensors": list(tensors)}


def _join(tensors: Mapping[str, torch.Tensor], description: str | bytes, source: str) -> ExpertWeights:
    """Return the experts of a description and its tensors. Raises ValueError that begins with the source."""
    try:
        return _joined(tensors, _expect_description(description))
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def _expect_description(description: str | bytes) -> Mapping[str, Any]:
    try:
        meta = json.loads(description)
    except ValueError as error:
        raise ValueError(f"{META}: expected a description in JSON, got {error}") from None
    version = meta.get("version") if isinstance(meta, dict) else None
    if version != VERSION:
        raise ValueError(f"expected experts written as version {VERSION}, got {version!r}")
    if not isinstance(meta.get("fields"), dict):
        raise ValueError(f"{META}: expected a description with fields, got {meta.get('fields')!r}")
    names = meta.get("tensors", [])
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError(f"{META}: expected the names of its tensors, got {names!r}")
    return meta


def _joined(tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any]) -> ExpertWeights:
    plain = meta["fields"]
    for name in meta.get("tensors", MATRICES):  # files of earlier releases don't list them
        if not any(key == name or key.startswith(f"{name}.") for key in tensors):
            raise ValueError(f"expected a tensor {name}, got none")
    for name in plain:
        if name.split(".")[-1] not in PLAIN:
            raise ValueError(f"{META}: expected fields that this release knows, got {name!r}")
    for name in ("activation", "gate_up_layout", "swiglu_limit"):
        if name not in plain and "tensors" in meta:
            raise ValueError(f"{META}: expected a field {name}, got none")
    given: dict[str, Any] = {}
    for name in MATRICES:
        given[name] = _matrix(name, tensors, plain)
    for name in BIASES:
        given[name] = tensors.get(name)
    if len({given[name] is None for name in BIASES}) == 2:
        lost = next(name for name in BIASES if given[name] is None)
        raise ValueError(f"expected a tensor {lost} beside the other bias, got none")
    given["format"] = _plain("format", plain)
    format = format_named(given["format"])
    given["activation"] = expect_activation(_plain("activation", plain, "swiglu"))
    given["gate_up_layout"] = _plain("gate_up_layout", plain, "interleaved")
    given["swiglu_limit"] = plain.get("swiglu_limit")
    if given["swiglu_limit"] is not None and not expect_number("swiglu_limit", given["swiglu_limit"]) > 0:
        raise ValueError(f"swiglu_limit: expected None or a positive number, got {given['swiglu_limit']!r}")
    given["padding"] = plain.get("padding", 0)
    given["num_shared"], given["shared_gate"] = plain.get("num_shared", 0), tensors.get("shared_gate")
    experts = ExpertWeights(**given)
    _check(experts, format)
    return experts


def _plain(name: str, plain: Mapping[str, Any], default: str | None = None) -> str:
    value = plain.get(name, default)
    if not isinstance(value, str):
        raise ValueError(f"{name}: expected text, got {value!r}")
    return value


def _matrix(name: str, tensors: Mapping[str, torch.Tensor], plain: Mapping[str, Any]) -> Matrix:
    if name in tensors:
        return tensors[name]
    parts = {key[len(name) + 1 :]: x for key, x in tensors.items() if key.startswith(f"{name}.")}
    for part in ("values", "sf"):
        if part not in parts:
            raise ValueError(f"expected a tensor {f'{name}.{part}' if parts else name}, got none")
    group, order = plain.get(f"{name}.group"), _plain(f"{name}.order", plain, "rows")
    if not (isinstance(group, list) and len(group) == 2 and all(type(side) is int for side in group)):
        raise ValueError(f"{name}.group: expected two numbers, got {group!r}")
    expect_choice(f"{name}.order", order, ORDERS)
    scale, zeros = parts.get("scale"), parts.get("zeros")
    # A promise that isn't kept would make wrong numbers, so it is looked up again.
    sides = group[0], group[1]
    return with_checked_scales(QuantTensor(parts["values"], parts["sf"], sides, scale, order=order, zeros=zeros))


def _check(experts: ExpertWeights, format: Format) -> None:
    """Raise ValueError unless all tensors have the dtypes and shapes that go with gate_up and the format."""
    if len(experts.gate_up.shape) != 3:
        raise ValueError(f"gate_up: expected [num_experts, rows, hidden], got {list(experts.gate_up.shape)}")
    num_experts, rows, hidden = experts.gate_up.shape
    expect_int("padding", experts.padding, 0, max(0, experts.intermediate - 1))
    expect_int("num_shared", experts.num_shared, 0, num_experts)
    if experts.shared_gate is not None:
        expect_tensor("shared_gate", experts.shared_gate, torch.float32, (hidden,))
    shapes = {"gate_up": (num_experts, rows, hidden), "down": (num_experts, hidden, experts.intermediate)}
    for name, shape in shapes.items():
        _check_matrix(name, getattr(experts, name), shape, format.weights)
    for name, size in zip(BIASES, (rows, hidden), strict=True):
        bias = getattr(experts, name)
        if bias is not None:
            expect_tensor(name, bias, torch.float32, (num_experts, size))


def _check_matrix(name: str, weight: Matrix, shape: tuple[int, int, int], scheme: Scheme | None) -> None:
    if scheme is None or isinstance(weight, torch.Tensor):
        expect_tensor(name, weight, torch.bfloat16 if scheme is None else scheme.values, shape)
        return
    columns = shape[2] // 2 if scheme.values == torch.uint8 else shape[2]
    group = weight.group if scheme == INT4 else scheme.group_for(shape)
    if min(group) < 1:
        raise ValueError(f"{name}.group: expected at least 1 row and 1 column, got {group}")
    factors = (shape[0], *(-(-size // side) for size, side in zip(shape[1:], group, strict=True)))
    expect_tensor(f"{name}.values", weight.values, scheme.values, (*shape[:2], columns))
    expect_tensor(f"{name}.sf", weight.sf, FACTORS if scheme == INT4 else scheme.sf, factors)
    if weight.zeros is not None and scheme != INT4:
        raise ValueError(f"expected no tensor {name}.zeros in {scheme.name}, got {describe(weight.zeros)}")
    if weight.zeros is not None:
        expect_tensor(f"{name}.zeros", weight.zeros, torch.uint8, factors)
    if scheme.sf == torch.float8_e4m3fn or weight.order == fp8_fragments.ORDER:
        if weight.scale is None:
            raise ValueError(f"expected a tensor {name}.scale, got none")
        expect_tensor(f"{name}.scale", weight.scale, torch.float32, shape[:2])
    elif weight.scale is not None:
        raise ValueError(f"expected no tensor {name}.scale in {scheme.name}, got {describe(weight.scale)}")
    if weight.group != group:
        raise ValueError(f"{name}.group: expected {group}, got {weight.group}")

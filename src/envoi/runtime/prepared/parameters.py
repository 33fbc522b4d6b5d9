"""Parameters of a compiled Triton or Gluon kernel, from a launch's arguments.

The order, in Triton 3.6 to 3.9: the arguments that aren't constexpr (None and an integer 1 are constexpr too), tuples
taken apart; a TMA descriptor is its map of 128 bytes, then its shape in int32, then its strides in int64; at the end
the addresses of two scratch memories. `check_sizes` compares that with what the driver knows of the kernel, so that a
Triton with another order is noticed.
"""

import math
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from envoi.runtime.prepared.driver import MAP_BYTES
from envoi.runtime.program import RefusedError

FORMATS = {
    "i1": "b", "u1": "B", "i8": "b", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I", "i64": "q", "u64": "Q",
    "fp32": "f", "fp64": "d",
}  # fmt: skip
ADDRESS_BYTES = 8


class Parameter(NamedTuple):
    """Bytes of a parameter; if they begin with the address of a tensor, that tensor.

    A map is followed by the shape and the strides of its matrix, which are parameters of their own.
    """

    value: bytes
    tensor: torch.Tensor | None = None

    @property
    def is_map(self) -> bool:
        """Return True for a TMA descriptor's map."""
        return len(self.value) == MAP_BYTES


def parameters_of(compiled: Any, arguments: tuple, driver: Any) -> list[Parameter]:
    """Return the parameters of a compiled kernel for these arguments. RefusedError for what isn't known here."""
    forms = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())

    def encode(descriptor: Any) -> bytes:
        form = next(forms, None)
        if form is None:
            raise RefusedError("a descriptor that the kernel takes apart")
        return driver.tensor_map(descriptor, form)

    kinds = tuple(compiled.src.signature.values())
    return [*_flatten(kinds, arguments, encode), *[Parameter(bytes(ADDRESS_BYTES))] * 2]


def _flatten(kinds: tuple, values: tuple, encode: Callable[[Any], bytes]) -> Iterator[Parameter]:
    for kind, value in zip(kinds, values, strict=True):
        if isinstance(kind, tuple):
            yield from _flatten(kind, value, encode)
        elif kind.startswith("tensordesc"):
            yield Parameter(encode(value), value.base)
            yield from (Parameter(struct.pack("i", side)) for side in value.shape)
            yield from (Parameter(struct.pack("q", stride)) for stride in value.strides)
        elif kind[0] == "*":
            yield _pointer(value)
        elif kind != "constexpr":
            yield Parameter(_number(kind, value))


def _pointer(value: Any) -> Parameter:
    if value is None:
        return Parameter(bytes(ADDRESS_BYTES))
    if not isinstance(value, torch.Tensor):
        raise RefusedError(f"an address without a tensor, given as {type(value).__name__}")
    return Parameter(struct.pack("Q", value.data_ptr()), value)


def _number(kind: str, value: Any) -> bytes:
    if kind not in FORMATS:
        raise RefusedError(f"a number of type {kind}")
    if kind == "fp32" and math.isfinite(value) and abs(value) > torch.finfo(torch.float32).max:
        raise RefusedError(f"{value} as float32")
    return struct.pack(FORMATS[kind], value)


def check_launch(compiled: Any) -> None:
    """Raise RefusedError for a kernel whose launch needs more than its parameters."""
    meta = compiled.metadata
    if meta.global_scratch_size or meta.profile_scratch_size:
        raise RefusedError("scratch memory that Triton allocates")
    if meta.num_ctas != 1:
        raise RefusedError("clusters of CTAs")
    if compiled.function is None:
        raise RefusedError("a kernel that isn't loaded")


def check_sizes(compiled: Any, parameters: list[Parameter], driver: Any) -> None:
    """Raise RefusedError unless the driver knows the kernel's parameters to have these sizes."""
    known, given = driver.parameter_sizes(compiled), [len(parameter.value) for parameter in parameters]
    if known != given:
        raise RefusedError(f"parameters of {given} bytes, where the driver knows of {known}")


def check_map(parameter: Parameter, driver: Any) -> None:
    """Raise RefusedError unless the first 8 bytes of a map are its address and nothing else depends on it."""
    other = 0x7F00_1234_5680
    if driver.moved_map(parameter.value, other) != struct.pack("Q", other) + parameter.value[ADDRESS_BYTES:]:
        raise RefusedError("a tensor map whose address stands elsewhere")

"""Stand-ins for the CUDA driver: what a launch hands over is read back from the bytes that its pointers lead to.

`InterpretingDriver` then runs the kernel in Triton's interpreter, on the addresses that it read: a replayed call
computes real results without a GPU, and a wrong address, size or place shows in them.
"""

import ctypes
import struct
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.interpreter import GridExecutor
from triton.runtime.jit import JITFunction

from envoi.runtime import launch, shortcuts, triton_compat, workspace
from envoi.runtime.devices import Target
from envoi.runtime.prepared import calls
from envoi.runtime.prepared import driver as driver_module
from envoi.runtime.prepared.driver import INVALID_CONTEXT, LaunchConfig
from envoi.runtime.prepared.replay import FORMATS
from tests.helpers import spoiled

POINTED = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "u8": torch.uint8, "i8": torch.int8,
    "i16": torch.int16, "i32": torch.int32, "i64": torch.int64, "fp8e4nv": torch.float8_e4m3fn,
}  # fmt: skip


def install(monkeypatch: Any, driver: Any) -> None:
    """Switch prepared calls on, with none known yet, and let the driver take their launches and those as always."""
    monkeypatch.setattr(shortcuts, "ENABLED", True)
    monkeypatch.setattr(shortcuts, "PREPARED", True)
    monkeypatch.setattr(driver_module, "active", lambda: driver)
    monkeypatch.setattr(launch, "run", driver.launch_as_always)
    monkeypatch.setattr(launch, "load", driver.load)
    monkeypatch.setattr(calls, "_calls", calls.Calls())
    monkeypatch.setattr(workspace, "_scratch", {})
    monkeypatch.setattr(workspace.Scratch, "take", spoiled.take)


@dataclass
class Pointer:
    """Address that a kernel in the interpreter takes for a tensor of this dtype."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        """Return the address."""
        return self.address


@dataclass
class FakeDriver:
    """Driver of one device, "cpu". calls: the LaunchConfig and the bytes of each parameter of each launch.

    sizes: of the parameters of each function. errors: what the next launches return, instead of running.
    num_loaded: kernels of calls that were planned.
    """

    device_type = "cpu"
    sizes: dict[int, list[int]] = field(default_factory=dict)
    calls: list[tuple[int, LaunchConfig, list[bytes]]] = field(default_factory=list)
    errors: list[int] = field(default_factory=list)
    stream_now: int = 7
    capturing: bool = False
    contexts: list[int] = field(default_factory=list)
    num_loaded: int = 0
    primary: int = 99

    def current_device(self) -> int:
        """Return the number that CPU tensors have."""
        return -1

    def device(self) -> torch.device:
        """Return the device."""
        return torch.device("cpu")

    def target(self) -> Target:
        """Describe the device: a CPU on which kernels are interpreted."""
        return Target("cpu", 1)

    def stream(self, device: int) -> int:
        """Return the current stream."""
        return self.stream_now

    def is_capturing(self) -> bool:
        """Tell whether a graph is being captured."""
        return self.capturing

    def empty(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a tensor of NaN, or of a huge number, by the CPU's sister of Inductor's allocation for a GPU."""
        made = torch._C._dynamo.guards._empty_strided_cpu(shape, strides, dtype)
        made.untyped_storage().fill_(0xFF if dtype.is_floating_point else 0x7F)
        return made

    def context(self) -> int:
        """Return the device's context."""
        return self.primary

    def set_context(self, context: int) -> None:
        """Note a context."""
        self.contexts.append(context)

    def parameter_sizes(self, compiled: Any) -> list[int]:
        """Return the bytes of each parameter."""
        return self.sizes[compiled.function]

    def launch(self, config_at: int, function: int, pointers_at: int, extra: None) -> int:
        """Stand in for cuLaunchKernelEx."""
        if self.errors:
            return self.errors.pop(0)
        config = LaunchConfig.from_buffer_copy(ctypes.string_at(config_at, ctypes.sizeof(LaunchConfig)))
        sizes = self.sizes[function]
        pointers = (ctypes.c_uint64 * len(sizes)).from_address(pointers_at)
        given = [ctypes.string_at(at, size) for at, size in zip(pointers, sizes, strict=True)]
        self.calls.append((function, config, given))
        self.run(function, config, given)
        return 0

    def run(self, function: int, config: LaunchConfig, given: list[bytes]) -> None:
        """Run the kernel, if the driver can."""


class _WithoutCopies(GridExecutor):
    """Interpreter's executor that works on the given memory itself."""

    def _init_args_hst(self, args_dev, kwargs):
        return args_dev, kwargs

    def _restore_args_dev(self, args_dev, args_hst, kwargs, kwargs_hst):
        pass


class InterpretingDriver(FakeDriver):
    """Driver that runs kernels in the interpreter. kernels: (kernel, signature, planned arguments) by function."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: dict[int, tuple[Any, Any, tuple]] = {}

    def launch_as_always(self, kernel: Any, grid: tuple, arguments: tuple, options: dict) -> None:
        """Stand in for `launch.run`: launch in the interpreter."""
        with _disable_current_modes():  # a GPU's launch is no operator of torch
            kernel[grid](*arguments, **options)

    def load(self, kernel: Any, grid: tuple, arguments: tuple, options: dict) -> Any:
        """Stand in for `launch.load`: return what stands for a compiled kernel."""
        self.num_loaded += 1
        signature, _, _ = triton_compat.specialize(JITFunction(kernel.fn), arguments, "sm_90")
        function = len(self.kernels) + 1
        self.kernels[function] = kernel, signature, arguments
        self.sizes[function] = [*map(_size, _leaves(tuple(signature.values()))), 8, 8]
        metadata = SimpleNamespace(
            global_scratch_size=0, profile_scratch_size=0, num_ctas=1, tensordesc_meta=None,
            launch_cooperative_grid=options.get("launch_cooperative_grid", False),
            launch_pdl=options.get("launch_pdl", False),
        )  # fmt: skip
        source = SimpleNamespace(signature=signature)
        packed = options.get("num_warps", 4), 1, 1000
        return SimpleNamespace(function=function, metadata=metadata, packed_metadata=packed, src=source)

    def run(self, function: int, config: LaunchConfig, given: list[bytes]) -> None:
        """Run the kernel on the parameters as they were handed over; constants are the planned ones."""
        kernel, signature, first = self.kernels[function]
        values = iter(given)
        arguments = _arguments(tuple(signature.values()), first, values)
        assert list(values) == [bytes(8), bytes(8)]
        _WithoutCopies(kernel.rewrite(), kernel.arg_names, tuple(config.grid))(*arguments)


def _arguments(kinds: tuple, first: tuple, values: Any) -> tuple:
    made = []
    for kind, value in zip(kinds, first, strict=True):
        if isinstance(kind, tuple):
            made.append(_arguments(kind, value, values))
        elif kind == "constexpr":
            made.append(value)
        elif kind[0] == "*":
            made.append(Pointer(POINTED[kind[1:]], *struct.unpack("Q", next(values))))
        else:
            made.append(*struct.unpack(FORMATS[kind], next(values)))
    return type(first)(*made) if hasattr(first, "_fields") else tuple(made)


def _leaves(kinds: tuple) -> list[str]:
    found = []
    for kind in kinds:
        found += _leaves(kind) if isinstance(kind, tuple) else [kind]
    return [kind for kind in found if kind != "constexpr"]


def _size(kind: str) -> int:
    return 8 if kind[0] == "*" else struct.calcsize(FORMATS[kind])


__all__ = ["INVALID_CONTEXT", "FakeDriver", "InterpretingDriver", "Pointer"]

"""Driver whose kernels are compiled for sm_90 without a GPU; it knows their parameters from PTX, and runs nothing."""

import re
import struct
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from envoi.runtime import devices, triton_compat
from envoi.runtime.devices import Target
from envoi.runtime.launch import kind_of
from tests.helpers.fake_driver import FakeDriver
from tools.kernel_cases import driver_for

BYTES = {"64": 8, "32": 4, "16": 2, "8": 1}

_compiled: dict[tuple, Any] = {}


class CompilingDriver(FakeDriver):
    """Driver that compiles. always: of each launch as always, its kernel, its grid of 3 and its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.always: list[tuple[Any, tuple[int, ...], tuple]] = []

    def target(self) -> Target:
        """Describe the GPU that it stands for."""
        return Target("sm_90", devices.num_sms(torch.device("cpu")))

    def launch_as_always(self, kernel: Any, grid: tuple, arguments: tuple, options: dict) -> None:
        """Stand in for `launch.run`: compile, and note the launch."""
        self.always.append((self._compiled(kernel, arguments, options), (*grid, 1, 1)[:3], arguments))

    def load(self, kernel: Any, grid: tuple, arguments: tuple, options: dict) -> Any:
        """Stand in for `launch.load`: return the compiled kernel as if it were loaded."""
        self.num_loaded += 1
        return self._compiled(kernel, arguments, options)

    def _compiled(self, kernel: Any, arguments: tuple, options: dict) -> Any:
        with _disable_current_modes():  # a GPU's launch is no operator of torch
            found = compiled(kernel, arguments, options)
        self.sizes[found.function] = parameter_sizes(found.asm["ptx"])
        return found

    def tensor_map(self, descriptor: Any, form: dict) -> bytes:
        """Make 128 bytes that begin with the address and depend on all else of a descriptor."""
        said = repr((descriptor.shape, descriptor.strides, descriptor.block_shape, sorted(form.items())))
        return struct.pack("Q", descriptor.base.data_ptr()) + said.encode()[:120].ljust(120, b".")

    def moved_map(self, tensor_map: bytes, address: int) -> bytes:
        """Return the map with another address."""
        return struct.pack("Q", address) + tensor_map[8:]


def compile_like_a_launch(kernel: Any, arguments: tuple, options: dict) -> Any:
    """Compile the kernel that a launch on Hopper would, as Triton does it; no GPU needed."""
    triton_compat.own(kernel)
    with driver_for("sm_90"):
        launched = kernel.warmup(*arguments, grid=(1,), **triton_compat.FP_FUSION, **options)
        return triton_compat.compiled_kernel(launched)


def compiled(kernel: Any, arguments: tuple, options: dict) -> Any:
    """Compile a kernel for these arguments, once."""
    kinds = [x if hasattr(x, "__hash__") and not _is_data(x) else kind_of(x) for x in arguments]
    key = kernel.fn, *sorted(options.items()), *kinds
    if key not in _compiled:
        made = triton_compat.compile_without_driver(kernel, arguments, "sm_90", options)
        # A loaded kernel has a handle. The original can't get one without a GPU.
        _compiled[key] = SimpleNamespace(
            function=len(_compiled) + 1, metadata=made.metadata, packed_metadata=made.packed_metadata, src=made.src,
            asm=made.asm,
        )  # fmt: skip
    return _compiled[key]


def _is_data(x: Any) -> bool:
    return isinstance(x, torch.Tensor | tuple) or hasattr(x, "base")


def parameter_sizes(ptx: str) -> list[int]:
    """Return the bytes of each parameter of a kernel's entry point, as PTX declares them."""
    head = re.search(r"\.visible \.entry \w+\((.*?)\n\)", ptx, re.DOTALL)
    assert head, "no entry point"
    sizes = []
    for line in head.group(1).split(",\n"):
        array = re.search(r"\.b8 \w+\[(\d+)\]", line)
        sizes.append(int(array.group(1)) if array else BYTES[re.search(r"\.param \.[a-z](\d+)", line).group(1)])
    return sizes

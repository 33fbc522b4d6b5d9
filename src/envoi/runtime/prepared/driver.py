"""CUDA driver by ctypes, as prepared calls need it: launches, the sizes of a kernel's parameters, tensor maps.

Everything here is documented in the CUDA driver API but for one thing, which is checked for each map: that a tensor
map begins with its address.
"""

import ctypes
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch

from envoi.runtime import shortcuts
from envoi.runtime.devices import Target

LIBRARY = "libcuda.so.1"
MAP_BYTES = 128
INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: the thread hasn't used CUDA yet
POINTER, SIZE = ctypes.c_void_p, ctypes.c_size_t
COOPERATIVE, OVERLAPPING = 2, 6  # attributes: all CTAs at once; may start before the launch before it has ended


class Attribute(ctypes.Structure):
    """CUlaunchAttribute: a number, then a union of 64 bytes, of which only an int is used here."""

    _fields_ = (("name", ctypes.c_uint), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint),
        ("stream", POINTER), ("attributes", POINTER), ("num_attributes", ctypes.c_uint),
    )  # fmt: skip


class Driver:
    """Functions of the driver.

    `launch` is cuLaunchKernelEx itself: (config, function, pointers, None) -> error; `set_context` is cuCtxSetCurrent.
    """

    device_type = "cuda"

    def __init__(self) -> None:
        self.library = ctypes.CDLL(LIBRARY)
        self.launch = self._function("cuLaunchKernelEx", POINTER, POINTER, POINTER, POINTER)
        self._parameter = self._function("cuFuncGetParamInfo", POINTER, SIZE, POINTER, POINTER)
        # By compiled kernel, not by handle: once Triton has unloaded a kernel, another may get its handle.
        self._sizes: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()
        self._replace_address = self._function("cuTensorMapReplaceAddress", POINTER, POINTER)
        self._get_device = self._function("cuDeviceGet", POINTER, ctypes.c_int)
        self._retain_context = self._function("cuDevicePrimaryCtxRetain", POINTER, ctypes.c_int)
        self._contexts: dict[int, int] = {}  # by device; retained once, for as long as the process runs
        self.set_context = self._function("cuCtxSetCurrent", POINTER)
        self.current_device = torch._C._cuda_getDevice
        self.stream = torch._C._cuda_getCurrentRawStream
        self.is_capturing = torch._C._cuda_isCurrentStreamCapturing
        # Inductor's allocation on the current device; it leaves out the fill for deterministic algorithms.
        self._empty = getattr(shortcuts.GUARDS, "_empty_strided_cuda", None)

    def _function(self, name: str, *types: Any) -> Any:
        found = self.library[name]  # an object of our own, unlike the attribute: nobody else sees its types
        found.argtypes, found.restype = types, ctypes.c_int
        return found

    def empty(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a tensor on the current device, as `torch.empty_strided` does; tuples, not a torch.Size."""
        if self._empty is None or torch._C._get_deterministic_algorithms():
            return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")
        return self._empty(shape, strides, dtype)

    def target(self) -> Target:
        """Describe the current GPU."""
        return Target.of(self.device())

    def device(self) -> torch.device:
        """Return the current GPU."""
        return torch.device(self.device_type, self.current_device())

    def parameter_sizes(self, compiled: Any) -> list[int]:
        """Return the bytes of each parameter of a compiled kernel that is loaded (CUDA 12.4 or newer).

        The driver is asked once for a kernel, and again if it named none: it may have had an error.
        """
        if known := self._sizes.get(compiled):
            return known
        sizes: list[int] = []
        at, size = SIZE(), SIZE()
        while not self._parameter(compiled.function, len(sizes), ctypes.addressof(at), ctypes.addressof(size)):
            sizes.append(size.value)
        self._sizes[compiled] = sizes
        return sizes

    def moved_map(self, tensor_map: bytes, address: int) -> bytes:
        """Return a tensor map of the same matrix at another address."""
        memory = ctypes.create_string_buffer(2 * MAP_BYTES)
        start = -(-ctypes.addressof(memory) // MAP_BYTES) * MAP_BYTES  # a map has to be on 64 bytes
        ctypes.memmove(start, tensor_map, MAP_BYTES)
        error = self._replace_address(start, address)
        if error:
            raise RuntimeError(f"cuTensorMapReplaceAddress: expected 0 from the CUDA driver, got {error}")
        return ctypes.string_at(start, MAP_BYTES)

    def context(self) -> int:
        """Return the primary context of the current GPU, which PyTorch uses. RuntimeError if there is none."""
        device = self.current_device()
        if device not in self._contexts:
            handle, context = ctypes.c_int(), POINTER()
            error = self._get_device(ctypes.addressof(handle), device)
            error = error or self._retain_context(ctypes.addressof(context), handle.value)
            if error:
                raise RuntimeError(f"cuDevicePrimaryCtxRetain: expected 0 from the CUDA driver, got {error}")
            self._contexts[device] = context.value or 0
        return self._contexts[device]

    def tensor_map(self, descriptor: Any, form: dict) -> bytes:
        """Encode a TMA descriptor. form: the compiled kernel's entry for it in `metadata.tensordesc_meta`."""
        from envoi.runtime import triton_compat

        made = triton_compat.tensor_map(descriptor, form)  # a Python object whose last bytes are the map
        return ctypes.string_at(id(made) + type(made).__basicsize__ - MAP_BYTES, MAP_BYTES)


@cache
def active() -> Driver | None:
    """Return the driver; None if there is none, or one older than CUDA 12.4."""
    try:
        return Driver()
    except (OSError, AttributeError):
        return None


def attributes_of(is_cooperative: bool, overlaps: bool) -> list[int]:
    """Return the attributes of a launch, in the order in which Triton sets them."""
    return [OVERLAPPING] * overlaps + [COOPERATIVE] * is_cooperative

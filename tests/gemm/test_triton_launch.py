"""Launch shortcuts compared with the installed Triton: they use its private names, and must launch equal arguments.

Triton's own host code runs here down to its launcher, which is replaced by one that records the arguments for the GPU.
"""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

from envoi.runtime import launch as module
from envoi.runtime import triton_compat
from envoi.runtime.launch import kind_of, launch
from envoi.runtime.tma import descriptor, unswizzled_descriptor


@triton.jit
def add(x, out, operands, n, scale, SIZE: tl.constexpr):
    """Small kernel with an argument of each kind."""
    bias, shift = operands
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at, at < n) * scale + tl.load(bias + at) + shift, at < n)


@triton.jit
def anything(x):
    """Kernel that is never compiled here."""


@pytest.fixture
def launched(monkeypatch):
    """Record the arguments of each launch, in place of a GPU's driver."""
    seen: list[tuple] = []
    utils = SimpleNamespace(
        load_binary=lambda *args: ("module", "function", 32, 0, 1024),
        unload_module=lambda module: None,
        get_device_properties=lambda device: {"max_shared_mem": 232448},
    )
    found = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 7,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        launcher_cls=lambda src, metadata: lambda *args: seen.append(args),
        utils=utils,
    )
    monkeypatch.setattr(driver, "_active", found)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(module, "_compiled", {})
    yield seen
    add.device_caches.clear()


def arguments(size=256):
    x = torch.zeros(size)
    return x, torch.zeros(size), (torch.zeros(size), 3), size, 0.5, 128


def test_the_shortcut_launches_what_triton_does(launched, monkeypatch):
    given = arguments()
    for enabled in (False, True):
        monkeypatch.setattr(module.shortcuts, "ENABLED", enabled)
        launch(add, (2,), given, {"num_warps": 4})
    by_triton, by_shortcut = launched
    assert len(by_triton) == len(by_shortcut)
    for one, other in zip(by_triton, by_shortcut, strict=True):
        assert one is other or (type(one) is type(other) and getattr(one, "data", one) == getattr(other, "data", other))
    assert by_triton[:4] == (2, 1, 1, 7)
    assert by_triton[-len(given) :] == given


def test_the_compiled_kernel_is_found_again(launched):
    launch(add, (2,), arguments(), {"num_warps": 4})
    (compiled,) = module._compiled.values()
    launch(add, (3,), arguments(512), {"num_warps": 4})
    assert list(module._compiled.values()) == [compiled]
    assert launched[1][:3] == (3, 1, 1)
    assert launched[1][4] is compiled.function


def test_a_promise_of_a_kernel_is_waited_for():
    kernel = object()
    assert triton_compat.compiled_kernel(SimpleNamespace(result=lambda: kernel)) is kernel
    assert triton_compat.compiled_kernel(kernel) is kernel
    assert triton_compat.compiled_kernel(None) is None


def test_a_launcher_is_built_after_the_type_of_descriptors_is_known(monkeypatch):
    """In Triton 3.6 a launcher keeps the type that it finds when it is loaded."""
    from triton.backends.nvidia import driver as nvidia

    def utils() -> None:
        monkeypatch.setattr(nvidia, "PyCUtensorMap", object)

    known = []
    monkeypatch.setattr(nvidia, "PyCUtensorMap", None)
    monkeypatch.setattr(nvidia, "CudaUtils", utils)
    monkeypatch.setattr(nvidia, "CudaLauncher", lambda src, metadata: known.append(nvidia.PyCUtensorMap))
    triton_compat.build_launcher(SimpleNamespace(src=None, metadata=None))  # pyright: ignore[reportArgumentType]
    assert known == [object]


VALUES: list[Any] = [
    0, 1, 2, 16, 17, -1, -16, 2**31 - 1, 2**31, 2**31 + 16, -(2**31), -(2**31) - 16, 2**40,
    True, False, 0.5, 1.0, 0.0, None,
    *(torch.zeros(64, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.float8_e4m3fn)),
    torch.zeros(64), torch.zeros(64)[4:], torch.zeros(64)[1:], torch.zeros(64)[3:], torch.zeros(4, 16).T,
    (), (1, 2), (3, 2), (torch.zeros(8), 16), (torch.zeros(9), 32), (torch.zeros(9)[1:], 32),
    (None, (1, 0.5)), (None, (1, 2.5)),
    *(descriptor(torch.zeros(rows, 128, dtype=torch.bfloat16), 64, 64) for rows in (64, 80, 4096)),
    descriptor(torch.zeros(64, 256, dtype=torch.bfloat16), 64, 64), descriptor(torch.zeros(64, 128), 64, 32),
    descriptor(torch.zeros(64, 128, dtype=torch.bfloat16), 64, 32), unswizzled_descriptor(torch.zeros(64, 128), 64, 32),
]  # fmt: skip


def test_what_has_one_key_is_one_kernel_to_triton():
    compiled_for = [triton_compat.specialize(anything, (value,), "sm_90") for value in VALUES]
    same = 0
    for (i, one), (j, other) in itertools.combinations(enumerate(VALUES), 2):
        if kind_of(one) == kind_of(other):
            signature, _, attributes = compiled_for[i]
            assert (signature, attributes) == (compiled_for[j][0], compiled_for[j][2]), (one, other)
            same += 1
    assert same > 10


@pytest.mark.parametrize(("rows", "columns", "dtype"), [(64, 64, torch.bfloat16), (128, 128, torch.float8_e4m3fn)])
def test_a_descriptor_is_what_triton_would_make(rows, columns, dtype):
    x = torch.zeros(256, 512).to(dtype)
    ours = descriptor(x, rows, columns)
    theirs = TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns], ours.layout)
    assert type(ours) is type(theirs)
    assert ours.base is x
    rest = {key: value for key, value in vars(theirs).items() if key != "base"}
    assert {key: value for key, value in vars(ours).items() if key != "base"} == rest

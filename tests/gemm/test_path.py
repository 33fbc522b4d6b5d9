"""Path of one call: the files that `envoi.gemm` passes through before the kernel's first instruction."""

import sys
from pathlib import Path

import pytest
import torch

import envoi
from envoi.ops.gemm import backend
from envoi.ops.gemm.hopper import host
from envoi.ops.gemm.triton import host as triton_host
from envoi.runtime import launch

# Files that only return a value to the call.
LEAVES = {
    "ops/gemm/grouping.py", "ops/gemm/hopper/config.py", "runtime/devices.py", "runtime/math.py",
    "runtime/shortcuts.py", "runtime/triton_compat.py",
}  # fmt: skip
PACKAGE = Path(envoi.__file__).parent
ROOMS = [PACKAGE / room for room in ("ops/gemm", "runtime")]


@pytest.fixture
def launched(monkeypatch):
    """Make the CPU count as Hopper, with launches that end with the kernel's name."""
    kernels = []
    monkeypatch.setattr(backend, "implementation", lambda device: "hopper")
    monkeypatch.setattr(launch, "launch", lambda kernel, grid, arguments, options: kernels.append(kernel))
    return kernels


def files_of(call) -> set[str]:
    """Return the files of gemm/ and runtime/ of which a function runs during the call."""
    found = set()

    def note(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if any(room in path.parents for room in ROOMS):
            found.add(str(path.relative_to(PACKAGE)))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def test_a_call_passes_through_few_files(launched):
    a, b = torch.randn(256, 512).bfloat16(), torch.randn(384, 512).bfloat16()
    envoi.gemm(a, b)  # warms up: chooses a config, lowers the epilogue
    files = files_of(lambda: envoi.gemm(a, b))
    kernel = Path(launched[-1].fn.__code__.co_filename)
    files -= LEAVES
    files |= {str(kernel.relative_to(PACKAGE)), str(Path(launch.__file__).relative_to(PACKAGE))}
    assert files == {
        "runtime/prepared/calls.py", "ops/gemm/api.py", "runtime/custom_op.py", "ops/gemm/backend.py",
        "ops/gemm/hopper/host.py", "runtime/tma.py", "runtime/launch.py", "runtime/program.py",
        "ops/gemm/hopper/kernel.py",
    }  # fmt: skip
    assert len(launched) == 2


def test_what_a_backend_refuses_goes_to_the_next(launched, monkeypatch):
    seen = []
    monkeypatch.setattr(host, "why_not_hopper", lambda a, b, ir: "no")
    monkeypatch.setattr(triton_host, "run_gemm", lambda *given, **named: seen.append(given) or [torch.zeros(1)])
    envoi.gemm(torch.randn(8, 16).bfloat16(), torch.randn(8, 16).bfloat16())
    assert len(seen) == 1 and not launched

"""Properties of a device and the implementation of operators on it; the only place that decides by device."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from envoi import env
from envoi.check import expect_int

EVERY_ARCH = "sm_90", "sm_100", "sm_103"  # that Envoi has kernels of its own for
TCGEN05 = "sm_100", "sm_103"  # whose tensor cores have a memory, and multiply MX numbers by their scale factors
SHARED_BYTES = 232448  # shared memory that one CTA can have on sm_90, sm_100 and sm_103
SMS_WITHOUT_GPU = 132  # multiprocessors assumed for tensors without memory: an H200's


@dataclass(frozen=True)
class Target:
    """GPU for which kernels are compiled, which needn't be present: its architecture and its multiprocessors."""

    arch: str
    num_sms: int = SMS_WITHOUT_GPU

    @property
    def implementation(self) -> str:
        """Implementation on this GPU, as `implementation` returns it."""
        return "hopper" if self.arch == "sm_90" else "triton"

    @property
    def is_interpreter(self) -> bool:
        """Tell whether the kernels will run in Triton's interpreter, on a CPU: arch "cpu"."""
        return self.arch == "cpu"

    @staticmethod
    def of(device: torch.device) -> "Target":
        """Describe a GPU of this machine."""
        major, minor = torch.cuda.get_device_capability(device)
        return Target(f"sm_{major}{minor}", num_sms(device))


@contextmanager
def scoped(local: threading.local, **values: Any) -> Iterator[None]:
    """Set attributes of a thread's own values inside the context; they are as before after it, whatever happens."""
    before = {name: getattr(local, name) for name in values}
    local.__dict__.update(values)
    try:
        yield
    finally:
        local.__dict__.update(before)


class _Local(threading.local):
    target: Target | None = None
    most_sms: int | None = None


_local = _Local()


def standing_for(target: Target) -> AbstractContextManager[None]:
    """Let tensors without memory stand for tensors of a GPU inside the context, in this thread."""
    return scoped(_local, target=target)


def limited(most: int) -> AbstractContextManager[None]:
    """Let this thread's calls take at most so many multiprocessors inside the context, as far as a launch's grid says.

    Raises ValueError for what is no positive integer, and while torch.compile traces: it calls the operators later.
    """
    expect_int("num_sms", most, 1)
    if torch.compiler.is_compiling():
        raise ValueError("num_sms: expected None in a call that torch.compile traces")
    return scoped(_local, most_sms=most)


def implementation(device: torch.device) -> str:
    """Return the implementation for a device: "hopper" (sm_90), "triton" (other GPUs) or "torch".

    A CPU has "triton" under Triton's interpreter, else "torch". Calls that the Hopper kernels refuse
    (`hopper.why_not_hopper`, `hopper_mx.why_not_mx`, `widened.why_not_widened`) run on the Triton kernels there;
    float32 runs on torch, which is faster.
    """
    if device.type == "meta" and _local.target is not None:
        return _local.target.implementation
    return _implementation(device)


@cache
def _implementation(device: torch.device) -> str:
    if device.type == "cpu":
        return "triton" if env.interpreting() else "torch"
    if device.type != "cuda":
        return "torch"
    return "hopper" if torch.cuda.get_device_capability(device) == (9, 0) else "triton"


def on_gpu(device: torch.device) -> bool:
    """Tell whether kernels run on a GPU there, not in Triton's interpreter; "meta" stands for a GPU."""
    if device.type == "meta":
        return _local.target is None or not _local.target.is_interpreter
    return device.type != "cpu"


def capturing(device: torch.device) -> bool:
    """Tell whether a CUDA graph is being captured on the device's current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def expect_no_capture(name: str, device: torch.device, why: str) -> None:
    """Raise RuntimeError while a CUDA graph is captured on the device's current stream: the call would wait for it."""
    if capturing(device):
        raise RuntimeError(f"{name}: expected no CUDA graph to be captured, {why}")


def num_sms(device: torch.device) -> int:
    """Return the number of multiprocessors, at most those of `limited`: 1 for a CPU; for "meta" those of
    `standing_for`, or an H200's."""
    target = _local.target if device.type == "meta" else None
    found = _num_sms(device) if target is None else target.num_sms
    return found if _local.most_sms is None else min(found, _local.most_sms)


@cache
def _num_sms(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return SMS_WITHOUT_GPU if device.type == "meta" else 1


def casts_e4m3(device: torch.device) -> bool:
    """Tell whether a GPU has the cast to E4M3; "meta" stands for one that has, unless `standing_for` says otherwise."""
    if device.type == "meta":
        target = _local.target
        return target is None or not (target.is_interpreter or int(target.arch.removeprefix("sm_")) < 89)
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def has_tcgen05(device: torch.device) -> bool:
    """Tell whether a GPU has tcgen05: tensor memory, and products of MX numbers by scale factors; sm_100, sm_103."""
    if device.type == "meta":
        return _local.target is not None and _local.target.arch in TCGEN05
    return device.type == "cuda" and torch.cuda.get_device_capability(device) in ((10, 0), (10, 3))


# Rates of an H200 that all models of its time share: of a layer (the estimate), a GEMM's config, a router's tiling.
# Each has constants of its own besides, for what only its kernels do.


@dataclass(frozen=True)
class GpuRates:
    """Rates of a GPU under load.

    l2_bytes: loaded per cycle by one multiprocessor. hbm_gb_per_s: read and written together. launch_us: a kernel's
    launch up to its first product, plus its last tile.
    """

    num_sms: int
    shared_bytes: int
    clock_mhz: float
    l2_bytes: float
    hbm_gb_per_s: float
    launch_us: float

    @property
    def hbm_bytes(self) -> float:
        """Bytes that all multiprocessors together load per cycle."""
        return self.hbm_gb_per_s * 1e3 / self.clock_mhz

    @property
    def launch_cycles(self) -> float:
        """Cycles of `launch_us`."""
        return self.launch_us * self.clock_mhz


H200 = GpuRates(
    num_sms=SMS_WITHOUT_GPU,
    shared_bytes=SHARED_BYTES,
    clock_mhz=1755,  # notes/2026-11-plan.md
    l2_bytes=80,  # of tiles of 128 x 128, fitted: tools/time_models
    hbm_gb_per_s=4212,  # 2400 bytes a cycle; the roof of bench/results, a device copy, is 4230
    launch_us=5.0,  # bench/results: time of GEMMs with few tokens beyond that of their bytes
)

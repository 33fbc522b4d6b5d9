"""Measured roofs of a device, taken in the run that they are compared with."""

from dataclasses import dataclass, field
from typing import cast

import torch

from bench.timing import Clock
from bench.torch_gemm import product
from envoi.quant.cast import quantize
from envoi.quant.formats import Scheme, format_named

COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
GEMM_MNK = {"cuda": ((8192, 8192, 8192), (8192, 4096, 7168)), "cpu": ((1024, 1024, 1024),)}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
REPEAT = {"cuda": 20, "cpu": 5}


@dataclass(frozen=True)
class Roof:
    """Rates that the device reached: copied bytes (read + written), and matmul rates by kind.

    Kinds are "bf16", "fp32", "fp8" (scales of rows) and, where torch has it, "fp8_block128".
    """

    gb_per_s: float
    tflops: dict[str, float] = field(default_factory=dict)

    def floor_us(self, num_bytes: float, flops: float = 0.0, kind: str = "bf16") -> float | None:
        """Return the least time for the work at these roofs; None if there is no roof for `kind`."""
        bytes_us = num_bytes / self.gb_per_s / 1e3
        if not flops:
            return bytes_us
        rate = self.tflops.get(kind) or self.tflops.get(kind.partition("_")[0])
        return max(bytes_us, flops / rate / 1e6) if rate else None


def kind_of(format: str) -> str:
    """Return the kind of matmul whose roof counts for products in a format."""
    return format if format in ("bf16", "fp8_block128") else "fp8"


def measure_roof(device: torch.device) -> Roof:
    """Copy a large buffer and multiply large matrices with torch; the 10th percentile of the times counts."""
    clock = Clock(device, REPEAT[device.type], cold=False)
    num_bytes = COPY_BYTES[device.type]
    source = torch.zeros(num_bytes, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    copied = 2 * num_bytes / clock.calls(lambda: target.copy_(source)).p10_us / 1e3
    tflops = {name: max(_matmul_tflops(clock, mnk, name) for mnk in GEMM_MNK[device.type]) for name in DTYPES}
    if device.type == "cpu":
        tflops["bf16"] = max(tflops.values())  # a CPU may widen to float32 first
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        tflops["fp8"] = max(_fp8_tflops(clock, mnk, "fp8_row") for mnk in GEMM_MNK["cuda"])
    if device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0):
        tflops["fp8_block128"] = max(_fp8_tflops(clock, mnk, "fp8_block128") for mnk in GEMM_MNK["cuda"])
    return Roof(copied, tflops)


def _matmul_tflops(clock: Clock, mnk: tuple[int, int, int], dtype: str) -> float:
    m, n, k = mnk
    a, b = (torch.randn(rows, k, device=clock.device).to(DTYPES[dtype]) for rows in (m, n))
    return 2 * m * n * k / clock.calls(lambda: a @ b.T).p10_us / 1e6


def _fp8_tflops(clock: Clock, mnk: tuple[int, int, int], format: str) -> float:
    m, n, k = mnk
    scheme = format_named(format)
    rows = (cast(Scheme, scheme.activations), m), (cast(Scheme, scheme.weights), n)
    a, b = (quantize(torch.randn(count, k, device=clock.device), one) for one, count in rows)
    return 2 * m * n * k / clock.calls(product(a, b)).p10_us / 1e6

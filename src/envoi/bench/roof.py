"""Measured roofs of a device, taken in the run that they are compared with."""

from dataclasses import dataclass, field

import torch
from torch.nn.functional import ScalingType, scaled_mm

from envoi.bench.timing import Clock
from envoi.quant.cast import quantize

COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
GEMM_MNK = {"cuda": ((8192, 8192, 8192), (8192, 4096, 7168)), "cpu": ((1024, 1024, 1024),)}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
REPEAT = {"cuda": 20, "cpu": 5}


@dataclass(frozen=True)
class Roof:
    """Rates that the device reached: copied bytes (read + written), and matmul rates of "bf16", "fp32" and "fp8"."""

    gb_per_s: float
    tflops: dict[str, float] = field(default_factory=dict)

    def floor_us(self, num_bytes: float, flops: float = 0.0, kind: str = "bf16") -> float | None:
        """Return the least time for the work at these roofs; None if there is no roof for `kind`."""
        bytes_us = num_bytes / self.gb_per_s / 1e3
        if not flops:
            return bytes_us
        return max(bytes_us, flops / self.tflops[kind] / 1e6) if kind in self.tflops else None


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
        tflops["fp8"] = max(_fp8_tflops(clock, mnk) for mnk in GEMM_MNK["cuda"])
    return Roof(copied, tflops)


def _matmul_tflops(clock: Clock, mnk: tuple[int, int, int], dtype: str) -> float:
    m, n, k = mnk
    a, b = (torch.randn(rows, k, device=clock.device).to(DTYPES[dtype]) for rows in (m, n))
    return 2 * m * n * k / clock.calls(lambda: a @ b.T).p10_us / 1e6


def _fp8_tflops(clock: Clock, mnk: tuple[int, int, int]) -> float:
    m, n, k = mnk
    a, b = (quantize(torch.randn(rows, k, device=clock.device), "fp8_row") for rows in (m, n))

    def run() -> torch.Tensor:
        row = ScalingType.RowWise
        return scaled_mm(a.values, b.values.T, a.sf, row, b.sf.T, row, output_dtype=torch.bfloat16, use_fast_accum=True)

    return 2 * m * n * k / clock.calls(run).p10_us / 1e6

"""Rates of an H200 that all models of its time share: of a layer (the plan), a GEMM's config, a router's tiling.

Each model has constants of its own besides, for what only its kernels do.
"""

from dataclasses import dataclass

from envoi.runtime.devices import SHARED_BYTES, SMS_WITHOUT_GPU


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

"""Sample measurement for tests."""

from bench.evidence import Measurement


def sample(**changes) -> Measurement:
    values = {
        "suite": "gemm",
        "case": "8192x4096x7168 bf16",
        "ours_us": 670.5,
        "baselines": {"cublas": 665.0, "eager": 700},
        "floor_us": 640.0,
        "tflops": 717.4,
        "gb_per_s": None,
        "error": {"ours": 1.7e-3, "torch": 0},
        "gpu": "NVIDIA H200",
        "num_gpus": 1,
        "torch": "2.11.0+cu130",
        "triton": "3.6.0",
        "commit": "0123456789ab",
        "date": "2026-11-21",
        "n": 100,
    }
    return Measurement(**{**values, **changes})

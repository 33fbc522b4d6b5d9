"""Published times of others for cases of a suite, shown beside ours.

Measured on another machine by another method: compare only each side's ratios.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """Published times. times_us: by case, one for each of `columns`, of which the last is eager."""

    what: str
    hardware: str
    columns: tuple[str, ...]
    times_us: dict[str, tuple[float, ...]]


PUBLISHED = {
    "router_call": Published(
        what="two fused kernels for Blackwell, an epilogue visitor tree of CUTLASS with dense output and quack's CuTe "
        "DSL with compact output",
        hardware="Blackwell (sm_100)",
        columns=("CUTLASS", "quack", "eager"),
        times_us={
            "512x8x128 top4 softmax fp16": (21.5, 27.9, 135.2),
            "512x16x128 top4 softmax fp16": (23.6, 28.2, 137.2),
            "1024x64x512 top4 softmax fp16": (32.3, 28.4, 136.2),
            "2048x128x1024 top4 softmax fp16": (38.0, 28.5, 144.6),
            "4096x64x2048 top4 softmax fp16": (36.9, 28.4, 142.5),
            "4096x128x2048 top4 softmax fp16": (41.0, 28.1, 160.4),
        },
    ),
}

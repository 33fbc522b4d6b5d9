"""Result of a check of a promise."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """Run of a check.

    promise: "same bits/run to run/gemm bf16", "soak/memory", "faults/killed".. count: calls, cases or kernels that
    were checked; wrong: those that weren't right. text: of the first wrong one, or a remark.
    """

    promise: str
    count: int
    wrong: int
    seconds: float
    text: str = ""

"""GEMMs with a fused epilogue: mainloops and tile schedulers."""

from envoi.ops.gemm.api import gemm, grouped_gemm

__all__ = ["gemm", "grouped_gemm"]

"""Fused GPU kernels for Mixture-of-Experts and sparse-attention inference: every kernel is a GEMM with an envoi."""

__version__ = "0.1.0"

"""Fused GPU kernels for Mixture-of-Experts and sparse-attention inference: every kernel is a GEMM with an envoi."""

from envoi import epilogue, experts, plan, router
from envoi.epilogue import EpilogueError
from envoi.gemm import gemm, grouped_gemm
from envoi.indexer import indexer_topk
from envoi.moe import moe
from envoi.moe.parallel import ExpertParallel, PeerTimeout
from envoi.moe.router import route
from envoi.types import ExpertRows, ExpertWeights, QuantTensor, Routing
from envoi.warming import warm_up

__version__ = "0.2.0"

__all__ = [
    "EpilogueError",
    "ExpertParallel",
    "ExpertRows",
    "ExpertWeights",
    "PeerTimeout",
    "QuantTensor",
    "Routing",
    "epilogue",
    "experts",
    "gemm",
    "grouped_gemm",
    "indexer_topk",
    "moe",
    "plan",
    "route",
    "router",
    "warm_up",
]

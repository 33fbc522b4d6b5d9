"""Fused GPU kernels for Mixture-of-Experts and sparse-attention inference: every kernel is a GEMM with an envoi."""

import envoi.epilogue  # an earlier name; imported before the decorator takes it
import envoi.plan  # noqa: F401  # the same: the function takes it
from envoi import experts, router
from envoi.epilogues import EpilogueError, epilogue
from envoi.estimates import estimate
from envoi.ops.gemm import gemm, grouped_gemm
from envoi.ops.indexer import indexer_blocks, indexer_topk, indexer_topk_in_blocks
from envoi.ops.moe import moe, supports
from envoi.ops.moe.parallel import ExpertParallel, PeerTimeout
from envoi.ops.moe.router import route
from envoi.planning import plan
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
    "estimate",
    "experts",
    "gemm",
    "grouped_gemm",
    "indexer_blocks",
    "indexer_topk",
    "indexer_topk_in_blocks",
    "moe",
    "plan",
    "route",
    "router",
    "supports",
    "warm_up",
]

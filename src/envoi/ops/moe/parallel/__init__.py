"""MoE layer over ranks: dispatch and combine over NVLink, or by NCCL or gloo."""

from envoi.ops.moe.parallel.api import ExpertParallel
from envoi.ops.moe.parallel.exchange import Dispatched
from envoi.ops.moe.parallel.failure import PeerTimeout

__all__ = ["Dispatched", "ExpertParallel", "PeerTimeout"]

"""MoE layer over ranks: dispatch and combine over NVLink, or by NCCL or gloo."""

from envoi.moe.parallel.api import ExpertParallel
from envoi.moe.parallel.timeout import PeerTimeout

__all__ = ["ExpertParallel", "PeerTimeout"]

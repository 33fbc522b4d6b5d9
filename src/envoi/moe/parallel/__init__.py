"""Dispatch and combine across ranks."""

from envoi.moe.parallel.api import ExpertParallel
from envoi.moe.parallel.timeout import PeerTimeout

__all__ = ["ExpertParallel", "PeerTimeout"]

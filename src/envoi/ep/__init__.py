"""Dispatch and combine across ranks."""

from envoi.ep.api import ExpertParallel
from envoi.ep.watch import PeerTimeout

__all__ = ["ExpertParallel", "PeerTimeout"]

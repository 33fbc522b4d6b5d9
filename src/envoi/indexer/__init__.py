"""Sparse attention: scores, top-k, KV slots."""

from envoi.indexer.api import indexer_topk

__all__ = ["indexer_topk"]

"""Indexer of sparse attention: scores of cached tokens, top-k, KV slots."""

from envoi.ops.indexer.api import indexer_topk
from envoi.ops.indexer.certificate import UncertifiedWarning

__all__ = ["UncertifiedWarning", "indexer_topk"]

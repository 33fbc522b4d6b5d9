"""Indexer of sparse attention: scores of cached tokens, top-k, KV slots."""

from envoi.indexer.api import indexer_topk
from envoi.indexer.certificate import UncertifiedWarning

__all__ = ["UncertifiedWarning", "indexer_topk"]

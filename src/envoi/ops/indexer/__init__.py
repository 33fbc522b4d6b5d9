"""Indexer of sparse attention: scores of cached tokens, top-k, KV slots."""

from envoi.ops.indexer.api import indexer_blocks, indexer_topk, indexer_topk_in_blocks
from envoi.ops.indexer.certificate import UncertifiedWarning

__all__ = ["UncertifiedWarning", "indexer_blocks", "indexer_topk", "indexer_topk_in_blocks"]

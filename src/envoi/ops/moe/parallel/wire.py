"""Tokens as bytes, one row a token: values, scale factors, expert ids and routing weights."""

import torch

from envoi.ops.moe.parallel.slots import SentTokens
from envoi.types import Matrix, QuantTensor


def to_bytes(tokens: SentTokens) -> torch.Tensor:
    """Concatenate each token's parts as bytes: uint8 [T, B]."""
    parts = [*_parts(tokens.rows), tokens.topk_ids, tokens.weights]
    return torch.cat([_seen_as(part, torch.uint8) for part in parts], dim=1)


def from_bytes(packed: torch.Tensor, like: SentTokens) -> SentTokens:
    """Inverse of `to_bytes`; `like` gives the dtypes and widths."""
    # Copies, always: one row's columns are contiguous where they are, at any byte, and so can't be seen as float32.
    columns, start = [], 0
    for part in (*_parts(like.rows), like.topk_ids, like.weights):
        width = part.shape[1] * part.element_size()
        own = packed[:, start : start + width].clone(memory_format=torch.contiguous_format)
        columns.append(_seen_as(own, part.dtype))
        start += width
    if isinstance(like.rows, torch.Tensor):
        return SentTokens(*columns)
    return SentTokens(QuantTensor(columns[0], columns[1], like.rows.group), *columns[2:])


def _seen_as(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the bytes of a matrix [T, C] as elements of another dtype, [T, bytes of a row / bytes of an element]."""
    if x.numel():
        return x.contiguous().view(dtype)
    # Without an element any strides count as contiguous, also those that `view` refuses.
    return x.new_empty(len(x), x.shape[1] * x.element_size() // dtype.itemsize, dtype=dtype)


def _parts(rows: Matrix) -> list[torch.Tensor]:
    return [rows] if isinstance(rows, torch.Tensor) else [rows.values, rows.sf]

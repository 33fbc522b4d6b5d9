"""Layout of the paged K cache in memory; packing and unpacking of pages.

A page of 64 tokens is one run of 64 * 132 = 8448 bytes, although its shape [64, 1, 132] suggests 132 bytes a token:

    bytes    0 .. 8191    E4M3 values, token t at t * 128
    bytes 8192 .. 8447    float32 scales, little-endian, token t at 8192 + 4 * t
"""

import torch

HEAD_DIM = 128
PAGE_SIZE = 64
BYTES_PER_TOKEN = HEAD_DIM + 4
PAGE_BYTES = PAGE_SIZE * BYTES_PER_TOKEN
VALUE_BYTES = PAGE_SIZE * HEAD_DIM


def pack_cache(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Pack values [P, 64, 128] float8_e4m3fn and scales [P, 64] float32 into a cache [P, 64, 1, 132] int8."""
    num_pages = values.shape[0]
    pages = torch.empty(num_pages, PAGE_BYTES, dtype=torch.uint8, device=values.device)
    pages[:, :VALUE_BYTES] = values.contiguous().view(torch.uint8).view(num_pages, -1)
    pages[:, VALUE_BYTES:] = scales.contiguous().view(torch.uint8).view(num_pages, -1)
    return pages.view(torch.int8).view(num_pages, PAGE_SIZE, 1, BYTES_PER_TOKEN)


def unpack_pages(k_cache: torch.Tensor, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unpack pages, by ids [n], of a cache: values [n * 64, 128] float8_e4m3fn and scales [n * 64] float32."""
    chosen = k_cache.view(torch.uint8).view(-1, PAGE_BYTES)[pages.long()]
    values = chosen[:, :VALUE_BYTES].contiguous().view(torch.float8_e4m3fn).view(-1, HEAD_DIM)
    scales = chosen[:, VALUE_BYTES:].contiguous().view(torch.float32).view(-1)
    return values, scales


def pages_of(length: int) -> int:
    """Return the number of pages that hold `length` tokens."""
    return -(-length // PAGE_SIZE)


def to_slots(positions: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Convert positions in a sequence to slots of the cache, int32: page * 64 + place in the page."""
    return (pages.long()[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE).to(torch.int32)

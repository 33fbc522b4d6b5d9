"""Layout of the paged K cache in memory; packing and unpacking of pages.

A page of 64 tokens is one run of 64 * 132 = 8448 bytes, although its shape [64, 1, 132] suggests 132 bytes a token:

    bytes    0 .. 8191    E4M3 values, token t at t * 128
    bytes 8192 .. 8447    float32 scales, little-endian, token t at 8192 + 4 * t

or, of keys in FP4, of 64 * 68 = 4352 bytes, although its shape is [64, 1, 68]:

    bytes    0 .. 4095    E2M1 values, two a byte, the first in the low bits, token t at t * 64
    bytes 4096 .. 4351    UE8M0 factors, one for each 32 values, token t at 4096 + 4 * t
"""

import torch

from envoi.quant.bits import e2m1_decode, e8m0_to_float, unpack_nibbles

HEAD_DIM = 128
PAGE_SIZE = 64
BYTES_PER_TOKEN = HEAD_DIM + 4
PAGE_BYTES = PAGE_SIZE * BYTES_PER_TOKEN
VALUE_BYTES = PAGE_SIZE * HEAD_DIM
FP4_GROUP = 32
FP4_VALUE_BYTES = PAGE_SIZE * HEAD_DIM // 2
FP4_BYTES_PER_TOKEN = HEAD_DIM // 2 + HEAD_DIM // FP4_GROUP


def is_fp4(k_cache: torch.Tensor) -> bool:
    """Tell whether a cache has keys in FP4, by its last side."""
    return k_cache.dim() == 4 and k_cache.shape[-1] == FP4_BYTES_PER_TOKEN


def pack_cache(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Pack values [P, 64, 128] float8_e4m3fn and scales [P, 64] float32 into a cache [P, 64, 1, 132] int8.

    Or, of keys in FP4, values [P, 64, 64] uint8, two a byte, and factors [P, 64, 4] float8_e8m0fnu into [P, 64, 1, 68].
    """
    num_pages = values.shape[0]
    parts = [x.contiguous().view(torch.uint8).flatten(1) for x in (values, scales)]
    pages = torch.cat(parts, 1).view(torch.int8)
    return pages.view(num_pages, PAGE_SIZE, 1, pages.shape[1] // PAGE_SIZE)


def unpack_pages(k_cache: torch.Tensor, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unpack pages, by ids [n], of a cache: values [n * 64, 128] and scales [n * 64] float32.

    Values are float8_e4m3fn; of keys in FP4 float32, times their factors, and the scales are 1.
    """
    chosen = k_cache.view(torch.uint8).flatten(1)[pages.long()]
    if is_fp4(k_cache):
        values = e2m1_decode(unpack_nibbles(chosen[:, :FP4_VALUE_BYTES].reshape(-1, FP4_GROUP // 2)))
        factors = e8m0_to_float(chosen[:, FP4_VALUE_BYTES:].reshape(-1, 1).view(torch.float8_e8m0fnu))
        values = (values * factors).view(-1, HEAD_DIM)
        return values, values.new_ones(len(values))
    values = chosen[:, :VALUE_BYTES].contiguous().view(torch.float8_e4m3fn).view(-1, HEAD_DIM)
    scales = chosen[:, VALUE_BYTES:].contiguous().view(torch.float32).view(-1)
    return values, scales


def pages_of(length: int) -> int:
    """Return the number of pages that hold `length` tokens."""
    return -(-length // PAGE_SIZE)


def to_slots(positions: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Convert positions in a sequence to slots of the cache, int32: page * 64 + place in the page."""
    return (pages.long()[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE).to(torch.int32)

"""4-bit weights in the order in which a warpgroup's threads hold them as a register operand of wgmma.

A tile is 64 rows by 64 of K: 2048 bytes of E2M1 and 128 bytes of UE8M0 (MXFP4) or 256 of E4M3 (NVFP4), contiguous, or
2048 bytes of INT4 with 64 or 128 factors of 16 bits and, if they have zero points, as many bytes of those; tiles follow
each other along K, then along the rows. A thread of four warps loads 16 bytes of a tile, all of them its
own, and its warp 512 neighbouring ones: no shared memory, no shuffle.

    values: bytes [row tile, K step, warp 4, g 8, t 4, k16 2, half 2, b 2, k8 2], each two weights of the same row
            row = 64 tile + 16 warp + 2 g + half
            K   = 64 step + 32 block + 16 k16 + 8 k8 + 2 t + b            block 0 and block 1 share the byte
    sf:     bytes [row tile, K step, warp 4, g 8, block 2, half 2], of NVFP4 [.., g 8, block 2, k16 2, half 2]
            of INT4 in groups of 32 [.., g 8, block 2, half 2], of 64 or more [.., g 8, half 2]; zeros likewise

So a thread's row pair is 2 g and 2 g + 1, gate and up of one feature where those are interleaved; and K is in natural
order for bf16 products (m64nTk16 number `2 block + k16` has 2 t + b and 8 + 2 t + b), whereas FP8 products, whose
registers hold four of K, want their tokens permuted (`envoi.ops.gemm.hopper_w4a16.tokens`).

A byte's bits, from the highest: sign of block 1, its mantissa, sign of block 0, exponent of block 1 (2 bits), exponent
and mantissa of block 0 (3 bits). So two operations make four weights of block 0 E4M3 (times 2^-6), and four of block 1
take three. Of INT4 the low nibble is of block 0, the high one of block 1: q as it is where there are zero points,
else `envoi.quant.int4.to_codes`. INT4 in groups of 128, 256, .. has factors for 64 in this order.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from envoi.quant import fp8_fragments, int4
from envoi.quant.bits import pack_nibbles, unpack_nibbles
from envoi.types import QuantTensor

TILE = 64  # rows, and elements of K
NOT_IN_TILES = f"rows and columns aren't multiples of {TILE}"
LARGEST_CODE = 0x7E  # byte of E4M3's largest number; above are NaN and what is negative
# Experts are reordered together, about so many bytes at a time. vLLM 0.33 loads with torch's `max_split_size_mb` of 20,
# under which a block of 20 MiB, made for a request of 1 to 10 MiB, serves none like it again: one expert of a few MiB
# at a time, packing a model would hold tens of GiB until it is loaded.
PART_BYTES = 32 << 20

# Axes of a matrix by rows: tile, warp, g, half | step, block, k16, k8, t, b; and of its factors: .. | step, block, to
# which NVFP4's k16 belongs.
_VALUES, _VALUES_BACK = (0, 4, 1, 2, 8, 6, 3, 9, 7, 5), (0, 2, 3, 6, 1, 9, 5, 8, 4, 7)
_SF, _SF_BACK = (0, 4, 1, 2, 5, 3), (0, 2, 3, 5, 1, 4)


def why_not_fragments(x: QuantTensor) -> str:
    """Return why a QuantTensor [E, N, K] can't be put into this order; "" if it can.

    It takes N and K that are multiples of 64, MXFP4's factors up to 2, NVFP4's that are neither negative nor NaN. Reads
    the factors of NVFP4 and waits for them; on meta, where there is nothing to read, takes them for allowed ones.
    """
    if x.integers and x.scale is None:
        return _why_not_int4(x)
    nvfp4 = x.packed and x.sf.dtype == torch.float8_e4m3fn and x.group == (1, 16)
    mxfp4 = x.packed and x.sf.dtype == torch.float8_e8m0fnu and x.group == (1, 32) and x.scale is None
    if not (nvfp4 or mxfp4):
        return "it isn't MXFP4, NVFP4 or INT4"
    if not _in_tiles(x):
        return NOT_IN_TILES
    if mxfp4:
        return "" if x.scales_at_most_2 else "a scale factor is above 2"
    codes = x.sf.view(torch.uint8)
    readable = codes.numel() and x.device.type != "meta"
    return "a scale factor is negative or NaN" if readable and int(codes.max()) > LARGEST_CODE else ""


def _in_tiles(x: QuantTensor) -> bool:
    return len(x.shape) == 3 and x.shape[-2] % TILE == 0 and x.shape[-1] % TILE == 0


def _why_not_int4(x: QuantTensor) -> str:
    if not _in_tiles(x):
        return NOT_IN_TILES
    if x.group[0] != 1 or (x.group[1] != 32 and x.group[1] % TILE):
        return f"{x.group[0]} x {x.group[1]} weights share a factor, not 32 or a multiple of {TILE} of a row"
    return ""


def to_fragments(x: QuantTensor) -> QuantTensor:
    """Put 4-bit weights [E, N, K] into the order, in place: values and sf of `x` must not be used any more.

    Raises ValueError if they can't be put into it.
    """
    why = why_not_fragments(x)
    if x.order != "rows":
        why = "it is in this order already"
    if why:
        sizes = f"[E, N, K] with N and K multiples of {TILE}"
        raise ValueError(f"weights: expected MXFP4 with scales_at_most_2, NVFP4 or INT4, by rows, {sizes}: {why}")
    if x.integers:
        return _int4_to_fragments(x)
    _reorder(x.values, _values_to_fragments)
    _reorder(x.sf.view(torch.uint8), partial(_sf_to_fragments, columns=x.group[1]))
    return replace(x, order="fragments")


def _reorder(x: torch.Tensor, reordered: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Reorder matrices [E, N, ..] in place; several that follow each other are one with more tiles of rows."""
    for part in x.tensor_split(max(1, min(len(x), x.nbytes // PART_BYTES))):
        part.copy_(reordered(part.flatten(0, 1)).view(part.shape))


def _int4_to_fragments(x: QuantTensor) -> QuantTensor:
    columns = min(x.group[1], TILE)
    x = int4.with_columns(x, columns)
    _reorder(x.values, partial(_integers_to_fragments, symmetric=x.zeros is None))
    for part in (x.sf, x.zeros):
        if part is not None:
            _reorder(part, partial(_sf_to_fragments, columns=columns))
    return replace(x, order="fragments")


def to_rows(x: QuantTensor) -> QuantTensor:
    """Return the weights by rows: a copy, or `x` itself if it is by rows already. Any leading shape.

    Inverts `to_fragments`, and `fp8_fragments.to_fp8_fragments`, whose scale of each row becomes part of the factors.
    """
    if x.order == "rows":
        return x
    if x.order == fp8_fragments.ORDER:
        return fp8_fragments.to_rows(x)
    if x.integers:
        return _int4_to_rows(x)
    values = x.values.reshape(-1, *x.values.shape[-2:])
    sf = x.sf.view(torch.uint8).reshape(-1, *x.sf.shape[-2:])
    values = torch.stack([_values_to_rows(part) for part in values]) if len(values) else values
    sf = torch.stack([_sf_to_rows(part, x.group[1]) for part in sf]) if len(sf) else sf
    sf = sf.view(x.sf.shape).view(x.sf.dtype)
    return replace(x, values=values.view(x.values.shape), sf=sf, order="rows")


def _int4_to_rows(x: QuantTensor) -> QuantTensor:
    def by_rows(part: torch.Tensor | None, reorder: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor | None:
        if part is None or not part.numel():
            return part
        return torch.stack([reorder(one) for one in part.reshape(-1, *part.shape[-2:])]).view(part.shape)

    values = by_rows(x.values, lambda one: _integers_to_rows(one, x.zeros is None))
    sf, zeros = (by_rows(part, lambda one: _sf_to_rows(one, x.group[1])) for part in (x.sf, x.zeros))
    return replace(x, values=values, sf=sf, zeros=zeros, order="rows")


def _integers_to_fragments(values: torch.Tensor, symmetric: bool) -> torch.Tensor:
    """Reorder the integers of one matrix, uint8 [N, K / 2], in a copy of that shape."""
    first, second = _by_places(values)
    if symmetric:
        first, second = int4.to_codes(first), int4.to_codes(second)
    return (second << 4 | first).reshape(values.shape)


def _integers_to_rows(values: torch.Tensor, symmetric: bool) -> torch.Tensor:
    first, second = values & 15, values >> 4
    if symmetric:
        first, second = int4.from_codes(first), int4.from_codes(second)
    return _from_places(first, second)


def _by_places(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the nibbles of block 0 and of block 1 of one matrix, uint8 [N, K / 2], in the order of fragments."""
    N, K = values.shape[0], 2 * values.shape[1]
    codes = unpack_nibbles(values).view(N // TILE, 4, 8, 2, K // TILE, 2, 2, 2, 4, 2)
    return codes.permute(_VALUES).unbind(-1)


def _from_places(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Invert `_by_places`, whose results have the shape of the values here."""
    N, K = first.shape[0], 2 * first.shape[1]
    codes = torch.stack((first, second), -1).view(N // TILE, K // TILE, 4, 8, 4, 2, 2, 2, 2, 2)
    return pack_nibbles(codes.permute(_VALUES_BACK).reshape(N, K))


def _values_to_fragments(values: torch.Tensor) -> torch.Tensor:
    """Reorder the values of one matrix, uint8 [N, K / 2], in a copy of that shape."""
    first, second = _by_places(values)
    joined = (second & 8) << 4 | (second & 1) << 6 | (first & 8) << 2 | (second & 6) << 2 | (first & 7)
    return joined.reshape(values.shape)


def _values_to_rows(values: torch.Tensor) -> torch.Tensor:
    first = (values >> 2) & 8 | values & 7
    second = (values >> 4) & 8 | (values >> 2) & 6 | (values >> 6) & 1
    return _from_places(first, second)


def _sf_to_fragments(sf: torch.Tensor, columns: int) -> torch.Tensor:
    """Reorder the scale factors of one matrix, [N, K / columns], in a copy of that shape."""
    N, groups, per_step = *sf.shape, TILE // columns
    return sf.view(N // TILE, 4, 8, 2, groups // per_step, per_step).permute(_SF).reshape(sf.shape)


def _sf_to_rows(sf: torch.Tensor, columns: int) -> torch.Tensor:
    N, groups, per_step = *sf.shape, TILE // columns
    return sf.view(N // TILE, groups // per_step, 4, 8, per_step, 2).permute(_SF_BACK).reshape(sf.shape)

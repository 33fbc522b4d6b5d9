"""MXFP4 weights in the order of a warpgroup's register operand of FP8 wgmma, every factor relative to its row's.

A weight is e2m1 * 2^f, f of a group of 32 along K. With a reference r of the row, e2m1 * 2^(f - r) is an E4M3 number,
exactly, for every shift f - r from -8 to 6: 0.5 * 2^-8 is E4M3's smallest step 2^-9, 6 * 2^6 = 384 is below 448. So a
product of E4M3 weights and FP8 tokens, times 2^r, has the weights' exact numbers if a row's factors are at most 2^14
apart. Zeros have any factor: a group of zeros doesn't count.

    values: tiles of 64 rows by 64 of K, 2048 bytes each, along K, then along the rows, as in `envoi.quant.fragments`:
            words of 32 bits [row tile, K step, warp 4, g 8, t 4, k16 2, half 2], eight weights of one row each
            row = 64 tile + 16 warp + 2 g + half
            K   = 64 step + 32 block + 16 k16 + 4 t + i                   i 0 .. 3, block 0 and 1
    sf:     bytes [row tile, K step, warp 4, g 8, block 2, half 2], f - r + 8, or `NAN_INDEX` for the factor NaN
    scale:  2^r, float32 [E, N]

Bits of a word: magnitude i of block 0 at 4 i, of block 1 at 16 + 4 i, three each; sign i of block 0 at 8 i + 7, of
block 1 at 8 i + 3. So a byte permute (`prmt`) by half a word looks four magnitudes up in a table of eight E4M3 numbers,
those of the group's shift (`e4m3_tables`), and the signs are there or four places from there.
"""

from dataclasses import replace

import torch

from envoi.quant.bits import e2m1_decode, pack_nibbles, unpack_nibbles
from envoi.types import QuantTensor

ORDER = "fp8_fragments"
TILE = 64  # rows, and elements of K
LEAST_SHIFT, LARGEST_SHIFT = -8, 6  # powers of two by which every E2M1 number is an E4M3 number
NAN_INDEX = 15  # of the table of NaN
LEAST_COMPUTED = 3  # index from which on a table follows from its index: see `in_near_shifts`
NAN_BYTE, BIAS = 255, 127  # of UE8M0
SPREAD = LARGEST_SHIFT - LEAST_SHIFT


def e4m3_tables() -> torch.Tensor:
    """Return for each shift + 8 the E4M3 bytes of E2M1's eight magnitudes times 2^shift, and NaN: uint8 [16, 8]."""
    magnitudes = e2m1_decode(torch.arange(8, dtype=torch.uint8)).double()
    shifts = torch.arange(LEAST_SHIFT, LARGEST_SHIFT + 1, dtype=torch.float64)
    tables = (magnitudes * (2.0 ** shifts[:, None])).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.cat((tables, torch.full((1, 8), 0x7F, dtype=torch.uint8)))


def shifts_of(x: QuantTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each group's shift against its row's reference, int16 [.., N, K / 32], and the references, int16 [.., N].

    x: MXFP4 by rows. A group of zeros has the largest shift that its own factor allows, a factor that is NaN 0. Where a
    row's factors are further apart than `SPREAD`, some shift is below `LEAST_SHIFT`.
    """
    factors = x.sf.view(torch.uint8).to(torch.int16) - BIAS
    groups = x.values.unflatten(-1, (-1, 16)) & 0x77
    counts = (groups != 0).any(-1) & (factors != NAN_BYTE - BIAS)
    largest = factors.masked_fill(~counts, -BIAS).amax(-1)
    reference = largest - LARGEST_SHIFT
    shifts = factors - reference.unsqueeze(-1)
    return torch.where(counts, shifts, shifts.clamp(LEAST_SHIFT, LARGEST_SHIFT)), reference


def why_not_fp8_fragments(x: QuantTensor) -> str:
    """Return why a QuantTensor [E, N, K] can't be put into this order; "" if it can.

    Reads all of x and waits for the device; on meta, where there is nothing to read, takes the factors for near ones.
    """
    if not (x.packed and x.sf.dtype == torch.float8_e8m0fnu and x.group == (1, 32) and x.scale is None):
        return "it isn't MXFP4"
    if len(x.shape) != 3 or x.shape[-2] % TILE or x.shape[-1] % TILE:
        return f"rows and columns aren't multiples of {TILE}"
    if x.device.type == "meta":
        return ""
    for expert in range(x.shape[0]):
        wide = (shifts_of(_part(x, expert))[0] < LEAST_SHIFT).any(-1).nonzero().flatten()
        if len(wide):
            row = int(wide[0])
            return f"{len(wide)} rows of expert {expert} have factors more than 2^{SPREAD} apart, first row {row}"
    return ""


def _part(x: QuantTensor, expert: int) -> QuantTensor:
    return QuantTensor(x.values[expert], x.sf[expert], x.group, order=x.order)


def to_fp8_fragments(x: QuantTensor) -> QuantTensor:
    """Put MXFP4 weights [E, N, K] into the order, in place: values and sf of `x` must not be used any more.

    Raises ValueError if they can't be put into it.
    """
    why = "it is in another order already" if x.order != "rows" else why_not_fp8_fragments(x)
    if why:
        raise ValueError(f"weights: expected MXFP4 by rows, [E, N, K] with N and K multiples of {TILE}: {why}")
    scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    for expert in range(x.shape[0]):
        part = _part(x, expert)
        shifts, reference = shifts_of(part)
        is_nan = part.sf.view(torch.uint8) == NAN_BYTE
        index = (shifts - LEAST_SHIFT).to(torch.uint8).masked_fill(is_nan, NAN_INDEX)
        scale[expert] = torch.ldexp(torch.ones_like(scale[expert]), reference.int())
        x.values[expert] = _values_to_fragments(part.values)
        x.sf[expert].view(torch.uint8).copy_(_sf_to_fragments(index))
    return in_near_shifts(replace(x, scale=scale, order=ORDER))


def in_near_shifts(x: QuantTensor) -> QuantTensor:
    """Return x, in this order, and whether all shifts are -5 or more and none is NaN in `scales_at_most_2`.

    Kernels then compute the tables, else they read them from memory. On meta it is taken for so.
    """
    index = x.sf.view(torch.uint8)
    near = x.device.type == "meta" or not index.numel()
    near = near or (int(index.min()) >= LEAST_COMPUTED and int(index.max()) < NAN_INDEX)
    return replace(x, scales_at_most_2=near)


def to_rows(x: QuantTensor) -> QuantTensor:
    """Invert `to_fp8_fragments` in a copy, number for number; factors of zeros may differ. Any leading shape.

    Without a scale the rows' references are 1.
    """
    values = x.values.reshape(-1, *x.values.shape[-2:])
    index = x.sf.view(torch.uint8).reshape(-1, *x.sf.shape[-2:])
    if len(values):
        values = torch.stack([_values_to_rows(part) for part in values])
        index = torch.stack([_sf_to_rows(part) for part in index])
    exponent = index.int() + (LEAST_SHIFT + BIAS)
    if x.scale is not None:  # 2^r is 0.5 * 2^(r + 1)
        exponent = exponent + (torch.frexp(x.scale)[1] - 1).reshape(index.shape[:-1]).unsqueeze(-1)
    factors = exponent.clamp(0, NAN_BYTE - 1)
    factors = factors.masked_fill(index == NAN_INDEX, NAN_BYTE).to(torch.uint8)
    sf = factors.view(x.sf.shape).view(x.sf.dtype)
    return replace(x, values=values.view(x.values.shape), sf=sf, scale=None, scales_at_most_2=False, order="rows")


def _values_to_fragments(values: torch.Tensor) -> torch.Tensor:
    """Reorder the values of one matrix, uint8 [N, K / 2], in a copy of that shape."""
    N, K = values.shape[0], 2 * values.shape[1]
    # Axes: tile, warp, g, half | step, block, k16, t, i -> .. t, k16, half | block, i
    codes = unpack_nibbles(values).view(N // TILE, 4, 8, 2, K // TILE, 2, 2, 4, 4)
    codes = codes.permute(0, 4, 1, 2, 7, 6, 3, 5, 8).reshape(-1, 2, 4)
    magnitudes, signs = codes & 7, codes >> 3
    # Nibble n of a word is magnitude i of block b, n = 4 b + i, under a sign: of block 0 at 2 i + 1, of block 1 at 2 i.
    nibbles = magnitudes.reshape(-1, 8) | (signs.flip(1).transpose(1, 2).reshape(-1, 8) << 3)
    return pack_nibbles(nibbles).reshape(values.shape)


def _values_to_rows(values: torch.Tensor) -> torch.Tensor:
    N, K = values.shape[0], 2 * values.shape[1]
    nibbles = unpack_nibbles(values).reshape(-1, 8)
    magnitudes, signs = nibbles & 7, nibbles >> 3
    codes = magnitudes.view(-1, 2, 4) | (signs.view(-1, 4, 2).transpose(1, 2).flip(1) << 3)
    codes = codes.view(N // TILE, K // TILE, 4, 8, 4, 2, 2, 2, 4)  # tile, step, warp, g, t, k16, half, block, i
    return pack_nibbles(codes.permute(0, 2, 3, 6, 1, 7, 5, 4, 8).reshape(N, K))


def _sf_to_fragments(sf: torch.Tensor) -> torch.Tensor:
    N, groups = sf.shape
    return sf.view(N // TILE, 4, 8, 2, groups // 2, 2).permute(0, 4, 1, 2, 5, 3).reshape(sf.shape)


def _sf_to_rows(sf: torch.Tensor) -> torch.Tensor:
    N, groups = sf.shape
    return sf.view(N // TILE, groups // 2, 4, 8, 2, 2).permute(0, 2, 3, 5, 1, 4).reshape(sf.shape)

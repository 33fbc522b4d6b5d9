"""Weights that are quantised already: read as they are stored, and written in another scheme without changing a number.

A factor of a group may be repeated for parts of the group, and a power of two may be kept in either type; nothing else
keeps every number. `why_not` says what stands in the way, `regroup` does it.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from envoi.check import describe, dtype_name, expect_tensor
from envoi.quant import int4
from envoi.quant.bits import as_bytes, concatenate, e8m0_ceil, e8m0_to_float
from envoi.quant.cast import dequantize, expand_sf
from envoi.quant.formats import INT4, Scheme
from envoi.quant.pack import pack_weight, with_checked_scales
from envoi.runtime.math import cdiv
from envoi.types import Matrix, QuantTensor

PUBLISHED = (16, 32, 128)  # sides of the groups that published checkpoints have, besides 1 and whole sides
PAIRS = (torch.uint8, torch.int8, torch.float4_e2m1fn_x2)
VALUES = (torch.float8_e4m3fn, *PAIRS)
FACTORS = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.uint8, torch.float8_e4m3fn)
Block = tuple[int, int]


def as_stored(
    values: torch.Tensor, sf: torch.Tensor, name: str, scale: torch.Tensor | None = None,
    block: Block | None = None, parts: int = 1,
) -> QuantTensor:  # fmt: skip
    """Return a checkpoint's quantised weights and their factors as a QuantTensor, without a copy of the values.

    values [E, R, C]: float8_e4m3fn, or two E2M1 numbers a byte as uint8, int8 or float4_e2m1fn_x2 [E, R, C / 2], the
        even column in the low nibble, also as blocks [E, R, C / 32, 16].
    sf: one factor a group, which is multiplied: [E, rows, columns] of groups, [E, R] (a factor a row), [E, 2] (one for
        the gate rows, one for the up rows), [E] (a factor an expert). float32; bf16 and fp16, which are widened;
        float8_e8m0fnu, also as its bytes in uint8; float8_e4m3fn beside a scale (nvfp4).
    scale: float32, multiplied on top: see `row_scales`.
    block: rows and columns of a group, the last of which may be smaller. None: groups of equal size, with sides of 1,
        a side of PUBLISHED that divides R / parts and C, or the whole of R / parts, R or C.
    parts: ranges of rows, one below the other, in each of which groups begin anew: 2 for gate and up.
    Raises ValueError that names `name` or `name`_sf.
    """
    if not isinstance(values, torch.Tensor) or values.dtype not in VALUES:
        raise ValueError(f"{name}: expected weights in float8_e4m3fn, or uint8 or int8 pairs, got {describe(values)}")
    if not isinstance(sf, torch.Tensor) or sf.dtype not in FACTORS:
        kinds = "float32, bfloat16, float16, float8_e8m0fnu or uint8"
        raise ValueError(f"{name}_sf: expected the factors of {describe(values)} in {kinds}, got {describe(sf)}")
    packed = values.dtype in PAIRS
    if packed:
        values = values.view(torch.uint8)
        values = values.flatten(-2) if values.dim() == 4 and values.shape[-1] == 16 else values
    if values.dim() != 3:
        raise ValueError(f"{name}: expected [num_experts, rows, columns], got {describe(values)}")
    sizes = values.shape[1], values.shape[2] * (2 if packed else 1)
    groups = sf[(..., *(None,) * (3 - sf.dim()))] if sf.dim() in (1, 2) and block is None else sf
    whole = groups.dim() == 3 and groups.shape[0] == values.shape[0]
    counts = (groups.shape[1], groups.shape[2]) if whole else (0, 0)
    if block is None:
        sides = _guessed(sizes[0], counts[0], parts), _guessed(sizes[1], counts[1], 1)
    else:
        expected = tuple(map(cdiv, (sizes[0] // parts, sizes[1]), block))
        sides = block if counts == (parts * expected[0], expected[1]) else (None, None)
    if sides[0] is None or sides[1] is None:
        raise ValueError(_not_factors(name, describe(sf), values.shape[0], sizes, block, parts))
    group, factors = (sides[0], min(sides[1], max(sizes[1], 1))), stored_factors(groups)
    if parts > 1 and block is not None and sizes[0] // parts % group[0]:
        group, factors = _evened(group, factors, sizes[0] // parts, parts)
    x = QuantTensor(values, factors, group)
    return x if scale is None else replace(x, scale=row_scales(scale, x.shape, name))


def as_integers(
    values: torch.Tensor, sf: torch.Tensor, zeros: torch.Tensor | None, name: str
) -> QuantTensor:  # fmt: skip
    """Return INT4 weights as a QuantTensor, without a copy of the values.

    values uint8 [E, R, C / 2]: two integers from 0 to 15 a byte, the even column in the low nibble. sf [E, R, groups]:
    bfloat16 or float16, a factor for equal parts of a row. zeros: uint8 of sf's shape, 0 to 16, or None, which means 8.
    Raises ValueError that names `name`, `name`_sf or `name`_zeros.
    """
    expect_tensor(name, values, torch.uint8, ("num_experts", "rows", "columns / 2"))
    expect_tensor(f"{name}_sf", sf, int4.FACTORS, (*values.shape[:2], "groups"), values.device)
    columns, groups = 2 * values.shape[2], sf.shape[2]
    if groups == 0 or columns % groups:
        raise ValueError(f"{name}_sf: expected factors for equal parts of {columns} columns, got {describe(sf)}")
    if zeros is not None:
        expect_tensor(f"{name}_zeros", zeros, torch.uint8, sf.shape, sf.device)
        if zeros.numel() and zeros.device.type != "meta" and int(zeros.max()) > int4.LARGEST_ZERO:
            raise ValueError(
                f"{name}_zeros: expected zero points from 0 to {int4.LARGEST_ZERO}, got {int(zeros.max())}"
            )
    return QuantTensor(values, sf, (1, columns // groups), zeros=zeros)


def _guessed(size: int, count: int, parts: int) -> int | None:
    """Return the side of `count` equal groups of a side of `size`, None if it isn't one that can be told by that."""
    if count in (1, parts):
        return max(size // count, 1) if size % count == 0 else None
    side = _equal_parts(size, count)
    return side if side == 1 or (side in PUBLISHED and size // parts % side == 0) else None


def _not_factors(
    name: str, came: str, num_experts: int, sizes: tuple[int, int], block: Block | None, parts: int
) -> str:  # fmt: skip
    """Return what to say of factors whose shape isn't that of the weights' groups."""
    whole = f"the factors of {num_experts} matrices of {sizes[0]} x {sizes[1]}"
    if block is not None:
        rows, columns = map(cdiv, (sizes[0] // parts, sizes[1]), block)
        each = f", as blocks begin anew at each of {parts} x {sizes[0] // parts} rows" if parts > 1 else ""
        shape = [num_experts, parts * rows, columns]
        return f"{name}_sf: expected {whole} in blocks of {block[0]} x {block[1]}, {shape}{each}, got {came}"
    return (
        f"{name}_sf: expected {whole}, one for each row, for each matrix, or for equal groups of rows and columns with "
        f"sides of {', '.join(map(str, PUBLISHED))}, got {came}; pass weight_block_size=(rows, columns) for other "
        "groups, and where the last of a side is smaller"
    )


def _evened(group: Block, factors: torch.Tensor, rows: int, parts: int) -> tuple[Block, torch.Tensor]:
    """Repeat factors of row blocks of which the last of each part is smaller, for equal groups that no part shares."""
    side = math.gcd(group[0], rows)
    raw = as_bytes(factors).unflatten(1, (parts, -1)).repeat_interleave(group[0] // side, dim=2)
    raw = raw[:, :, : rows // side].flatten(1, 2)
    return (side, group[1]), raw.contiguous().view(factors.dtype)


def in_whole_blocks(
    x: QuantTensor, sf: torch.Tensor, block: Block, axis: int, added: int, parts: int = 1
) -> QuantTensor:
    """Return x = as_stored(.., sf, .., block, parts) in float8_e4m3fn with zeros, so that its last blocks are whole.

    axis, added, parts: as in `with_zeros`, 1 for rows and 2 for columns. Copies the values if there is any to add.
    """
    count = (x.shape[axis] // parts + added) // block[axis - 1]
    factors = stored_factors(sf)
    factors = with_zeros(factors, count - factors.shape[axis] // parts, axis, parts)
    return QuantTensor(with_zeros(x.values, added, axis, parts), factors.contiguous(), block)


def with_zeros(x: torch.Tensor, added: int, axis: int, parts: int = 1) -> torch.Tensor:
    """Return x with `added` zeros after each of its `parts` equal ranges along an axis: x itself if there are none."""
    if not added:
        return x
    size = x.shape[axis] // parts
    raw = as_bytes(x).unflatten(axis, (parts, size))
    whole = raw.new_zeros((*raw.shape[: axis + 1], size + added, *raw.shape[axis + 2 :]))
    whole.narrow(axis + 1, 0, size).copy_(raw)
    return whole.flatten(axis, axis + 1).view(x.dtype)


def row_scales(scale: torch.Tensor, shape: tuple[int, ...], name: str) -> torch.Tensor:
    """Return float32 scales of matrices [E, R, C] for each row, [E, R].

    scale: one number, for all; [E], one a matrix; [E, n], one for each of n equal ranges of rows, so [E, 2] for gate
        and up, one below the other.
    Raises ValueError that names `name`_scale.
    """
    num_experts, rows = shape[:2]
    parts = 1
    if isinstance(scale, torch.Tensor) and scale.dim() == 2 and scale.shape[0] == num_experts:
        parts = _equal_parts(rows, scale.shape[1]) and scale.shape[1]
    given = isinstance(scale, torch.Tensor) and scale.dtype == torch.float32
    if not given or not parts or scale.numel() not in (1, num_experts * parts) or scale.dim() > 2:
        sizes = f"[], [{num_experts}], [{num_experts}, 2] or [{num_experts}, {rows}]"
        raise ValueError(f"{name}_scale: expected float32 {sizes}, got {describe(scale)}")
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(num_experts, rows).contiguous()
    return scale.reshape(num_experts, parts).repeat_interleave(rows // parts, dim=1)


def _equal_parts(size: int, count: int) -> int | None:
    """Return the size of `count` equal parts, None if there are none."""
    return size // count if 0 < count <= size and size % count == 0 else None


def stored_factors(sf: torch.Tensor) -> torch.Tensor:
    """Return factors in a dtype that a QuantTensor has: bytes viewed as UE8M0, 16-bit floats widened."""
    if sf.dtype == torch.uint8:
        return sf.view(torch.float8_e8m0fnu)
    return sf.float() if sf.dtype in (torch.bfloat16, torch.float16) else sf


def why_not(x: QuantTensor, scheme: Scheme) -> str:
    """Return why the numbers of x can't be written in a scheme exactly; "" if they can. Reads the factors only,
    and on meta, where there is nothing to read, takes them for any numbers."""
    group, sf = scheme.group_for(x.shape), x.sf
    if x.integers != (scheme == INT4):
        return f"their elements are {_kind(x)}, and those of {scheme.name} are {_kind_of(scheme)}"
    if scheme == INT4:
        whole = x.group[0] == 1 and x.shape[-1] % x.group[1] == 0
        return "" if whole else f"{x.group[0]} x {x.group[1]} elements share a factor, not equal parts of a row"
    if x.values.dtype != scheme.values:
        return f"their elements are {_kind(x)}, and those of {scheme.name} are {_kind_of(scheme)}"
    for axis, size in enumerate(x.shape[-2:]):
        if x.group[axis] % group[axis] and x.group[axis] < size:
            return (
                f"{x.group[0]} x {x.group[1]} elements share a factor, and those of {scheme.name} are shared by "
                f"{group[0]} x {group[1]}"
            )
    if x.scale is not None and scheme.sf != torch.float8_e4m3fn:
        return f"they have a scale on top of their factors, which {scheme.name} hasn't"
    if (sf.dtype == torch.float8_e4m3fn) != (scheme.sf == torch.float8_e4m3fn):
        return f"their factors are in {dtype_name(sf.dtype)}, and those of {scheme.name} in {dtype_name(scheme.sf)}"
    if scheme.sf == torch.float8_e8m0fnu and sf.dtype == torch.float32 and not _powers_of_two(sf):
        return f"not all of their factors are powers of two, as those of {scheme.name} are"
    return ""


def _kind(x: QuantTensor) -> str:
    return "integers" if x.integers else "E2M1" if x.packed else "E4M3"


def _kind_of(scheme: Scheme) -> str:
    return "integers" if scheme == INT4 else "E2M1" if scheme.values == torch.uint8 else "E4M3"


def _powers_of_two(sf: torch.Tensor) -> bool:
    return sf.device.type != "meta" and bool((e8m0_to_float(e8m0_ceil(sf)) == sf).all())


def regroup(x: QuantTensor, scheme: Scheme) -> QuantTensor:
    """Write x in a scheme for which `why_not` has no reason: values are shared, factors are repeated or shared."""
    group, sf = scheme.group_for(x.shape), x.sf
    if scheme == INT4:
        zeros = None if x.zeros is None else x.zeros.contiguous()
        return int4.without_needless_zeros(replace(x, values=x.values.contiguous(), sf=sf.contiguous(), zeros=zeros))
    if scheme.sf == torch.float8_e8m0fnu and sf.dtype == torch.float32:
        sf = e8m0_ceil(sf)
    elif scheme.sf == torch.float32 and sf.dtype == torch.float8_e8m0fnu:
        sf = e8m0_to_float(sf)
    raw = as_bytes(sf)
    for axis, size in zip((-2, -1), x.shape[-2:], strict=True):
        if x.group[axis] != group[axis]:
            count = -(-size // group[axis])
            raw = raw.repeat_interleave(-(-x.group[axis] // group[axis]), dim=axis).narrow(axis, 0, count)
    sf = raw.contiguous().view(scheme.sf)
    x = replace(x, values=x.values.contiguous(), sf=sf, group=group, scales_at_most_2=False)
    if scheme.sf == torch.float8_e4m3fn:
        none = torch.ones((), dtype=torch.float32, device=x.device)
        return replace(x, scale=row_scales(none if x.scale is None else x.scale, x.shape, "weights"))
    return with_checked_scales(x)


def requantize(
    x: QuantTensor,
    scheme: Scheme | None,
    name: str,
    order: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach,
) -> Matrix:
    """Quantise the numbers of x [E, R, C] anew in a scheme (None: bf16), so that they are rounded a second time.

    One expert at a time, and all its rows at once; order: applied to its float32 matrix before.
    """
    parts: list[Any] = []
    for expert in range(x.shape[0]):
        scale = x.scale if x.scale is None or x.scale.numel() == 1 else x.scale[expert : expert + 1]
        part = slice(expert, expert + 1)
        zeros = None if x.zeros is None else x.zeros[part]
        one = replace(x, values=x.values[part], sf=x.sf[part], scale=scale, zeros=zeros)
        parts.append(pack_weight(order(dequantize(one)), scheme, name))
    if not parts:
        return pack_weight(order(dequantize(x)), scheme, name)
    if scheme is None:
        return concatenate(parts)
    values, sf = concatenate([part.values for part in parts]), concatenate([part.sf for part in parts])
    bounded = all(part.scales_at_most_2 for part in parts)
    scale = None if parts[0].scale is None else torch.cat([part.scale for part in parts])
    return QuantTensor(values, sf, parts[0].group, scale, scales_at_most_2=bounded)


def share_factors(x: QuantTensor, parts: int) -> tuple[QuantTensor, int]:
    """Give row blocks b, b + n/parts, .. of x, which `parts` equal ranges of rows have, one factor: their largest.

    x [E, R, C] in float8_e4m3fn with float32 factors. Returns x with the values of the other blocks divided by as much
    and rounded, and how many values have changed by that; 0 if every number has been kept, as where factors are powers
    of two or alike.
    """
    blocks = x.sf.unflatten(-2, (parts, -1))
    shared = blocks.abs().amax(dim=-3, keepdim=True).expand_as(blocks)
    if torch.equal(shared, blocks):
        return x, 0
    sf, changed = shared.flatten(-3, -2).contiguous(), 0
    values = torch.empty_like(x.values)
    for expert, given in enumerate(x.values):
        # Products of a float32 and an E4M3 number are exact in float64.
        own, new = (expand_sf(factors[expert].double(), x.group, given.shape) for factors in (x.sf, sf))
        meant = given.double() * own
        values[expert] = torch.where(new == 0, 0.0, meant / new).to(torch.float8_e4m3fn)
        kept = (values[expert].double() * new == meant) | (meant.isnan() & values[expert].float().isnan())
        changed += int((~kept).sum())
    return replace(x, values=values, sf=sf), changed

# pyright: reportArgumentType=false
"""Index vectors, loads and stores of a tile, for lowered epilogues in Triton; the functions of tile_gluon.

FP8 is stored as bits in uint8, so that every GPU can write it.
"""

import triton
import triton.language as tl

from envoi.epilogues.codes_triton import from_e4m3, to_e4m3, widen
from envoi.epilogues.device import INTERPRETED, maximum, mxfp8_factors, near_e4m3


@triton.jit
def row_ids(x, m):
    """Return m, m + 1, .. for the rows of x."""
    return m + tl.arange(0, x.shape[0])


@triton.jit
def col_ids(x, n):
    """Return n, n + 1, .. for the columns of x."""
    return n + tl.arange(0, x.shape[1])


@triton.jit
def rows_like(r, x):
    """Return the row value unchanged; Triton needs no layout."""
    return r


@triton.jit
def even(x):
    """Return columns 0, 2, 4 .."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))[0]


@triton.jit
def odd(x):
    """Return columns 1, 3, 5 .."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))[1]


@triton.jit
def ids_like(like, start):
    """Return start, start + 1, .. for the entries of the vector `like`."""
    return start + tl.arange(0, like.shape[0])


@triton.jit
def load_at(pointer, ids, limit):
    """Load float32 values for the ids below the limit, 0 for the others."""
    return widen(tl.load(pointer + ids, mask=ids < limit, other=0.0))


@triton.jit
def load_one(pointer):
    """Load the float32 value of a tensor of one element."""
    return widen(tl.load(pointer))


@triton.jit
def load_tile(pointer, x, m, n, m_end, num_columns):
    """Load a float32 value for each element of x from a row-major tensor with num_columns columns."""
    rows, columns = row_ids(x, m), col_ids(x, n)
    at = rows[:, None].to(tl.int64) * num_columns + columns[None, :]
    mask = (rows < m_end)[:, None] & (columns < num_columns)[None, :]
    return widen(tl.load(pointer + at, mask=mask, other=0.0))


@triton.jit
def store_row(pointer, value, m, m_end, stride, offset):
    """Store one value a row, `stride` elements apart."""
    ids = ids_like(value, m)
    tl.store(pointer + ids.to(tl.int64) * stride + offset, value, mask=ids < m_end)


@triton.jit
def store_tile(pointer, value, m, n, m_end, num_columns, cfg):
    """Store to a row-major tensor with num_columns columns."""
    rows, columns = row_ids(value, m), col_ids(value, n)
    at = rows[:, None].to(tl.int64) * num_columns + columns[None, :]
    mask = (rows < m_end)[:, None] & (columns < num_columns)[None, :]
    tl.store(pointer + at, value, mask=mask)


@triton.jit
def scatter_tile(addresses, value, m, n, m_end, num_columns, cfg):
    """Scatter rows to their addresses."""
    rows, columns = row_ids(value, m), col_ids(value, n)
    to = tl.load(addresses + rows, mask=rows < m_end, other=0).to(tl.pointer_type(value.dtype))
    mask = (rows < m_end)[:, None] & (columns < num_columns)[None, :]
    tl.store(to[:, None] + columns[None, :], value, mask=mask)


@triton.jit
def scatter_factors(addresses, factors, m, n, m_end, num_columns, COLUMNS: tl.constexpr):
    """Store the float32 factors [rows, groups] of a chunk of COLUMNS values behind the num_columns bytes of their rows.

    n: the chunk's first group. num_columns: a multiple of the group.
    """
    rows, groups = row_ids(factors, m), col_ids(factors, n)
    to = tl.load(addresses + rows, mask=rows < m_end, other=0) + num_columns
    group: tl.constexpr = COLUMNS // factors.shape[1]
    mask = (rows < m_end)[:, None] & (groups * group < num_columns)[None, :]
    tl.store(to.to(tl.pointer_type(tl.float32))[:, None] + groups[None, :], factors, mask=mask)


@triton.jit
def sum_columns(x):
    """Return the sum of each row."""
    return tl.sum(x, axis=1)


@triton.jit
def largest(x, AXIS: tl.constexpr):
    """Return the largest along an axis; NaN if there is one."""
    if INTERPRETED:  # it would call `maximum` once an element, and its own maximum ignores NaN
        return tl.where(tl.max((x != x).to(tl.int32), AXIS) > 0, float("nan"), tl.max(x, AXIS))
    else:
        return tl.reduce(x, AXIS, maximum)


@triton.jit
def max_columns(x):
    """Return the largest of each row; NaN if the row has one."""
    return largest(x, 1)


@triton.jit
def group_max(x, GROUP: tl.constexpr):
    """Return the largest of each GROUP columns of x [rows, C], as [rows, C / GROUP]."""
    return largest(tl.reshape(x, (x.shape[0], x.shape[1] // GROUP, GROUP)), 2)


@triton.jit
def times_group(x, factors, GROUP: tl.constexpr):
    """Multiply each GROUP columns of x by their factor; factors: [rows, C / GROUP]."""
    cut = tl.reshape(x, (x.shape[0], x.shape[1] // GROUP, GROUP)) * factors[:, :, None]
    return tl.reshape(cut, (x.shape[0], x.shape[1]))


@triton.jit
def round_mxfp8(x):
    """Round x [rows, C] to numbers of MXFP8, in groups of 32 columns."""
    groups = tl.reshape(x, (x.shape[0], x.shape[1] // 32, 32))
    factor, inverse = mxfp8_factors(tl.max(groups.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2))
    rounded = near_e4m3(groups * inverse[:, :, None]) * factor[:, :, None]
    return tl.reshape(rounded, (x.shape[0], x.shape[1]))


@triton.jit
def even_of_column(v, x):
    """Return entries 0, 2, 4 .. of a column value."""
    return tl.split(tl.reshape(v, (v.shape[0] // 2, 2)))[0]


@triton.jit
def odd_of_column(v, x):
    """Return entries 1, 3, 5 .. of a column value."""
    return tl.split(tl.reshape(v, (v.shape[0] // 2, 2)))[1]


@triton.jit
def pack_pairs(codes):
    """Pack nibbles [rows, C] into bytes [rows, C / 2], the even column in the low nibble."""
    return even(codes) | (odd(codes) << 4)


@triton.jit
def store_column(pointer, value, ids, limit):
    """Store a column value."""
    tl.store(pointer + ids, value, mask=ids < limit)


@triton.jit
def e4m3(x):
    """Round float32 to the bits of E4M3, saturating."""
    return to_e4m3(x)


@triton.jit
def e4m3_of_group(x):
    """Round float32 to the bits of E4M3."""
    return e4m3(x)


@triton.jit
def e4m3_scale(x):
    """Return a scale factor rounded to E4M3 bits, and the float32 inverse of the rounded factor."""
    sf = to_e4m3(tl.maximum(x, 0.001953125, propagate_nan=tl.PropagateNan.ALL))
    return sf, tl.div_rn(1.0, from_e4m3(sf))

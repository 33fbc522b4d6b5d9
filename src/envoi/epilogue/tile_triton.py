# pyright: reportArgumentType=false
"""Index vectors, loads and stores of a tile, for lowered epilogues in Triton: the twin of tile_gluon.

FP8 leaves as bits in uint8, so that every GPU can write it.
"""

import triton
import triton.language as tl

from envoi.epilogue.codes_triton import from_e4m3, to_e4m3, widen
from envoi.epilogue.device import INTERPRETED, maximum


@triton.jit
def row_ids(x, m):
    """m, m + 1, .. for the rows of x."""
    return m + tl.arange(0, x.shape[0])


@triton.jit
def col_ids(x, n):
    """n, n + 1, .. for the columns of x."""
    return n + tl.arange(0, x.shape[1])


@triton.jit
def rows_like(r, x):
    """A row value beside x; Triton needs no layout."""
    return r


@triton.jit
def even(x):
    """Columns 0, 2, 4 .."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))[0]


@triton.jit
def odd(x):
    """Columns 1, 3, 5 .."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))[1]


@triton.jit
def ids_like(like, start):
    """start, start + 1, .. in the layout of a vector."""
    return start + tl.arange(0, like.shape[0])


@triton.jit
def load_at(pointer, ids, limit):
    """A value for each id below the limit, 0 for the others."""
    return widen(tl.load(pointer + ids, mask=ids < limit, other=0.0))


@triton.jit
def load_one(pointer):
    """The value of a tensor of one element."""
    return widen(tl.load(pointer))


@triton.jit
def load_tile(pointer, x, m, n, m_end, num_columns):
    """A value for each element of x, from a row-major tensor."""
    rows, columns = row_ids(x, m), col_ids(x, n)
    at = rows[:, None].to(tl.int64) * num_columns + columns[None, :]
    mask = (rows < m_end)[:, None] & (columns < num_columns)[None, :]
    return widen(tl.load(pointer + at, mask=mask, other=0.0))


@triton.jit
def store_row(pointer, value, m, m_end, stride, offset):
    """One value a row, `stride` apart."""
    ids = ids_like(value, m)
    tl.store(pointer + ids.to(tl.int64) * stride + offset, value, mask=ids < m_end)


@triton.jit
def store_tile(pointer, value, m, n, m_end, num_columns):
    """To a row-major tensor."""
    rows, columns = row_ids(value, m), col_ids(value, n)
    at = rows[:, None].to(tl.int64) * num_columns + columns[None, :]
    mask = (rows < m_end)[:, None] & (columns < num_columns)[None, :]
    tl.store(pointer + at, value, mask=mask)


@triton.jit
def send_tile(addresses, value, m, n, m_end, num_columns, cfg):
    """Rows to the addresses given for them."""
    rows, columns = row_ids(value, m), col_ids(value, n)
    to = tl.load(addresses + rows, mask=rows < m_end, other=0).to(tl.pointer_type(value.dtype))
    mask = (rows < m_end)[:, None] & (columns < num_columns)[None, :]
    tl.store(to[:, None] + columns[None, :], value, mask=mask)


@triton.jit
def sum_columns(x):
    """The sum of each row."""
    return tl.sum(x, axis=1)


@triton.jit
def largest(x, AXIS: tl.constexpr):
    """The largest along an axis; NaN if there is one."""
    if INTERPRETED:  # which calls a function of ours for each element, and whose own maximum ignores NaN
        return tl.where(tl.max((x != x).to(tl.int32), AXIS) > 0, float("nan"), tl.max(x, AXIS))
    else:
        return tl.reduce(x, AXIS, maximum)


@triton.jit
def max_columns(x):
    """The largest of each row; NaN if there is one."""
    return largest(x, 1)


@triton.jit
def group_max(x, GROUP: tl.constexpr):
    """[rows, C] -> the largest of each GROUP columns, [rows, C / GROUP]."""
    return largest(tl.reshape(x, (x.shape[0], x.shape[1] // GROUP, GROUP)), 2)


@triton.jit
def times_group(x, factors, GROUP: tl.constexpr):
    """Each GROUP columns of x times its factor [rows, C / GROUP]."""
    cut = tl.reshape(x, (x.shape[0], x.shape[1] // GROUP, GROUP)) * factors[:, :, None]
    return tl.reshape(cut, (x.shape[0], x.shape[1]))


@triton.jit
def even_of_column(v, x):
    """Entries 0, 2, 4 .. of a column value."""
    return tl.split(tl.reshape(v, (v.shape[0] // 2, 2)))[0]


@triton.jit
def odd_of_column(v, x):
    """Entries 1, 3, 5 .. of a column value."""
    return tl.split(tl.reshape(v, (v.shape[0] // 2, 2)))[1]


@triton.jit
def pack_pairs(codes):
    """Nibbles [rows, C] -> bytes [rows, C / 2], the even column in the low nibble."""
    return even(codes) | (odd(codes) << 4)


@triton.jit
def store_column(pointer, value, ids, limit):
    """A vector over columns."""
    tl.store(pointer + ids, value, mask=ids < limit)


@triton.jit
def e4m3(x):
    """float32 -> E4M3, saturating."""
    return to_e4m3(x)


@triton.jit
def e4m3_scale(x):
    """A scale factor stored as E4M3, and the float32 of its inverse."""
    sf = to_e4m3(tl.maximum(x, 0.001953125, propagate_nan=tl.PropagateNan.ALL))
    return sf, tl.div_rn(1.0, from_e4m3(sf))

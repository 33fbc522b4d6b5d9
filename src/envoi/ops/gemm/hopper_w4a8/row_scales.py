"""Quantisation of an L1's rows by the CTA that completes them, in Gluon: E4M3 with a scale a row.

A scale needs the whole row, which CTAs compute piece by piece. The last of a row's tiles to arrive reads the rows back,
from the L2 cache, and quantises them while the SM's other CTA multiplies: no kernel does it afterwards. The bits are
those of `envoi.ops.moe.kernels.quantize_kernel`.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from envoi.epilogues.tile_gluon import divide, e4m3, group_amax
from envoi.ops.gemm.hopper_w4a8.config import PIECE

E4M3_MAX = gl.constexpr(448.0)


@gluon.constexpr_function
def pieces_of(columns):
    """Return (first column, size) of each piece of a row: powers of two, the last one possibly beyond the row's end."""
    count, first, found = -(-columns // PIECE), 0, []
    while count > 0:
        size = 1 << (count.bit_length() - 1)
        found.append((first, size * PIECE))
        first, count = first + size * PIECE, count - size
    return tuple(found)


@gluon.jit
def quantize_rows(hidden, values, scales, m, m_end, cfg: gl.constexpr):
    """Quantise the rows m .. m_end of bf16 [M, cfg.quantized_columns]: E4M3 values, as bytes, and float32 scales [M].

    Called by all warps of a consumer; each takes one or two rows at a time.
    """
    columns: gl.constexpr = cfg.quantized_columns
    each: gl.constexpr = cfg.rows_of_warp
    warps: gl.constexpr = gl.num_warps()
    pieces: gl.constexpr = pieces_of(columns)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [warps, 1], [1, 0])
    for first in range(m, m_end, warps * each):
        rows = first + gl.arange(0, warps * each, gl.SliceLayout(1, layout))
        held = ()
        largest = gl.full((warps * each,), 0, gl.int32, gl.SliceLayout(1, layout))
        for i in gl.static_range(len(pieces)):
            at, inside = place(rows, m_end, columns, pieces[i][0], pieces[i][1], layout)
            x = gl.load(hidden + at, mask=inside, other=0.0, cache_modifier=".cg")
            held += (x,)
        for i in gl.static_range(len(pieces)):
            # As integers, magnitudes compare as they do as numbers, and NaN is above all.
            bits = held[i].to(gl.int16, bitcast=True).to(gl.int32) & 0x7FFF
            largest = gl.maximum(largest, gl.max(bits, axis=1))
        amax = group_amax((largest << 16).to(gl.float32, bitcast=True))
        gl.store(scales + rows, divide(amax, E4M3_MAX), mask=rows < m_end)
        factors = divide(gl.full(amax.shape, E4M3_MAX, gl.float32, amax.type.layout), amax)
        for i in gl.static_range(len(pieces)):
            at, inside = place(rows, m_end, columns, pieces[i][0], pieces[i][1], layout)
            x = e4m3(held[i].to(gl.float32) * factors[:, None])
            gl.store(values + at, x.to(gl.uint8, bitcast=True), mask=inside)


@gluon.jit
def place(rows, m_end, columns: gl.constexpr, first: gl.constexpr, size: gl.constexpr, layout: gl.constexpr):
    """Return the offsets of a piece of rows, and which of them are inside."""
    c = first + gl.arange(0, size, gl.SliceLayout(0, layout))
    at = rows.to(gl.int64)[:, None] * columns + c[None, :]
    return at, (rows < m_end)[:, None] & (c < columns)[None, :]

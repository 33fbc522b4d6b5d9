# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
"""Stages of the Hopper router and their loads by TMA: which rows, columns and steps a CTA has, and its producer.

Columns without an expert are loaded as little as can be: TMA takes about four times as long to fill a row of the gate
with zeros as to load one.
"""

from typing import Any, NamedTuple

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from envoi.runtime.triton_compat import tma_load


class Stages(NamedTuple):
    """Pipeline: x [num_stages, tile, block_k], y [num_stages, block_n, block_k], barriers empty and full per stage.

    z [num_stages, rest_n, block_k]: columns after those of y; the buffer y if there are none.
    """

    x: Any
    y: Any
    z: Any
    empty: Any
    full: Any


class Sides(NamedTuple):
    """Descriptors of the product's sides: x tokens, in boxes [box_m, block_k], y gate, in boxes [box_n, block_k]."""

    x: Any
    y: Any


class Sizes(NamedTuple):
    """Sizes M (tokens) and K (hidden) of the product."""

    num_tokens: Any
    hidden: Any


class Part(NamedTuple):
    """Work of a CTA: rows from m, columns from n, steps [first, last) along K; its number among its rows' parts."""

    m: Any
    n: Any
    first: Any
    last: Any
    number: Any


@gluon.jit
def part_of(sizes, tiling: gl.constexpr):
    """Find the Part of this CTA."""
    pid = gl.program_id(0)
    part = pid % tiling.parts
    first = part // tiling.parts_n * tiling.steps_each
    last = gl.minimum(first + tiling.steps_each, gl.cdiv(sizes.hidden, tiling.block_k))
    return Part(pid // tiling.parts * tiling.rows_per_cta, part % tiling.parts_n * tiling.width, first, last, part)


@gluon.jit
def shifted(part, columns):
    """Return a Part whose columns begin so many later."""
    return Part(part.m, part.n + columns, part.first, part.last, part.number)


@gluon.jit
def load_stage(sides, stages, stage, part, k, sizes, tiling: gl.constexpr, spec: gl.constexpr):
    """Load step k of the rows and columns of a Part into a stage."""
    full = stages.full.index(stage)
    expect_stage(sides, full, part.n, tiling, spec)
    if tiling.box_m < tiling.rows_per_cta:
        load_tokens(sides.x, stages.x, full, stage, part.m, k, sizes, tiling)
    else:
        x_buf = stages.x.index(stage)
        if tiling.rows_per_cta < tiling.tile:
            x_buf = x_buf.slice(0, tiling.rows_per_cta, dim=0)  # results of the rows after these are never read
        tma_load(sides.x, [part.m, k * tiling.block_k], full, x_buf)
    if tiling.box_n == tiling.width:
        tma_load(sides.y, [part.n, k * tiling.block_k], full, stages.y.index(stage))
    else:
        load_gate(sides.y, stages.y, full, stage, part.n, k, tiling, spec)
        if tiling.rest_n > 0:
            load_gate(sides.y, stages.z, full, stage, part.n + tiling.block_n, k, tiling, spec)


@gluon.jit
def expect_stage(sides, full, n, tiling: gl.constexpr, spec: gl.constexpr):
    """Announce to a stage's barrier the bytes of tokens and of columns from n on: of boxes that have experts."""
    tokens: gl.constexpr = sides.x.block_type.nbytes * (tiling.rows_per_cta // tiling.box_m)
    gate: gl.constexpr = sides.y.block_type.nbytes
    all: gl.constexpr = tokens + gate * (tiling.width // tiling.box_n)
    left: gl.constexpr = spec.num_experts % tiling.width
    last: gl.constexpr = tokens + gate * (-(-left // tiling.box_n))
    if left == 0 or tiling.box_n == tiling.width:
        mbarrier.expect(full, all)
    elif spec.num_experts < tiling.width:
        mbarrier.expect(full, last)
    else:
        is_last = n + tiling.width > spec.num_experts
        mbarrier.expect(full, last, pred=is_last)
        mbarrier.expect(full, all, pred=is_last == 0)


@gluon.jit
def load_tokens(x_desc, buffers, full, stage, m, k, sizes, tiling: gl.constexpr):
    """Load step k of rows from m on in boxes.

    A box of such rows only is loaded from m, since a stage's bytes have to be the same; its products are never read.
    """
    count: gl.constexpr = tiling.rows_per_cta // tiling.box_m
    for b in gl.static_range(count):
        at = m + b * tiling.box_m
        at = gl.where(at < sizes.num_tokens, at, m)
        box = buffers.index(stage).slice(b * tiling.box_m, tiling.box_m, dim=0)
        tma_load(x_desc, [at, k * tiling.block_k], full, box)


@gluon.jit
def load_gate(y_desc, buffers, full, stage, n, k, tiling: gl.constexpr, spec: gl.constexpr):
    """Load step k of columns from n on in boxes, those with experts; products with the others are never read."""
    count: gl.constexpr = buffers.shape[1] // tiling.box_n
    for b in gl.static_range(count):
        at = n + b * tiling.box_n
        box = buffers.index(stage).slice(b * tiling.box_n, tiling.box_n, dim=0)
        tma_load(y_desc, [at, k * tiling.block_k], full, box, pred=at < spec.num_experts)


@gluon.jit
def load_first(x_desc, y_desc, stages, sizes, tiling: gl.constexpr, spec: gl.constexpr):
    """Fill the first stages, usually all of them, before the roles start."""
    part = part_of(sizes, tiling)
    for k in range(part.first, gl.minimum(part.first + tiling.num_first, part.last)):
        load_stage(Sides(x_desc, y_desc), stages, k - part.first, part, k, sizes, tiling, spec)


@gluon.jit
def producer(x_desc, y_desc, stages, sizes, tiling: gl.constexpr, spec: gl.constexpr):
    """Fill the other stages, and refill each as it becomes empty: a role of one warp."""
    part = part_of(sizes, tiling)
    turns: gl.constexpr = tiling.turns
    for turn in gl.static_range(turns):
        before = turn * (part.last - part.first)
        for k in range(part.first + (tiling.num_first if turn == 0 else 0), part.last):
            step = before + k - part.first
            mbarrier.wait(stages.empty.index(step % tiling.num_stages), ((step // tiling.num_stages) & 1) ^ 1)
            at = shifted(part, turn * tiling.block_n)
            load_stage(Sides(x_desc, y_desc), stages, step % tiling.num_stages, at, k, sizes, tiling, spec)

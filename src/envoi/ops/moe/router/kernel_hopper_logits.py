# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
"""Logits of the Hopper router between the products and the choice of experts: in registers and in shared memory."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from envoi.epilogues.device import INF
from envoi.ops.moe.router.choose_experts import halvings
from envoi.ops.moe.router.device_types import Biases, Positions
from envoi.ops.moe.router.selection import load_biases
from envoi.runtime.triton_compat import reinterpret


@gluon.constexpr_function
def row_layout(tiling, lanes):
    """Layout of logits [rows, columns], `lanes` lanes for each row; each has neighbouring columns of every run."""
    return gl.BlockedLayout([1, tiling.run // lanes], [32 // lanes, lanes], [tiling.num_warps, 1], [1, 0])


@gluon.constexpr_function
def slot_layout(tiling, lanes, slots):
    """Layout of the chosen experts [rows, slots], in the lanes of `row_layout`."""
    return gl.BlockedLayout([1, max(1, slots // lanes)], [32 // lanes, lanes], [tiling.num_warps, 1], [1, 0])


@gluon.jit
def columns_in(layout: gl.constexpr, count: gl.constexpr):
    """Return 0, 1, 2, .. as [1, count] for tiles of a layout."""
    return gl.arange(0, count, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def positions_of(LANES: gl.constexpr, tiling: gl.constexpr, spec: gl.constexpr):
    """Make the Positions of tiles with LANES lanes for each row."""
    layout: gl.constexpr = row_layout(tiling, LANES)
    slots: gl.constexpr = slot_layout(tiling, LANES, spec.slots)
    contenders: gl.constexpr = slot_layout(tiling, LANES, spec.contenders)
    columns = columns_in(layout, tiling.columns)
    if tiling.in_runs:
        # Whole registers of columns after z: with one number for all of them, the compiler drops all but one.
        columns = gl.where(columns < tiling.width, columns, tiling.width)
    return Positions(
        columns, columns_in(slots, spec.slots), columns_in(contenders, spec.contenders),
        columns_in(layout, spec.group_slots),
    )  # fmt: skip


@gluon.jit
def biases_of(tables, LANES: gl.constexpr, tiling: gl.constexpr, spec: gl.constexpr):
    """Load the Biases of tiles with LANES lanes for each row."""
    columns = columns_in(row_layout(tiling, LANES), tiling.columns)
    biases = load_biases(tables, columns, spec)
    if tiling.in_runs and spec.has_expert_bias:  # constants, for the sake of `positions_of`
        return Biases(biases.logit, gl.where(columns < spec.num_experts, biases.key, -INF))
    else:
        return biases


@gluon.constexpr_function
def logits_layout(columns):
    """Shared-memory layout of logits: no two lanes of a half warp write to the same bank."""
    return gl.SwizzledSharedLayout(8, 1, min(8, columns // 8), [1, 0])


@gluon.jit
def logits_buffer(stages, rows: gl.constexpr):
    """View the gate's memory as boards of logits [tile, run], each cut into rows: [boards * tile / rows, rows, run].

    The last boards, after the stages, take the logits of all turns but the last; those of the last turn, or the only
    one, replace stages that are consumed.
    """
    tiling: gl.constexpr = stages.tiling
    count: gl.constexpr = tiling.boards * (tiling.tile // rows)
    return reinterpret(stages.y, gl.float32, [count, rows, tiling.run], logits_layout(tiling.run))


@gluon.jit
def board_of(turn, tiling: gl.constexpr):
    """Return the board of a turn's logits; that of the last turn is in the memory of the stages."""
    if tiling.turns > 1:
        return tiling.boards - 1 - turn
    else:
        return 0


@gluon.jit
def load_board(stages, row, rows: gl.constexpr, turn: gl.constexpr, lanes: gl.constexpr):
    """Load a turn's logits [rows, run] of the rows from `row` of this CTA on."""
    tiling: gl.constexpr = stages.tiling
    at = board_of(turn, tiling) * (tiling.tile // rows) + row // rows
    return logits_buffer(stages, rows).index(at).load(row_layout(tiling, lanes))


@gluon.jit
def beside(left, right):
    """Put two tiles [R, C] side by side: [R, 2 C]."""
    both = gl.join(left, right).permute((0, 2, 1))
    return both.reshape([left.shape[0], 2 * left.shape[1]])


@gluon.jit
def both_buffers(stages, rows: gl.constexpr):
    """View the memory of y as logits [tile, block_n] and that of z as logits [tile, rest_n], cut into rows each."""
    tiling: gl.constexpr = stages.tiling
    count: gl.constexpr = tiling.boards * (tiling.tile // rows)
    left = reinterpret(stages.y, gl.float32, [count, rows, tiling.block_n], logits_layout(tiling.block_n))
    right = reinterpret(stages.z, gl.float32, [count, rows, tiling.rest_n], logits_layout(tiling.rest_n))
    return left, right


@gluon.jit
def load_both(stages, row, rows: gl.constexpr, lanes: gl.constexpr):
    """Load the logits [rows, columns] of the rows from `row` of this CTA on, of y and z; zeros for columns after."""
    tiling: gl.constexpr = stages.tiling
    layout: gl.constexpr = row_layout(tiling, lanes)
    left, right = both_buffers(stages, rows)
    y = left.index(row // rows).load(layout)
    z = right.index(row // rows).load(layout)
    doublings: gl.constexpr = halvings(tiling.block_n // tiling.rest_n)
    for _ in gl.static_range(doublings):
        z = beside(z, gl.full(z.shape, 0.0, gl.float32, layout))
        z = gl.convert_layout(z, layout, assert_trivial=True)
    return gl.convert_layout(beside(y, z), layout, assert_trivial=True)


@gluon.jit
def load_logits(stages, row, rows: gl.constexpr, lanes: gl.constexpr):
    """Load the logits [rows, columns] of the rows from `row` of this CTA on, those of two turns side by side."""
    tiling: gl.constexpr = stages.tiling
    x = load_board(stages, row, rows, 0, lanes)
    if tiling.turns > 1:
        x = beside(x, load_board(stages, row, rows, 1, lanes))
        x = gl.convert_layout(x, row_layout(tiling, lanes), assert_trivial=True)
    return x

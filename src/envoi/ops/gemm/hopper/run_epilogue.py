"""Run a lowered epilogue on a consumer's accumulator, in column chunks.

The epilogue is generated code (`envoi.epilogues.lower`). It sees [tokens, features], also where the mainloop computes
the transpose. A chunk is `cfg.epilogue_columns` wide: that bounds the registers that the epilogue takes beside the
accumulator, and the shared memory through which its outputs are stored by TMA.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from envoi.epilogues.chunk import ChunkBuffers, ChunkPosition
from envoi.epilogues.tile_gluon import halves, load_addresses
from envoi.ops.gemm.hopper.problem import Problem
from envoi.ops.gemm.hopper.split_k import SplitK
from envoi.runtime.aggregate import Scalar, aggregate
from envoi.runtime.sync import arrive


@aggregate
class RowReductions:
    """Scratch, in global memory, for reductions over rows that several tiles span; an empty buffer without any.

    partials: a slot for each tile along N; with `code.maxima_together` [reductions, M, num_slots]. Never cleared.
    counters: 0 at launch; the last of a row's tiles to arrive resets its counter.
    """

    partials: gl.tensor  # float32 pointer, [reductions, num_slots, M]
    counters: gl.tensor  # int32 pointer, [M + block_m], indexed by a tile's first row


@aggregate
class EpilogueArgs:
    """Epilogue's inputs, outputs and scratch."""

    descs: gl.tuple  # TMA descriptors: of two outputs, then of two tile operands; None where there is none
    operands: gl.tuple  # pointers and scalars in the order of the epilogue's operands
    outputs: gl.tuple  # pointers; of scattered rows to their addresses, or the addresses (`with_addresses`)
    row_reductions: RowReductions
    split_k: SplitK | gl.constexpr  # None in a kernel that never splits a tile along K
    problem: Problem
    code: gl.constexpr  # epilogues.lower.Lowered


@aggregate
class EpilogueBuffers:
    """Shared memory of a consumer for its epilogue; no other role uses it."""

    stores: gl.tuple  # for each TMA output a ring of cfg.num_store_buffers chunks; in pairs where the first tile waits
    loads: gl.tuple  # for each TMA operand a chunk
    loaded: gl.shared_memory_descriptor | Scalar  # mbarriers, one per TMA operand: TMA arrives, the consumer waits
    columns: gl.tuple  # with cfg.columns_ahead, for each column operand its values of a tile

    @staticmethod
    @gluon.jit
    def create(args, cfg: gl.constexpr):
        """Allocate the buffers and initialise their barriers."""
        stores = args.code.buffers(args.descs, cfg)
        loads, loaded = args.code.operand_buffers(args.descs, cfg)
        columns = args.code.column_buffers(cfg) if cfg.columns_ahead else (0,)
        return EpilogueBuffers(stores, loads, loaded, columns)


@aggregate
class OutputTile:
    """Share of a tile that a consumer's epilogue works on: rows [m, m_end) of the tokens, columns from n on."""

    m: Scalar
    n: Scalar
    m_end: Scalar
    first_slot: Scalar  # of its partial sums in `SplitK`
    is_split: Scalar


@aggregate
class ChunkArgs:
    """Values shared by all chunks of a tile."""

    epilogue: EpilogueArgs  # with the operands of the tile's expert
    buffers: EpilogueBuffers
    tiles_done: Scalar  # tiles this consumer has finished: the parity of `loaded` follows from it


@gluon.jit
def load_columns(tile, epilogue):
    """Start loading the column operands' values of a tile, with cfg.columns_ahead.

    Ahead of the mainloop, whose products hide the loads; `code.keep_columns` puts them where the chunks find them.
    """
    problem = epilogue.problem
    cfg: gl.constexpr = problem.cfg
    if cfg.columns_ahead:
        return epilogue.code.load_columns(of_tile(tile, epilogue).operands, tile.y, problem.N, cfg)
    else:
        return (0,)


@gluon.jit
def with_addresses(tile, epilogue):
    """Return the arguments with the addresses of a tile's own rows, if rows are scattered and tokens are the M side.

    Ahead of the mainloop, whose products hide the loads: each chunk would wait for them before its first store. With
    pingpong the other consumer's products hide that, so the arguments are returned as they are.
    """
    problem = epilogue.problem
    cfg: gl.constexpr = problem.cfg
    code: gl.constexpr = epilogue.code
    if code.scattered and not cfg.swap_ab and not cfg.pingpong:
        columns: gl.constexpr = min(cfg.epilogue_columns, cfg.block_y) // code.output_specs[0].columns
        bits: gl.constexpr = code.output_specs[0].dtype.itemsize * 8
        rows: gl.constexpr = cfg.rows_per_consumer
        addresses = load_addresses(epilogue.outputs[0], tile.x, tile.row_end, rows, columns, bits)
        return EpilogueArgs(
            epilogue.descs, epilogue.operands, (addresses,), epilogue.row_reductions, epilogue.split_k, problem, code
        )
    else:
        return epilogue


@gluon.jit
def of_tile(tile, epilogue):
    """Return the arguments with the operands of the tile's expert."""
    problem = epilogue.problem
    if problem.row_mode.is_grouped:
        return with_expert(epilogue, gl.minimum(tile.expert, problem.num_experts - 1))
    else:
        return epilogue


@gluon.jit
def run_epilogue(accs, tile, first_slot, is_split, tiles_done, buffers, epilogue):
    """Apply the epilogue to a consumer's accumulators; with row reductions, the row's last tile completes them.

    accs: a tuple, of one or in a tile of two widths of two; the second has the columns after those of the first.
    tile: the corner of the consumer's share. Called by all warps of the consumer.
    """
    problem = epilogue.problem
    cfg: gl.constexpr = problem.cfg
    code: gl.constexpr = epilogue.code
    m, n = (tile.y, tile.x) if cfg.swap_ab else (tile.x, tile.y)
    if cfg.split_k > 1:
        code.fetch_operands(epilogue.descs, buffers.loads, buffers.loaded, m, n, cfg)
    own = of_tile(tile, epilogue)
    acc = as_chunked(accs[0], code, cfg)
    m_end = gl.minimum(tile.row_end, m + cfg.block_y) if cfg.narrowed and cfg.swap_ab else tile.row_end
    out = OutputTile(m, n, m_end, first_slot, is_split)
    chunks = ChunkArgs(own, buffers, tiles_done)
    partials = apply_in_chunks(acc, out, chunks, 0)
    if len(accs) == 1:
        complete_rows(partials, out, epilogue, acc.shape[1])
    else:
        rest = as_chunked(accs[1], code, cfg)
        others = apply_in_chunks(rest, out, chunks, acc.shape[1])
        if code.partials > 0:
            partials = code.merge(partials, laid_out_like(others, partials))
        complete_rows(partials, out, epilogue, acc.shape[1] + rest.shape[1])


@gluon.jit
def as_chunked(acc, code: gl.constexpr, cfg: gl.constexpr):
    """Return an accumulator as chunks are cut from it: [tokens, features], gate and up in turn."""
    if code.takes_halves:
        acc = interleave_gate_up(acc, cfg)
    return to_token_major(acc, cfg)


@gluon.jit
def laid_out_like(partials, others):
    """Return row reductions in the layouts of others, of another accumulator: no value changes its thread."""
    found = ()
    for i in gl.static_range(len(partials)):
        found = found + (gl.convert_layout(partials[i], others[i].type.layout, assert_trivial=True),)
    return found


@gluon.jit
def with_expert(epilogue, expert):
    """Return the arguments with column operands [num_experts, N] at an expert's row."""
    operands = epilogue.code.of_expert(epilogue.operands, expert, epilogue.problem.N)
    return EpilogueArgs(
        epilogue.descs, operands, epilogue.outputs, epilogue.row_reductions, epilogue.split_k, epilogue.problem,
        epilogue.code,
    )  # fmt: skip


@gluon.jit
def complete_rows(partials, out, epilogue, COLUMNS: gl.constexpr):
    """Store a tile's partial row reductions; the last of the rows' tiles finishes them. COLUMNS: of a tile."""
    code: gl.constexpr = epilogue.code
    if code.partials > 0:
        rows, M = epilogue.row_reductions, epilogue.problem.M
        num_slots = gl.cdiv(epilogue.problem.N, COLUMNS)
        code.save(partials, rows.partials, out.n // COLUMNS, num_slots, out.m, out.m_end, M)
        if arrive(rows.counters + out.m, num_slots):
            like, operands, outputs = partials[0], epilogue.operands, epilogue.outputs
            code.finish(like, rows.partials, num_slots, out.m, out.m_end, M, operands, outputs)


@gluon.jit
def apply_in_chunks(acc, out, args, COLUMN: gl.constexpr):
    """Apply the epilogue to the columns of `acc`, the tile's from COLUMN on; return the merged row reductions.

    Halves `acc` until it is a chunk. A split tile's chunk is replaced by the sum of its parts right before use.
    """
    cfg: gl.constexpr = args.epilogue.problem.cfg
    if acc.shape[1] <= cfg.epilogue_columns:
        if cfg.split_k > 1 and not cfg.swap_ab:
            if out.is_split:
                acc = args.epilogue.split_k.sum_splits(acc, out.first_slot, COLUMN, cfg)
        return visit_chunk(acc, out, args, COLUMN)
    else:
        left, right = halves(acc)
        half: gl.constexpr = acc.shape[1] // 2
        a = apply_in_chunks(left, out, args, COLUMN)
        if cfg.few_columns and COLUMN + half >= cfg.block_y:
            return a
        else:
            b = apply_in_chunks(right, out, args, COLUMN + half)
            return args.epilogue.code.merge(a, b)


@gluon.jit
def visit_chunk(x, out, args, COLUMN: gl.constexpr):
    """Run the epilogue's generated code on a chunk, the tile's columns from COLUMN on; return its row reductions."""
    epilogue, buffers, problem = args.epilogue, args.buffers, args.epilogue.problem
    cfg: gl.constexpr = problem.cfg
    chunk: gl.constexpr = COLUMN // cfg.epilogue_columns
    loads = (buffers.loads, buffers.loaded, args.tiles_done)
    at = ChunkPosition(out.m, out.n + COLUMN, out.m_end, problem.N)
    if cfg.stored_in_boxes:
        # Outputs are elementwise, so that any layout will do; the stores to shared memory transpose as they are.
        x = gl.permute(x, (1, 0))
        at = ChunkPosition(out.m + COLUMN, out.n, out.m_end, problem.N)
    return epilogue.code.visit(
        x, at, epilogue.operands, epilogue.outputs,
        ChunkBuffers(epilogue.descs, buffers.stores, loads, chunk, buffers.columns), problem.row_mode.is_grouped, cfg,
    )  # fmt: skip


@gluon.jit
def interleave_gate_up(acc, cfg: gl.constexpr):
    """Return the accumulator with its features in turn, gate 0, up 0, gate 1, ..; before: all gates, then all ups.

    Both are in one thread where features are columns, so that only names of registers change; with swap_ab
    `to_token_major` moves every value anyhow.
    """
    rows: gl.constexpr = acc.shape[0]
    columns: gl.constexpr = acc.shape[1]
    if cfg.swap_ab:
        return gl.reshape(gl.permute(gl.reshape(acc, (2, rows // 2, columns)), (1, 0, 2)), (rows, columns))
    else:
        return gl.reshape(gl.permute(gl.reshape(acc, (rows, 2, columns // 2)), (0, 2, 1)), (rows, columns))


@gluon.jit
def to_token_major(acc, cfg: gl.constexpr):
    """Return the accumulator as [tokens, features]: with swap_ab transposed, a thread with four features in a row.

    If `stored_in_boxes`, as it is: `visit_chunk` transposes.
    """
    if not cfg.swap_ab or cfg.stored_in_boxes:
        return acc
    else:
        warps: gl.constexpr = gl.num_warps()
        lanes: gl.constexpr = min(32, cfg.rows_per_consumer // 4)
        layout: gl.constexpr = gl.BlockedLayout([1, 4], [32 // lanes, lanes], [warps, 1], [1, 0])
        return gl.convert_layout(gl.permute(acc, (1, 0)), layout)

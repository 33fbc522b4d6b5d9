"""Run a lowered epilogue on an accumulator in tensor memory, in column chunks; partial sums of split tiles.

A chunk is `cfg.epilogue_columns` wide: that bounds the registers it takes.
"""

# The order of a comparison's operands matters to Triton's compiler.
# ruff: noqa: SIM300

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    tensor_memory_descriptor,
)

from envoi.ops.gemm.blackwell.pipeline import release
from envoi.ops.gemm.hopper.run_epilogue import visit_chunk
from envoi.runtime.aggregate import Scalar, aggregate
from envoi.runtime.triton_compat import tmem_layout


@aggregate
class Products:
    """Accumulator whose products have ended."""

    acc: tensor_memory_descriptor  # float32 [block_x, block_y]
    free: gl.shared_memory_descriptor  # its barrier: see `pipeline`
    is_empty: Scalar  # True without steps along K: the sum is 0, the accumulator's content stale


@gluon.constexpr_function
def chunk_layout(rows, columns, num_warps):
    """Return the register layout of a chunk: a thread has a row with 4 warps, half a row with 8."""
    part = TensorMemoryLayout((rows, columns), col_stride=1)
    return tmem_layout(gl.float32, (rows, columns), part, num_warps)


@gluon.jit
def load_chunk(acc, COLUMN: gl.constexpr, cfg: gl.constexpr):
    """Load an accumulator's chunk from COLUMN on to registers."""
    layout: gl.constexpr = chunk_layout(cfg.block_x, cfg.epilogue_columns, gl.num_warps())
    return acc.slice(COLUMN, cfg.epilogue_columns).load(layout)


@gluon.jit
def apply_in_chunks(products, out, args, COLUMN: gl.constexpr, WIDTH: gl.constexpr):
    """Apply the epilogue to the WIDTH columns of a tile from COLUMN on; return the merged row reductions.

    out: `OutputTile`. args: `ChunkArgs`. The accumulator is released once its last chunk has been loaded; a split
    tile's has been released before, and its chunks are the sums of all parts.
    """
    problem = args.epilogue.problem
    cfg: gl.constexpr = problem.cfg
    if WIDTH <= cfg.epilogue_columns:
        if cfg.split_k > 1:
            if out.is_split:
                x = sum_splits(args.epilogue.split_k, out.first_slot, COLUMN, cfg)
            else:
                x = load_chunk(products.acc, COLUMN, cfg)
        else:
            x = load_chunk(products.acc, COLUMN, cfg)
            if problem.row_mode.has_tail:
                x = gl.where(products.is_empty, 0.0, x)
        if COLUMN + WIDTH == cfg.block_y:
            release(products.free, out.is_split == 0)
        return computed(visit_chunk(x, out, args, COLUMN), args.epilogue.code.partials)
    else:
        half: gl.constexpr = WIDTH // 2
        a = apply_in_chunks(products, out, args, COLUMN, half)
        b = apply_in_chunks(products, out, args, COLUMN + half, half)
        return args.epilogue.code.merge(a, b)


@gluon.jit
def computed(partials, COUNT: gl.constexpr):
    """Return a chunk's COUNT row reductions, computed before the next chunk is loaded: the compiler would keep both."""
    if COUNT == 0:
        return partials
    else:
        found = ()
        for i in gl.static_range(COUNT):
            mov: gl.constexpr = "mov.b32 $0, $1;"
            found += (gl.inline_asm_elementwise(mov, "=r,r", [partials[i]], gl.float32, is_pure=False, pack=1),)
        return found


@gluon.jit
def store_partial_sums(acc, is_empty, split_k, slot, cfg: gl.constexpr):
    """Store a part's sums to its slot of `SplitK`, chunk by chunk; zeros if there were no steps along K (is_empty)."""
    num_chunks: gl.constexpr = cfg.num_chunks
    for i in gl.static_range(num_chunks):
        v = to_vector(load_chunk(acc, i * cfg.epilogue_columns, cfg))
        at = split_k.pointers(v, slot, i * cfg.epilogue_columns, cfg)
        gl.store(at, gl.where(is_empty, 0.0, v))


@gluon.jit
def sum_splits(split_k, first_slot, COLUMN: gl.constexpr, cfg: gl.constexpr):
    """Return the sum of all parts of a chunk, added in their order."""
    layout: gl.constexpr = chunk_layout(cfg.block_x, cfg.epilogue_columns, gl.num_warps())
    like = gl.full((cfg.block_x, cfg.epilogue_columns), 0.0, gl.float32, layout)
    v = to_vector(like)
    total = gl.load(split_k.pointers(v, first_slot, COLUMN, cfg), cache_modifier=".cg")
    splits: gl.constexpr = cfg.split_k
    for s in gl.static_range(1, splits):
        total += gl.load(split_k.pointers(v, first_slot + s, COLUMN, cfg), cache_modifier=".cg")
    return from_vector(total, like)


@gluon.jit
def to_vector(x):
    """Flatten a chunk so that neighbours in memory are neighbouring threads' groups of four registers."""
    rows: gl.constexpr = x.shape[0]
    columns: gl.constexpr = x.shape[1]
    return gl.reshape(gl.permute(gl.reshape(x, (rows, columns // 4, 4)), (1, 0, 2)), (rows * columns,))


@gluon.jit
def from_vector(v, like):
    """Inverse of `to_vector`; moves no data between threads. like: gives shape and layout."""
    rows: gl.constexpr = like.shape[0]
    columns: gl.constexpr = like.shape[1]
    v = gl.reshape(gl.permute(gl.reshape(v, (columns // 4, rows, 4)), (1, 0, 2)), (rows, columns))
    return gl.convert_layout(v, like.type.layout, assert_trivial=True)

"""Lowering of an epilogue's IR to device code: source text, one line a node, that a GEMM calls on its accumulator.

The text for `swiglu` in Gluon, with its output stored through a TMA descriptor:

    def visit(x1, at, operands, outputs, buffers, GROUPED: L.constexpr, cfg: L.constexpr):
        x2 = even(x1)
        v0 = x1
        v1 = even(v0)
        v2 = odd(v0)
        v3 = silu(v1)
        v4 = v3 * v2
        o0 = bf16(v4)
        if GROUPED:
            if at.m + x1.shape[0] <= at.m_end:
                put_tiles((o0,), buffers.descs, buffers.stages, (at.n // 2,), at.m, buffers.turn, cfg)
            else:
                store_tile(outputs[0], o0, at.m, at.n // 2, at.m_end, at.N // 2, cfg)
        else:
            put_tiles((o0,), buffers.descs, buffers.stages, (at.n // 2,), at.m, buffers.turn, cfg)
        return (0,)

x1 is a chunk of the accumulator in registers; `at` (ChunkPosition) is its position, `buffers` (ChunkBuffers) the
buffers of its tiles. Where rows are GROUPED by expert, a chunk that has rows of the next one is stored without TMA,
which would write them too. A tile value is a two-dimensional tensor, a row or column value a vector, a top-k value k
row vectors.

A reduction over a row is complete at once if the chunk has the whole row (`whole_rows`). Else `visit` returns partial
values; the GEMM merges those of its chunks with `merge` and stores one a tile in memory (`save`), and the last of the
row's tiles to arrive calls `finish`, which reads them in order and stores what depends on them.

A GEMM may load column operands ahead of its mainloop (`load_columns`, into `column_buffers` by `keep_columns`), so that
no chunk waits for them. `of_expert` has an expert's own column operands, `buffers` and `operand_buffers` the shared
memory of outputs and tile operands, whose first chunks `fetch_operands` asks for.
"""

import hashlib
import itertools
import linecache
import weakref
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from envoi.epilogues.ir import IR, kept_with_ir
from envoi.epilogues.outputs import OutputSpec, chunk_columns, deferred, output_specs, pairs_up, rows_must_fit, scatters
from envoi.epilogues.writer import Writer

FUNCTIONS = (
    "visit", "merge", "save", "finish", "buffers", "operand_buffers", "fetch_operands", "of_expert", "load_columns",
    "column_buffers", "keep_columns",
)  # fmt: skip
ONE_TILE = "rows can be sent to addresses if the only output is a tile, quantised in groups of 128 or not at all"
_number = itertools.count()  # numbers the file names: each text needs its own
ONE_GROUP = "pairs of chunks can be quantised if the only output is a tile rounded to bf16, in groups of 128 to FP8"
NEEDS_ROWS = "a row's value is used before the row is complete"


@dataclass(frozen=True, eq=False)
class Lowered:
    """Device code of an epilogue; `lower` makes one per IR and set of options.

    output_specs: the tensors it writes. tma_outputs: indices of those stored through TMA descriptors. partials: partial
    reductions a row that a tile passes on. maxima_together: all of them are maxima, and all threads of a role share the
    loads that complete them (`tile_gluon.max_of_slots`). elementwise: every output is a tile whose elements depend on
    one accumulator each, so that any layout will do. tma_operands: names of the operands loaded by TMA.
    chunk_columns: a chunk has a multiple of this many columns. whole_rows: chunks hold whole rows. scattered: each row
    is stored at an address of its own. takes_halves: column 2 j of a chunk's accumulators is column j of the product,
    column 2 j + 1 is column j + N / 2. paired: two neighbouring chunks share scale factors; a consumer gets them in
    turn. columns_ahead: values of column operands, for each column of the accumulator, that a GEMM may load ahead of
    its mainloop.
    """

    visit: Any
    merge: Any
    save: Any
    finish: Any
    buffers: Any
    operand_buffers: Any
    fetch_operands: Any
    of_expert: Any
    load_columns: Any
    column_buffers: Any
    keep_columns: Any
    output_specs: tuple[OutputSpec, ...]
    tma_outputs: tuple[int, ...]
    partials: int
    maxima_together: bool
    elementwise: bool
    tma_operands: tuple[str, ...]
    chunk_columns: int
    whole_rows: bool
    scattered: bool
    takes_halves: bool
    paired: bool
    columns_ahead: float
    source: str

    @property
    def num_descs(self) -> int:
        """Number of outputs stored through descriptors."""
        return len(self.tma_outputs)

    @property
    def staged_output_bytes(self) -> float:
        """Bytes stored through shared memory (by TMA, or scattered) for each column of the accumulator."""
        if self.paired:
            return torch.bfloat16.itemsize / self.output_specs[0].columns
        return sum(
            spec.dtype.itemsize / spec.columns / (2 if spec.packed else 1)
            for spec in (self.output_specs if self.scattered else map(self.output_specs.__getitem__, self.tma_outputs))
        )

    def __repr__(self) -> str:
        """Name every field, functions by the digest of their text, so that the compiler's cache can tell two apart."""
        from envoi.runtime.triton_compat import settled_key  # not at the top: `import envoi` must not import Triton

        keys = ",".join(settled_key(getattr(self, name)) for name in FUNCTIONS)
        source = hashlib.sha256(self.source.encode()).hexdigest()[:16]
        rest = (
            self.output_specs, self.tma_outputs, self.partials, self.maxima_together, self.elementwise,
            self.tma_operands, self.chunk_columns, self.whole_rows, self.scattered, self.takes_halves, self.paired,
            self.columns_ahead,
        )  # fmt: skip
        return f"Lowered({keys},{source},{','.join(map(str, rest))})"

    __str__ = __repr__


@kept_with_ir
def lower(
    ir: IR, out_dtype: torch.dtype, dialect: str, whole_rows: bool, tma: bool, pointers: frozenset[str],
    tma_operands: tuple[str, ...] = (), scattered: bool = False, paired: bool = False,
) -> Lowered:  # fmt: skip
    """Return the device code for an IR.

    dialect: "gluon" or "triton". whole_rows: chunks hold whole rows. tma: store tiles through descriptors, else from
    registers. pointers: the Scalar operands passed as tensors of one element. tma_operands: the Tile operands loaded by
    TMA, at most MAX_DESCS. scattered: store each row of the only output, a tile, at an address, a quantised row's scale
    factors right after its values; the addresses are passed in place of the output. paired: a chunk has half of the
    columns that share a scale factor of the only output, see `pairs_up`.
    """
    if not whole_rows and rows_must_fit(ir):
        raise ValueError(f"epilogue {ir.name}: {NEEDS_ROWS}; it needs pieces of whole rows")
    found = output_specs(ir, out_dtype)
    if scattered and (tma or not scatters(ir, found)):
        raise ValueError(f"epilogue {ir.name}: {ONE_TILE}")
    if paired and (not pairs_up(ir) or tma or tma_operands or dialect != "gluon"):
        raise ValueError(f"epilogue {ir.name}: {ONE_GROUP}")
    waiting = frozenset() if whole_rows else deferred(ir)
    writer = Writer(ir, found, waiting, tma, pointers, tma_operands, scattered, paired, dialect == "gluon")
    source = writer.write()
    filename, namespace = _compile(source, ir.name, dialect)
    lowered = Lowered(
        **{name: namespace[name] for name in FUNCTIONS}, output_specs=found, tma_outputs=tuple(writer.tma_outputs),
        partials=len(writer.partials), maxima_together=writer.maxima_together,
        elementwise=_is_elementwise(ir, found), tma_operands=tma_operands,
        chunk_columns=chunk_columns(ir) // (2 if paired else 1), whole_rows=whole_rows, scattered=scattered,
        takes_halves=ir.takes_halves, paired=paired, source=source,
        columns_ahead=sum(1 / operand.shape.divisor for operand in writer.columns_ahead),
    )  # fmt: skip
    weakref.finalize(lowered, linecache.cache.pop, filename, None).atexit = False
    return lowered


def _is_elementwise(ir: IR, specs: tuple[OutputSpec, ...]) -> bool:
    steps = all(node.step in ("element", "load", "store") and node.op != "quantize" for node in ir.nodes)
    return steps and chunk_columns(ir) == 1 and all(spec.kind == "tile" for spec in specs)


def _compile(source: str, name: str, dialect: str) -> tuple[str, dict[str, Any]]:
    """Execute the text with the dialect's functions in scope; return the name of its file, from which the compiler
    reads it back through linecache, and the namespace it defines."""
    language, jit, library = _dialect(dialect)
    filename = f"<epilogue {name}, {dialect}, {next(_number)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {"L": language, "__name__": f"envoi.epilogues.lowered.{name}", **library}
    exec(compile(source, filename, "exec"), namespace)
    return filename, {key: jit(value) if key in FUNCTIONS else value for key, value in namespace.items()}


def _dialect(dialect: str) -> tuple[ModuleType, Any, dict[str, Any]]:
    """Return the language's module, its jit decorator, and the functions that the text calls."""
    from envoi.epilogues import device

    if dialect == "triton":
        import triton
        import triton.language as tl

        from envoi.epilogues import tile_triton

        return tl, triton.jit, {**_functions(device), **_functions(tile_triton)}
    import triton.experimental.gluon.language as gl
    from triton.experimental import gluon

    from envoi.epilogues import tile_gluon

    math = {name: gluon.jit(function.fn) for name, function in _functions(device).items()}
    return gl, gluon.jit, {**math, **_functions(tile_gluon)}


def _functions(module: ModuleType) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if hasattr(value, "fn")}

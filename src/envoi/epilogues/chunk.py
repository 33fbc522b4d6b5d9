"""Arguments of the generated `visit`, which runs an epilogue on one chunk of the accumulator."""

from typing import Any, NamedTuple


class ChunkPosition(NamedTuple):
    """Position of a chunk: first row m and column n, end of the rows that count, columns N of the accumulator."""

    m: Any
    n: Any
    m_end: Any
    N: Any


class ChunkBuffers(NamedTuple):
    """Buffers through which a chunk's tiles are stored and loaded by TMA; 0 where a kernel has no descriptors.

    descs: of outputs, then of tile operands. stages: shared memory of each output. operands: shared memory of the tile
    operands, the barriers on which they arrive, and the tiles done. turn: number of the chunk, which picks the stage.
    columns: shared memory of the column operands, with `cfg.columns_ahead`.
    """

    descs: Any
    stages: Any
    operands: Any
    turn: Any
    columns: Any

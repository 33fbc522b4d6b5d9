"""Interface of a config for the parts that kernels share: tile scheduler, epilogue, and the host's descriptors."""

from typing import Protocol, runtime_checkable

from envoi.constant import Constant


@runtime_checkable
class TileConfig(Protocol):
    """Tiles and column chunks of a GEMM; every kernel's config has these fields, and those of its mainloop.

    x and y are the M and the N side of the tensor-core instruction: tokens and features, or swapped (`swap_ab`). A
    consumer is the role that holds an accumulator: [rows_per_consumer, block_y].

    With `wide_tail_tiles` the last rows of an expert, h = rows_per_consumer or fewer, are covered by tiles of another
    shape. Both take the same time, but the wide one computes no rows after the expert's last:

             block_y = 2 h                       2 block_y
        +----------------+           +----------------+----------------+
        |   consumer 0   | h         |   consumer 0   |   consumer 1   | h
        +----------------+           +----------------+----------------+
        |   consumer 1   | h
        +----------------+
          tile of 2 h rows                 wide tile at an expert's end

    With `paired_tiles` a CTA computes two neighbours along the features one after the other, a consumer both tiles'
    columns of the same rows: in a pair of wide tiles columns [0, block_y) and [block_y, 2 block_y) are consumer 0's.
    """

    # tile

    @property
    def rows_per_consumer(self) -> int:
        """Rows of x that a consumer multiplies."""
        ...

    @property
    def consumers_per_tile(self) -> int:
        """Consumers that share a tile; 1 with pingpong."""
        ...

    @property
    def block_x(self) -> int:
        """Rows of x in a tile: rows_per_consumer * consumers_per_tile."""
        ...

    @property
    def block_y(self) -> int:
        """Rows of y in a tile."""
        ...

    @property
    def tensor_y(self) -> int:
        """Columns of the tensor that is a consumer's first accumulator: a power of two."""
        ...

    @property
    def block_m(self) -> int:
        """Tokens of a tile; of the lower kind with `wide_tail_tiles`."""
        ...

    @property
    def block_n(self) -> int:
        """Features of a tile, or of a pair of tiles; of the wider kind with `wide_tail_tiles`."""
        ...

    @property
    def swap_ab(self) -> bool:
        """Return True if x are the features and y the tokens: few tokens fill a narrow N side."""
        ...

    @property
    def wide_tail_tiles(self) -> bool:
        """Return True if an expert's last rows get tiles of another shape; see the picture."""
        ...

    @property
    def mixed_experts(self) -> bool:
        """Return True if tiles of experts with many rows and with few are taken in turns.

        See `envoi.ops.gemm.hopper.mixed_experts`."""
        ...

    @property
    def short_boxes(self) -> bool:
        """Return True if tiles with few rows load a smaller box of x, by `rest_desc`; see `Config`."""
        ...

    @property
    def paired_tiles(self) -> bool:
        """Return True if a CTA takes pairs of tiles, for an epilogue lowered so (`Lowered.paired`)."""
        ...

    @property
    def tiles_per_unit(self) -> int:
        """Tiles that a CTA takes at a time: 2 with `paired_tiles`, else 1."""
        ...

    @property
    def tiles_overlap(self) -> bool:
        """Return True if the last tokens of a dense GEMM get a tile that begins within the one before.

        See `TileScheduler.ending_with_tokens`.
        """
        ...

    @property
    def narrowed(self) -> bool:
        """Return True if block_y is no power of two, and one instruction computes it; see `runtime.narrow_wgmma`."""
        ...

    @property
    def stored_in_boxes(self) -> bool:
        """Return True if a narrowed tile's outputs leave by TMA.

        Chunks are of tokens then, and the epilogue works on the transposed accumulator. Other narrowed tiles are like
        wider ones, of which rows after the first block_y are left out.
        """
        ...

    @property
    def few_columns(self) -> bool:
        """Return True if chunks are cut from an accumulator of which only the first block_y columns are the tile's."""
        ...

    @property
    def small_box(self) -> int:
        """Return the tokens of a TMA box that stores outputs, if `stored_in_boxes`."""
        ...

    @property
    def epilogue_in_place(self) -> bool:
        """Return True if epilogues work on the products where the tensor cores leave them, with swap_ab.

        A thread then has neighbouring features of a token or, after their pairs, single ones.
        """
        ...

    # schedule

    @property
    def split_k(self) -> int:
        """Parts along K of the tiles that don't fill a round; 1 = none."""
        ...

    @property
    def swizzle_rows(self) -> int:
        """Rows of tiles that the L2 swizzle walks together, so that both operands stay in the L2."""
        ...

    @property
    def spread_experts(self) -> bool:
        """Return True if vectors over experts are spread over a role's warps; else each warp has all."""
        ...

    # epilogue

    @property
    def epilogue_columns(self) -> int:
        """Accumulator columns of a chunk; if `stored_in_boxes`, its tokens."""
        ...

    @property
    def num_chunks(self) -> int:
        """Chunks of a consumer's accumulator."""
        ...

    @property
    def columns_ahead(self) -> bool:
        """Return True if a consumer loads column operands ahead of its mainloop and keeps them in shared memory."""
        ...

    @property
    def num_store_buffers(self) -> int:
        """Chunks in a TMA output's ring of buffers."""
        ...


class EqualTiles(Constant):
    """Base of configs whose tiles all have one shape and are taken one at a time; see `TileConfig`."""

    wide_tail_tiles = False
    mixed_experts = False
    short_boxes = False
    paired_tiles = False
    tiles_overlap = False
    columns_ahead = False
    narrowed = False
    stored_in_boxes = False
    few_columns = False
    epilogue_in_place = False
    small_box = 0
    tiles_per_unit = 1
    block_y: int

    @property
    def tensor_y(self) -> int:
        """Columns of an accumulator's tensor: all are computed."""
        return self.block_y


class SwappedTiles(EqualTiles):
    """Base of configs with weights on the M side of wgmma, K in one piece, and all consumers on one tile.

    A subclass is a frozen dataclass with num_consumers, rows_per_consumer and block_y; for the tile scheduler that
    several kernels share with swizzle_rows too.
    """

    num_consumers: int
    rows_per_consumer: int
    block_y: int
    swizzle_rows: int
    swap_ab = True
    split_k = 1
    num_store_buffers = 1

    @property
    def spread_experts(self) -> bool:
        """Return False: each warp holds whole vectors over the experts, so that sums over them need no barrier."""
        return False

    @property
    def epilogue_columns(self) -> int:
        """Features of a chunk: all of a consumer's."""
        return self.rows_per_consumer

    @property
    def num_chunks(self) -> int:
        """Chunks of a consumer's accumulator."""
        return 1

    @property
    def consumers_per_tile(self) -> int:
        """Consumers that share a tile: all."""
        return self.num_consumers

    @property
    def block_x(self) -> int:
        """Features of a tile."""
        return self.num_consumers * self.rows_per_consumer

    @property
    def block_m(self) -> int:
        """Tokens of a tile."""
        return self.block_y

    @property
    def block_n(self) -> int:
        """Features of a tile."""
        return self.block_x

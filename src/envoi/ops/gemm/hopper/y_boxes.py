"""Boxes of y in the stages of the Hopper GEMM, by kind of tile: buffers, TMA loads, and what the tensor cores read.

    kind        block_y, the rows of y in a tile            boxes of a stage                    accumulators
    OneWidth    a power of two                              one; two of a wide tail tile        one
    TwoWidths   main_y + rest_y features, 96, 160 or 192    one of each width, in two buffers   one for each width
    Narrowed    no power of two: one instruction            some of main_y rows, then some of   one, tensor_y columns
                (`runtime.narrow_wgmma`)                    small_box, in one buffer

A tile's config decides its kind (`new_y_boxes`); `Pipeline` calls `load` and `operand` of whichever it has.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from envoi.runtime.aggregate import aggregate
from envoi.runtime.triton_compat import reinterpret, tma_load


@aggregate
class OneWidth:
    """Boxes of a power of two of rows: one for each stage, or two where wide tail tiles take the memory of x."""

    bufs: gl.shared_memory_descriptor  # [num_stages * y_boxes_per_stage, main_y, block_k], or [.., 2, half, ..]
    takes_halves: gl.constexpr
    cfg: gl.constexpr

    @staticmethod
    @gluon.jit
    def create(y_desc, x_bufs, takes_halves: gl.constexpr, cfg: gl.constexpr):
        """Allocate the buffers; those of wide tail tiles are x's."""
        shape: gl.constexpr = [cfg.num_stages * cfg.y_boxes_per_stage] + y_desc.block_type.shape
        if cfg.wide_tail_tiles:
            bufs = reinterpret(x_bufs, y_desc.dtype, shape, y_desc.layout)
        else:
            bufs = gl.allocate_shared_memory(y_desc.dtype, shape, y_desc.layout)
        return OneWidth(bufs, takes_halves, cfg)

    @gluon.jit
    def box(self, stage, i):
        """Return box i of a stage."""
        return self.bufs.index(y_box_index(stage, i, self.cfg))

    @gluon.jit
    def load(self, y_desc, rest_desc, full, stage, tile, k, IS_LOW: gl.constexpr):
        """Start the TMA loads of a stage, which arrive on its barrier `full`."""
        cfg: gl.constexpr = self.cfg
        for i in gl.static_range(num_y_boxes(IS_LOW, cfg)):
            at = corner(tile.y + i * cfg.y_pitch, tile.expert, k, self.takes_halves and not cfg.swap_ab)
            tma_load(y_desc, at, full, self.box(stage, i))

    @gluon.jit
    def operand(self, stage, i, WIDTH: gl.constexpr):
        """Return the y.T [block_k, main_y] of box i of a stage."""
        return as_matrix(self.box(stage, i), self.cfg.main_y, self.cfg.block_k).permute((1, 0))


@aggregate
class TwoWidths:
    """Boxes of main_y rows, and in a buffer of their own, by a descriptor of their own, boxes of the other rest_y."""

    main: OneWidth
    rest: gl.shared_memory_descriptor  # [num_stages, rest_y, block_k], or [num_stages, 2, rest_y / 2, block_k]

    @staticmethod
    @gluon.jit
    def create(y_desc, rest_desc, takes_halves: gl.constexpr, cfg: gl.constexpr):
        """Allocate both buffers."""
        main = OneWidth.create(y_desc, None, takes_halves, cfg)
        shape: gl.constexpr = [cfg.num_stages] + rest_desc.block_type.shape
        return TwoWidths(main, gl.allocate_shared_memory(rest_desc.dtype, shape, rest_desc.layout))

    @gluon.jit
    def load(self, y_desc, rest_desc, full, stage, tile, k, IS_LOW: gl.constexpr):
        """Start the TMA loads of a stage, which arrive on its barrier `full`."""
        self.main.load(y_desc, rest_desc, full, stage, tile, k, IS_LOW)
        at = corner(tile.y + self.main.cfg.main_y, 0, k, self.main.takes_halves)
        tma_load(rest_desc, at, full, self.rest.index(stage))

    @gluon.jit
    def operand(self, stage, i, WIDTH: gl.constexpr):
        """Return the y.T of a stage's boxes: [block_k, main_y] of WIDTH 0, [block_k, rest_y] of WIDTH 1."""
        cfg: gl.constexpr = self.main.cfg
        if WIDTH == 0:
            return self.main.operand(stage, i, 0)
        else:
            return as_matrix(self.rest.index(stage), cfg.rest_y, cfg.block_k).permute((1, 0))


@aggregate
class Narrowed:
    """Boxes of block_y rows in all, in one buffer, which the tensor cores see as the first of tensor_y."""

    # [num_stages * block_y / 8, 8, block_k], or [num_stages, tensor_y, block_k] if Triton can't view those as more
    bufs: gl.shared_memory_descriptor
    cfg: gl.constexpr

    @staticmethod
    @gluon.jit
    def create(y_desc, cfg: gl.constexpr):
        """Allocate the buffer."""
        shape: gl.constexpr = narrowed_shape(cfg)
        return Narrowed(gl.allocate_shared_memory(y_desc.dtype, shape, y_desc.layout), cfg)

    @gluon.jit
    def rows(self, stage, FIRST: gl.constexpr, ROWS: gl.constexpr):
        """Return ROWS rows of a stage from row FIRST on; those after block_y are another stage's."""
        cfg: gl.constexpr = self.cfg
        if cfg.stage_y == cfg.block_y:
            shape: gl.constexpr = [ROWS, cfg.block_k]
            eight = self.bufs.index(stage * (cfg.block_y // 8) + FIRST // 8)
            return reinterpret(eight, eight.dtype, shape, eight.layout)
        else:
            return self.bufs.index(stage).slice(FIRST, ROWS)

    @gluon.jit
    def load(self, y_desc, small_desc, full, stage, tile, k, IS_LOW: gl.constexpr):
        """Start the TMA loads of a stage, which arrive on its barrier `full`."""
        cfg: gl.constexpr = self.cfg
        for i in gl.static_range(cfg.block_y // cfg.main_y):
            tma_load(y_desc, [tile.y + i * cfg.main_y, k], full, self.rows(stage, i * cfg.main_y, cfg.main_y))
        box: gl.constexpr = cfg.small_box
        first: gl.constexpr = cfg.block_y // cfg.main_y * cfg.main_y
        for i in gl.static_range((cfg.block_y - first) // box):
            tma_load(small_desc, [tile.y + first + i * box, k], full, self.rows(stage, first + i * box, box))

    @gluon.jit
    def operand(self, stage, i, WIDTH: gl.constexpr):
        """Return the y.T [block_k, tensor_y] of a stage."""
        return self.rows(stage, 0, self.cfg.tensor_y).permute((1, 0))


@gluon.jit
def new_y_boxes(y_desc, rest_desc, x_bufs, takes_halves: gl.constexpr, cfg: gl.constexpr):
    """Allocate the boxes of all stages. rest_desc: the second descriptor of y, None in a tile of `OneWidth`."""
    if cfg.narrowed:
        return Narrowed.create(y_desc, cfg)
    elif cfg.rest_y > 0:
        return TwoWidths.create(y_desc, rest_desc, takes_halves, cfg)
    else:
        return OneWidth.create(y_desc, x_bufs, takes_halves, cfg)


@gluon.constexpr_function
def accumulator_widths(cfg):
    """Return the columns of a consumer's accumulators, one for each WIDTH of `operand`."""
    return [cfg.tensor_y, cfg.rest_y] if cfg.rest_y else [cfg.tensor_y]


@gluon.constexpr_function
def num_y_boxes(is_low, cfg):
    """Return the number of y boxes that a stage of a tile of one width has."""
    return cfg.y_boxes_per_stage if is_low else 1


@gluon.constexpr_function
def narrowed_shape(cfg):
    """Return the shape of `Narrowed.bufs`."""
    if cfg.stage_y == cfg.block_y:
        return [cfg.num_stages * (cfg.block_y // 8), 8, cfg.block_k]
    return [cfg.num_stages, cfg.tensor_y, cfg.block_k]


@gluon.jit
def y_box_index(stage, i, cfg: gl.constexpr):
    """Return the index in `OneWidth.bufs` of box i of a stage."""
    return stage + i * cfg.num_stages


@gluon.jit
def corner(row, expert, k, IS_HALVES: gl.constexpr):
    """Return the coordinates of a box in its descriptor. row: of the tile. IS_HALVES: see `takes_halves`."""
    if IS_HALVES:
        return [2 * expert, row // 2, k]
    else:
        return [row, k]


@gluon.jit
def as_matrix(box, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Return a box of shared memory, [ROWS, COLUMNS] or [2, ROWS / 2, COLUMNS], as [ROWS, COLUMNS]."""
    if len(box.shape) == 3:
        return box.reshape((ROWS, COLUMNS))
    else:
        return box

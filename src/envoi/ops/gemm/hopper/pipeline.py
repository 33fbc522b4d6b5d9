"""Shared-memory pipeline of the Hopper GEMM: the ring of stages between the producer and the consumers.

A stage holds a tile's operands for block_k elements along K, as TMA boxes:

    x box [rows_per_consumer, block_k]   one for each consumer of the tile
    y box [block_y, block_k]             one, shared by the consumers; other kinds of tiles have several, see `y_boxes`

    wide tail tiles (`cfg.wide_tail_tiles`; h = rows_per_consumer, block_y = 2 h)

        tile of 2 h x block_y                      tile of h x 2 block_y, at the end of an expert's rows
                  y box 0                                    y box 0         y box 1
        x box 0 [ consumer 0 ]                     x box 0 [ consumer 0 ][ consumer 1 ]
        x box 1 [ consumer 1 ]

    A stage holds 2 x boxes and 1 y box, or 1 x box and 2 y boxes. A y box is as large as two x boxes; the second x box
    of a stage takes the first half of the memory of its second y box.

    halves (`takes_halves`): the weights' box has n rows of gate features, then the n rows of the same up features

        descriptor [2 * experts, N / 2, K], box [2, n, block_k] at (2 * expert, first feature, k)
        in shared memory [2 n, block_k]: an ordinary x or y box, n = rows_per_consumer / 2 or block_y / 2

The stages are a `Ring`: TMA completes `full`, with all bytes of a stage; each consumer of a tile arrives on `empty`.
`step` counts fills since the kernel began.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from envoi.ops.gemm.hopper.tile_scheduler import Tile
from envoi.ops.gemm.hopper.y_boxes import (
    Narrowed,
    OneWidth,
    TwoWidths,
    as_matrix,
    corner,
    new_y_boxes,
    num_y_boxes,
)
from envoi.runtime.aggregate import Scalar, aggregate
from envoi.runtime.ring import Ring, new_barriers
from envoi.runtime.triton_compat import reinterpret, role_barrier, tma_load

TILE_WORDS = gl.constexpr(5)  # of a published tile: its index in the order, x, y // block_y, row_end, expert
WRITTEN_RING = gl.constexpr(4)  # units that consumers may be ahead of who waits for them


@aggregate
class StageBoxes:
    """Indices of the two TMA boxes of a stage that one consumer multiplies."""

    x: Scalar
    y: Scalar


@aggregate
class Pipeline:
    """Buffers and barriers of all stages."""

    x_bufs: gl.shared_memory_descriptor  # [num_x_boxes, rows_per_consumer, block_k], or [.., 2, half of them, ..]
    y: OneWidth | TwoWidths | Narrowed
    ring: Ring
    turn: gl.shared_memory_descriptor | gl.constexpr  # mbarriers [2, 1]: see `wait_for_turn`; None without pingpong
    tiles: Ring | gl.constexpr  # num_stages + 1 published tiles, without `empty`; None where none is published
    tile_words: gl.shared_memory_descriptor | gl.constexpr  # int32 [(num_stages + 1) * TILE_WORDS, 1]
    takes_halves: gl.constexpr  # True if the weights' boxes have rows of both halves of their matrix
    cfg: gl.constexpr  # Config

    @staticmethod
    @gluon.jit
    def create(x_desc, y_desc, rest_desc, takes_halves: gl.constexpr, cfg: gl.constexpr):
        """Allocate the stages and initialise their barriers. The caller fences before any role uses them.

        rest_desc: second descriptor of y, or None, see `new_y_boxes`.
        """
        x_shape: gl.constexpr = [cfg.num_x_boxes] + x_desc.block_type.shape
        x_bufs = gl.allocate_shared_memory(x_desc.dtype, x_shape, x_desc.layout)
        y = new_y_boxes(y_desc, rest_desc, x_bufs, takes_halves, cfg)
        ring = Ring.create(cfg.num_stages, 1, cfg.consumers_per_tile)
        if cfg.pingpong:
            turn = new_barriers(2, 1)
        else:
            turn: gl.constexpr = None
        return Pipeline(x_bufs, y, ring, turn, None, None, takes_halves, cfg)

    @gluon.jit
    def x_box(self, stage, i):
        """Return x box i of a stage, [rows_per_consumer, block_k]."""
        return self.x_bufs.index(x_box_index(stage, i, self.cfg))

    # consumer side

    @gluon.jit
    def wait_for_tile(self, count):
        """Consumer: wait until the producer has published the CTA's count-th tile; return its index, and the tile.

        The index is negative after the last one.

        Before a tile is published, its first stage is empty: a consumer has released the step num_stages before, so it
        has read that step's tile. L1's end is published without a step; each end of L2 waits for a step, as if it had
        one. So in a ring of num_stages + 1 nothing is overwritten before it is read.
        """
        self.tiles.wait_full(count)
        word = self.tiles.stage(count) * TILE_WORDS
        x, row_end = get_word(self.tile_words, word + 1), get_word(self.tile_words, word + 3)
        # A multiple of the tile's features, as the compiler has to know: it would store byte after byte otherwise.
        y = get_word(self.tile_words, word + 2) * self.cfg.block_y
        return get_word(self.tile_words, word), Tile(x, y, row_end, get_word(self.tile_words, word + 4))

    @gluon.jit
    def operands(self, step, boxes):
        """Consumer: return x [rows_per_consumer, block_k] and y.T [block_k, tensor_y] of a stage."""
        return self.x_operand(step, boxes), self.y_operand(step, boxes, 0)

    @gluon.jit
    def x_operand(self, step, boxes):
        """Consumer: return x [rows_per_consumer, block_k] of a stage."""
        cfg: gl.constexpr = self.cfg
        return as_matrix(self.x_box(self.ring.stage(step), boxes.x), cfg.rows_per_consumer, cfg.block_k)

    @gluon.jit
    def y_operand(self, step, boxes, WIDTH: gl.constexpr):
        """Consumer: return the y.T of a stage for accumulator WIDTH, [block_k, its columns]."""
        return self.y.operand(self.ring.stage(step), boxes.y, WIDTH)

    # pingpong: two consumers, each with its own tiles, use the tensor cores alternately

    @gluon.jit
    def wait_for_turn(self, count, role: gl.constexpr):
        """Consumer, pingpong: wait until the other consumer has issued its tile's last wgmma.

        count: tiles this role has multiplied. Without it a role could wait for a stage that is more than one round of
        the ring ahead, which the parity of `full` can't tell from this round.
        """
        mbarrier.wait(self.turn.index(role), (count & 1) ^ (1 - role))

    @gluon.jit
    def pass_turn(self, role: gl.constexpr):
        """Consumer: let the other consumer multiply; nothing without pingpong."""
        if self.cfg.pingpong:
            mbarrier.arrive(self.turn.index(1 - role), count=1)

    # producer side

    @gluon.jit
    def publish_tile(self, count, index, tile):
        """Producer: publish the CTA's count-th tile and its index to consumers, which needn't search for its expert.

        index: in the order; 2 p and 2 p + 1 for the tiles of pair p. The tile's token rows are in memory. The caller
        has waited for the tile's first stage to be empty.
        """
        word = self.tiles.stage(count) * TILE_WORDS
        put_word(self.tile_words, word + 1, tile.x)
        put_word(self.tile_words, word + 2, tile.y // self.cfg.block_y)
        put_word(self.tile_words, word + 3, tile.row_end)
        put_word(self.tile_words, word + 4, tile.expert)
        self.publish(count, index)

    @gluon.jit
    def publish_end(self, count):
        """Producer: publish that there is no count-th tile. The caller has waited as for a tile."""
        self.publish(count, -1)

    @gluon.jit
    def publish(self, count, index):
        """Producer: complete the words of the count-th tile with its index, and let consumers read them."""
        put_word(self.tile_words, self.tiles.stage(count) * TILE_WORDS, index)
        role_barrier()  # one lane arrives, for the words of all
        self.tiles.arrive_full(count)

    @gluon.jit
    def fill(self, x_desc, y_desc, rest_desc, stage, tile, k, IS_LOW: gl.constexpr):
        """Producer: start the TMA loads of a tile's elements [k, k + block_k) into a free stage.

        IS_LOW: the tile has one x box only; the second one's rows are after the expert's last. `full` of the stage
        completes once all bytes have arrived.
        """
        self.expect(x_desc, y_desc, rest_desc, stage, tile, IS_LOW)
        self.load_x(x_desc, rest_desc, stage, tile, k, IS_LOW)
        self.y.load(y_desc, rest_desc, self.ring.full.index(stage), stage, tile, k, IS_LOW)

    @gluon.jit
    def expect(self, x_desc, y_desc, rest_desc, stage, tile, IS_LOW: gl.constexpr):
        """Producer: arrive on `full` of a stage, which completes once the bytes of all boxes have arrived too."""
        cfg: gl.constexpr = self.cfg
        y_bytes: gl.constexpr = num_y_boxes(IS_LOW, cfg) * y_desc.block_type.nbytes * cfg.block_y // cfg.main_y
        x_bytes: gl.constexpr = num_x_boxes(IS_LOW, cfg) * x_desc.block_type.nbytes
        if cfg.short_boxes:
            short_rows: gl.constexpr = rest_desc.block_type.shape[0]
            is_long = tile.x + short_rows < tile.row_end
            self.ring.expect(stage, y_bytes + x_bytes, is_long)
            self.ring.expect(stage, y_bytes + x_bytes * short_rows // cfg.rows_per_consumer, is_long == 0)
        else:
            self.ring.expect(stage, y_bytes + x_bytes)

    @gluon.jit
    def load_x(self, x_desc, rest_desc, stage, tile, k, IS_LOW: gl.constexpr):
        """Producer: start the TMA loads of a stage's x boxes."""
        cfg: gl.constexpr = self.cfg
        full = self.ring.full.index(stage)
        if cfg.short_boxes:
            is_long = tile.x + rest_desc.block_type.shape[0] < tile.row_end
            tma_load(x_desc, [tile.x, k], full, self.x_box(stage, 0), pred=is_long)
            self.load_short_x(rest_desc, stage, tile, k, is_long == 0)
        else:
            for i in gl.static_range(num_x_boxes(IS_LOW, cfg)):
                at = corner(tile.x + i * cfg.rows_per_consumer, tile.expert, k, self.takes_halves and cfg.swap_ab)
                tma_load(x_desc, at, full, self.x_box(stage, i))

    @gluon.jit
    def load_short_x(self, rest_desc, stage, tile, k, wanted):
        """Producer: start the TMA loads of a tile's first rows, if wanted; the rest of the x box keeps what it had.

        In shared memory an x box is one column of rows of 128 bytes after another, swizzled in groups of eight rows.
        """
        rows: gl.constexpr = rest_desc.block_type.shape[0]
        columns: gl.constexpr = rest_desc.block_type.shape[1]
        pitch: gl.constexpr = self.cfg.rows_per_consumer // rows
        parts: gl.constexpr = self.cfg.block_k // columns
        shape: gl.constexpr = [self.cfg.num_x_boxes * parts * pitch, rows, columns]
        boxes = reinterpret(self.x_bufs, rest_desc.dtype, shape, rest_desc.layout)
        for i in gl.static_range(parts):
            box = boxes.index((stage * parts + i) * pitch)
            tma_load(rest_desc, [tile.x, k + i * columns], self.ring.full.index(stage), box, pred=wanted)


@aggregate
class Written:
    """Units that consumers have written, in the order of their CTA: a ring of WRITTEN_RING barriers each way.

    Consumers arrive, and another role waits for each unit's turn and notes it.
    """

    ring: Ring  # full: consumers arrive; empty: who waits for `full` arrives

    @staticmethod
    @gluon.jit
    def create(num_consumers: gl.constexpr):
        """Allocate the barriers and initialise them. The caller fences before any role uses them."""
        return Written(Ring(new_barriers(WRITTEN_RING, num_consumers), new_barriers(WRITTEN_RING, 1), WRITTEN_RING))

    @gluon.jit
    def arrive(self, n):
        """Consumer: signal that the CTA's n-th unit is written: a role that waits sees what all warps have written."""
        self.ring.wait_empty(n)
        role_barrier()
        self.ring.arrive_full(n)

    @gluon.jit
    def wait(self, n):
        """Wait until the CTA's n-th unit is written, and let consumers go on."""
        self.ring.wait_full(n)
        self.ring.release(n)


@gluon.jit
def put_word(words, i, value):
    """Store an int32 in shared memory [.., 1], by all warps of the role."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    words.index(i).store(gl.full([1], value, gl.int32, one))


@gluon.jit
def get_word(words, i):
    """Load an int32 from shared memory [.., 1]."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(words.index(i).load(one), 0)


@gluon.constexpr_function
def num_x_boxes(is_low, cfg):
    """Return the number of x boxes that a stage of a tile has."""
    return 1 if is_low else cfg.consumers_per_tile


@gluon.jit
def x_box_index(stage, i, cfg: gl.constexpr):
    """Return the index in `x_bufs` of x box i of a stage; the picture above shows why wide tail tiles differ."""
    if cfg.wide_tail_tiles:
        return 4 * cfg.num_stages + stage + i * (stage - 2 * cfg.num_stages)
    else:
        return stage * cfg.consumers_per_tile + i

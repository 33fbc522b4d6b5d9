"""Stages of the Hopper router and their loads by TMA: which rows, columns and steps a CTA has, and its producer.

Columns without an expert are loaded as little as can be: TMA takes about four times as long to fill a row of the gate
with zeros as to load one.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import tma

from envoi.runtime.aggregate import Scalar, aggregate
from envoi.runtime.ring import Ring, allocate_barriers
from envoi.runtime.triton_compat import tma_load


@aggregate
class Part:
    """Work of a CTA: rows from m, columns from n, steps [first, last) along K; its number among its rows' parts."""

    m: Scalar
    n: Scalar
    rest_n: Scalar  # first column of z
    first: Scalar
    last: Scalar
    number: Scalar


@aggregate
class Rest:
    """Last tiles of a launch that only multiplies, cut along K; None where no tile is."""

    first: Scalar  # number of the first of them
    parts: Scalar  # CTAs of each
    steps: Scalar  # along K of a CTA


@aggregate
class Problem:
    """Sizes of the product tokens [num_tokens, hidden] @ gate.T, and how it is divided among CTAs."""

    num_tokens: Scalar
    hidden: Scalar
    rest: Rest
    tiling: gl.constexpr  # RouterTiling
    spec: gl.constexpr  # Spec

    @gluon.jit
    def num_parts(self):
        """Return the number of tiles that are only multiplied, a part of one that is cut along K counting as one."""
        tiles = gl.cdiv(self.num_tokens, self.tiling.rows_per_cta) * self.tiling.parts
        if self.rest.first is None:
            return tiles
        else:
            return self.rest.first + (tiles - self.rest.first) * self.rest.parts

    @gluon.jit
    def tile_of(self, number):
        """Return the tile of a number among `num_parts`, and its part along K."""
        if self.rest.first is None:
            return number, 0
        else:
            of_rest = gl.maximum(number - self.rest.first, 0)
            return gl.minimum(number, self.rest.first) + of_rest // self.rest.parts, of_rest % self.rest.parts

    @gluon.jit
    def part(self):
        """Return the Part of this CTA, or its first one."""
        return self.part_of(gl.program_id(0))

    @gluon.jit
    def part_of(self, number):
        """Return a Part by its number among those of all rows."""
        tiling: gl.constexpr = self.tiling
        num_steps = gl.cdiv(self.hidden, tiling.block_k)
        if self.rest.first is not None:
            is_rest = number >= self.rest.first
            number, along_k = self.tile_of(number)
            part = number % tiling.parts
            first = along_k * self.rest.steps
            last = gl.where(is_rest, gl.minimum(first + self.rest.steps, num_steps), num_steps)
        else:
            part = number % tiling.parts
            first = part // tiling.parts_n * tiling.steps_each
            last = gl.minimum(first + tiling.steps_each, num_steps)
        m = number // tiling.parts * tiling.rows_per_cta
        n = part % tiling.parts_n * tiling.width
        return Part(m, n, n + tiling.block_n, first, last, part)


@aggregate
class Stages:
    """Buffers and barriers of all stages. A stage that is filled only once has no `empty`."""

    x: gl.shared_memory_descriptor  # tokens [num_stages, tile, block_k]
    y: gl.shared_memory_descriptor  # gate [gate_slots, block_n, block_k]
    z: gl.shared_memory_descriptor | gl.constexpr  # gate [gate_slots, rest_n, block_k], columns after y's; or None
    ring: Ring
    tiling: gl.constexpr

    @staticmethod
    @gluon.jit
    def create(x_desc, y_desc, tiling: gl.constexpr):
        """Allocate the stages and initialise their barriers. The caller fences before any role uses them."""
        x_shape: gl.constexpr = [tiling.num_stages, tiling.tile, tiling.block_k]
        y_shape: gl.constexpr = [tiling.gate_slots, tiling.block_n, tiling.block_k]
        x = gl.allocate_shared_memory(x_desc.dtype, x_shape, x_desc.layout)
        y = gl.allocate_shared_memory(y_desc.dtype, y_shape, y_desc.layout)
        if tiling.rest_n > 0:
            z_shape: gl.constexpr = [tiling.gate_slots, tiling.rest_n, tiling.block_k]
            z = gl.allocate_shared_memory(y_desc.dtype, z_shape, y_desc.layout)
        else:
            z: gl.constexpr = None
        full = allocate_barriers(tiling.num_stages)
        if tiling.single_fill:
            empty: gl.constexpr = None
        else:
            empty = allocate_barriers(tiling.num_stages)
        ring = Ring(full, empty, tiling.num_stages)
        ring.set_up(1, 0 if tiling.single_fill else 1)
        return Stages(x, y, z, ring, tiling)


@aggregate
class ProducerArgs:
    """Producer's TMA descriptors and stages."""

    x_desc: tma.tensor_descriptor  # tokens, in boxes [box_m, block_k]
    y_desc: tma.tensor_descriptor  # gate, in boxes [box_n, block_k]
    stages: Stages
    problem: Problem
    counters: Scalar  # pointer to arrival counters if tiles are only multiplied, two for each block of rows

    @gluon.jit
    def load_stage(self, stage, m, n, k):
        """Load step k of a Part's rows from m and columns from n on into a stage."""
        tiling: gl.constexpr = self.problem.tiling
        full = self.stages.ring.full.index(stage)
        self.expect(stage, n)
        if tiling.box_m < tiling.rows_per_cta:
            self.load_tokens(full, stage, m, k)
        else:
            x_buf = self.stages.x.index(stage)
            if tiling.rows_per_cta < tiling.tile:
                x_buf = x_buf.slice(0, tiling.rows_per_cta, dim=0)  # results of the rows after these are never read
            tma_load(self.x_desc, [m, k * tiling.block_k], full, x_buf)
        if tiling.box_n == tiling.width:
            tma_load(self.y_desc, [n, k * tiling.block_k], full, self.stages.y.index(stage))
        else:
            self.load_gate(self.stages.y, full, stage, n, k)
            if tiling.rest_n > 0:
                self.load_gate(self.stages.z, full, stage, n + tiling.block_n, k)

    @gluon.jit
    def expect(self, stage, n):
        """Announce to a stage's barrier the bytes of tokens and of columns from n on: of boxes that have experts."""
        tiling: gl.constexpr = self.problem.tiling
        num_experts: gl.constexpr = self.problem.spec.num_experts
        ring = self.stages.ring
        tokens: gl.constexpr = self.x_desc.block_type.nbytes * (tiling.rows_per_cta // tiling.box_m)
        gate: gl.constexpr = self.y_desc.block_type.nbytes
        all: gl.constexpr = tokens + gate * (tiling.width // tiling.box_n)
        left: gl.constexpr = num_experts % tiling.width
        last: gl.constexpr = tokens + gate * (-(-left // tiling.box_n))
        if left == 0 or tiling.box_n == tiling.width:
            ring.expect(stage, all)
        elif num_experts < tiling.width:
            ring.expect(stage, last)
        else:
            is_last = n + tiling.width > num_experts
            ring.expect(stage, last, is_last)
            ring.expect(stage, all, is_last == 0)

    @gluon.jit
    def load_tokens(self, full, stage, m, k):
        """Load step k of rows from m on in boxes.

        A box without tokens is loaded from m, since a stage's bytes have to be the same; its products are never read.
        """
        tiling: gl.constexpr = self.problem.tiling
        count: gl.constexpr = tiling.rows_per_cta // tiling.box_m
        for b in gl.static_range(count):
            at = m + b * tiling.box_m
            at = gl.where(at < self.problem.num_tokens, at, m)
            box = self.stages.x.index(stage).slice(b * tiling.box_m, tiling.box_m, dim=0)
            tma_load(self.x_desc, [at, k * tiling.block_k], full, box)

    @gluon.jit
    def load_gate(self, buffers, full, stage, n, k):
        """Load step k of columns from n on in boxes, those with experts; products with the others are never read."""
        tiling: gl.constexpr = self.problem.tiling
        count: gl.constexpr = buffers.shape[1] // tiling.box_n
        for b in gl.static_range(count):
            at = n + b * tiling.box_n
            box = buffers.index(stage).slice(b * tiling.box_n, tiling.box_n, dim=0)
            tma_load(self.y_desc, [at, k * tiling.block_k], full, box, pred=at < self.problem.spec.num_experts)


@gluon.jit
def load_first(args):
    """Fill the first stages, usually all of them, before the roles start."""
    tiling: gl.constexpr = args.problem.tiling
    part = args.problem.part()
    for k in range(part.first, gl.minimum(part.first + tiling.num_first, part.last)):
        args.load_stage(k - part.first, part.m, part.n, k)


@gluon.jit
def producer(args):
    """Fill the other stages, and refill each as it becomes empty: a role of one warp."""
    tiling: gl.constexpr = args.problem.tiling
    ring = args.stages.ring
    if tiling.apart:
        refill_for_tiles(args)
    else:
        part = args.problem.part()
        turns: gl.constexpr = tiling.turns
        for turn in gl.static_range(turns):
            before = turn * (part.last - part.first)
            for k in range(part.first + (tiling.num_first if turn == 0 else 0), part.last):
                step = before + k - part.first
                ring.wait_empty(step)
                args.load_stage(ring.stage(step), part.m, part.n + turn * tiling.block_n, k)


@gluon.jit
def refill_for_tiles(args):
    """Refill the stages for one tile after the other, and count the arrival of those that the consumer has stored.

    The consumer has stored a tile when it releases a stage of the next, and so it needn't wait for its stores itself.
    """
    tiling: gl.constexpr = args.problem.tiling
    ring = args.stages.ring
    step = tiling.num_first
    for tile in range(gl.program_id(0), args.problem.num_parts(), gl.num_programs(0)):
        part = args.problem.part_of(tile)
        is_first = tile == gl.program_id(0)
        for k in range(part.first + gl.where(is_first, tiling.num_first, 0), part.last):
            ring.wait_empty(step)
            if (k - part.first == tiling.num_stages) & (is_first == 0):
                count_tile(args.counters, tile - gl.num_programs(0), args.problem)
            args.load_stage(ring.stage(step), part.m, part.n, k)
            step += 1


@gluon.jit
def count_tile(counters, number, problem):
    """Count that a tile, or a part of it along K, is stored, in the counter of its rows."""
    tile, _along_k = problem.tile_of(number)
    gl.atomic_add(counters + 2 * (tile // problem.tiling.parts), 1, sem="release", scope="gpu")

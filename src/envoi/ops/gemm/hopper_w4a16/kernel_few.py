"""GEMM by expert for few tokens: MXFP4 or INT4 weights straight from memory into FP8 wgmma, bound by reading them.

    acc[row, token] = sum over groups k of 32:  2^sf[row, k] * (w[row, k] @ high[k, token] + w[row, k] @ low[k, token])

bf16 has 8 significant bits, so a token is the sum of two E4M3 numbers, high and low, under a power of two (`tokens`):
exact for all that isn't 2^9 below the largest. MXFP8's have 4, so that there is no low. E2M1 becomes E4M3 in five
integer operations for eight weights, INT4, whose numbers E4M3 holds too, in seven. So 32 of K are two wgmma m64nTk32,
or one, into a fresh accumulator, and a multiply-add for each of its elements: what the factor costs. INT4 less zero
points becomes bf16 in eleven operations, E4M3 in thirteen: there tokens stay bf16, and 32 of K are two wgmma m64nTk16.

Weights are the register operand, loaded in the order in which threads hold them; tokens, all of K, are in shared
memory. There are no roles and no barriers in the loop: 16 warps an SM hide each other's waits, in 4 CTAs, or in 2 or 1
where tokens are wide.

Work is shared out evenly in groups of `unroll` steps of 64 of K, numbered (expert, tile of tokens, tile of rows, K).
Worker i has one contiguous range. Timeline of one whose range begins inside tile 4 and ends inside tile 6:

    fetch tokens | end of 4 -> part, flag | all of 5, epilogue | beginning of 6 | wait for flags, add parts, epilogue
    weights: requested one group ahead, across tiles and epilogues; the first ones before the tokens are there

Of a tile that is cut, whoever has its beginning adds the others' parts in the order of K: bits don't depend on who was
first. It comes to that last, and they came to theirs first, so it rarely waits. Workers are numbered from the last CTA
down: a CTA waits for ones that were launched before it, so it doesn't matter how many fit the GPU at once.

    flag      set by                            reset by               meaning
    flags[i]  worker i, after its part          who adds that part     parts[i] can be read

Launches overlap: permute (`tokens`) -> L1 -> L2. Each may start once all CTAs of the one in front have let it,
and requests weights; what the one in front writes is read after `wait_for_grid`. `offsets`, which permute writes, tells
where weights are. So L1 lets L2 start only after it has seen the end of permute itself, and either waits for that first
or, for few slots, finds from the ids where weights are.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from envoi.epilogues.device import plus
from envoi.ops.gemm.hopper_w4a8.widening import widened
from envoi.ops.gemm.hopper_w4a16 import few_config
from envoi.ops.gemm.hopper_w4a16.few_epilogue import Outputs, finish_l1, finish_l2
from envoi.ops.gemm.hopper_w4a16.few_tokens import Fp8Tokens, Tokens
from envoi.ops.gemm.hopper_w4a16.fragments import E4M3_CODE, TAME, Weights, by_thread, either, row_factors, to_e4m3
from envoi.ops.gemm.hopper_w4a16.int4 import INT4_CODE, int4_factors, int4_less_zeros
from envoi.runtime.aggregate import Scalar, aggregate
from envoi.runtime.sync import let_next_start, wait_for_grid
from envoi.runtime.triton_compat import PINS_LOADS, role_barrier

INT4_UP = gl.constexpr(few_config.INT4_UP)


@aggregate
class Tile:
    """64 or 128 rows of an expert's weights, and up to tile_tokens of its tokens: rows token to token_end."""

    expert: gl.tensor
    row_tile: gl.tensor
    token: gl.tensor
    token_end: gl.tensor
    strip: gl.tensor  # number of the tile of tokens: tiles of one strip share their tokens


@gluon.jit
def bounds_of(routing, cfg: gl.constexpr):
    """Return experts, and where their rows begin and end, int32 [max_experts].

    Every warp has all of them, so that sums need no barrier.
    """
    per_thread: gl.constexpr = cfg.max_experts // 32
    layout: gl.constexpr = gl.BlockedLayout([per_thread], [32], [gl.num_warps()], [0])
    index = gl.arange(0, cfg.max_experts, layout)
    if cfg.reads_ids:
        # `offsets` isn't there yet, and weights can be requested without it.
        S: gl.constexpr = cfg.max_slots
        wide: gl.constexpr = gl.BlockedLayout([per_thread, S], [32, 1], [gl.num_warps(), 1], [1, 0])
        e = gl.arange(0, cfg.max_experts, gl.SliceLayout(1, wide))[:, None]
        s = gl.arange(0, S, gl.SliceLayout(0, wide))
        ids = gl.load(routing.topk_ids + s, mask=s < routing.num_slots, other=-1)
        ids = gl.where((ids < 0) | (ids >= routing.num_experts), cfg.max_experts, ids).to(gl.int32)[None, :]
        first = gl.convert_layout(gl.sum((ids < e).to(gl.int32), 1), layout, assert_trivial=True)
        last = gl.convert_layout(gl.sum((ids <= e).to(gl.int32), 1), layout, assert_trivial=True)
        return index, first, last
    else:
        first = gl.load(routing.offsets + index, mask=index < routing.num_experts, other=0)
        return index, first, gl.load(routing.offsets + index + 1, mask=index < routing.num_experts, other=0)


@aggregate
class Routing:
    """Rows of experts: offsets, int32 pointer [num_experts + 1], and the ids [num_slots] they are computed from."""

    offsets: gl.tensor
    topk_ids: gl.tensor
    num_slots: Scalar
    num_experts: Scalar


@aggregate
class Schedule:
    """Positions of tiles: ends [max_experts] counts the tiles of tokens up to and with each expert's.

    index, first, last: the expert, its first row and the row after its last.
    """

    ends: gl.tensor
    index: gl.tensor
    first: gl.tensor
    last: gl.tensor
    routing: Routing
    tiles_per_strip: Scalar
    cfg: gl.constexpr

    @staticmethod
    @gluon.jit
    def create(routing, num_row_tiles, cfg: gl.constexpr):
        """Count the tiles."""
        index, first, last = bounds_of(routing, cfg)
        ends = gl.associative_scan(gl.cdiv(last - first, cfg.tile_tokens), 0, plus)
        return Schedule(ends, index, first, last, routing, gl.cdiv(num_row_tiles, cfg.num_row_tiles), cfg)

    @gluon.jit
    def num_units(self):
        """Return how many groups of steps there are to share out."""
        return gl.max(self.ends, 0) * self.tiles_per_strip * self.cfg.num_groups

    @gluon.jit
    def tile(self, t):
        """Return tile t."""
        strip = t // self.tiles_per_strip
        passed = self.ends <= strip
        e = gl.minimum(gl.sum(passed.to(gl.int32), 0), self.routing.num_experts - 1)
        before = (strip - gl.max(gl.where(passed, self.ends, 0), 0)) * self.cfg.tile_tokens
        row_tile = t % self.tiles_per_strip * self.cfg.num_row_tiles
        if self.cfg.reads_ids:
            # first and last rise from expert to expert, and the lane of expert e is the one after those that passed.
            token = gl.max(gl.where(self.index <= e, self.first, 0), 0)
            token_end = gl.max(gl.where(self.index <= e, self.last, 0), 0)
            return Tile(e, row_tile, token + before, token_end, strip)
        else:
            first = gl.load(self.routing.offsets + e)
            return Tile(e, row_tile, first + before, gl.load(self.routing.offsets + e + 1), strip)


@aggregate
class Parts:
    """Partial sums of tiles that are split over workers, for the worker with a tile's first unit.

    A worker has at most one such tile that begins before its own units. `store` writes the worker's sums and sets its
    flag to 1; the worker that finishes the tile reads them in `add` and resets the flag to 0.
    """

    sums: gl.tensor  # float32 pointer, [workers, 16 * warps * tile_tokens]
    flags: gl.tensor  # int32 pointer [workers]; 0 between launches
    units: gl.tensor
    workers: gl.tensor

    @gluon.jit
    def begin_of(self, worker):
        """Return the first unit of a worker, or of the one after the last."""
        return worker * (self.units // self.workers) + gl.minimum(worker, self.units % self.workers)

    @gluon.jit
    def store(self, worker, acc):
        """Keep a worker's sums of its first tile and set its flag."""
        gl.store(self.sums + worker * acc.numel + place_in(acc), acc)
        role_barrier()
        gl.atomic_xchg(self.flags + worker, 1, sem="release", scope="gpu")

    @gluon.jit
    def add(self, worker, acc, missing, tile_end):
        """Return acc plus the sums of the workers after this one, until no unit of the tile is missing."""
        other = worker + 1
        while missing > 0:
            while gl.atomic_cas(self.flags + other, 1, 0, sem="acquire", scope="gpu") == 0:
                pass
            role_barrier()
            acc += gl.load(self.sums + other * acc.numel + place_in(acc), cache_modifier=".cg")
            missing = tile_end - self.begin_of(other + 1)
            other += 1
        return acc


@gluon.jit
def place_in(acc):
    """Return the place of each element in a part."""
    layout: gl.constexpr = acc.type.layout
    row = gl.arange(0, acc.shape[0], gl.SliceLayout(1, layout))
    return row[:, None] * acc.shape[1] + gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def issue_step(held, tokens, step, zero):
    """Start the products of a step of 64 of K; return those of block 0 and of block 1, without scale factors.

    Where both have the same factors, return the sum of all alone.
    """
    cfg: gl.constexpr = tokens.cfg
    mma: gl.constexpr = zero.type.layout
    dot: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=2 if cfg.bf16 else 4)
    if cfg.bf16:
        return issue_bf16_step(held, tokens, step, zero, dot)
    else:
        return issue_split_step(held, tokens, step, zero, dot)


@gluon.jit
def issue_bf16_step(held, tokens, step, zero, dot: gl.constexpr):
    """Run `issue_step` for tokens in bf16."""
    w0, w1 = int4_less_zeros(held.words, held.zeros, dot, tokens.cfg.words_per_step)
    p0 = warpgroup_mma(w0, tokens.bf16_part(step, 0), zero, use_acc=False, is_async=True)
    if tokens.cfg.shares_factors:
        return (warpgroup_mma(w1, tokens.bf16_part(step, 1), p0, is_async=True),)
    else:
        return p0, warpgroup_mma(w1, tokens.bf16_part(step, 1), zero, use_acc=False, is_async=True)


@gluon.jit
def issue_split_step(held, tokens, step, zero, dot: gl.constexpr):
    """Run `issue_step` for tokens split into two E4M3, of which the low one is 0 for MXFP8's numbers."""
    code: gl.constexpr = E4M3_CODE if tokens.cfg.int4 is None else INT4_CODE
    w0, w1 = to_e4m3(held.words, code, dot)
    if tokens.cfg.shares_factors:
        p = warpgroup_mma(w0, tokens.part(step, 0, 0), zero, use_acc=False, is_async=True)
        p = warpgroup_mma(w1, tokens.part(step, 1, 0), p, is_async=True)
        p = warpgroup_mma(w0, tokens.part(step, 0, 1), p, is_async=True)
        return (warpgroup_mma(w1, tokens.part(step, 1, 1), p, is_async=True),)
    else:
        p0 = warpgroup_mma(w0, tokens.part(step, 0, 0), zero, use_acc=False, is_async=True)
        p1 = warpgroup_mma(w1, tokens.part(step, 1, 0), zero, use_acc=False, is_async=True)
        if not tokens.cfg.mxfp8:
            p0 = warpgroup_mma(w0, tokens.part(step, 0, 1), p0, is_async=True)
            p1 = warpgroup_mma(w1, tokens.part(step, 1, 1), p1, is_async=True)
        return p0, p1


@gluon.jit
def finish_step(acc, products, factors, second, tokens, step):
    """Wait for a step's products; return acc plus them times their scale factors, words of `Step`."""
    cfg: gl.constexpr = tokens.cfg
    mma: gl.constexpr = acc.type.layout
    rows: gl.constexpr = gl.SliceLayout(1, mma)
    columns: gl.constexpr = gl.SliceLayout(0, mma)
    if cfg.int4 is None:
        f0, f1 = row_factors(factors, 0, rows), row_factors(factors, 2, rows)
    else:
        half: gl.constexpr = cfg.int4.half
        f0 = int4_factors(factors, rows, half)
        if cfg.words_per_step == 1:
            f1 = f0
        else:
            f1 = int4_factors(second, rows, half)
    if cfg.shares_factors:
        if cfg.tokens_unscaled:
            p = warpgroup_mma_wait(num_outstanding=0, deps=products)
            acc += p * f0[:, None]
        else:
            t = tokens.factor(step, 0, columns)
            p = warpgroup_mma_wait(num_outstanding=0, deps=products)
            acc += p * f0[:, None] * t[None, :]
    elif cfg.tokens_unscaled:
        p0, p1 = warpgroup_mma_wait(num_outstanding=0, deps=products)
        acc += p0 * f0[:, None]
        acc += p1 * f1[:, None]
    elif cfg.groups_per_step == 1:
        t = tokens.factor(step, 0, columns)
        p0, p1 = warpgroup_mma_wait(num_outstanding=0, deps=products)
        acc += (p0 * f0[:, None] + p1 * f1[:, None]) * t[None, :]
    else:
        t0, t1 = tokens.factor(step, 0, columns), tokens.factor(step, 1, columns)
        p0, p1 = warpgroup_mma_wait(num_outstanding=0, deps=products)
        acc += p0 * (f0[:, None] * t0[None, :])
        acc += p1 * (f1[:, None] * t1[None, :])
    return acc


@gluon.jit
def issue_fp8_step(acc, words, factors, tokens, step):
    """Start the products of a step of 64 of K with FP8 tokens; return acc with them, whose factors are in weights."""
    dot: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=4)
    w0, w1 = widened(by_thread(words), factors, tokens.tables, tokens.cfg.looks_up, dot)
    acc = warpgroup_mma(w0, tokens.part(step, 0), acc, is_async=True)
    return warpgroup_mma(w1, tokens.part(step, 1), acc, is_async=True)


@gluon.jit
def multiply_group(acc, held, tokens, group, place, next_place, next_group, is_wanted):
    """Return acc with a group of steps added, and the weights of the next group, requested meanwhile.

    held: what was requested for this group, whose weights are at `place`. is_wanted: 0 if there is no next group.
    """
    cfg: gl.constexpr = tokens.cfg
    U: gl.constexpr = cfg.unroll
    num_steps: gl.constexpr = cfg.num_steps
    rows: gl.constexpr = acc.shape[0]
    T: gl.constexpr = acc.shape[1]
    mma: gl.constexpr = acc.type.layout
    zero = gl.zeros((rows, T), gl.float32, mma)
    ahead: gl.constexpr = U - cfg.late
    pins: gl.constexpr = cfg.late > 0 and PINS_LOADS
    requested = ()
    for i in gl.static_range(ahead, U):
        held = held + (place.load(i, is_step(group * U + i, cfg), cfg.zero_tail),)
    if pins:
        pin_loads()
    if cfg.prefetches:
        next_place.prefetch(U, U, is_wanted * ((next_group + 2) * U <= num_steps).to(gl.int32))
    for i in gl.static_range(U):
        step, wanted, factors = group * U + i, is_wanted, held[i].factors
        if cfg.fp8:
            if num_steps % U:
                factors = gl.where(step < num_steps, factors, 0)  # weights are 0 after the last step, in any table
                wanted = is_wanted * (next_group * U + i < num_steps).to(gl.int32)
            acc = issue_fp8_step(acc, held[i].words, factors, tokens, within(step, cfg))
            if i < ahead:
                requested = requested + (next_place.load(i, wanted, cfg.zero_tail),)
            # The next step is widened while this one's products are in flight.
            acc = warpgroup_mma_wait(num_outstanding=2 if i + 1 < U else 0, deps=(acc,))
        else:
            products = issue_step(held[i], tokens, within(step, cfg), zero)
            second = held[i].second
            if cfg.int4 is None:
                factors += TAME
            if num_steps % U:
                # A step after the last counts 0 times the last one. Its weights are anything, but finite as E4M3.
                factors = gl.where(step < num_steps, factors, 0)
                if second is not None:
                    second = gl.where(step < num_steps, second, 0)
                wanted = is_wanted * (next_group * U + i < num_steps).to(gl.int32)
            if i < ahead:
                requested = requested + (next_place.load(i, wanted),)
                if pins:
                    pin_loads()
            acc = finish_step(acc, products, factors, second, tokens, within(step, cfg))
    return acc, requested


@gluon.jit
def pin_loads():
    """Keep loads on their side of this point: a warp's barrier, of which the assembler makes a NOP.

    It would move them as registers suit it: to the end of a turn, or to right before their use, which then waits.
    """
    gl.inline_asm_elementwise("bar.warp.sync 0xffffffff; // $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def is_step(step, cfg: gl.constexpr):
    """Return 1 for a step of K, 0 for one after the last."""
    if cfg.num_steps % cfg.unroll:
        return (step < cfg.num_steps).to(gl.int32)
    else:
        return 1


@gluon.jit
def within(step, cfg: gl.constexpr):
    """Return a step, or the last one if K hasn't as many."""
    if cfg.num_steps % cfg.unroll:
        return gl.minimum(step, cfg.num_steps - 1)
    else:
        return step


@gluon.jit
def few_kernel(
    values, factors, words, sf, zeros, scale, tables, bias, row_weights, out, out_factors, offsets, topk_ids, sums,
    flags, num_row_tiles, num_experts, num_slots, cfg: gl.constexpr,
):  # fmt: skip
    """Run one worker. Grid: (any number of CTAs,).

    Arguments are fields of `Tokens` or `Fp8Tokens`, `Weights`, `Outputs`, `Routing` and `Parts`, which say what they
    are.
    """
    if cfg.waits_first:
        wait_for_grid()
    if not cfg.reads_ids:
        let_next_start()
    if cfg.fp8:
        tokens = Fp8Tokens.create(values, factors, tables, cfg)
    else:
        tokens = Tokens.create(values, factors, cfg)
    weights = Weights(words, sf, zeros, num_row_tiles, cfg.num_steps, cfg.words_per_step)
    outputs = Outputs(scale, bias, row_weights, out, out_factors, factors, num_row_tiles, cfg)
    schedule = Schedule.create(Routing(offsets, topk_ids, num_slots, num_experts), num_row_tiles, cfg)
    units = schedule.num_units()
    if cfg.reads_ids and units == 0:
        wait_for_grid()  # all CTAs would end at once otherwise, and L2 would start and read `offsets` too early
    parts = Parts(sums, flags, units, gl.maximum(gl.minimum(gl.num_programs(0), units), 1))
    worker = parts.workers - 1 - gl.program_id(0)
    if worker >= 0:
        begin, end = parts.begin_of(worker), parts.begin_of(worker + 1)
        if begin < end:
            work(tokens, weights, outputs, schedule, parts, worker, begin, end)


@gluon.jit
def work(tokens, weights, outputs, schedule, parts, worker, begin, end):
    """Multiply units begin to end."""
    cfg: gl.constexpr = tokens.cfg
    U: gl.constexpr = cfg.unroll
    T: gl.constexpr = cfg.tile_tokens
    warps: gl.constexpr = gl.num_warps()
    num_rows: gl.constexpr = 16 * warps
    num_groups: gl.constexpr = cfg.num_groups
    num_steps: gl.constexpr = cfg.num_steps
    k: gl.constexpr = 16 if cfg.bf16 else 32  # of an instruction
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, T, k])
    first, last = begin // num_groups, gl.cdiv(end, num_groups)
    tile = schedule.tile(first)
    group = begin - first * num_groups
    place = weights.at(tile.expert, tile.row_tile, group * U)
    ahead: gl.constexpr = U - cfg.late
    held = ()
    for i in gl.static_range(ahead):
        held = held + (place.load(i, (group * U + i < num_steps).to(gl.int32), cfg.zero_tail),)
    if not cfg.waits_first:
        wait_for_grid()
    if cfg.reads_ids:
        let_next_start()
    tokens.fetch(tile)
    for t in range(first, last):
        next_tile = schedule.tile(gl.minimum(t + 1, last - 1))
        next_begin = weights.at(next_tile.expert, next_tile.row_tile, 0)
        low = gl.maximum(begin - t * num_groups, 0)
        high = gl.minimum(end - t * num_groups, num_groups)
        acc = gl.zeros((num_rows, T), gl.float32, mma)
        for g in range(low, high):
            is_last = g + 1 == high
            next_place = either(is_last, next_begin, place.advance(U))
            next_group = gl.where(is_last, 0, g + 1)
            more = ((not is_last) | (t + 1 < last)).to(gl.int32)
            acc, held = multiply_group(acc, held, tokens, g, place, next_place, next_group, more)
            place = next_place
        if low > 0:
            parts.store(worker, acc)
        else:
            acc = parts.add(worker, acc, num_groups - high, (t + 1) * num_groups)
            if cfg.int4 is not None and not cfg.bf16:
                acc = acc * INT4_UP
            if cfg.is_l1:
                finish_l1(acc, tile, outputs)
            else:
                finish_l2(acc, tile, outputs)
        if next_tile.strip != tile.strip:
            role_barrier()
            tokens.fetch(next_tile)
        tile = next_tile

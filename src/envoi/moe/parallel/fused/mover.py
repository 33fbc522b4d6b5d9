"""Mover of the fused L1: one warp that pulls peers' tokens into this rank's rows and counts their arrivals."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from envoi.moe.parallel.fused import config
from envoi.moe.parallel.fused.scheduler import BLOCK_ROWS, batch_of
from envoi.runtime import timeline
from envoi.runtime.aggregate import Scalar, aggregate
from envoi.runtime.sync import wait_for_grid
from envoi.runtime.timeline_device import note_begin, note_moment
from envoi.runtime.triton_compat import role_barrier

LANES = gl.constexpr(config.LANES)
MOVER = gl.constexpr(timeline.PRODUCER + 1)  # the first one's track


@aggregate
class MoverArgs:
    """Mover's pointers and sizes."""

    row_map: gl.tuple  # RowMap
    num_rows: gl.tensor  # pointer to int32: rows of this rank's experts in this call
    tokens_at: Scalar  # bytes from the start of a rank's memory to its tokens
    sf_at: Scalar  # and to their scale factors
    token_bits: Scalar  # of a token's number: those below the source's
    cfg: gl.constexpr  # MoverConfig
    trace: gl.tuple | gl.constexpr  # `Trace`, or None


@gluon.jit
def mover(args, number: gl.constexpr):
    """Role: draw tickets until no rows are left; pull each token whose first row is in a ticket's batch. One warp.

    Waits for `order_rows` alone. While a batch is moved, the next one's tokens are looked up and the ticket after it is
    drawn. A token's rows are counted while the next one's loads are in flight, or after a batch without one.

    number: of the CTA's movers, which tells their tracks apart.
    """
    lane = gl.arange(0, LANES, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    num_rows = gl.load(args.num_rows)
    moved = gl.full_like(lane, -1)  # rows of the last token, not counted yet
    wait_for_grid()
    ticket = draw(args, lane, lane)
    first, tokens = look_up(args, ticket, num_rows, lane)
    next_ticket = draw(args, lane, gl.minimum(ticket, 0))  # a ticket isn't negative
    event = 0
    while first < num_rows:
        note_begin(args.trace, MOVER + number, event, first)
        first, next_tokens = look_up(args, next_ticket, num_rows, lane)
        next_ticket = draw(args, lane, gl.minimum(next_ticket, 0))
        token = gl.max(tokens, 0)
        if token < 0:
            count_rows(args, moved)
            moved = gl.full_like(lane, -1)
        while token >= 0:
            moved = move_token(args, token, moved, lane)
            tokens = gl.where(tokens == token, -1, tokens)
            token = gl.max(tokens, 0)
        tokens = next_tokens
        note_moment(args.trace, MOVER + number, event, 1)
        event += 1
    count_rows(args, moved)


@gluon.jit
def look_up(args, ticket, num_rows, lane):
    """Return a ticket's first row, and the tokens whose first rows are in its batch: int32 [LANES] numbers, else -1.

    Waits for the ticket, not for the numbers.
    """
    cfg: gl.constexpr = args.cfg
    first, end = batch_of(gl.max(ticket, 0), cfg.alone, cfg.batch)
    row = first + lane
    return first, gl.load(args.row_map.row_tokens + row, mask=row < gl.minimum(end, num_rows), other=-1)


@gluon.jit
def draw(args, lane, offset):
    """Draw the next ticket: int32 [LANES], which only lane 0 knows; the others have -1. Nothing waits for it here.

    offset: int32 [LANES], 0 in lane 0. If ptxas could prove all of them equal, it would add once for all lanes and wait
    for the sum, to hand it out.
    """
    counter, one = args.row_map.tickets + offset, gl.full_like(lane, 1)
    drawn = gl.atomic_add(counter, one, mask=lane == 0, sem="relaxed", scope="gpu")
    return gl.where(lane == 0, drawn, -1)


@gluon.jit
def at_lane(values, lane, i):
    """Return values[i], at least -1."""
    return gl.max(gl.where(lane == i, values, -1), 0)


@gluon.jit
def count_rows(args, rows):
    """Add each of these rows, -1 = none, to its block's arrivals (release). rows: int32 [LANES].

    The barrier orders all lanes' stores of the rows before any lane's addition.
    """
    role_barrier()
    blocks = args.row_map.arrivals + rows // BLOCK_ROWS
    gl.atomic_add(blocks, gl.full_like(rows, 1), mask=rows >= 0, sem="release", scope="gpu")


@gluon.jit
def move_token(args, number, moved, lane):
    """Copy a token and its scale factors to all its rows; return these, int32 [LANES], then -1.

    number: of the token, see `RowMap`. moved: rows of the token before, which are counted meanwhile.
    """
    cfg: gl.constexpr = args.cfg
    row_map = args.row_map
    num_words: gl.constexpr = cfg.num_words
    piece: gl.constexpr = cfg.piece
    token = (number & ((1 << args.token_bits) - 1)).to(gl.int64)
    base = gl.load(row_map.peers + (number >> args.token_bits))
    rows = gl.load(row_map.token_rows + number * cfg.num_slots + lane, mask=lane < cfg.num_slots, other=-1)
    words = gl.multiple_of((base + args.tokens_at).to(row_map.rows.dtype), 16) + token * num_words
    sf_lane = gl.arange(0, cfg.sf_lanes, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    from_sf = gl.multiple_of((base + args.sf_at).to(row_map.rows_sf.dtype), 4) + token * cfg.num_sf
    sf = gl.load(from_sf + sf_lane, mask=sf_lane < cfg.num_sf, other=0)
    column = gl.arange(0, piece, gl.BlockedLayout([4], [32], [gl.num_warps()], [0]))
    for begin in gl.static_range(0, num_words, piece):
        x = gl.load(words + begin + column, mask=begin + column < num_words, other=0)
        if begin == 0:
            count_rows(args, moved)
        i = 0
        row = at_lane(rows, lane, 0)
        while row >= 0:
            to = row_map.rows + row.to(gl.int64) * num_words
            gl.store(to + begin + column, x, mask=begin + column < num_words)
            if begin == 0:
                to_sf = row_map.rows_sf + row.to(gl.int64) * cfg.num_sf
                gl.store(to_sf + sf_lane, sf, mask=sf_lane < cfg.num_sf)
            i += 1
            row = at_lane(rows, lane, i)
    return rows

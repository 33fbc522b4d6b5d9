# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
"""Order in which movers bring rows, and what a block of rows lacks: integers alone, in Triton and Gluon alike.

A mover draws a ticket, which stands for a batch of rows. Tickets are handed out in order, so rows come roughly from the
first to the last, whichever multiprocessors run; early batches are single rows, so that all movers share those that
the first tiles wait for:

    alone = 3, batch = 4, 9 rows

    ticket     0   1   2 | 3             4
    rows       0   1   2 | 3  4  5  6    7  8  (9  10: past the last)

Arrivals are counted in blocks of BLOCK_ROWS rows from row 0 on, whatever the experts: the last block has fewer rows.
"""

import triton
import triton.language as tl

from envoi.moe.parallel.fused import memory

BLOCK_ROWS: tl.constexpr = tl.constexpr(memory.BLOCK_ROWS)


@triton.jit
def batch_of(ticket, alone, BATCH: tl.constexpr):
    """Return the rows [first, end) of a ticket. The first `alone` tickets have one row each, all others BATCH."""
    is_alone = ticket < alone
    first = tl.where(is_alone, ticket, alone + (ticket - alone) * BATCH)
    return first, first + tl.where(is_alone, 1, BATCH)


@triton.jit
def rows_in_block(block, num_rows):
    """Return the rows of a block: BLOCK_ROWS, fewer in the last one, 0 past it."""
    return tl.minimum(tl.maximum(num_rows - block * BLOCK_ROWS, 0), BLOCK_ROWS)


@triton.jit
def rows_before(block, lane, is_missing, LANES: tl.constexpr):
    """Return how many rows are there without a gap, if `lane` [LANES] of the blocks from `block` on lack some.

    lane: 0, 1, ..; is_missing: True where block + lane lacks rows.
    """
    complete = LANES - tl.max(tl.where(is_missing, LANES - lane, 0), 0)
    return (block + complete) * BLOCK_ROWS

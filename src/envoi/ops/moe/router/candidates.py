"""Tilings of the Hopper router that are worth comparing."""

from collections.abc import Iterator

from envoi.ops.moe.router.spec import Spec, block_sum
from envoi.ops.moe.router.tiling import FEW_SIGNALS, MAX_SIGNALS, MAX_WIDTH, TILE, Cut, RouterTiling, make, two_widths

WIDTHS = {4: (16, 32, 64, 128), 8: (128, 256)}  # warps -> block_n for which a block's sums and the total fit registers
TURN_COLUMNS = 256  # columns of a turn, whose logits of 64 rows shared memory holds beside four stages
MOST_POLLED_ROWS = 256  # with more than FEW_SIGNALS sums: polling was up to 10 % slower for more rows


def candidates(M: int, hidden: int, spec: Spec, num_sms: int) -> Iterator[RouterTiling]:
    """Yield all tilings worth comparing."""
    polled = MAX_SIGNALS if M <= MOST_POLLED_ROWS else FEW_SIGNALS
    num_blocks = -(-hidden // block_sum(hidden))
    if M > TILE:  # first: as fast as one width by the model, but for its empty columns
        yield from fitted_candidates(M, hidden, spec, num_sms)
    for num_warps, widths in WIDTHS.items():
        for block_n in widths:
            if block_n > spec.columns:
                continue
            for blocks_each in {-(-num_blocks // parts) for parts in range(1, num_blocks + 1)}:
                tiling = make(M, hidden, spec, Cut(num_warps, block_n, blocks_each, most_signals=polled), num_sms)
                if tiling.all_parts_wait or blocks_each == num_blocks:
                    yield tiling
                if tiling.polls_sums and tiling.sum_bytes(M) > 4 * FEW_SIGNALS:
                    yield make(M, hidden, spec, Cut(num_warps, block_n, blocks_each, most_signals=0), num_sms)
            if block_n == spec.columns:
                for rows in (8, 16, 32):
                    if rows < M:
                        yield make(M, hidden, spec, Cut(num_warps, block_n, num_blocks, rows), num_sms)
    if M > TILE:
        yield from large_candidates(M, hidden, spec, num_sms)


def large_candidates(M: int, hidden: int, spec: Spec, num_sms: int) -> Iterator[RouterTiling]:
    """Yield tilings for many rows: 128 of them a CTA, which halves the loads of the gate; or all columns in two turns.

    No turns for columns of which two widths have room.
    """
    num_blocks = -(-hidden // block_sum(hidden))
    if 64 <= spec.columns <= 128:
        yield make(M, hidden, spec, Cut(8, spec.columns, num_blocks, 2 * TILE, tile=2 * TILE), num_sms)
    if MAX_WIDTH < spec.num_experts <= 2 * TURN_COLUMNS:
        yield make(M, hidden, spec, Cut(8, TURN_COLUMNS, num_blocks, turns=2), num_sms)


def fitted_candidates(M: int, hidden: int, spec: Spec, num_sms: int) -> Iterator[RouterTiling]:
    """Yield tilings whose parts have two widths, for numbers of experts such as 160 = 128 + 32 or 2 * (64 + 16)."""
    num_blocks = -(-hidden // block_sum(hidden))
    for parts in (1, 2):
        block_n, rest_n = two_widths(spec.num_experts, parts)
        if not rest_n:
            continue
        if parts == 1 and block_n == 128:
            yield make(M, hidden, spec, Cut(8, block_n, num_blocks, 2 * TILE, tile=2 * TILE, rest_n=rest_n), num_sms)
        for num_warps in (4, 8):
            # Four warps have registers for 160 columns; eight warps' instructions are wasted on 64.
            suits = block_n == 64 or (parts == 1 and block_n + rest_n <= 160) if num_warps == 4 else block_n > 64
            if not suits:
                continue
            most_k = num_blocks if num_warps == 8 and block_n == 128 else 1  # no room for others, or not measured
            for blocks_each in {-(-num_blocks // k) for k in range(1, most_k + 1)}:
                cut = Cut(num_warps, block_n, blocks_each, rest_n=rest_n, most_signals=FEW_SIGNALS)
                tiling = make(M, hidden, spec, cut, num_sms)
                if tiling.all_parts_wait or tiling.parts == 1:
                    yield tiling
            if parts == 1:
                for rows in (16, 32):
                    yield make(M, hidden, spec, Cut(num_warps, block_n, num_blocks, rows, rest_n=rest_n), num_sms)

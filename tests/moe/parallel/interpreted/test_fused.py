"""Order of rows and of movers of the fused L1: against the staged pull, and against loops in Python."""

import pytest
import torch
import triton
import triton.language as tl

from envoi.moe.parallel import dispatch
from envoi.moe.parallel.fused import memory, order_kernels, scheduler
from envoi.moe.parallel.fused.host import order_rows
from envoi.moe.parallel.load import load_of
from envoi.moe.parallel.shared_device import OUTCOME, REFUSED
from envoi.moe.parallel.symmetric_memory import SharedLayout
from tests.helpers.accuracy import assert_same_bits
from tests.moe.layers import make
from tests.moe.parallel import domains as ranks
from tests.moe.parallel.interpreted.test_nvlink import ENDS, SMALL

LAYERS = {
    "uneven": {},
    "masked": {"k": 4, "masked": 0.5},
    "all masked": {"masked": 1.0},
    "few": {"tokens": 3},
    "none": {"tokens": 0},
    "many": {"tokens": 150, "experts": 6, "k": 3},
}


@triton.jit
def batches_kernel(out, alone, BATCH: tl.constexpr, TICKETS: tl.constexpr):
    first, end = scheduler.batch_of(tl.arange(0, TICKETS), alone, BATCH)
    tl.store(out + tl.arange(0, TICKETS), first)
    tl.store(out + TICKETS + tl.arange(0, TICKETS), end)


def test_tickets_have_all_rows_in_order():
    for alone, batch in ((5, 4), (0, 8), (32, 8)):
        out = torch.empty(2, 32, dtype=torch.int32)
        batches_kernel[(1,)](out, alone, batch, 32)
        rows, want = 0, []
        for ticket in range(32):
            size = 1 if ticket < alone else batch
            want.append((rows, rows + size))
            rows += size
        assert list(zip(*out.tolist(), strict=True)) == want


@triton.jit
def arrived_kernel(counts, out, num_rows, block, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    expected = scheduler.rows_in_block(block + lane, num_rows)
    found = tl.load(counts + block + lane, mask=expected > 0, other=0)
    tl.store(out, scheduler.rows_before(block, lane, (expected > 0) & (found < expected), LANES))


def test_rows_are_there_up_to_the_first_block_that_lacks_some():
    generator, size, lanes = torch.Generator().manual_seed(0), scheduler.BLOCK_ROWS.value, 8
    for num_rows in (0, 1, 64, 65, 500, 1000):
        for _ in range(6):
            blocks = -(-num_rows // size)
            counts = [min(size, num_rows - block * size) for block in range(blocks)]
            missing = torch.rand(blocks, generator=generator) < 0.2
            counts = [count - int(lacks) for count, lacks in zip(counts, missing.tolist(), strict=True)]
            begin = int(torch.randint(0, blocks + 1, (1,), generator=generator))
            end = begin
            while end < begin + lanes and (end >= blocks or counts[end] >= min(size, num_rows - end * size)):
                end += 1
            out = torch.empty(1, dtype=torch.int32)
            arrived_kernel[(1,)](torch.tensor([*counts, 0], dtype=torch.int32), out, num_rows, begin, lanes)
            assert int(out) == end * size


def opened_for(layer, token_ends, expert_ends):
    sizes = layer.routing.num_experts, max(1, len(layer.tokens)), 4, layer.tokens.shape[1], "fp8_block128"
    opened = ranks.open_all(SharedLayout(len(token_ends), *sizes, fused=True), [0, *expert_ends])
    for domain in opened:
        domain.fused.counters.fill_(7)
        domain.fused.row_tokens.fill_(12345)
        domain.fused.token_rows.fill_(12345)
    ranks.exchange_routing(opened, ranks.split(layer, token_ends))
    return opened


def pulled_by_movers(domain, opened) -> list[int]:
    """Do what the movers do, ticket by ticket: fill domain.rows, return the arrivals of each block."""
    fused, num_rows, layout = domain.fused, int(domain.offsets[-1]), domain.layout
    arrivals, bits = fused.arrivals.tolist(), memory.token_bits(layout.max_tokens)
    for row in range(num_rows):
        number = int(fused.row_tokens[row])
        if number < 0:
            continue
        source, token = number >> bits, number & ((1 << bits) - 1)
        theirs = layout.tokens_in(opened[source].memory)
        rows = fused.token_rows[number].tolist()
        assert row == min(r for r in rows if r >= 0), "a token comes with the first of its rows"
        for to in [r for r in rows if r >= 0]:
            domain.rows.values.view(torch.uint8)[to] = theirs.values.view(torch.uint8)[token]
            domain.rows.sf[to] = theirs.sf[token]
            arrivals[to // memory.BLOCK_ROWS] += 1
    return arrivals


@pytest.mark.parametrize("changes", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
def test_movers_bring_the_rows_of_the_staged_pull(changes, ends):
    layer = make(**(SMALL | changes))
    tokens = len(layer.tokens)
    opened = opened_for(layer, [tokens // 3, tokens // 3, tokens], ends)
    for domain in opened:
        num_rows = int(domain.offsets[-1])
        dispatch.pull_rows(domain)
        want = [x[:num_rows].clone() for x in (domain.rows.values, domain.rows.sf)]
        given = [x[:num_rows].clone() for x in (domain.row_weights, domain.row_destinations)]
        for x in (domain.rows.values.view(torch.uint8), domain.rows.sf, domain.row_weights, domain.row_destinations):
            x.zero_()
        order_rows(domain)
        assert int(domain.fused.tickets) == 0
        arrivals = pulled_by_movers(domain, opened)
        for got, expected in zip((domain.rows.values, domain.rows.sf), want, strict=True):
            assert_same_bits(got[:num_rows], expected)
        for got, expected in zip((domain.row_weights, domain.row_destinations), given, strict=True):
            assert_same_bits(got[:num_rows], expected)
        full, rest = divmod(num_rows, memory.BLOCK_ROWS)
        assert arrivals[: full + (rest > 0)] == [memory.BLOCK_ROWS] * full + [rest] * (rest > 0)


def test_duplicate_ids_and_one_expert_for_all():
    layer = make(**(SMALL | {"tokens": 12, "k": 3}))
    layer.routing.topk_ids.fill_(0)
    opened = opened_for(layer, [4, 8, 12], ENDS["even"])
    for domain in opened:
        order_rows(domain)
    first = opened[0]
    assert int(first.offsets[-1]) == 36
    assert pulled_by_movers(first, opened)[0] == 36
    assert sorted(row for rows in first.fused.token_rows.tolist() for row in rows if 0 <= row < 99) == list(range(36))


def test_a_refused_call_has_no_rows_and_does_not_count():
    layer = make(**SMALL)
    layer.routing.topk_ids[3, 1] = 6
    for domain in opened_for(layer, [4, 4, 11], ENDS["even"]):
        order_rows(domain)
        assert int(domain.state[OUTCOME.value]) == REFUSED.value
        assert int(domain.offsets[-1]) == 0
        assert domain.fused.row_tokens.eq(12345).all()
        assert load_of(domain.history, [0, 2, 4, 6]).busiest() is None


def test_the_call_is_counted_once():
    layer = make(**SMALL)
    opened, counts = (
        opened_for(layer, [4, 4, 11], ENDS["even"]),
        [int((layer.routing.topk_ids == e).sum()) for e in range(6)],
    )
    for domain in opened:
        order_rows(domain)
        assert load_of(domain.history, [0, 2, 4, 6]).num_tokens_per_expert[-1].tolist() == counts


def test_host_and_device_share_constants():
    assert scheduler.BLOCK_ROWS.value == memory.BLOCK_ROWS
    assert order_kernels.ARRIVALS_AT.value == memory.FIRST_ARRIVALS

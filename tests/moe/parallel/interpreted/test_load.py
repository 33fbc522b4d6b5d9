"""Load counted by the kernels: over NVLink and around collectives, refused calls, prepared calls, objects apart."""

from itertools import pairwise

import pytest
import torch

from envoi.ops.moe.parallel.combine_kernels import LOST, OUTCOME
from envoi.ops.moe.parallel.load import HISTORY, NO_CALL, load_of
from envoi.ops.moe.parallel.nvlink import SharedLayout
from tests.moe.layers import make
from tests.moe.parallel import domains
from tests.moe.parallel.domains import use
from tests.moe.parallel.interpreted.test_hosts import ranks_of
from tests.moe.parallel.interpreted.test_nvlink import ENDS, SMALL, run
from tests.moe.parallel.interpreted.test_prepared import inputs, open_here

TOKEN_ENDS = [4, 4, 11]


def counts(ids: torch.Tensor, num_experts: int) -> list[int]:
    return [int((ids == expert).sum()) for expert in range(num_experts)]


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
def test_kernels_of_nvlink_count_all_ranks_tokens(ends):
    layer = make(**SMALL, masked=0.2)
    opened, packed, parts = run(layer, "bf16", TOKEN_ENDS, ends)
    domains.moe(opened, parts, packed)
    few = [(tokens[:1], type(r)(r.topk_weights[:1], r.topk_ids[:1], r.num_experts)) for tokens, r in parts]
    domains.moe(opened, few, packed)
    ids = layer.routing.topk_ids
    want = [[NO_CALL] * 6, counts(ids, 6), counts(torch.cat([r.topk_ids for _, r in few]), 6)]
    for domain in opened:
        load = load_of(domain.history, [0, *ends])
        assert load.num_tokens_per_expert[-3:].tolist() == want
        by_rank = [sum(want[1][a:b]) for a, b in pairwise([0, *ends])]
        assert load.num_tokens_per_rank[-2].tolist() == by_rank


def test_kernels_around_collectives_count_and_leave_refused_calls_out():
    layer = make(**SMALL, masked=0.2)
    ranks = ranks_of(layer, "bf16", list("abc"), TOKEN_ENDS, expert_ends=ENDS["uneven"])
    ranks.run()
    ranks.run(refusing=(1,))
    ranks.run()
    want, offsets = counts(layer.routing.topk_ids, 6), [0, *ENDS["uneven"]]
    for buffers, (first, last) in zip(ranks.opened, pairwise(offsets), strict=True):
        found = load_of(buffers.domain.history, offsets).num_tokens_per_expert
        mine = [n if first <= expert < last else 0 for expert, n in enumerate(want)]  # those of its host
        assert found[-3:].tolist() == [[NO_CALL] * 6, mine, mine]


def test_a_lost_call_and_one_with_a_bad_id_do_not_count():
    layer = make(**SMALL)
    opened, packed, parts = run(layer, "bf16", TOKEN_ENDS, ENDS["even"])
    parts[0][1].topk_ids[0, 0] = 6
    domains.moe(opened, parts, packed)
    parts[0][1].topk_ids[0, 0] = 5
    for domain in opened:
        domain.state[OUTCOME.value] = LOST.value
    domains.moe(opened, parts, packed)
    for domain in opened:
        assert load_of(domain.history, [0, *ENDS["even"]]).num_tokens_per_expert.eq(NO_CALL).all()


def test_the_ring_begins_again():
    layer = make(**SMALL)
    layout = SharedLayout(1, 6, 12, 2, 128, "bf16")
    (domain,) = domains.open_all(layout, [0, 6])
    domain.history[HISTORY, 0] = HISTORY - 1
    for _ in range(2):
        domains.moe([domain], domains.split(layer, [11]), None)
    assert int(domain.history[HISTORY, 0]) == HISTORY + 1
    want = counts(layer.routing.topk_ids, 6)
    assert domain.history[HISTORY - 1].tolist() == want
    assert domain.history[0].tolist() == want


def test_prepared_calls_count_for_the_object_that_makes_them(fake, monkeypatch):
    one = open_here(monkeypatch, "bf16")
    other = open_here(monkeypatch, "bf16")
    use(other, one._exchange.owner)  # layers of equal sizes share memory and prepared calls
    tokens, routing = inputs(0)
    for _ in range(3):
        one.moe(tokens, routing)
    before = len(fake.calls)
    other.moe(tokens, routing)
    assert len(fake.calls) > before  # replayed
    want = counts(routing.topk_ids, 4)
    for parallel, calls in ((one, 3), (other, 1)):
        found = parallel.load().num_tokens_per_expert
        assert found[-calls:].tolist() == [want] * calls
        assert found[: HISTORY - calls].eq(NO_CALL).all()

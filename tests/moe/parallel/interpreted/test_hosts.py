"""Kernels around the two collectives between hosts, several hosts of several ranks in one process."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

from envoi.ops.moe import moe
from envoi.ops.moe.parallel import rail, rail_kernels
from envoi.ops.moe.parallel.combine_kernels import BAD_IDS, LATE_AT_COMBINE, LATE_AT_DISPATCH, OUTCOME
from envoi.ops.moe.parallel.failure import BEGUN, LOST
from envoi.ops.moe.parallel.nvlink import (
    MAX_CHUNKS,
    REFUSED_ON_HOST,
    SharedLayout,
    combine_barrier,
    num_chunks,
    pull_rows,
    run_local_experts,
    set_peers,
)
from envoi.ops.moe.parallel.rail import Grid, HostsLayout, Rail
from tests.helpers.accuracy import assert_same_bits
from tests.helpers.slow import mostly_slow
from tests.moe.layers import make
from tests.moe.parallel import domains
from tests.moe.parallel.interpreted.test_nvlink import SMALL
from tests.moe.parallel.test_hosts import summed_by_host

SOME = ("bf16", "fp8_row", "fp8_block128", "mxfp4_mxfp8")
PAIRS, MIXED, ALONE, EACH = list("aabb"), list("abba"), list("ab"), list("abcd")
ENDS = {4: [1, 1, 4, 6], 3: [1, 5, 6], 2: [2, 6]}


@dataclass
class Ranks:
    """Ranks of one process: their collectives are copies, and they take their steps in turn."""

    opened: list[Rail]
    packed: list
    parts: list
    grid: Grid

    def rails(self):
        return [[self.opened[rank] for rank in row] for row in self.grid.grid.tolist()]

    def gather(self):
        for members in self.rails():
            for host, source in enumerate(members):
                for other in members:
                    other.parcels[host].copy_(source.own_parcel)

    def announce(self):
        """Announce on all ranks: a rank has everyone's slots only in the second turn."""
        for buffers in self.opened:
            domains.error_codes(buffers.domain).zero_()  # of the last call: its ranks read some before all were sent
        for buffers in self.opened:
            rail.unpack(buffers)
        errors = [domains.error_codes(buffers.domain).clone() for buffers in self.opened]
        for turn in range(2):
            for buffers, codes in zip(self.opened, errors, strict=True):
                domains.error_codes(buffers.domain).copy_(codes)  # again, since they are cleared where they are read
            for buffers in self.opened:
                buffers.domain.report[1].zero_()
                domains.flags(buffers.domain)[0] = num_chunks(buffers.domain.layout) if turn else 100 * MAX_CHUNKS
                rail.send_routing(buffers)

    def exchange(self):
        for members in self.rails():
            for host, source in enumerate(members):
                for other, dest in enumerate(members):
                    dest.received[host].copy_(source.sent[other])

    def run(self, refusing=()):
        for rank, (buffers, (tokens, routing)) in enumerate(zip(self.opened, self.parts, strict=True)):
            if rank in refusing:
                none = torch.empty(0, 1, dtype=torch.int32)
                rail.pack_parcel(buffers, tokens[:0], none.float(), none, REFUSED_ON_HOST)
            else:
                rail.pack_parcel(buffers, tokens, routing.topk_weights, routing.topk_ids)
        self.gather()
        self.announce()
        for buffers in self.opened:
            pull_rows(buffers.domain)
        for buffers, packed in zip(self.opened, self.packed, strict=True):
            run_local_experts(buffers.domain, packed, 10)
        for buffers in self.opened:
            domains.flags(buffers.domain)[1] = 1
            combine_barrier(buffers.domain)
            rail.seal_parts(buffers)
        self.exchange()
        return [
            rail.sum_received(buffers, routing.topk_ids)
            for buffers, (_, routing) in zip(self.opened, self.parts, strict=True)
        ]


def ranks_of(
    layer, format, hosts, token_ends, presum=False, max_tokens=7, num_topk=4, expert_ends=None, device="cpu"
):  # fmt: skip
    grid, offsets = Grid.of(hosts), [0, *(expert_ends or ENDS[len(hosts)])]
    sizes = len(hosts), layer.routing.num_experts, max_tokens, num_topk, layer.tokens.shape[1], format, presum
    layout = HostsLayout(SharedLayout(*sizes), grid.grid.shape[1])
    on = torch.device(device)
    opened = [rail.open_rail(layout, grid, rank, offsets, 1.0, on, shared=False) for rank in range(len(hosts))]
    for rank, buffers in enumerate(opened):
        set_peers(buffers.domain, [opened[peer].domain.memory.data_ptr() for peer in grid.grid[:, grid.host[rank]]])
        for poisoned in (buffers.received, buffers.sent):
            poisoned.fill_(float("nan"))
    packed = [layer.pack(format, first, last) for first, last in pairwise(offsets)]
    return Ranks(opened, packed, domains.split(layer, token_ends), grid)


@pytest.mark.parametrize("format", mostly_slow(SOME, quick=["bf16", "fp8_block128"]))
def test_the_bits_of_one_rank(format):
    layer = make(**SMALL)
    ranks = ranks_of(layer, format, PAIRS, [4, 4, 6, 11])
    want = moe(layer.tokens, layer.routing, layer.pack(format))
    for _ in range(2):  # the second call uses the memory as the first call wrote it
        assert_same_bits(torch.cat(ranks.run()), want)
    for buffers in ranks.opened:
        assert not buffers.domain.report.any()
        assert not buffers.late.any()
        assert buffers.host.tolist() == [2, 2, 2, 0]


@pytest.mark.parametrize("hosts", mostly_slow([MIXED, ALONE, EACH, list("aaaa")], quick=[MIXED, EACH]), ids="".join)
def test_other_hosts(hosts):
    layer = make(**SMALL)
    token_ends = [5, 11] if len(hosts) == 2 else [3, 5, 5, 11]
    ranks = ranks_of(layer, "bf16", hosts, token_ends)
    assert_same_bits(torch.cat(ranks.run()), moe(layer.tokens, layer.routing, layer.pack()))


@pytest.mark.parametrize(
    "changes",
    mostly_slow(
        [{"masked": 1.0}, {"k": 4, "masked": 0.5}, {"bias": True, "activation": "swiglu_oai"}, {"tokens": 3}],
        quick=[{"k": 4, "masked": 0.5}, {"tokens": 3}],
    ),
)
def test_other_layers(changes):
    layer = make(**(SMALL | changes))
    tokens = len(layer.tokens)
    ranks = ranks_of(layer, "bf16", PAIRS, [0, tokens // 2, tokens, tokens])
    assert_same_bits(torch.cat(ranks.run()), moe(layer.tokens, layer.routing, layer.pack()))


def test_no_tokens_at_all():
    ranks = ranks_of(make(**(SMALL | {"tokens": 0})), "bf16", PAIRS, [0, 0, 0, 0])
    assert [out.shape for out in ranks.run()] == [(0, 128)] * 4


def test_a_host_without_an_expert_that_is_named():
    layer = make(**SMALL)
    layer.routing.topk_ids.fill_(5)
    ranks = ranks_of(layer, "fp8_block128", PAIRS, [4, 8, 9, 11])
    assert_same_bits(torch.cat(ranks.run()), moe(layer.tokens, layer.routing, layer.pack("fp8_block128")))
    assert [int(buffers.domain.offsets[-1]) for buffers in ranks.opened] == [0, 0, 0, layer.routing.topk_ids.numel()]


@pytest.mark.parametrize(("format", "hosts"), mostly_slow(
    [("bf16", PAIRS), ("bf16", MIXED), ("fp8_row", PAIRS), ("fp8_row", MIXED), ("bf16", EACH), ("fp8_row", EACH)],
    quick=[("bf16", MIXED), ("fp8_row", EACH)],
))  # fmt: skip
def test_with_presum_a_host_sends_sums(format, hosts):
    layer = make(**(SMALL | {"masked": 0.3, "k": 4}))
    ranks = ranks_of(layer, format, hosts, [4, 4, 6, 11], presum=True)
    want = summed_by_host(layer, format, ENDS[4], hosts)
    for _ in range(2):
        assert_same_bits(torch.cat(ranks.run()), want)


@pytest.mark.parametrize(("wrong", "hosts"), mostly_slow(
    [(6, PAIRS), (6, MIXED), (-2, PAIRS), (-2, MIXED)], quick=[(6, PAIRS), (-2, MIXED)]
))  # fmt: skip
def test_bad_ids_refuse_the_call_on_all_and_name_their_rank(wrong, hosts):
    layer = make(**SMALL)
    ranks = ranks_of(layer, "bf16", hosts, [4, 6, 8, 11])
    want = moe(layer.tokens, layer.routing, layer.pack())
    right = ranks.parts[2][1].topk_ids.clone()
    ranks.parts[2][1].topk_ids[1, 0] = wrong
    assert all(out.isnan().all() for out in ranks.run())
    for buffers in ranks.opened:
        place, code = next((at, int(code)) for at, code in enumerate(buffers.domain.report[1]) if code)
        assert buffers.culprit(place, code) == (2, BAD_IDS.value)
        buffers.domain.report.zero_()  # as the host does
    ranks.parts[2][1].topk_ids.copy_(right)
    assert_same_bits(torch.cat(ranks.run()), want)
    assert not any(buffers.domain.report.any() for buffers in ranks.opened)


def test_a_host_refuses_the_call_on_all():
    layer = make(**SMALL)
    ranks = ranks_of(layer, "bf16", PAIRS, [4, 6, 8, 11])
    assert all(out.isnan().all() for out in ranks.run(refusing=[3]))
    for buffers in ranks.opened:
        assert buffers.domain.report[1, 0] == 0
        assert buffers.culprit(1, int(buffers.domain.report[1, 1])) == (3, REFUSED_ON_HOST)
        buffers.domain.report.zero_()
    assert_same_bits(torch.cat(ranks.run()), moe(layer.tokens, layer.routing, layer.pack()))


def test_a_parcel_of_another_call_is_of_a_rank_that_is_late():
    ranks = ranks_of(make(**SMALL), "bf16", PAIRS, [4, 6, 8, 11])
    ranks.run()
    ranks.opened[2].mark(BEGUN)  # rank 2 has begun a call that the others know nothing of
    outs = ranks.run()
    assert all(outs[rank].isnan().all() for rank in (0, 2))
    assert ranks.opened[0].late.tolist() == [0, LATE_AT_DISPATCH.value]
    assert ranks.opened[2].late.tolist() == [LATE_AT_DISPATCH.value, 0]


@pytest.mark.parametrize("presum", [False, True])
def test_rows_of_a_rank_that_has_given_the_call_up_are_not_summed(presum):
    ranks = ranks_of(make(**SMALL), "bf16", ALONE, [4, 11], presum=presum)
    ranks.run()
    ranks.opened[0].host[LOST] = 1
    assert all(out.isnan().all() for out in ranks.run())
    assert ranks.opened[1].late.tolist() == [LATE_AT_COMBINE.value, 0]
    assert int(ranks.opened[1].domain.state[OUTCOME.value]) == 0


def test_a_token_may_name_an_expert_twice():
    layer = make(**(SMALL | {"experts": 3, "tokens": 12}))
    layer.routing.topk_ids.fill_(0)
    ranks = ranks_of(layer, "bf16", list("abc"), [4, 8, 12], max_tokens=4, num_topk=2, expert_ends=[1, 2, 3])
    assert_same_bits(torch.cat(ranks.run()), moe(layer.tokens, layer.routing, layer.pack()))


def test_a_call_that_the_host_gave_up_returns_nan_and_so_do_all_later_ones():
    ranks = ranks_of(make(**SMALL), "bf16", list("abc"), [4, 8, 11])
    for _ in range(2):
        for buffers in ranks.opened[:2]:
            buffers.host[LOST] = 1
        assert all(out.isnan().all() for out in ranks.run()[:2])


def test_bytes_between_hosts_are_those_of_the_collectives():
    for presum in (False, True):
        ranks = ranks_of(make(**SMALL), "fp8_row", PAIRS, [4, 6, 8, 11], presum=presum)
        buffers = ranks.opened[0]
        sent = buffers.own_parcel.nbytes, buffers.sent[0].nbytes
        assert buffers.layout.bytes_between_hosts == sent


def test_the_host_knows_the_kernels_constants():
    assert rail_kernels.PACKED.value == rail.PACKED
    assert rail_kernels.HOST_SHIFT.value == rail.HOST_SHIFT
    assert (rail_kernels.BEGUN.value, rail_kernels.HOST_LOST.value) == (BEGUN, LOST)
    ranks = ranks_of(make(**SMALL), "bf16", PAIRS, [4, 6, 8, 11])
    ranks.opened[0].mark(BEGUN)
    assert int(ranks.opened[0].own_parcel.view(torch.int32)[rail_kernels.CALL.value]) == 1

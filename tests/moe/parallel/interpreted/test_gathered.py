"""Kernels around the two collectives of constant size, several ranks in one process."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

from envoi.ops.moe import moe
from envoi.ops.moe.parallel import dispatch, gathered_device, gathered_kernels, shared_device
from envoi.ops.moe.parallel.gathered_device import Buffers
from envoi.ops.moe.parallel.nvlink import run_local_experts
from envoi.ops.moe.parallel.progress import BEGUN, DONE, LOST
from envoi.ops.moe.parallel.shared_device import (
    BAD_IDS,
    FINE,
    LATE_AT_COMBINE,
    LATE_AT_DISPATCH,
    OUTCOME,
    REFUSED,
    REFUSED_ON_HOST,
)
from envoi.ops.moe.parallel.symmetric_memory import SharedLayout
from tests.helpers.accuracy import assert_same_bits
from tests.helpers.slow import mostly_slow
from tests.moe.layers import make
from tests.moe.parallel import domains
from tests.moe.parallel.interpreted.test_nvlink import ENDS, SMALL, by_rank

# One format for each way in which tokens are sent.
SOME = ("bf16", "fp8_row", "fp8_block128", "mxfp4_mxfp8")


@dataclass
class Ranks:
    """Ranks of one process: their collectives are copies."""

    opened: list[Buffers]
    packed: list
    parts: list

    def gather(self):
        """All-gather: every segment to all ranks."""
        for source, buffers in enumerate(self.opened):
            for other in self.opened:
                other.segments[source].copy_(buffers.segments[source])

    def exchange(self):
        """All-to-all of equal parts."""
        for source, buffers in enumerate(self.opened):
            for dest, other in enumerate(self.opened):
                other.received[source].copy_(buffers.sent[dest])

    def run(self, refusing=()):
        """Run a layer: each step on all ranks before the next one. Returns every rank's output."""
        for rank, (buffers, (tokens, routing)) in enumerate(zip(self.opened, self.parts, strict=True)):
            if rank in refusing:
                buffers.mark(BEGUN)
                dispatch.refuse(buffers.solo)
            else:
                gathered_device.fill_segment(buffers, tokens, routing.topk_weights, routing.topk_ids)
        self.gather()
        for buffers, packed in zip(self.opened, self.packed, strict=True):
            gathered_device.place_rows(buffers)
            rows = run_local_experts(buffers.domain, packed, 10)
            gathered_device.fill_parts(buffers, rows)
        self.exchange()
        return [
            gathered_device.sum_received(buffers, routing.topk_ids)
            for buffers, (_, routing) in zip(self.opened, self.parts, strict=True)
        ]


def ranks_of(layer, format, token_ends, expert_ends, max_tokens=12, num_topk=4, presum=False):
    layout = SharedLayout(
        len(token_ends), layer.routing.num_experts, max_tokens, num_topk, layer.tokens.shape[1], format, presum
    )
    cpu, offsets = torch.device("cpu"), [0, *expert_ends]
    opened = [gathered_device.open_buffers(layout, rank, offsets, 1.0, cpu) for rank in range(len(token_ends))]
    packed = [layer.pack(format, first, last) for first, last in pairwise(offsets)]
    return Ranks(opened, packed, domains.split(layer, token_ends))


@pytest.mark.parametrize("format", mostly_slow(SOME, quick=["bf16", "fp8_block128"]))
def test_the_bits_of_one_rank(format):
    layer = make(**SMALL)
    ranks = ranks_of(layer, format, [4, 4, 11], ENDS["uneven"])
    want = moe(layer.tokens, layer.routing, layer.pack(format))
    for _ in range(2):  # the second call uses the memory as the first call wrote it
        assert_same_bits(torch.cat(ranks.run()), want)
    for buffers in ranks.opened:
        assert not buffers.domain.report.any()
        assert buffers.host.tolist() == [2, 2, 2, 0]


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
    ranks = ranks_of(layer, "bf16", [0, tokens // 2, tokens], ENDS["even"])
    assert_same_bits(torch.cat(ranks.run()), moe(layer.tokens, layer.routing, layer.pack()))


def test_no_tokens_at_all():
    ranks = ranks_of(make(**(SMALL | {"tokens": 0})), "bf16", [0, 0, 0], ENDS["even"])
    assert [out.shape for out in ranks.run()] == [(0, 128)] * 3
    assert all(int(buffers.domain.offsets.abs().max()) == 0 for buffers in ranks.opened)


def test_all_to_one_expert():
    layer = make(**SMALL)
    layer.routing.topk_ids.fill_(5)
    ranks = ranks_of(layer, "fp8_block128", [4, 8, 11], ENDS["even"])
    assert_same_bits(torch.cat(ranks.run()), moe(layer.tokens, layer.routing, layer.pack("fp8_block128")))


def test_a_token_may_name_an_expert_twice():
    layer = make(**(SMALL | {"experts": 3, "tokens": 12}))
    layer.routing.topk_ids.fill_(0)
    ranks = ranks_of(layer, "bf16", [4, 8, 12], [1, 2, 3], max_tokens=4, num_topk=2)
    assert_same_bits(torch.cat(ranks.run()), moe(layer.tokens, layer.routing, layer.pack()))


@pytest.mark.parametrize(
    ("format", "changes"),
    mostly_slow(
        [("bf16", {"masked": 0.4}), ("bf16", {"k": 1}), ("fp8_block128", {"tokens": 5, "k": 4})],
        quick=[("fp8_block128", {"tokens": 5, "k": 4})],
    ),
)
def test_rows_are_summed_on_their_ranks_with_presum(format, changes):
    layer = make(**(SMALL | changes))
    tokens = len(layer.tokens)
    ranks = ranks_of(layer, format, [0, tokens // 2, tokens], ENDS["uneven"], presum=True)
    rows = by_rank(layer, format, ENDS["uneven"])
    want = sum((row.float() for row in rows), torch.zeros_like(layer.tokens, dtype=torch.float32)).bfloat16()
    for _ in range(2):
        assert_same_bits(torch.cat(ranks.run()), want)


@pytest.mark.parametrize("wrong", [6, -2])
def test_bad_ids_refuse_the_call_on_all_and_only_this_call(wrong):
    layer = make(**SMALL)
    ranks = ranks_of(layer, "bf16", [5, 8, 11], ENDS["even"])
    want = moe(layer.tokens, layer.routing, layer.pack())
    right = ranks.parts[1][1].topk_ids.clone()
    ranks.parts[1][1].topk_ids[2, 1] = wrong
    assert all(out.isnan().all() for out in ranks.run())
    for buffers in ranks.opened:
        assert buffers.domain.report.tolist() == [[0, 0, 0], [0, BAD_IDS.value, 0]]
        assert int(buffers.domain.state[OUTCOME.value]) == REFUSED.value
        buffers.domain.report.zero_()  # as the host does
    ranks.parts[1][1].topk_ids.copy_(right)
    assert_same_bits(torch.cat(ranks.run()), want)
    assert all(int(buffers.domain.state[OUTCOME.value]) == FINE.value for buffers in ranks.opened)
    assert not any(buffers.domain.report.any() for buffers in ranks.opened)


def test_a_host_refuses_the_call_on_all():
    layer = make(**SMALL)
    ranks = ranks_of(layer, "bf16", [5, 8, 11], ENDS["even"])
    outs = ranks.run(refusing=[2])
    assert all(out.isnan().all() for out in outs)
    assert [b.domain.report[1].tolist() for b in ranks.opened] == [[0, 0, REFUSED_ON_HOST.value]] * 3
    for buffers in ranks.opened:
        buffers.domain.report.zero_()
    assert_same_bits(torch.cat(ranks.run()), moe(layer.tokens, layer.routing, layer.pack()))


def test_the_host_knows_the_kernels_constants():
    assert gathered_kernels.HEAD_BYTES.value == gathered_device.HEAD_BYTES
    assert gathered_kernels.CALL_COLUMNS.value == gathered_device.CALL_COLUMNS
    assert (gathered_kernels.BEGUN.value, gathered_kernels.HOST_LOST.value) == (BEGUN, LOST)
    buffers = ranks_of(make(**SMALL), "bf16", [4, 8, 11], ENDS["even"]).opened[1]
    buffers.solo.report[1, 0] = 7
    head = buffers.segments[1, : gathered_device.HEAD_BYTES].view(torch.int32)
    assert int(head[gathered_kernels.ERROR_CODE.value]) == 7


def test_calls_are_counted_where_the_host_reads_it():
    ranks = ranks_of(make(**SMALL), "bf16", [4, 8, 11], ENDS["even"])
    tokens, routing = ranks.parts[0]
    gathered_device.fill_segment(ranks.opened[0], tokens, routing.topk_weights, routing.topk_ids)
    assert (int(ranks.opened[0].host[BEGUN]), int(ranks.opened[0].host[DONE])) == (1, 0)


def test_a_call_that_the_host_gave_up_returns_nan_and_so_do_all_later_ones():
    ranks = ranks_of(make(**SMALL), "bf16", [4, 8, 11], ENDS["even"])
    for _ in range(2):
        for buffers in ranks.opened[:2]:
            buffers.host[LOST] = 1
        assert all(out.isnan().all() for out in ranks.run()[:2])
    assert [int(buffers.domain.state[OUTCOME.value]) for buffers in ranks.opened[:2]] == [shared_device.LOST.value] * 2


def test_a_segment_of_another_call_is_of_a_rank_that_is_late():
    ranks = ranks_of(make(**SMALL), "bf16", [4, 8, 11], ENDS["even"])
    ranks.run()
    ranks.opened[1].mark(BEGUN)  # rank 1 has begun a call that the others know nothing of
    assert all(out.isnan().all() for out in ranks.run())
    late = [buffers.domain.report[0].tolist() for buffers in ranks.opened]
    assert late == [[0, LATE_AT_DISPATCH.value, 0], [LATE_AT_DISPATCH.value, 0, LATE_AT_DISPATCH.value]] + late[:1]


@pytest.mark.parametrize("presum", [False, True])
def test_rows_of_a_rank_that_has_given_the_call_up_are_not_summed(presum):
    ranks = ranks_of(make(**SMALL), "bf16", [4, 8, 11], ENDS["even"], presum=presum)
    ranks.run()
    ranks.opened[0].host[LOST] = 1
    assert all(out.isnan().all() for out in ranks.run())
    assert [int(buffers.domain.state[OUTCOME.value]) for buffers in ranks.opened] == [shared_device.LOST.value, 0, 0]
    late = [buffers.domain.report[0].tolist() for buffers in ranks.opened]
    assert late == [[0, 0, 0], [LATE_AT_COMBINE.value, 0, 0], [LATE_AT_COMBINE.value, 0, 0]]

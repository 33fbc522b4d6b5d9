"""Dispatch and combine by kernels with experts between: the bits of a layer, over NVLink's memory and a rail."""

import pytest
import torch

from envoi.ops.moe import moe
from envoi.ops.moe.experts import run_experts
from envoi.ops.moe.parallel import nvlink
from tests.helpers.accuracy import assert_same_bits
from tests.moe.layers import make
from tests.moe.parallel import domains
from tests.moe.parallel.interpreted.test_nvlink import ENDS, SMALL, run
from tests.moe.parallel.interpreted.test_prepared import inputs, open_here


def by_others(sent, experts):
    return run_experts(sent.rows, sent.topk_weights, sent.offsets, experts)


@pytest.mark.parametrize(
    ("way", "format", "presum"), [("memory", "bf16", False), ("memory", "bf16", True), ("hosts", "fp8_block128", False)]
)
def test_the_bits_of_moe(fake, monkeypatch, way, format, presum):
    parallel = open_here(monkeypatch, format, way, presum)
    for seed in range(3):
        tokens, routing = inputs(seed)
        want = parallel.moe(tokens, routing)
        sent = parallel.dispatch(tokens, routing.topk_ids, routing.topk_weights)
        # Rows past the last expert's are undefined: whatever is there mustn't be sent.
        rows = by_others(sent, parallel.experts)
        rows[int(sent.offsets[-1]) :] = float("nan")
        out = torch.empty_like(tokens)
        assert parallel.combine(rows, sent, out=out) is out
        assert_same_bits(out, want)
    with pytest.raises(ValueError, match="^handle: expected that of the last call"):
        parallel.combine(rows, sent)
    sent = parallel.dispatch(tokens, routing.topk_ids, routing.topk_weights)
    parallel.moe(tokens, routing)  # takes the memory of the rows, by prepared launches
    with pytest.raises(ValueError, match="^handle: expected that of the last call"):
        parallel.combine(rows, sent)
    with pytest.raises(ValueError, match="^tokens: expected bfloat16"):
        parallel.dispatch(tokens.double(), routing.topk_ids, routing.topk_weights)


def test_rows_of_several_ranks_are_sent_as_l2_sends_them():
    layer = make(**SMALL)
    opened, packed, parts = run(layer, "bf16", [4, 4, 11], ENDS["uneven"])
    domains.exchange_routing(opened, parts)
    for domain, experts in zip(opened, packed, strict=True):
        nvlink.pull_rows(domain)
        nvlink.send_rows(domain, run_experts(domain.rows, domain.row_weights, domain.offsets, experts))
    outs = []
    for domain, (_, routing) in zip(opened, parts, strict=True):
        domains.flags(domain)[1] = 1
        nvlink.combine_barrier(domain)
        outs.append(nvlink.sum_rows(domain, routing.topk_ids))
    assert_same_bits(torch.cat(outs), moe(layer.tokens, layer.routing, layer.pack()))


def test_num_sms_has_prepared_calls_of_its_own(fake, monkeypatch):
    parallel = open_here(monkeypatch, "bf16")
    for num_sms in (None, 3, 3, None):
        parallel.num_sms = num_sms
        for seed in range(2):
            parallel.moe(*inputs(seed))
    assert {key[0][2] for key in parallel._calls.known} == {None, 3}
    assert len(parallel._calls.known) == 2

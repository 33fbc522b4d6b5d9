"""The kernels between the ranks of an NVLink domain, several ranks in one process."""

from itertools import pairwise

import pytest
import torch

from envoi.ep import kernel_triton, memory, nvlink
from envoi.ep.kernel_triton import BAD_IDS, FINE, LATE_AT_COMBINE, LATE_AT_DISPATCH, LOST, REFUSED, VERDICT
from envoi.ep.memory import Plan
from envoi.experts import launch, moe
from envoi.quant import FORMATS
from tests.ep import domains as ranks
from tests.experts.layers import make
from tests.helpers.accuracy import assert_same_bits

SMALL = {"tokens": 11, "experts": 6, "k": 2, "hidden": 128, "intermediate": 128}
ENDS = {"even": [2, 4, 6], "uneven": [1, 5, 6]}


def plan_of(layer, num_ranks, format, max_tokens=12, num_topk=4):
    return Plan(num_ranks, layer.routing.num_experts, max_tokens, num_topk, layer.tokens.shape[1], format)


def run(layer, format, token_ends, expert_ends, **sizes):
    opened = ranks.open_all(plan_of(layer, len(token_ends), format, **sizes), [0, *expert_ends])
    packed = [layer.pack(format, first, last) for first, last in pairwise([0, *expert_ends])]
    parts = ranks.split(layer, token_ends)
    return opened, packed, parts


@pytest.mark.parametrize("format", FORMATS)
def test_the_bits_of_one_rank(format):
    layer = make(**SMALL)
    opened, packed, parts = run(layer, format, [4, 4, 11], ENDS["uneven"])
    want = moe(layer.tokens, layer.routing, layer.pack(format))
    for _ in range(2):  # the second call finds what the first left
        assert_same_bits(torch.cat(ranks.moe(opened, parts, packed)), want)
    assert not torch.stack([domain.report for domain in opened]).any()


@pytest.mark.parametrize(
    "changes", [{"masked": 1.0}, {"k": 4, "masked": 0.5}, {"bias": True, "activation": "swiglu_oai"}, {"tokens": 3}]
)
def test_other_layers(changes):
    layer = make(**(SMALL | changes))
    tokens = len(layer.tokens)
    opened, packed, parts = run(layer, "bf16", [0, tokens // 2, tokens], ENDS["even"])
    assert_same_bits(torch.cat(ranks.moe(opened, parts, packed)), moe(layer.tokens, layer.routing, layer.pack()))


def test_all_to_one_expert():
    layer = make(**SMALL)
    layer.routing.topk_ids.fill_(5)
    opened, packed, parts = run(layer, "fp8_block128", [4, 8, 11], ENDS["even"])
    want = moe(layer.tokens, layer.routing, layer.pack("fp8_block128"))
    assert_same_bits(torch.cat(ranks.moe(opened, parts, packed)), want)


def test_no_tokens_at_all():
    layer = make(**(SMALL | {"tokens": 0}))
    opened, packed, parts = run(layer, "bf16", [0, 0, 0], ENDS["even"])
    assert [out.shape for out in ranks.moe(opened, parts, packed)] == [(0, 128)] * 3
    assert all(int(domain.offsets.abs().max()) == 0 for domain in opened)


def test_the_host_knows_the_kernels_constants():
    assert set(nvlink.LATE) == {LATE_AT_DISPATCH.value, LATE_AT_COMBINE.value}
    assert kernel_triton.REFUSED_ON_HOST.value == nvlink.REFUSED_ON_HOST
    parts = [kernel_triton.TOKENS, kernel_triton.FACTORS, kernel_triton.RETURNS]
    assert [part.value for part in parts] == [memory.TOKENS, memory.FACTORS, memory.RETURNS]


def test_a_token_may_name_an_expert_twice():
    layer = make(**(SMALL | {"experts": 3, "tokens": 12}))
    layer.routing.topk_ids.fill_(0)
    opened, packed, parts = run(layer, "bf16", [4, 8, 12], [1, 2, 3], max_tokens=4, num_topk=2)
    assert_same_bits(torch.cat(ranks.moe(opened, parts, packed)), moe(layer.tokens, layer.routing, layer.pack()))


def announce(domain, layer, trouble=0):
    ids, weights = layer.routing.topk_ids, layer.routing.topk_weights
    places = launch.sort(ids, domain.plan.num_experts)
    nvlink.run("announce_kernel", nvlink.announce_arguments(domain, ids, weights, places, trouble))


def test_a_late_rank_is_named_and_nothing_goes_on():
    layer = make(**SMALL)
    opened, _, _ = run(layer, "bf16", [11, 11], [3, 6])
    domain = opened[0]
    ranks.flags(domain)[0] = torch.tensor([nvlink.CHUNKS, nvlink.CHUNKS - 1])
    announce(domain, layer)
    assert domain.report.tolist() == [[0, LATE_AT_DISPATCH.value], [0, 0]]
    assert int(domain.state[VERDICT.value]) == LOST.value
    assert domain.offsets.tolist() == [0] * 4
    nvlink.run("meet_kernel", nvlink.meet_arguments(domain))
    assert not ranks.flags(opened[1])[1].any(), "a rank that gave up says that it has met the others"
    out = torch.zeros_like(layer.tokens)
    nvlink.run("sum_kernel", nvlink.sum_arguments(domain, launch.sort(layer.routing.topk_ids, 6).slot_to_pos, out))
    assert out.isnan().all()


def test_a_rank_late_with_its_rows_is_named():
    layer = make(**SMALL)
    opened, _, _ = run(layer, "bf16", [11, 11], [3, 6])
    domain = opened[0]
    nvlink.run("meet_kernel", nvlink.meet_arguments(domain))
    assert domain.report.tolist() == [[0, LATE_AT_COMBINE.value], [0, 0]]
    assert int(domain.state[VERDICT.value]) == LOST.value


@pytest.mark.parametrize("wrong", [6, -2])
def test_bad_ids_refuse_the_call_on_all_and_only_this_call(wrong):
    layer = make(**SMALL)
    opened, packed, parts = run(layer, "bf16", [5, 8, 11], ENDS["even"])
    want = moe(layer.tokens, layer.routing, layer.pack())
    bad = parts[1][1].topk_ids.clone()
    parts[1][1].topk_ids[2, 1] = wrong
    # What was wrong in the first turn is forgotten in the second, which judges what was announced again.
    outs = ranks.moe(opened, parts, packed)
    assert all(out.isnan().all() for out in outs)
    assert [domain.report.tolist() for domain in opened] == [[[0, 0, 0], [0, BAD_IDS.value, 0]]] * 3
    assert all(int(domain.state[VERDICT.value]) == REFUSED.value for domain in opened)
    parts[1][1].topk_ids.copy_(bad)
    assert_same_bits(torch.cat(ranks.moe(opened, parts, packed)), want)
    assert all(int(domain.state[VERDICT.value]) == FINE.value for domain in opened)

"""Choice of an L1 that pulls its tokens: measurements on two H200s, and its consequences."""

import pytest

from envoi.plan import pulling
from envoi.plan.pulling import pays, saved_us


def sizes(layer, max_tokens, num_ranks=2):
    hidden, intermediate, num_topk, num_experts = layer
    return {
        "hidden": hidden, "intermediate": intermediate, "num_topk": num_topk, "max_tokens": max_tokens,
        "num_ranks": num_ranks, "num_experts": num_experts,
    }  # fmt: skip


WIDE, NARROW = (4096, 2048, 6, 128), (2048, 768, 8, 64)  # hidden, intermediate, slots, experts of two ranks
WIDER = (4096, 2048, 6, 256)
# Layer, tokens a rank, what the staged path took more than the fused one, in us, and whether that is 2 % of the call.
MEASURED = [
    (WIDE, 64, -7.3, False),
    (WIDE, 512, -5.8, False),
    (WIDE, 2048, 0.9, False),
    (WIDE, 8192, 74.6, True),
    (NARROW, 64, -5.1, False),
    (NARROW, 2048, -14.7, False),
    (NARROW, 8192, -0.9, False),
]


@pytest.mark.parametrize(("layer", "tokens", "gain_us", "faster"), MEASURED)
def test_as_measured(monkeypatch, layer, tokens, gain_us, faster):
    assert not pays(**sizes(layer, tokens), format="fp8_block128") or 2 in pulling.MEASURED_RANKS
    monkeypatch.setattr(pulling, "MEASURED_RANKS", (2,))
    assert pays(**sizes(layer, tokens), format="fp8_block128") == faster


def test_more_tokens_never_make_it_slower():
    saved = [saved_us(**sizes(WIDE, 1 << power)) for power in range(17)]
    assert saved == sorted(saved)
    assert saved[0] > -2 * pulling.LOST_US


def test_one_rank_pulls_nothing():
    assert saved_us(**sizes(WIDE, 8192, num_ranks=1)) == -pulling.LOST_US
    assert saved_us(**sizes(WIDE, 0)) == -pulling.LOST_US


def test_what_was_not_measured_stays_staged(monkeypatch):
    monkeypatch.setattr(pulling, "MEASURED_RANKS", (2,))
    assert not pays(**sizes(WIDE, 8192), format="bf16")
    assert not pays(**sizes(WIDER, 8192, num_ranks=4), format="fp8_block128")
    assert saved_us(**sizes(WIDER, 8192, num_ranks=4)) > saved_us(**sizes(WIDE, 8192))

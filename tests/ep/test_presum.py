"""Whether rows that meet on a rank are summed there: what was measured on four H200s, and what follows from it."""

from dataclasses import replace

import pytest

from envoi.ep.memory import Plan
from envoi.ep.presum import pays


def plan_of(hidden, num_experts, num_topk, max_tokens, num_ranks=4, format="fp8_block128"):
    return Plan(num_ranks, num_experts, max_tokens, num_topk, hidden, format)


@pytest.mark.parametrize(
    ("plan", "intermediate", "faster"),
    [
        (plan_of(2048, 128, 8, 64), 768, False),
        (plan_of(2048, 128, 8, 2048), 768, True),
        (plan_of(2048, 128, 8, 8192), 768, True),
        (plan_of(4096, 256, 6, 64), 2048, False),
        (plan_of(4096, 256, 6, 2048), 2048, False),
        (plan_of(4096, 256, 6, 8192), 2048, False),
        (plan_of(7168, 256, 8, 2048), 2048, False),
    ],
    ids=lambda x: f"{x.hidden} {x.max_tokens}" if isinstance(x, Plan) else "",
)
def test_as_measured(plan, intermediate, faster):
    assert pays(plan, intermediate) == faster


def test_weights_that_are_widened_take_the_products_longer():
    assert not pays(plan_of(4096, 128, 8, 2048, format="mxfp4"), 1024)
    assert pays(plan_of(4096, 128, 8, 2048, format="fp8_row"), 1024)


def test_nothing_meets():
    assert not pays(plan_of(2048, 128, 1, 8192), 768)
    assert not pays(plan_of(2048, 128, 8, 8192, num_ranks=1), 768)


def test_a_rank_has_room_for_one_row_from_each():
    plan = plan_of(128, 8, 2, 10, num_ranks=4)
    row = plan.max_tokens * plan.slot_bytes
    assert plan.at[-1] - plan.at[-2] == 2 * row
    summing = replace(plan, presum=True)
    assert summing.at[-1] - summing.at[-2] == 4 * row

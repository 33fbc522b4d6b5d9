"""What is where in the memory that ranks share."""

from dataclasses import replace

from envoi.ep.memory import Plan


def test_a_rank_has_room_for_a_row_a_slot_or_with_presum_for_one_from_each_rank():
    plan = Plan(4, 8, 10, 2, 128, "fp8_block128")
    row = plan.max_tokens * plan.slot_bytes
    assert plan.at[-1] - plan.at[-2] == 2 * row
    summing = replace(plan, presum=True)
    assert summing.at[-1] - summing.at[-2] == 4 * row

"""Layout of the memory that ranks share."""

from dataclasses import replace

from envoi.moe.parallel.symmetric_memory import SharedLayout


def test_a_rank_has_room_for_a_row_a_slot_or_with_presum_for_one_from_each_rank():
    layout = SharedLayout(4, 8, 10, 2, 128, "fp8_block128")
    row = layout.max_tokens * layout.slot_bytes
    assert layout.regions.end - layout.regions.returned_rows == 2 * row
    summing = replace(layout, presum=True)
    assert summing.regions.end - summing.regions.returned_rows == 4 * row

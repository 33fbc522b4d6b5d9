"""Tiles of L2 behind L1: every tile once, and CTAs that L1's last round leaves idle take more."""

import pytest

from envoi.moe.parallel.fused.scheduler import own_tiles, split_second, tile_of


def tiles_of(cta: int, num_ctas: int, units_ahead: int, num_tiles: int, ratio: int) -> list[int]:
    late, early, head = split_second.fn(units_ahead, num_tiles, num_ctas, ratio)
    own_head = own_tiles.fn(cta - late, head, early)
    num_units = own_head + own_tiles.fn(cta, num_tiles - head, num_ctas)
    return [tile_of.fn(u, cta, num_ctas, late, early, head, own_head) for u in range(num_units)]


@pytest.mark.parametrize("num_ctas", [1, 2, 6, 132])
@pytest.mark.parametrize("ratio", [1, 2, 7])
def test_every_tile_once(num_ctas, ratio):
    for units_ahead in (0, 1, num_ctas - 1, num_ctas, num_ctas + 1, 5 * num_ctas + num_ctas // 2):
        for num_tiles in (0, 1, num_ctas, 3 * num_ctas + 1, 20 * num_ctas - 1):
            found = [tiles_of(cta, num_ctas, units_ahead, num_tiles, ratio) for cta in range(num_ctas)]
            assert sorted(tile for tiles in found for tile in tiles) == list(range(num_tiles))
            # In units of L2's tiles nobody has more than one tile more work than another.
            work = [len(x) + ratio * ((units_ahead - cta + num_ctas - 1) // num_ctas) for cta, x in enumerate(found)]
            if num_tiles >= ratio * num_ctas:
                assert max(work) - min(work) <= 1


def test_the_picture():
    found = [tiles_of(cta, 6, 8, 18, 2) for cta in range(6)]
    assert found[0] == [8, 14]
    assert found[2] == [0, 4, 10, 16]
    assert found[5] == [3, 7, 13]

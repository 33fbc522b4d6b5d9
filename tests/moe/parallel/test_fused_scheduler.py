"""Rows that L1's early rounds complete: of whole experts, and of all but few of those that they can complete."""

import random
from bisect import bisect_right
from itertools import accumulate

import pytest

from envoi.gemm.hopper.tile_scheduler import two_thirds


def num_early(token_tiles: list[int], num_feature_tiles: int, num_ctas: int) -> int:
    """Return how many experts end before the rows that `early_rows` returns, as the kernel finds them."""
    early = two_thirds.fn(sum(token_tiles) * num_feature_tiles, num_ctas) * num_ctas
    return bisect_right(list(accumulate(token_tiles)), early // num_feature_tiles)


def units_done(token_tiles: list[int], num_feature_tiles: int, num_ctas: int) -> set[int]:
    """Return the units of the early rounds: of those of each CTA the first two thirds of all rounds."""
    units = range(sum(token_tiles) * num_feature_tiles)
    num_rounds = -(-len(units) // num_ctas)
    return {unit for cta in range(num_ctas) for unit in units[cta::num_ctas][: num_rounds * 2 // 3]}


@pytest.mark.parametrize("num_ctas", [1, 4, 132])
@pytest.mark.parametrize("num_feature_tiles", [1, 3, 16])
def test_early_rows_are_complete(num_ctas, num_feature_tiles):
    source = random.Random(num_ctas + num_feature_tiles)
    for most in (1, 2, 9):
        for num_experts in (1, 5, 64):
            tiles = [source.randrange(most + 1) for _ in range(num_experts)]
            done, count = units_done(tiles, num_feature_tiles, num_ctas), num_early(tiles, num_feature_tiles, num_ctas)
            ends = [end * num_feature_tiles for end in accumulate(tiles)]
            assert set(range(ends[count - 1] if count else 0)) <= done
            missed = [e for e in range(count, num_experts) if tiles[e] and set(range(ends[e])) <= done]
            assert not missed


def test_rounds():
    assert [two_thirds.fn(units, 132) for units in (0, 1, 132, 133, 265, 400, 16 * 132)] == [0, 0, 0, 1, 2, 2, 10]

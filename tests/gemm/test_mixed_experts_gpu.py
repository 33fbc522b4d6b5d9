"""The mixed order of experts' tiles on a GPU: every tile has one place, kinds alternate, waits are long enough."""

import numpy as np
import pytest
import torch
import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from envoi.ops.gemm.grouping import RowMode
from envoi.ops.gemm.hopper import host
from envoi.ops.gemm.hopper.mixed_experts import MixedTiles
from envoi.ops.gemm.hopper.problem import Problem
from envoi.ops.moe.one_launch.config import FEW, SQUARE, WIDE

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("tidy_gpu")]
N, NEXT_N = 1024, 384
MANY = 128


@gluon.jit
def places_kernel(
    offsets, M, num_experts, found, of_next, sizes, N: gl.constexpr, NEXT: gl.constexpr, ROW_MODE: gl.constexpr,
    MAX_EXPERTS: gl.constexpr, CFG: gl.constexpr, NEXT_CFG: gl.constexpr,
):  # fmt: skip
    """Write [tile, expert, begin, end, tiles before] of each place, and for the next GEMM's the places it waits for."""
    problem = Problem(M, N, 128, num_experts, 0, offsets, ROW_MODE, MAX_EXPERTS, CFG)
    tiles = MixedTiles.create(problem, gl.cdiv(N, CFG.block_n))
    follower = Problem(M, NEXT, 128, num_experts, 0, offsets, ROW_MODE, MAX_EXPERTS, NEXT_CFG)
    after = tiles.of_next(follower, gl.cdiv(NEXT, NEXT_CFG.block_n))
    gl.store(sizes, tiles.num_tiles())
    gl.store(sizes + 1, after.num_tiles())
    for place in range(tiles.num_tiles()):
        tile = tiles.tile_at(place)
        expert, begin, end, before = tiles.find(tile)
        gl.store(found + 5 * place, tile)
        gl.store(found + 5 * place + 1, expert)
        gl.store(found + 5 * place + 2, begin)
        gl.store(found + 5 * place + 3, end)
        gl.store(found + 5 * place + 4, before)
    for place in range(after.num_tiles()):
        tile = after.tile_at(place)
        expert, _begin, _end, _before = after.find(tile)
        gl.store(of_next + 2 * place, expert)
        gl.store(of_next + 2 * place + 1, tiles.places_until(after.search(tile)))


def rows_of(kind: str, num_experts: int, seed: int) -> np.ndarray:
    draw = np.random.default_rng(seed)
    if kind == "zipf":
        shares = draw.permutation(1.0 / np.arange(1, num_experts + 1) ** 1.2)
        return draw.multinomial(int(draw.integers(1, 60 * num_experts)), shares / shares.sum())
    if kind == "even":
        return draw.multinomial(130 * num_experts, np.full(num_experts, 1 / num_experts))
    if kind == "none":
        return np.zeros(num_experts, int)
    if kind == "one row":
        return np.eye(1, num_experts, int(draw.integers(num_experts)), dtype=int)[0]
    if kind == "one expert":
        return 5000 * np.eye(1, num_experts, int(draw.integers(num_experts)), dtype=int)[0]
    return draw.choice([0, 1, 64, 65, 128, 129, 256, 1000], num_experts)


@pytest.mark.parametrize("tiling", [FEW, WIDE, SQUARE], ids=["few", "wide", "square"])
@pytest.mark.parametrize("num_experts", [1, 7, 32, 60, 64, 256])
@pytest.mark.parametrize("kind", ["zipf", "even", "none", "one row", "one expert", "edges"])
def test_every_tile_has_one_place(kind, num_experts, tiling):
    for seed in range(3):
        check(rows_of(kind, num_experts, seed), tiling)


@pytest.mark.parametrize("tail", [1, 500])
@pytest.mark.parametrize("kind", ["zipf", "none", "edges"])
def test_rows_of_no_expert_come_last(kind, tail):
    check(rows_of(kind, 16, 3), SQUARE, tail=tail)


@pytest.mark.parametrize("shift", [-70, 70])
def test_rows_outside_are_left_out(shift):
    check(rows_of("edges", 16, 5), SQUARE, shift=shift)


def test_too_many_rows_to_mix():
    check(np.array([2**20 - 200, 100, 300, 0, 50]), SQUARE)


def test_room_for_too_many_rows_mixes_those_that_come():
    check(rows_of("edges", 16, 5), SQUARE, room=2**20)


def check(rows: np.ndarray, tiling, shift: int = 0, tail: int = 0, room: int = 0) -> None:
    """Check the places of experts with so many rows, and of `tail` rows of no expert.

    shift: of the offsets, so that some rows aren't in [0, M). room: for more rows, which don't come.
    """
    num_experts, M = len(rows), int(rows.sum()) + tail + room
    offsets = torch.tensor(np.concatenate([[0], rows.cumsum()]) + shift, dtype=torch.int32, device="cuda")
    bounds = offsets.clamp(0, M).tolist() + [M] * (tail > 0)
    rows = np.diff(bounds)  # the tail's last
    max_experts = host.max_experts(num_experts, tail > 0)
    first, second = tiling
    token_tiles = -(-rows // first.block_m)
    features, next_features = -(-N // first.block_n), -(-NEXT_N // second.block_n)
    total = int(token_tiles.sum())
    found = torch.full((total * features + 1, 5), -1, dtype=torch.int32, device="cuda")
    of_next = torch.full((total * next_features + 1, 2), -1, dtype=torch.int32, device="cuda")
    sizes = torch.empty(2, dtype=torch.int32, device="cuda")
    places_kernel[(1,)](
        offsets, M, num_experts, found, of_next, sizes, N, NEXT_N, RowMode.of(True, tail > 0), max_experts, first,
        second, num_warps=1,
    )  # fmt: skip
    assert sizes.tolist() == [total * features, total * next_features]
    got, waits = found.cpu().numpy(), of_next.cpu().numpy()
    assert (got[-1] == -1).all() and (waits[-1] == -1).all()  # nothing is written past the last place
    got, waits = got[:-1], waits[:-1]
    assert sorted(got[:, 0]) == list(range(total * features))
    for expert in range(len(rows)):
        tiles = got[got[:, 1] == expert]
        assert len(tiles) == token_tiles[expert] * features
        assert (tiles[:, 2] == bounds[expert]).all() and (tiles[:, 3] == bounds[expert + 1]).all()
        assert (tiles[:, 0] - tiles[:, 4] == np.arange(len(tiles))).all()  # in order
    if tail:
        last_tiles = token_tiles[-1] * features
        assert (got[len(got) - last_tiles :, 1] == num_experts).all()
        got = got[: len(got) - last_tiles]
    is_many = (rows[got[:, 1]] > MANY) & (rows.sum() <= 2**20)
    share = is_many.mean() if len(got) else 0.0
    # Neither kind is ahead of its share by more than a tile, and rounding.
    ahead = np.cumsum(is_many) - share * np.arange(1, len(is_many) + 1)
    assert (np.abs(ahead) <= 1.0 + 2e-6 * len(is_many)).all()
    last = {expert: int(np.flatnonzero(got[:, 1] == expert)[-1]) for expert in set(got[:, 1].tolist())}
    for expert, until in waits.tolist():
        if expert < num_experts:
            assert last[expert] < until <= min(last[expert] + 6, len(got))

"""Calls that go on without lost ranks: what is missing, and what is refused."""

import os

import pytest
import torch
import torch.distributed as dist

from envoi.ops.moe import moe
from envoi.ops.moe.parallel import PeerTimeout
from envoi.quant import FORMATS
from tests.helpers.accuracy import assert_same_bits
from tests.helpers.ranks import run_ranks
from tests.helpers.slow import mostly_slow
from tests.moe.layers import make
from tests.moe.parallel import cases
from tests.moe.parallel.test_placement import open_placed, tokens_of

# Three ranks that pack 4: without rank 1, of whose experts 5 and 1 have replicas, 3 and 4 are missing.
THREE, THREE_ENDS = [0, 1, 2, 5, 3, 5, 4, 1, 6, 7, 0, 2], [4, 8, 12]


def lose_a_rank(rank: int, num_ranks: int, format: str, how: str, options: dict) -> dict:
    """Let rank 1 die, or say that it is lost; go on without it; return errors, the next calls' outputs, and so on."""
    layer = make()
    parallel = open_placed(layer, format, rank, THREE_ENDS, THREE, timeout_s=6.0, **options)
    inputs = tokens_of(layer, rank, num_ranks)
    parallel.moe(*inputs)
    found: dict = {"ranks": [1]}
    if how == "dies":
        if rank == 1:
            os._exit(3)
        try:
            parallel.moe(*inputs)
        except PeerTimeout as error:
            found["ranks"] = error.ranks
    elif rank == 1:
        dist.barrier()
        return found
    left = parallel.without(found["ranks"])
    found |= {
        "missing": left.missing_experts, "num_experts": left.num_experts, "offsets": left.expert_offsets,
        "outs": [left.moe(*inputs) for _ in range(2)], "again": "",
    }  # fmt: skip
    try:
        parallel.moe(*inputs)
    except (ValueError, RuntimeError) as error:
        found["again"] = f"{type(error).__name__}: {error}"
    if how != "dies":
        dist.barrier()
    return found


def assert_only_missing_experts_are_missed(outcomes, format: str) -> None:
    layer = make()
    want = moe(layer.tokens, layer.routing, layer.pack(format))
    for rank in (0, 2):
        assert outcomes[rank].text == ""
        found, rows = outcomes[rank].value, slice(20 * rank, 20 * rank + 20)
        assert found["ranks"] == [1] and found["missing"] == (3, 4)
        assert (found["num_experts"], found["offsets"]) == (8, [0, 4, 8])
        needs = torch.isin(layer.routing.topk_ids[rows], torch.tensor([3, 4])).any(1)
        assert 0 < needs.sum() < 20
        for out in found["outs"]:
            assert out[needs].isnan().all()
            assert_same_bits(out[~needs], want[rows][~needs])
        assert "expected an open object, got one that was closed" in found["again"]


def test_calls_go_on_without_a_rank_that_died():
    outcomes = run_ranks(3, lose_a_rank, "bf16", "dies", {})
    assert outcomes[1].error == "died"
    assert_only_missing_experts_are_missed(outcomes, "bf16")


@pytest.mark.parametrize("format", mostly_slow([f for f in FORMATS if f != "bf16"], ["fp8_block128", "mxfp4_mxfp8"]))
def test_a_missing_expert_spoils_its_tokens_alone(format):
    outcomes = run_ranks(3, lose_a_rank, format, "told", {})
    assert_only_missing_experts_are_missed(outcomes, format)


def without_wrongly(rank: int, num_ranks: int) -> list[str]:
    """Say wrong things of who is lost, at last ranks that differ; return the errors."""
    layer, found = make(), []
    parallel = cases.open_parallel(layer, "bf16", rank, [2, 4, 8], timeout_s=3.0)
    inputs = tokens_of(layer, rank, num_ranks)
    want = parallel.moe(*inputs)
    for wrong in ([], [rank], [7], "1", 1, [[1 - rank]]):
        try:
            parallel.without(wrong)
        except ValueError as error:
            found.append(str(error))
    try:
        parallel.without([(rank + 1) % 3], dist.group.WORLD)
    except ValueError as error:
        found.append(str(error))
    assert torch.equal(parallel.moe(*inputs), want)
    dist.barrier()
    if rank != 2:
        try:
            parallel.without([1 - rank])
        except PeerTimeout as error:
            found.append(f"{error.step} {error.ranks}")
    dist.barrier()
    return found


def test_ranks_that_name_different_ones_end_in_time():
    for rank, outcome in enumerate(run_ranks(3, without_wrongly)):
        assert outcome.text == ""
        starts = [
            "ranks: expected some of the group's ranks [0, 1, 2], got []",
            f"ranks: expected others than this one, {rank}, got [{rank}]",
            "ranks: expected some of the group's ranks [0, 1, 2], got [7]",
            "ranks: expected some of the group's ranks [0, 1, 2], got '1'",
            "ranks: expected some of the group's ranks [0, 1, 2], got 1",
            f"ranks: expected some of the group's ranks [0, 1, 2], got [[{1 - rank}]]",
            f"group: expected one of ranks {sorted({0, 1, 2} - {(rank + 1) % 3})}, got one of [0, 1, 2]",
        ]
        assert outcome.value[: len(starts)] == starts
        assert outcome.value[len(starts) :] == ([] if rank == 2 else ["going on without lost ranks [2]"])


def come_again(rank: int, num_ranks: int, how: str) -> list:
    """Go on without rank 2, rank 1 only when rank 0 has given up to, or at first without rank 0; then both at once.

    Returns how that ended."""
    layer, found = make(), []
    parallel = cases.open_parallel(layer, "bf16", rank, [2, 4, 8], timeout_s=3.0)
    inputs = tokens_of(layer, rank, num_ranks)
    want = parallel.moe(*inputs)
    dist.barrier()
    if rank == 2:
        cases.hear([0, 1], "done")
        return found
    if rank == 1 and how == "late":
        cases.hear([0], "gave up")
    if rank == 0 or how == "others":
        try:
            parallel.without([0] if rank == 1 else [2])
        except PeerTimeout as error:
            found.append(error.ranks)
    cases.say(rank, "gave up")
    cases.hear([1 - rank], "gave up")
    left = parallel.without([2])
    needs = torch.isin(inputs[1].topk_ids, torch.tensor(left.missing_experts)).any(1)
    found += [left.missing_experts, torch.equal(left.moe(*inputs)[~needs], want[~needs])]
    cases.say(rank, "done")
    return found


@pytest.mark.parametrize("how", ["late", "others"])
def test_ranks_that_came_apart_can_try_again(how):
    for rank, outcome in enumerate(run_ranks(3, come_again, how)):
        assert outcome.text == ""
        gave_up = [[[1]], [[2]] if how == "others" else []]
        assert rank == 2 or outcome.value == [*gave_up[rank], (4, 5, 6, 7), True]


def after_other_groups(rank: int, num_ranks: int) -> tuple:
    """Go on without rank 2 where rank 0 is in a group more, and NCCL would split the default group's communicator."""
    layer, splits = make(), []
    dist.new_group([0])
    parallel = cases.open_parallel(layer, "bf16", rank, [2, 4, 8], timeout_s=6.0)
    inputs = tokens_of(layer, rank, num_ranks)
    want = parallel.moe(*inputs)
    if rank == 2:
        cases.hear([0, 1], "done")
        return ()
    internals = dist.distributed_c10d
    default, device = internals._get_default_group(), torch.device("cuda", 0)
    default.bound_device_id, internals._get_split_source = device, splits.append
    left = parallel.without([2])
    needs = torch.isin(inputs[1].topk_ids, torch.tensor(left.missing_experts)).any(1)
    right = torch.equal(left.moe(*inputs)[~needs], want[~needs])
    cases.say(rank, "done")
    return right, splits, default.bound_device_id == device


def test_ranks_that_are_left_need_no_other_group():
    outcomes = run_ranks(3, after_other_groups)
    assert [(outcome.text, outcome.value) for outcome in outcomes] == [("", (True, [], True))] * 2 + [("", ())]

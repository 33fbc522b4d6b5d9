"""Experts in one launch, without a GPU: memory, tilings, and what `ExpertParallel(fused=True)` refuses, in words."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from envoi.gemm.grouping import Grouping
from envoi.gemm.hopper.config import Config
from envoi.moe.one_launch import host
from envoi.moe.one_launch.config import (
    LANES,
    LEAST_SHIFT,
    NUM_COUNTERS,
    OTHER_COUNTERS,
    UNIT_COUNTERS,
    WIDE,
    PullConfig,
)
from envoi.moe.parallel import ExpertParallel, fused
from envoi.moe.parallel import cases as kernels
from envoi.moe.parallel import memory as shared
from envoi.moe.parallel.symmetric_memory import SharedLayout, allocate
from envoi.moe.parallel.warm_up import ParallelCall
from envoi.moe.warm_up import without_tensors
from envoi.plan import fused as one_launch
from envoi.runtime.devices import Target
from envoi.runtime.rehearsal import rehearse, standing_for
from envoi.types import ExpertWeights, QuantTensor
from tests.helpers.ranks import run_ranks
from tests.moe.layers import make
from tests.moe.parallel import cases

SIZES = {"max_tokens": 60, "num_topk": 3}
EXPECTED = "fused: expected gated experts in fp8_block128 on Hopper GPUs that reach each other's memory, for True; got "


def test_only_the_format_of_one_launch_takes_the_memory():
    """Staged layouts too: L1 and L2 alone are one launch, or not, from call to call."""
    given = 0, [0, 4, 8], 1.0, torch.device("meta"), False
    other, staged = (allocate(SharedLayout(2, 8, 10, 2, 128, name), *given) for name in ("fp8_row", "fp8_block128"))
    fused = allocate(replace(staged.layout, fused=True), *given)
    assert other.progress is None
    assert len(fused.owned) == len(staged.owned) == len(other.owned) + 1
    assert fused.progress.shape == staged.progress.shape == (NUM_COUNTERS,)
    assert fused.layout != staged.layout, "objects of both kinds would share memory"


def test_there_is_a_counter_for_every_unit_of_l1():
    for rows in (0, 1, 64, 65, 10_000, 1 << 20):
        for num_experts in (1, 3, 64, 512):
            # The most units that so many rows can be: one row of every other expert, all others of one.
            tiles = min(rows, num_experts - 1) + -(-max(0, rows - num_experts + 1) // 64)
            shift = host.unit_shift(rows, 4096, num_experts, WIDE[0])
            assert tiles * 4096 // 512 <= UNIT_COUNTERS << shift
            assert shift == LEAST_SHIFT or tiles * 4096 // 512 > UNIT_COUNTERS << shift - 2, "more than it needs"
    assert NUM_COUNTERS == OTHER_COUNTERS + UNIT_COUNTERS + LANES


@pytest.mark.parametrize("hidden", [128, 2048, 2816, 7168, 8192])
def test_a_token_fits_registers_and_its_vectors(hidden):
    pull = PullConfig(hidden // 4, hidden // 128, 6, 100, 2 * hidden, 0, 1, 0, 128)
    assert pull.words >= hidden // 4 and pull.words % (4 * LANES) == 0
    assert pull.factors >= hidden // 128 and pull.slots == 8 and pull.experts == 128
    assert pull.tokens * pull.words <= 128 * 128, "more than 128 registers of a thread"
    assert pull.tokens % 4 == 0, "a warp without a token"


def test_what_one_launch_does_not_cover_is_said():
    layer = make()
    packed = layer.pack("fp8_block128")
    assert fused.supports_fused(layer.pack("bf16"), 3) == "experts in bf16, not fp8_block128"
    assert fused.supports_fused(packed, 3) == "experts on cpu, which is no Hopper GPU"


def test_on_hopper_more_slots_than_lanes_are_refused(monkeypatch):
    for module in (fused, host):
        monkeypatch.setattr(module, "implementation", lambda device: "hopper")
    packed = make().pack("fp8_block128")
    assert fused.supports_fused(packed, 32) == ""
    assert fused.supports_fused(packed, 33) == "num_topk 33, more than 32"
    rows = replace(packed, gate_up=make(hidden=256, intermediate=128).pack("fp8_row").gate_up)
    assert fused.supports_fused(rows, 3) == "the operands' formats"
    wide = without_tensors(make(hidden=20480, experts=1, k=1).pack("fp8_block128"))
    assert fused.supports_fused(wide, 1) == "hidden 20480, more than 8192"
    ungated = make(activation="relu2").pack("fp8_block128")
    assert fused.supports_fused(ungated, 3) == "experts whose L1 has no groups of 128 gated columns: relu2, 128 wide"
    assert fused.supports_fused(make().pack("fp8_block128", 2, 2), 3) == "", "a rank without experts refuses nothing"


def refusals(rank: int, num_ranks: int) -> list[str]:
    found, ends, layer = [], [4, 8], make()
    differs = {"fused": rank == 0}
    for format, options in (
        ("fp8_block128", {"fused": True, **SIZES}),
        ("fp8_block128", {"fused": True}),
        ("bf16", {"fused": "yes"}),
        ("bf16", differs),
        ("bf16", {"fused": False, **SIZES}),
        ("bf16", SIZES),
    ):
        try:
            parallel = cases.open_parallel(layer, format, rank, ends, **options)
            found.append(f"opened, {parallel.fused}")
        except ValueError as error:
            found.append(str(error))
    return found


def test_true_is_an_error_on_all_ranks_where_memory_is_not_shared():
    for outcome in run_ranks(2, refusals):
        assert outcome.text == ""
        without, unsized, wrong, different, off, default = outcome.value
        assert without == unsized == EXPECTED + "the group is one of gloo"
        assert wrong == "fused: expected True, False or None, got 'yes'"
        assert "sizes: expected the same on every rank" in different
        assert "fused=True on rank 0" in different
        assert off == default == "opened, False"


@pytest.mark.parametrize(
    ("fused", "hidden", "max_tokens", "wanted"),
    [(None, 4096, 8192, True), (None, 4096, 64, False), (False, 4096, 8192, False), (True, 4096, 64, True)],
)
def test_none_asks_the_rule(monkeypatch, fused, hidden, max_tokens, wanted):
    opened = []
    monkeypatch.setattr(one_launch, "saved_us", lambda hidden, intermediate, num_topk, max_tokens: max_tokens - 100.0)
    monkeypatch.setattr(shared, "open_domain", lambda owner, experts, layout, group, fused: opened.append(layout))
    layout = SharedLayout(8, 256, max_tokens, 6, hidden, "fp8_block128")
    parallel = SimpleNamespace(
        transport="nccl", max_tokens=max_tokens, num_topk=6, experts=SimpleNamespace(intermediate=2048), _owner=None,
        _layout=lambda max_tokens, num_topk: layout,
    )  # fmt: skip
    ExpertParallel._open_domain(cast(ExpertParallel, parallel), cast(Any, None), False, fused)
    assert opened == [replace(layout, fused=wanted)]


@pytest.mark.parametrize("reason", ["", "experts on cpu, which is no Hopper GPU"])
def test_the_rule_asks_for_no_more_than_all_ranks_can(monkeypatch, reason):
    layouts = []
    monkeypatch.setattr(shared, "gather_texts", lambda channel, text, step: [text, text])
    monkeypatch.setattr(shared.nvlink, "supports_kernels", lambda experts: "")
    monkeypatch.setattr(shared, "supports_fused", lambda experts, num_topk: reason)
    monkeypatch.setattr(shared, "new_domain", lambda owner, layout, group: (layouts.append(layout), "no memory"))
    channel = SimpleNamespace(watch=SimpleNamespace(ranks=[0, 1]))
    owner = SimpleNamespace(channel=channel, expert_offsets=(), timeout_s=1)
    layout = SharedLayout(2, 8, 10, 2, 128, "fp8_block128", fused=True)
    given = cast(Any, owner), cast(Any, None), layout, cast(Any, None)
    shared.open_domain(*given, None)
    assert [found.fused for found in layouts] == [not reason]
    if reason:
        with pytest.raises(ValueError, match=reason):
            shared.open_domain(*given, True)


def names_of(layout: SharedLayout, rank: int, ends: tuple[int, ...], experts, num_tokens: int = 60) -> list[str]:
    call = ParallelCall(layout, 3, rank, ends, 10.0, experts)
    return [kernel.fn.__name__ for kernel, *_ in rehearse(call, num_tokens, Target("sm_90"))]


@pytest.mark.parametrize("presum", [False, True])
def test_a_call_launches_pull_and_experts_at_once(presum):
    experts = without_tensors(make().pack("fp8_block128"))
    layout = SharedLayout(2, 16, 60, 3, 256, "fp8_block128", presum, fused=True)
    combine = ["send_partial_sums_kernel"] * presum + ["combine_barrier_kernel"]
    assert names_of(layout, 1, (0, 8, 16), experts) == [
        "stage_tokens_kernel", "send_routing_kernel", "fused_kernel", *combine,
        "sum_ranks_kernel" if presum else "sum_kernel",
    ]  # fmt: skip


def test_a_rank_without_experts_notes_the_load_alone():
    experts = without_tensors(make().pack("fp8_block128", 0, 0))
    layout = SharedLayout(2, 16, 60, 3, 256, "fp8_block128", fused=True)
    names = names_of(layout, 0, (0, 0, 16), experts)
    assert names[:3] == ["stage_tokens_kernel", "send_routing_kernel", "pull_kernel"]
    assert "fused_kernel" not in names
    assert names[-2:] == ["combine_barrier_kernel", "sum_kernel"]


def test_both_gemms_have_the_same_stages():
    for case in kernels.FUSED:
        _, arguments, options = case.launch()[1:]
        one, two = (argument for argument in arguments if isinstance(argument, Config))
        assert one.paired_tiles and not two.paired_tiles
        assert (one.num_stages, one.block_k, one.block_m) == (two.num_stages, two.block_k, two.block_m)
        assert one.consumers_per_tile == two.consumers_per_tile
        assert one.wide_tail_tiles == two.wide_tail_tiles
        assert options["launch_cooperative_grid"], "CTAs that wait for others must all run"


@pytest.mark.parametrize("hidden", [128, 256, 384, 1152, 2816, 7168])
@pytest.mark.parametrize("intermediate", [128, 256, 768, 2048])
@pytest.mark.parametrize("rows", [1, 64, 65, 100, 300, 1000])
@pytest.mark.parametrize("sent", [False, True])
def test_what_is_supported_has_a_tiling(hidden, intermediate, rows, sent):
    def matrix(n: int, k: int) -> QuantTensor:
        sf = torch.empty(4, n // 128, k // 128, device="meta")
        return QuantTensor(torch.empty(4, n, k, dtype=torch.float8_e4m3fn, device="meta"), sf, (128, 128))

    with standing_for(Target("sm_90", 132)):
        experts = ExpertWeights(matrix(2 * intermediate, hidden), matrix(hidden, intermediate), "fp8_block128")
        assert fused.supports_fused(experts, 2) == ""
        layout = SharedLayout(2, 8, 4096, 2, hidden, "fp8_block128", fused=True)
        domain = allocate(layout, 0, [0, 4, 8], 1.0, torch.device("meta"), shared=False)
        grouping = Grouping(write_tail=False, expected=4 * rows, to=domain.row_destinations if sent else None)
        found = fused.plan_fused(domain, experts, grouping, 132)
    assert rows > 64 or found.first_config.num_consumers == 1
    assert found.first_config.block_m == found.second_config.block_m


def test_few_rows_have_one_consumer_in_l1():
    configs = [next(x for x in case.launch().arguments if isinstance(x, Config)) for case in kernels.FUSED]
    assert [config.num_consumers for config in configs] == [2, 2, 1]

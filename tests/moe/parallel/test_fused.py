"""Fused L1 without a GPU: memory, movers' shapes, and what `ExpertParallel(fused=True)` refuses, in words."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from envoi.moe.parallel import ExpertParallel
from envoi.moe.parallel import cases as kernels
from envoi.moe.parallel import memory as shared
from envoi.moe.parallel.fused import host, memory
from envoi.moe.parallel.fused.config import MoverConfig
from envoi.moe.parallel.nvlink import LATE_STEPS
from envoi.moe.parallel.shared_device import LATE_IN_L1
from envoi.moe.parallel.symmetric_memory import SharedLayout, allocate
from envoi.moe.parallel.warm_up import ParallelCall
from envoi.moe.warm_up import without_tensors
from envoi.plan import pulling
from envoi.runtime.devices import Target
from envoi.runtime.rehearsal import rehearse
from tests.helpers.ranks import run_ranks
from tests.moe.layers import make
from tests.moe.parallel import cases

SIZES = {"max_tokens": 60, "num_topk": 3}
EXPECTED = "fused: expected experts in fp8_block128 on Hopper GPUs that reach each other's memory, for True; got "


@pytest.mark.parametrize(("max_tokens", "bits"), [(1, 0), (2, 1), (3, 2), (64, 6), (65, 7), (8192, 13)])
def test_a_tokens_number_has_room_for_every_token(max_tokens, bits):
    assert memory.token_bits(max_tokens) == bits
    found = memory.allocate(3, max_tokens, 5, torch.device("meta"))
    assert found.row_tokens.shape == (3 * max_tokens * 5,)
    assert found.token_rows.shape == (3 << bits, 8)
    assert found.tickets.numel() == 1
    assert found.arrivals.numel() * memory.BLOCK_ROWS >= found.row_tokens.numel()
    assert found.arrivals.storage_offset() * 4 % 128 == 0, "tickets and arrivals share a cache line"


def test_only_a_fused_layout_takes_the_memory():
    layout, given = SharedLayout(2, 8, 10, 2, 128, "fp8_block128"), (0, [0, 4, 8], 1.0, torch.device("meta"), False)
    staged, fused = allocate(layout, *given), allocate(replace(layout, fused=True), *given)
    assert staged.fused is None
    assert len(fused.owned) == len(staged.owned) + 3
    assert fused.layout != staged.layout, "objects of both kinds would share memory"


@pytest.mark.parametrize(("words", "loads", "piece"), [(1024, 4, 512), (512, 4, 512), (32, 4, 128), (1792, 8, 1024)])
def test_a_mover_has_no_more_in_flight_than_a_token(words, loads, piece):
    assert MoverConfig(words, words // 32, 8, loads=loads).piece == piece


def test_scale_factors_of_a_token_fit_a_vector():
    assert [MoverConfig(words, words // 32, 8).sf_lanes for words in (32, 1024, 1792)] == [32, 32, 64]


def test_the_host_names_the_late_step():
    assert LATE_STEPS[LATE_IN_L1.value] == "L1"


def test_what_the_fused_l1_does_not_cover_is_said():
    layer = make()
    packed = layer.pack("fp8_block128")
    assert host.supports_fused(layer.pack("bf16"), 3) == "experts in bf16, not fp8_block128"
    assert host.supports_fused(packed, 3) == "experts on cpu, which is no Hopper GPU"


def test_on_hopper_more_slots_than_lanes_are_refused(monkeypatch):
    monkeypatch.setattr(host, "implementation", lambda device: "hopper")
    packed = make().pack("fp8_block128")
    assert host.supports_fused(packed, 32) == ""
    assert host.supports_fused(packed, 33) == "num_topk 33, more than 32"
    rows = replace(packed, gate_up=make(hidden=256, intermediate=128).pack("fp8_row").gate_up)
    assert host.supports_fused(rows, 3) == "the operands' formats"
    assert host.supports_fused(make().pack("fp8_block128", 2, 2), 3) == "", "a rank without experts refuses nothing"


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
    monkeypatch.setattr(pulling, "COST", 0.5)
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


def test_a_call_launches_no_pull():
    experts = without_tensors(make().pack("fp8_block128"))
    layout = SharedLayout(2, 16, 60, 3, 256, "fp8_block128", fused=True)
    call = ParallelCall(layout, 3, 1, (0, 8, 16), 10.0, experts)
    names = [kernel.fn.__name__ for kernel, *_ in rehearse(call, 60, Target("sm_90"))]
    assert names[:4] == ["stage_tokens_kernel", "send_routing_kernel", "order_rows_kernel", "fused_l1_kernel"]
    assert "pull_kernel" not in names
    assert names[-2:] == ["combine_barrier_kernel", "sum_kernel"]


def test_a_rank_without_experts_pulls_nothing():
    experts = without_tensors(make().pack("fp8_block128", 0, 0))
    layout = SharedLayout(2, 16, 60, 3, 256, "fp8_block128", fused=True)
    call = ParallelCall(layout, 3, 0, (0, 0, 16), 10.0, experts)
    names = [kernel.fn.__name__ for kernel, *_ in rehearse(call, 60, Target("sm_90"))]
    assert names[:3] == ["stage_tokens_kernel", "send_routing_kernel", "order_rows_kernel"]
    assert not {"fused_l1_kernel", "pull_kernel"} & set(names)
    assert names[-2:] == ["combine_barrier_kernel", "sum_kernel"]


def test_the_cases_are_those_of_three_tilings():
    configs = [case.launch().arguments[-6] for case in kernels.FUSED[1:]]
    assert [(config.num_consumers, config.swap_ab, config.paired_tiles) for config in configs] == [
        (2, False, True), (1, False, True), (2, True, False),
    ]  # fmt: skip
    assert isinstance(kernels.FUSED[1].launch().arguments[-2], MoverConfig)

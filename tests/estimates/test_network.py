"""Estimate of several hosts: bytes as the exchanges send them, times by the rates given, refusals in one line."""

import shlex
from dataclasses import replace

import pytest
import torch

from envoi import cli
from envoi.estimates import MoeLayer, estimate
from envoi.estimates.steps import Network, bytes_between_hosts
from envoi.ops.moe.parallel.nvlink import SharedLayout
from envoi.ops.moe.parallel.rail import HostsLayout

ARGUMENTS = "--hidden 4096 --inter 2048 --experts 256 --topk 6 --tokens 512 --gpus 4 --format fp8_block128"
STEPS = ["router", "rail out", "dispatch", "L1", "L2", "combine", "rail back"]


def layer_of(num_tokens: int = 512, num_ranks: int = 4, num_hosts: int = 2, format: str = "fp8_block128") -> MoeLayer:
    return MoeLayer(4096, 2048, 256, 6, num_tokens, num_ranks, format, num_hosts)


@pytest.mark.parametrize("presum", [False, True])
@pytest.mark.parametrize(("num_hosts", "num_ranks"), [(2, 1), (2, 2), (4, 8)])
@pytest.mark.parametrize("format", ["bf16", "fp8_row", "fp8_block128", "mxfp4_mxfp8"])
def test_bytes_are_those_of_the_buffers(format, num_hosts, num_ranks, presum):
    layer = layer_of(512, num_ranks, num_hosts, format)
    sizes = layer.num_gpus, 256, 512, 6, 4096, format
    found = bytes_between_hosts(layer, 512, presum)
    sent = HostsLayout(SharedLayout(*sizes, presum), num_hosts).bytes_between_hosts
    assert found.by_host == pytest.approx(sent, rel=0.01)
    flat, elsewhere = HostsLayout(SharedLayout(*sizes), layer.num_gpus), (num_hosts - 1) * num_ranks
    segments, parts = elsewhere * flat.parcel.end, elsewhere * 2 * flat.part_columns
    assert found.gathered == pytest.approx((segments, parts), rel=0.015)
    assert sum(found.by_host) <= sum(found.gathered) / num_ranks * 1.001


@pytest.mark.parametrize(("num_hosts", "num_ranks"), [(2, 2), (4, 4)])
def test_counted_bytes_are_those_of_random_routing(num_hosts, num_ranks):
    layer, tokens = layer_of(4000, num_ranks, num_hosts), 4000
    torch.manual_seed(3)
    ids = torch.rand(tokens, 256).topk(6).indices
    rank = ids * layer.num_gpus // 256
    ranks = torch.arange(num_ranks, layer.num_gpus)  # those of other hosts than rank 0's
    needed = (rank.unsqueeze(2) == ranks).any(1).sum().item()
    rows = (rank >= num_ranks).sum().item()
    out, back = bytes_between_hosts(layer, tokens, False).counted
    assert out == pytest.approx(needed * (4096 + 4 * 32 + 8 * 6), rel=0.03)
    assert back == pytest.approx(rows * 8192, rel=0.03)


def test_steps_cross_at_the_rates_given():
    plan = estimate(layer_of(), network=Network(20.0, 50.0))
    steps = {step.name: step for step in plan.steps}
    assert list(steps) == STEPS
    assert plan.between_hosts is not None
    for name, num_bytes in zip(("rail out", "rail back"), plan.between_hosts.by_host, strict=True):
        step = steps[name]
        assert step.network_bytes == num_bytes
        assert step.network_us == pytest.approx(num_bytes / 20e3)
        assert step.time_us >= step.network_us + 50
    assert steps["rail back"].bound_by == "network"
    assert all(step.network_us == 0 for name, step in steps.items() if "rail" not in name)
    assert plan.staged_us == pytest.approx(sum(step.time_us for step in plan.steps))
    faster = estimate(layer_of(), network=Network(40.0, 50.0))
    saved = sum(step.network_us for step in plan.steps) / 2
    assert plan.staged_us - faster.staged_us == pytest.approx(saved)


def test_experts_and_rows_are_those_of_all_hosts():
    layer = layer_of()
    assert (layer.num_gpus, layer.num_local_experts, layer.num_all_tokens) == (8, 32, 4096)
    one = estimate(replace(layer, num_ranks=8, num_hosts=1))
    two = estimate(layer)
    for name in ("L1", "L2"):
        first, second = (next(step for step in plan.steps if step.name == name) for plan in (one, two))
        assert (first.flops, first.compute_us, first.hbm_bytes) == (second.flops, second.compute_us, second.hbm_bytes)
    assert one.between_hosts is None and one.network is None
    assert two.pool_rows == one.pool_rows


def run(capsys, more: str) -> str:
    assert cli.main(["plan", *shlex.split(f"{ARGUMENTS} {more}")]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("more", ["--hosts 2", "--hosts 2 --presum --tokens 30000", "--hosts 64 --gpus 1 --network 3"])
def test_the_table_and_the_picture_fit_80_columns(more, capsys):
    lines = run(capsys, more).splitlines()
    assert max(map(len, lines)) <= 80
    names = [line[:9].strip() for line in lines]
    assert [name for name in names if name in STEPS] == 3 * STEPS
    text = " ".join(" ".join(lines).split())
    assert "network us" in text and "network MB" in text and "░ network" in text
    assert "between hosts: " in text and "nothing has been measured between hosts" in text


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--hosts 0", "--hosts: expected an int from 1 to 1024, got 0"),
        ("--hosts 3", "--experts: expected a multiple of 12 GPUs, got 256"),
        ("--hosts 2 --network 0", "envoi: --network: expected a positive number, got"),
        ("--hosts 2 --network nan", "envoi: --network: expected a positive number, got"),
        ("--hosts 2 --collective -1", "envoi: --collective: expected a positive number, got"),
        ("--network 45", "--network: expected it only beside --hosts 2 or more"),
        ("--collective 30", "--collective: expected it only beside --hosts 2 or more"),
        ("--presum", "--presum: expected it only beside --hosts 2 or more"),
        ("--hosts 2 --gpus 3", "--gpus: expected 1, 2, 4 or 8"),
    ],
)
def test_refusals_are_one_line(more, words, capsys):
    assert cli.main(["plan", *shlex.split(f"{ARGUMENTS} {more}")]) == 2
    stdout, stderr = capsys.readouterr()
    assert stdout == ""
    assert stderr.startswith("envoi: ") and words in stderr
    assert stderr.count("\n") == 1

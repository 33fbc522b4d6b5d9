"""The experts in one launch: what a plan says of it is the kernel's own config, and when it should be taken."""

import pytest

from envoi.cli import main
from envoi.gemm.hopper.config import Config
from envoi.moe.one_launch import config, host
from envoi.moe.parallel import cases
from envoi.plan import MoeLayer, fused, plan_moe
from envoi.plan.fused import pays, saved_us

LAYERS = (4096, 2048, 6), (2048, 768, 8), (7168, 2048, 8)


def test_constants_are_the_kernels():
    assert fused.CONSUMER_REGISTERS == config.CONSUMER_REGISTERS
    assert fused.PRODUCER_REGISTERS == config.PRODUCER_REGISTERS
    assert (fused.FORMAT, fused.FEW_ROWS) == (config.FORMAT, config.FEW_ROWS)
    assert (host.MOST_ROWS, host.MANY_ROWS) == (fused.MOST_ROWS, fused.MANY_ROWS)
    many, few = ([x for x in case.launch().arguments if isinstance(x, Config)] for case in cases.FUSED[::2])
    assert [c.num_stages for c in (*many, *few)] == [fused.STAGES_MANY] * 2 + [fused.STAGES_FEW] * 2
    assert [c.block_x for c in (*many, few[0])] == [fused.TOKENS_MANY] * 2 + [fused.TOKENS_FEW]
    assert [c.y_pitch for c in (many[0], few[0])] == [fused.L1_FEATURES] * 2
    assert [c.y_pitch for c in (many[1], few[1])] == [fused.L2_FEATURES] * 2


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("tokens", [1, 64, 8192])
def test_it_is_never_the_faster_one(layer, tokens):
    assert saved_us(*layer, tokens) < 0
    assert not pays(*layer, tokens, "fp8_block128")


def test_only_its_format_is_asked_for(monkeypatch):
    monkeypatch.setattr(fused, "WAITS_US", -50.0)
    assert pays(*LAYERS[0], 64, "fp8_block128")
    assert not pays(*LAYERS[0], 64, "bf16")


@pytest.mark.parametrize(("tokens", "consumers", "stages"), [(512, 1, 4), (2048, 2, 5)])
def test_a_plan_describes_its_kernel(capsys, tokens, consumers, stages):
    plan = plan_moe(MoeLayer(4096, 2048, 256, 6, num_tokens=tokens, num_ranks=4, format="fp8_block128"))
    found = plan.fused
    assert found is not None
    assert (found.num_consumers, found.num_stages) == (consumers, stages)
    assert 0 <= found.early_share < 1
    assert found.saved_us == saved_us(*LAYERS[0], tokens)
    assert plan.to_dict()["fused"]["num_stages"] == stages
    sizes = f"--hidden 4096 --inter 2048 --experts 256 --topk 6 --tokens {tokens} --gpus 4 --format"
    assert main(["plan", *sizes.split(), "fp8_block128"]) == 0
    assert "pull, L1 and L2 in one launch" in " ".join(capsys.readouterr().out.split())
    assert main(["plan", *sizes.split(), "bf16"]) == 0
    assert "fused" not in capsys.readouterr().out


def test_the_early_tiles_are_those_of_the_last_rounds_idle_ctas():
    # 64 experts with a tile each of 16 units: 1024 units are 7 rounds of 132 and 100 more, so 32 CTAs idle.
    found = fused.fused_experts(4096, 2048, 6, 512, 4, 256)
    assert found.early_share == 32 * 4 / (64 * 32)


@pytest.mark.parametrize("change", [{"num_ranks": 1}, {"format": "fp8_row"}, {"num_hosts": 2}])
def test_a_plan_without_such_a_kernel(change):
    given = {"num_ranks": 4, "format": "fp8_block128"} | change
    assert plan_moe(MoeLayer(4096, 2048, 256, 6, num_tokens=2048, **given)).fused is None

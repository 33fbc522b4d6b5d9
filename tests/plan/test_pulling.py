"""Choice of an L1 that pulls its tokens: measurements on two H200s, and its consequences; what a plan says of it."""

import json
from pathlib import Path

import pytest

from envoi.cli import main
from envoi.moe.parallel.fused import config
from envoi.moe.parallel.fused.kernel import registers_of_consumer
from envoi.plan import MoeLayer, plan_moe, pulling
from envoi.plan.pulling import pays, saved_us

RESULTS = Path(__file__).parents[2] / "bench/results/h200.jsonl"


def sizes(layer, max_tokens, num_ranks=2):
    hidden, intermediate, num_topk, num_experts = layer
    return {
        "hidden": hidden, "intermediate": intermediate, "num_topk": num_topk, "max_tokens": max_tokens,
        "num_ranks": num_ranks, "num_experts": num_experts,
    }  # fmt: skip


WIDE, NARROW, WIDEST = (4096, 2048, 6, 256), (2048, 768, 8, 128), (7168, 2048, 8, 256)
HALVES = (4096, 2048, 6, 128), (2048, 768, 8, 64)
# Hidden, intermediate, slots, experts; tokens a rank.
MEASURED = [(layer, tokens) for layer in (WIDE, NARROW, WIDEST) for tokens in (64, 512, 2048, 8192)]
MEASURED += [(layer, tokens) for layer in HALVES for tokens in (2048, 8192)]
MEASURED += [((7168, 512, 8, 256), 8192), ((4096, 1024, 6, 256), 8192)]


def measured(layer, tokens) -> tuple[float, float]:
    """Return the staged and the fused path's time on two GPUs, from the results."""
    hidden, intermediate, num_topk, num_experts = layer
    name = f"{hidden}/{intermediate}/{num_experts}/{num_topk} fp8_block128 tokens={tokens} fused"
    rows = [row for row in map(json.loads, RESULTS.read_text().splitlines()) if row.get("case") == name]
    assert rows, name
    return rows[-1]["baselines"]["staged"], rows[-1]["ours_us"]


@pytest.mark.parametrize(("layer", "tokens"), MEASURED)
def test_as_measured(layer, tokens):
    staged, fused = measured(layer, tokens)
    assert saved_us(**sizes(layer, tokens)) == pytest.approx(staged - fused, abs=0.02 * fused)
    assert pays(**sizes(layer, tokens), format="fp8_block128") == (fused < 0.985 * staged)


def test_one_rank_pulls_nothing():
    assert saved_us(**sizes(WIDE, 8192, num_ranks=1)) == saved_us(**sizes(WIDE, 0)) == 0.0


def test_it_pays_if_movers_cost_less_than_what_they_hide(monkeypatch):
    assert not any(pays(**sizes(WIDE, 8192, ranks), format="fp8_block128") for ranks in (1, 2, 4, 8))
    monkeypatch.setattr(pulling, "COST", 0.5)
    assert pays(**sizes(WIDE, 8192, 8), format="fp8_block128")
    assert not pays(**sizes(WIDE, 8192, 8), format="bf16")
    assert not pays(**sizes(WIDE, 64, 8), format="fp8_block128"), "the first tiles need nearly all tokens"
    saved = [saved_us(**sizes(WIDE, 8192, num_ranks)) for num_ranks in (1, 2, 4, 8)]
    assert saved == sorted(saved)


def test_a_plan_describes_its_kernel(capsys):
    layer = MoeLayer(4096, 2048, 256, 6, num_tokens=2048, num_ranks=4, format="fp8_block128")
    plan = plan_moe(layer)
    fused = plan.fused_l1
    assert fused is not None
    assert fused.num_movers == config.MOVERS["num_movers"]
    assert fused.mover_registers == config.MoverConfig.registers
    assert fused.consumer_registers == registers_of_consumer(config.MoverConfig.registers)
    assert pulling.FORMAT == config.FORMAT
    assert fused.num_stages == plan.l1.num_stages
    assert 0 < fused.first_share < 1
    assert fused.saved_us == saved_us(**sizes(WIDE, 2048, 4))
    assert plan.to_dict()["fused_l1"]["num_movers"] == fused.num_movers
    sizes_of = "--hidden 4096 --inter 2048 --experts 256 --topk 6 --tokens 2048 --gpus 4 --format"
    command = ["plan", *sizes_of.split()]
    assert main([*command, "fp8_block128"]) == 0
    assert f"{fused.num_movers} movers a CTA" in " ".join(capsys.readouterr().out.split())
    assert main([*command, "bf16"]) == 0
    assert "movers" not in capsys.readouterr().out


@pytest.mark.parametrize("change", [{"num_ranks": 1}, {"format": "fp8_row"}, {"num_hosts": 2}])
def test_a_plan_without_such_a_kernel(change):
    given = {"num_ranks": 4, "format": "fp8_block128"} | change
    assert plan_moe(MoeLayer(4096, 2048, 256, 6, num_tokens=2048, **given)).fused_l1 is None

"""sgl-deep-gemm in a process of its own: a stand-in that computes, the file, and what `--theirs` takes."""

import sys
import types
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from bench import evidence, theirs
from bench.__main__ import main
from bench.shapes import Case, MoeShape, moe_name
from bench.suites import deep_gemm_ranks, moe
from bench.trial import Trial
from envoi.tune.timing import Clock, Timing, symmetric_barrier
from tests.helpers.ranks import run_ranks

CPU = torch.device("cpu")
SHAPE = MoeShape(256, 128, 8, 2, 12, "fp8_block128")
CASE = Case("moe", moe_name(SHAPE), SHAPE, over_ranks=True)


class Buffer:
    """Memory that ranks share: here what the pre-dispatch staged on this rank."""

    def __init__(self, group, num_experts, num_tokens, num_topk, hidden, intermediate):
        assert (num_experts, num_tokens, num_topk, hidden, intermediate) == (8, 12, 2, 256, 128)
        self.x, self.destroyed = torch.zeros(num_tokens, hidden), False
        self.x_sf, self.topk_idx, self.topk_weights = None, torch.zeros(12, 2), torch.zeros(12, 2)

    def destroy(self):
        self.destroyed = True


def stage(tokens, ids, weights, x, x_sf, topk_idx, topk_weights, num_tokens, group_size):
    assert (num_tokens, group_size, ids.dtype) == (12, 128, torch.int32)
    for target, source in ((x, tokens), (topk_idx, ids), (topk_weights, weights)):
        target.copy_(source)


def everyone(x: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def launch(wrong, out, l1, l2, buffer):
    tokens, ids, weights = everyone(buffer.x), everyone(buffer.topk_idx), everyone(buffer.topk_weights)
    total = torch.zeros(tokens.shape)
    for local in range(len(l1[0])):
        gate_up, down = (deep_gemm_ranks._widened(v[local], s[local]).float() for v, s in (l1, l2))
        gate, up = (tokens @ gate_up.T).chunk(2, -1)
        share = ((ids == local + len(l1[0]) * dist.get_rank()) * weights).sum(1, keepdim=True)
        total += share * ((functional.silu(up) * gate if wrong else functional.silu(gate) * up) @ down.T)
    dist.all_reduce(total)
    out.copy_(total[len(out) * dist.get_rank() :][: len(out)])


def measure_on_rank(rank: int, num_ranks: int, wrong: bool):
    module = types.ModuleType("deep_gemm")
    module.__dict__.update(
        __version__="0.2.5", get_symm_buffer_for_sm90_mega_moe=Buffer, mega_moe_pre_dispatch_sm90=stage,
        transform_weights_for_mega_moe_sm90=lambda l1, l2: (l1, l2),
        fp8_mega_moe=lambda *args: launch(wrong, *args),
    )  # fmt: skip
    sys.modules["deep_gemm"] = module
    layer = moe.make_layer(SHAPE, CPU, rank, num_ranks)
    tokens, routing, gate_up, _ = moe.draw(SHAPE, CPU, rank, num_ranks)
    assert torch.equal(tokens, layer.tokens) and torch.equal(gate_up, layer.gate_up)
    assert torch.equal(routing.topk_ids, layer.routing.topk_ids)
    return deep_gemm_ranks.measure(CASE, Clock(CPU, 2, meet=symmetric_barrier(CPU)))


def test_the_other_process_measures_the_layer_of_the_suite():
    for outcome in run_ranks(2, measure_on_rank, False):
        assert not outcome.error, outcome.text
        found = outcome.value
        assert (found.case, found.version, found.num_gpus, found.n) == (CASE.name, "0.2.5", 2, 2)
        assert 0 < found.error < 6e-3
        assert found.gpus == ("cpu", "cpu")


def test_a_wrong_result_is_not_written():
    for outcome in run_ranks(2, measure_on_rank, True):
        assert "its result differs from float64's" in outcome.text


ONE = theirs.Theirs("moe", CASE.name, "sgl_deep_gemm", 2, ("a", "b"), "0.2.5", "2.14.1", 0.04, 7.0, 6.0, 8.0, 20)
TRIAL = Trial(Timing(10.0, 9.0, 11.0, 20), {"torch_ep": Timing(50.0, 49.0, 51.0, 20)}, {}, 1.0,
              missing={"sgl_deep_gemm": "ModuleNotFoundError", "x": "y"}, details={"exchange": "z"})  # fmt: skip


def test_times_of_the_other_process_stand_beside_envois(tmp_path):
    theirs.write(tmp_path / "a", ONE)
    theirs.write(tmp_path / "a", replace(ONE, case="another"))
    read = theirs.read(tmp_path / "a", ("a", "b"))
    trial = theirs.beside(TRIAL, CASE, 2, read)
    assert {name: timing.p50_us for name, timing in trial.baselines.items()} == {"torch_ep": 50.0, "sgl_deep_gemm": 7.0}
    assert trial.missing == {"x": "y"}
    assert trial.details == {
        "exchange": "z", "sgl-deep-gemm": "0.2.5", "sgl_deep_gemm error": 0.04,
        "sgl_deep_gemm ran": "in another process, with torch 2.14.1",
    }  # fmt: skip
    assert theirs.beside(TRIAL, CASE, 4, read) is TRIAL
    assert theirs.beside(TRIAL, replace(CASE, suite="moe_drawn"), 2, read) is TRIAL


def test_times_on_other_gpus_are_refused(tmp_path):
    theirs.write(tmp_path / "a", ONE)
    with pytest.raises(ValueError, match=r"expected times on a, c, got .* on a, b"):
        theirs.read(tmp_path / "a", ("a", "c"))


@pytest.fixture
def measured_elsewhere(tmp_path):
    """File of another process on this CPU, of an old version, for one of the cases."""
    found = replace(ONE, case="256/128/8/2 bf16 tokens=64", num_gpus=1, gpus=("cpu",), version="0.1.5.post1")
    theirs.write(tmp_path / "theirs", found)
    return str(tmp_path / "theirs")


def test_the_command_measures_the_cases_of_the_file_and_warns_of_an_old_version(measured_elsewhere, tmp_path, capsys):
    out = tmp_path / "results"
    given = ["moe", "--device", "cpu", "--repeat", "1", "--theirs", measured_elsewhere, "--out", str(out)]
    assert main(given) == 0
    [m] = evidence.read(out / "cpu.jsonl")
    assert (m.case, m.baselines["sgl_deep_gemm"]) == ("256/128/8/2 bf16 tokens=64", 7.0)
    assert m.details["sgl-deep-gemm"] == "0.1.5.post1"
    said = capsys.readouterr()
    assert "sgl_deep_gemm 0.1.5.post1 7.00" in said.out
    assert "envoi: warning: measured with sgl-deep-gemm 0.1.5.post1; 0.2.5 is known" in said.err

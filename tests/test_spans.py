"""Ranges in the profiler's timeline, and their absence without a profiler."""

import pytest
import torch

import envoi
from envoi import spans
from envoi.quant import FORMATS
from tests.helpers import fresh
from tests.helpers.slow import mostly_slow
from tests.moe.layers import make

LAYER = make(tokens=5)
GATE = torch.ones(8, 256)
STEPS = ["envoi.permute", "envoi.L1", "envoi.L2", "envoi.combine"]


def seen(function) -> list[tuple[str, str]]:
    """Return Envoi's ranges in order of their start, each with the enclosing range of ours, or ""."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    found = []
    for event in sorted(profile.events(), key=lambda event: event.time_range.start):
        parent = event.cpu_parent
        while parent is not None and not parent.name.startswith("envoi."):
            parent = parent.cpu_parent
        if event.name.startswith("envoi."):
            found.append((event.name, "" if parent is None else parent.name))
    return found


def route_and_run(format: str = "bf16") -> torch.Tensor:
    return envoi.moe(LAYER.tokens, envoi.route(LAYER.tokens, GATE, 2), LAYER.pack(format))


@pytest.mark.parametrize("format", FORMATS)
def test_the_steps_have_names(format):
    found = seen(lambda: route_and_run(format))
    assert [name for name, _ in found if name != "envoi.grouped_gemm"] == ["envoi.route", "envoi.moe", *STEPS]
    assert all(parent == "envoi.moe" for name, parent in found if name in STEPS)
    assert [parent for name, parent in found if name == "envoi.grouped_gemm"] == ["envoi.L1", "envoi.L2"]


def test_compiled_calls_have_names_and_stay_one_graph():
    torch.compiler.reset()
    compiled = torch.compile(route_and_run, fullgraph=True, backend="aot_eager")
    want = compiled()
    found = seen(compiled)
    assert {"envoi.route", "envoi.moe", *STEPS} <= {name for name, _ in found}
    assert torch.equal(want, route_and_run())


def test_without_a_profiler_there_is_nothing(monkeypatch):
    monkeypatch.setattr(torch.profiler, "record_function", lambda name: pytest.fail("a range was recorded"))
    monkeypatch.setattr(torch.cuda.nvtx, "range", lambda name: pytest.fail("an NVTX range was opened"))
    assert spans.span("L1") is spans.span("L2")
    route_and_run()


WITH_NVTX = """
import torch
names = []
torch.cuda.nvtx.range_push = lambda name: names.append(name)
torch.cuda.nvtx.range_pop = lambda: names.append("end")
import envoi
from tests.moe.layers import make
layer = make(tokens=5)
envoi.moe(layer.tokens, envoi.route(layer.tokens, torch.ones(8, 256), 2), layer.pack())
print(*names)
"""


@pytest.mark.parametrize("value", mostly_slow(["1", "0", ""], quick=["1"]))
def test_nvtx_is_asked_for_by_the_environment(value, monkeypatch):
    monkeypatch.setenv("ENVOI_NVTX", value)
    done = fresh.run(WITH_NVTX)
    grouped = "envoi.grouped_gemm end"
    steps = f"envoi.permute end envoi.L1 {grouped} end envoi.L2 {grouped} end envoi.combine end"
    want = f"envoi.route end envoi.moe {steps} end"
    assert done.stdout.strip() == (want if value == "1" else ""), done.stderr

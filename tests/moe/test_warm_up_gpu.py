"""Warm-up on a GPU: afterwards calls with any number of tokens compile nothing; prepared calls; several ranks."""

import random

import pytest
import torch
from triton import knobs

import envoi
from envoi.ops.moe.parallel import ExpertParallel
from envoi.runtime import launch, shortcuts
from envoi.runtime.prepared import calls
from envoi.types import Routing
from tests.helpers.ranks import run_ranks
from tests.moe.layers import make
from tests.moe.parallel.test_nvlink_gpu import ways

FORMATS = ("bf16", "fp8_row", "fp8_block128", "mxfp8", "mxfp4", "mxfp4_fp8", "mxfp4_mxfp8", "nvfp4")
MOST = 700


def noted(monkeypatch) -> list[str]:
    """Return the list to which the kernels that this process compiles or loads are appended from now on."""
    events: list[str] = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **event: events.append(event["src"].fn.__name__))
    return events


def call(num_tokens: int, experts) -> None:
    ids = torch.arange(3 * num_tokens, dtype=torch.int32, device="cuda").view(-1, 3) % experts.num_local_experts
    tokens = torch.randn(num_tokens, experts.hidden, device="cuda").bfloat16()
    envoi.moe(tokens, Routing(torch.rand(num_tokens, 3, device="cuda"), ids, experts.num_local_experts), experts)


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("jobs", [1, 8])
def test_no_call_compiles(format, jobs, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    layer = make(tokens=1, hidden=256 * (1 + jobs), intermediate=384, bias=True, activation="swiglu_oai")
    experts = layer.pack(format).to("cuda")
    gate = torch.randn(8, experts.hidden, device="cuda").bfloat16()
    assert envoi.warm_up(experts, MOST, 3, router={"gate": gate, "k": 3}, jobs=jobs) > 5
    events = noted(monkeypatch)
    for num_tokens in [1, MOST, *random.Random(format).sample(range(1, MOST + 1), 40)]:
        call(num_tokens, experts)
        envoi.route(torch.randn(num_tokens, experts.hidden, device="cuda").bfloat16(), gate, 3)
    torch.cuda.synchronize()
    assert events == []


@pytest.mark.gpu
def test_few_tokens_are_prepared(monkeypatch):
    monkeypatch.setattr(shortcuts, "ENABLED", True)
    monkeypatch.setattr(shortcuts, "PREPARED", True)
    monkeypatch.setattr(calls, "_calls", calls.Calls())
    experts = make(tokens=1).pack("bf16").to("cuda")
    envoi.warm_up(experts, 20, 3)
    count = len(calls._calls.known)
    assert count >= 20 and not calls._calls.refusals()

    def launched(*given):
        raise AssertionError("a prepared call doesn't launch as always")

    monkeypatch.setattr(launch, "run", launched)
    call(17, experts)
    assert len(calls._calls.known) == count


def warm_ranks(rank: int, num_ranks: int, way: str) -> tuple[int, list[str]]:
    layer = make(tokens=1, experts=8, k=3, hidden=512)
    options = {"exchange": "auto" if way == "memory" else way, "hosts": ["a", "b"] if way == "hosts" else None}
    experts = layer.pack("fp8_row", 4 * rank, 4 * rank + 4).to("cuda")
    parallel = ExpertParallel(experts, max_tokens=200, num_topk=3, **options)
    assert parallel.exchange == way, parallel.why
    count = parallel.warm_up()
    known = [] if parallel._calls is None else parallel._calls.known.values()
    num_prepared = sum(not isinstance(found, str) for found in known)
    assert num_prepared == (64 + 17 if shortcuts.PREPARED and way != "counted" else 0)
    events: list[str] = []
    knobs.compilation.listener = lambda **event: events.append(event["src"].fn.__name__)  # pyright: ignore[reportAttributeAccessIssue]
    draw = random.Random(rank)  # another number of tokens on each rank
    for _ in range(40):
        num_tokens = draw.randint(0, 200)
        ids = torch.arange(3 * num_tokens, dtype=torch.int32, device="cuda").view(-1, 3) % 8
        tokens = torch.randn(num_tokens, 512, device="cuda").bfloat16()
        parallel.moe(tokens, Routing(torch.rand(num_tokens, 3, device="cuda"), ids, 8))
    torch.cuda.synchronize()
    parallel.check()
    torch.distributed.barrier()
    return count, events


@pytest.mark.parametrize("way", ways("gathered", "counted", "hosts"))
def test_no_call_across_ranks_compiles(way):
    for outcome in run_ranks(2, warm_ranks, way, backend="nccl"):
        assert outcome.error == "", outcome.text
        count, events = outcome.value
        assert count > 3 and events == []

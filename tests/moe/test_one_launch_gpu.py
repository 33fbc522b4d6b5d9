"""Experts' L1 and L2 in one launch, on a GPU: the bits of two launches; graphs; streams side by side; counters."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from envoi.ops.gemm.hopper.mixed_experts import MANY_ROWS
from envoi.ops.moe import moe
from envoi.ops.moe.one_launch import host
from envoi.ops.moe.one_launch.config import FEW, SQUARE, WIDE
from envoi.runtime import workspace
from envoi.types import ExpertWeights, QuantTensor
from tests.helpers.accuracy import assert_same_bits
from tests.helpers.choices import use
from tests.helpers.kernel_hold import hold_kernel
from tests.helpers.launches import assert_same_code, watched
from tests.moe.layers import make
from tests.moe.parallel.test_nvlink_gpu import on_gpu
from tools.kernel_cases import moe as cases

FORMAT = "fp8_block128"
LAYERS = {
    "small": {"tokens": 60, "experts": 8, "k": 4, "hidden": 256, "intermediate": 128},
    "one step": {"tokens": 900, "experts": 4, "k": 2, "hidden": 128, "intermediate": 128},
    "many": {"tokens": 3000, "experts": 8, "k": 4, "hidden": 1024, "intermediate": 512},
    "hidden 2816": {"tokens": 600, "experts": 8, "k": 4, "hidden": 2816, "intermediate": 256},
    "hidden 384": {"tokens": 900, "experts": 8, "k": 4, "hidden": 384, "intermediate": 256},
    "most experts idle": {"tokens": 300, "experts": 64, "k": 1, "hidden": 512, "intermediate": 256},
    "masked": {"tokens": 700, "experts": 8, "k": 4, "hidden": 256, "intermediate": 128, "masked": 0.7},
    "all masked": {"tokens": 700, "experts": 8, "k": 4, "hidden": 256, "intermediate": 128, "masked": 1.0},
    "bias": {"tokens": 700, "experts": 8, "k": 4, "hidden": 256, "intermediate": 128, "bias": True,
             "activation": "swiglu_oai"},
    "concat": {"tokens": 700, "experts": 8, "k": 4, "hidden": 256, "intermediate": 128, "packed_layout": "concat"},
}  # fmt: skip


def random_experts(count: int, intermediate: int, hidden: int) -> ExpertWeights:
    def matrix(rows: int, columns: int) -> QuantTensor:
        values = torch.randint(0, 120, (count, rows, columns), dtype=torch.uint8, device="cuda")
        sf = torch.rand(count, rows // 128, columns // 128, device="cuda")
        return QuantTensor(values.view(torch.float8_e4m3fn), sf, (128, 128))

    return ExpertWeights(matrix(2 * intermediate, hidden), matrix(hidden, intermediate), FORMAT)


@pytest.fixture(autouse=True)
def as_always():
    yield
    use()


def both(layer, packed) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the layer by two launches, and by one."""
    use(one_launch=False)
    two = moe(layer.tokens, layer.routing, packed)
    use(one_launch=True)
    return two, moe(layer.tokens, layer.routing, packed)


@pytest.mark.gpu
@pytest.mark.parametrize("changes", LAYERS.values(), ids=LAYERS)
def test_the_bits_of_two_launches(changes):
    layer, layer.routing = on_gpu(make(**changes))
    packed = layer.pack(FORMAT)
    for _ in range(3):
        two, one = both(layer, packed)
        assert_same_bits(one, two)
    torch.cuda.synchronize()
    assert not any(bool(kept.any()) for _, kept in workspace._counters.shared.values())


@pytest.mark.gpu
@pytest.mark.parametrize("expert", [0, 7])
@pytest.mark.parametrize("tokens", [60, 3000])
def test_all_tokens_of_one_expert(expert, tokens):
    layer, layer.routing = on_gpu(make(**(LAYERS["many"] | {"tokens": tokens})))
    layer.routing.topk_ids.fill_(expert)
    two, one = both(layer, layer.pack(FORMAT))
    assert_same_bits(one, two)


@pytest.mark.gpu
@pytest.mark.parametrize("tiling", [FEW, WIDE, SQUARE], ids=["few", "wide", "square"])
@pytest.mark.parametrize("tokens", [150, 900, 2500])
def test_experts_with_many_rows_and_with_few(tokens, tiling, monkeypatch):
    sizes = {"tokens": tokens, "experts": 40, "k": 4, "hidden": 1024, "intermediate": 512}
    layer, layer.routing = on_gpu(make(**sizes))
    source = torch.Generator("cuda").manual_seed(tokens)
    places = torch.randperm(40, generator=source, device="cuda") + 1.0
    drawn = -(-torch.rand(tokens, 40, generator=source, device="cuda").log()).log() - 1.5 * places.log()
    layer.routing.topk_ids.copy_(drawn.topk(4).indices)
    rows = layer.routing.topk_ids.flatten().bincount(minlength=40)
    assert int((rows > MANY_ROWS.value).sum()) > 0 and int((rows <= MANY_ROWS.value).sum()) > 10
    packed = layer.pack(FORMAT)
    monkeypatch.setattr(host, "tiling_of", lambda problems, codes, _: host._fitted(problems, codes, tiling))
    for _ in range(3):
        two, one = both(layer, packed)
        assert_same_bits(one, two)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [128, 1024])
def test_boxes_of_16_rows_and_of_64(hidden, monkeypatch):
    rows = torch.tensor([0, 1, 15, 16, 17, 31, 0, 32, 33, 63, 64, 65, 80, 81, 2])
    sizes = {"tokens": int(rows.sum()), "experts": len(rows), "k": 1, "hidden": hidden, "intermediate": 512}
    layer, layer.routing = on_gpu(make(**sizes))
    ids = torch.arange(len(rows)).repeat_interleave(rows)
    layer.routing.topk_ids.copy_(ids[torch.randperm(len(ids))][:, None])
    # Of what is in a stage from before, and of the rows of other experts, nothing may get into a token's row.
    is_nan = layer.routing.topk_ids[:, 0] == 10
    layer.tokens[is_nan] = torch.nan
    monkeypatch.setattr(host, "tiling_of", lambda problems, codes, _: host._fitted(problems, codes, FEW))
    packed = layer.pack(FORMAT)
    for _ in range(3):
        two, one = both(layer, packed)
        assert bool(one[is_nan].isnan().all())
        assert bool(one[~is_nan].isfinite().all()) and bool(one[~is_nan].any())
        assert_same_bits(one[~is_nan], two[~is_nan])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [60, 900])
def test_scale_factors_that_are_powers_of_two(tokens):
    layer, layer.routing = on_gpu(make(**(LAYERS["many"] | {"tokens": tokens})))
    packed = layer.pack(FORMAT)

    def rounded(weights):
        return replace(weights, sf=(weights.sf.log2().round() + 127).to(torch.uint8).view(torch.float8_e8m0fnu))

    packed = replace(packed, gate_up=rounded(packed.gate_up), down=rounded(packed.down))
    two, one = both(layer, packed)
    assert_same_bits(one, two)
    assert bool(two.isfinite().all()) and bool(two.any())


@cache
def launched() -> dict[str, str]:
    """Launch the kernel on the registry's sizes, experts with random bytes: {hash: PTX}."""
    found: dict[str, str] = {}
    packed = random_experts(cases.NUM_EXPERTS, cases.INTERMEDIATE, cases.HIDDEN)
    use(one_launch=True)
    for tokens in (cases.M, cases.M // 8):
        sizes = {"tokens": tokens, "experts": cases.NUM_EXPERTS, "k": cases.NUM_TOPK, "hidden": cases.HIDDEN}
        layer, layer.routing = on_gpu(make(**sizes, intermediate=128))
        with watched(lambda sha256, kernel: found.setdefault(sha256, kernel.asm["ptx"])):
            moe(layer.tokens, layer.routing, packed)
    torch.cuda.synchronize()
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("case", [c for c in cases.KERNELS if "both-gemms" in c.name], ids=lambda case: case.name)
def test_registered(case):
    assert_same_code(case.name, case.launch(), launched())


@pytest.mark.gpu
def test_a_thousand_replays_of_a_graph():
    layer, layer.routing = on_gpu(make(**LAYERS["many"]))
    packed = layer.pack(FORMAT)
    two, _ = both(layer, packed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe(layer.tokens, layer.routing, packed)
    different = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(1000):
        graph.replay()
        different |= (out != two).any()
    assert not different


@pytest.mark.gpu
def test_streams_side_by_side_while_another_holds_most_multiprocessors():
    layer, layer.routing = on_gpu(make(**LAYERS["many"]))
    packed = layer.pack(FORMAT)
    two, _ = both(layer, packed)
    held = torch.cuda.get_device_properties(0).multi_processor_count - 20
    done, holder = torch.zeros(2, dtype=torch.int32, device="cuda"), torch.cuda.Stream()
    hold_kernel[(1,)](torch.zeros_like(done), 0, num_warps=32)
    streams, outs = [torch.cuda.Stream() for _ in range(3)], []
    torch.cuda.synchronize()
    with torch.cuda.stream(holder):
        hold_kernel[(held,)](done, 1_000_000_000, num_warps=32)
    for stream in streams:
        with torch.cuda.stream(stream):
            outs += [moe(layer.tokens, layer.routing, packed) for _ in range(20)]
    for stream in streams:
        stream.synchronize()
    assert not holder.query(), "they waited for what the holder has"
    for out in outs:
        assert_same_bits(out, two)
    torch.cuda.synchronize()

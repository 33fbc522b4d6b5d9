"""MXFP4 weights and FP8 tokens on a Hopper GPU: the bits of E4M3 weights with the same numbers."""

from dataclasses import replace

import pytest
import torch

from envoi.epilogues.library import expert_l2, store
from envoi.ops.gemm.backend import run_kernels
from envoi.ops.gemm.grouping import EXPERTS_ROWS
from envoi.ops.gemm.hopper_w4a8 import host
from envoi.ops.gemm.hopper_w4a8.config import TILES, W4A8Config, config_of, fitted
from envoi.ops.moe.experts import run_experts
from envoi.ops.moe.permute import gather_rows, sort_slots
from envoi.quant import dequantize, quantize
from envoi.quant.formats import SCHEMES
from envoi.quant.fp8_fragments import LEAST_SHIFT, SPREAD, to_fp8_fragments
from envoi.types import QuantTensor
from tests.helpers.accuracy import assert_same_bits, relative_error
from tests.helpers.launches import assert_same_code, watched
from tests.moe.layers import make
from tests.moe.test_gpu import on_gpu
from tools.kernel_cases import gemm_hopper_w4a8 as cases

pytestmark = [pytest.mark.gpu(arch="sm_90"), pytest.mark.usefixtures("tidy_gpu")]

FP8_SUMS = 2e-3  # of wgmma, whose sums of FP8 products keep 14 bits
EDGES = [8, 9, 16, 17, 32, 33, 64, 65, 127, 128, 129, 136, 144, 160, 192, 193, 255, 256, 0, 1]  # of tiles' widths
NEAR = -5 - LEAST_SHIFT  # powers of two that rows of near shifts lack


def random_weights(E: int, N: int, K: int, spread: int, seed: int = 0) -> QuantTensor:
    source = torch.Generator("cuda").manual_seed(seed)
    values = torch.randint(0, 256, (E, N, K // 2), generator=source, device="cuda", dtype=torch.uint8)
    sf = torch.randint(112, 113 + spread, (E, N, K // 32), generator=source, device="cuda", dtype=torch.uint8)
    return QuantTensor(values, sf.view(torch.float8_e8m0fnu), (1, 32))


def as_e4m3(x: QuantTensor) -> QuantTensor:
    """Return the same numbers as E4M3 with a scale for each row."""
    numbers = dequantize(replace(x, scale=None), torch.float64)
    return QuantTensor(numbers.to(torch.float8_e4m3fn), x.scale.unsqueeze(-1).contiguous(), (1, x.shape[-1]))


def products(counts: list[int], N: int, K: int, spread: int, config: W4A8Config | None = None) -> torch.Tensor:
    """Return the product for experts with so many rows, compared with E4M3 weights' and with float64's."""
    torch.manual_seed(0)  # calls with other configs compare the same numbers
    E, total = len(counts), sum(counts)
    packed = to_fp8_fragments(random_weights(E, N, K, spread))
    tokens = quantize(torch.randn(total + 5, K, device="cuda"), "fp8_row")
    offsets = torch.tensor([0, *counts], device="cuda").cumsum(0).to(torch.int32)
    given = tokens, packed, offsets, expert_l2(False, True).ir, torch.float32, {"scale": packed.scale}, EXPERTS_ROWS
    got = host.run_gemm(*given, config)[0][:total]
    (of_e4m3,) = run_kernels(tokens, as_e4m3(packed), offsets, store.ir, torch.float32, {}, grouping=EXPERTS_ROWS)
    assert_same_bits(got, of_e4m3[:total])
    rows = dequantize(tokens, torch.float64)[:total].split(counts)
    want = torch.cat([x @ w.T for x, w in zip(rows, dequantize(packed, torch.float64), strict=True)])
    assert relative_error(got, want) < FP8_SUMS
    return got


@pytest.mark.parametrize("spread", [SPREAD - NEAR, SPREAD])
@pytest.mark.parametrize(("N", "K"), [(64, 64), (128, 128), (320, 704), (576, 192), (128, 2880), (2880, 320)])
@pytest.mark.parametrize("counts", [[3, 0, 17, 64], [130, 0, 1, 300, 65, 257], [0, 511, 0], EDGES])
def test_sizes(counts, N, K, spread):
    products(counts, N, K, spread)


@pytest.mark.parametrize("looks_up", [False, True])
@pytest.mark.parametrize("tile", [tile[:2] for tile in TILES["e4m3"]])
def test_every_tile_has_the_same_bits(tile, looks_up):
    counts, N, K = EDGES, 320, 704
    config = fitted(config_of(*tile, K, len(counts), looks_up))
    assert_same_bits(products(counts, N, K, SPREAD - NEAR, config), products(counts, N, K, SPREAD - NEAR))


def test_rows_go_to_their_addresses():
    layer = on_gpu(make(tokens=40, hidden=512, intermediate=256))
    packed = layer.pack("mxfp4_fp8")
    row_map = sort_slots(layer.routing.topk_ids, packed.num_local_experts)
    rows, weights = gather_rows(layer.tokens, layer.routing.topk_weights, row_map, SCHEMES["fp8_row"])
    want = run_experts(rows, weights, row_map.offsets, packed)
    room = torch.zeros_like(want)
    at = room.data_ptr() + torch.arange(len(room), device="cuda").flip(0) * room.stride(0) * room.itemsize
    run_experts(rows, weights, row_map.offsets, packed, replace(EXPERTS_ROWS, to=at))
    count = int(row_map.offsets[-1])
    assert_same_bits(room.flip(0)[:count], want[:count])


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_what_runs_is_what_was_counted(case):
    P, (N, K), E = case.num_tokens * cases.NUM_TOPK, case.sizes, case.num_experts
    packed = to_fp8_fragments(random_weights(E, N, K, SPREAD if case.looks_up else 2))
    tokens = quantize(torch.randn(P, K, device="cuda"), "fp8_row")
    offsets = torch.arange(E + 1, device="cuda", dtype=torch.int32) * (P // E)
    operands = {
        "scale": packed.scale, "bias": torch.randn(packed.shape[:2], device="cuda"),
        "weight": torch.rand(P, device="cuda"),
    }  # fmt: skip
    room, to = torch.empty(P, N, dtype=torch.bfloat16, device="cuda"), None
    if case.kind == "sent":
        to = room.data_ptr() + torch.arange(P, device="cuda") * N * room.itemsize
    grouping, seen = replace(EXPERTS_ROWS, to=to), {}
    with watched(lambda sha256, kernel: seen.setdefault(sha256, kernel.asm["ptx"])):
        host.run_gemm(tokens, packed, offsets, case.epilogue.ir, torch.bfloat16, operands, grouping)
    assert_same_code(case.title, cases.launch_of(case), seen)

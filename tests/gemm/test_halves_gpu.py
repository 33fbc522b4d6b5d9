"""Epilogues of halves on a GPU: every config gives the bits of interleaved weights; errors; what else runs them."""

import pytest
import torch

from envoi.epilogues import Col, HalfCol, HalfTile, Row, epilogue, halves, pairs, quantize, row_absmax, silu
from envoi.ops.gemm import gemm, grouped_gemm
from envoi.ops.gemm.backend import run_kernels
from envoi.ops.gemm.grouping import EXPERTS_ROWS
from envoi.ops.gemm.hopper import host, tune
from envoi.ops.gemm.hopper.candidates import candidates
from envoi.ops.gemm.hopper.config import Config
from envoi.ops.gemm.reference import cut_rows, pick_expert, spread_columns
from envoi.quant import quantize as cast_to
from envoi.quant.pack import interleave_gate_up
from envoi.runtime.devices import num_sms
from envoi.types import Matrix, QuantTensor
from tests.gemm.test_gpu import FORMATS, flat, judge, matrix, normal, operands_for, poisoned, torchs_product
from tests.helpers.accuracy import assert_same_bits
from tools.oracles.gemm import oracle

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures(poisoned.__name__)]
KINDS = ("bf16", "fp8_row", "fp8_block128")


def gated(split):
    """Make epilogues of gate and up from either split."""

    def plain(acc):
        gate, up = split(acc)
        return silu(gate) * up

    def biased(acc, weight: Row, bias: Col, scale: HalfCol, residual: HalfTile):
        gate, up = split(acc * weight + bias)
        return silu(gate) * up * scale + residual, row_absmax(gate)

    def quantised(acc, bias: Col):
        gate, up = split(acc + bias)
        return quantize(silu(gate) * up, "fp8_e4m3", group=32)

    def by_row(acc):
        gate, up = split(acc)
        return quantize(gate * up, "fp8_e4m3", group="row")

    return {f.__name__: epilogue(f) for f in (plain, biased, quantised, by_row)}


HALVES, PAIRS = gated(halves), gated(pairs)


def sides(format: str, P: int, N: int, K: int, E: int) -> tuple[Matrix, Matrix, Matrix]:
    """Return rows, concatenated weights and the same numbers interleaved, in fp8_block128 too: gate and up have one
    factor, since two blocks of interleaved rows, 64 of gate and 64 of up each, are one block of either."""
    of_a, of_b = FORMATS[format]
    rows = matrix(P, K, of_a, 0)
    if format == "bf16":
        weights = normal(E, N, K, seed=1)
        return rows, weights, interleave_gate_up(weights)
    values = normal(E, N, K, seed=1, dtype=torch.float32).to(torch.float8_e4m3fn)
    mixed = interleave_gate_up(values.view(torch.uint8)).view(values.dtype)
    if format == "fp8_row":
        sf = torch.rand(E, N, 1, device="cuda") + 0.5
        return rows, QuantTensor(values, sf, (1, K)), QuantTensor(mixed, interleave_gate_up(sf), (1, K))
    one = torch.rand(E, N // 256, K // 128, device="cuda") + 0.5
    assert of_b == "fp8_128x128"
    both = torch.cat((one, one), 1), one.repeat_interleave(2, dim=1)
    return rows, *(QuantTensor(x, sf, (128, 128)) for x, sf in zip((values, mixed), both, strict=True))


def offsets_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device="cuda")


def configs(rows: Matrix, weights: Matrix, offsets: torch.Tensor | None, ir, operands: dict) -> list[Config]:
    """Return the config of this call, and a candidate of each kind: compiling all of them takes too long."""
    call, chosen = host.planned(rows, weights, offsets, ir, torch.bfloat16, operands, num_sms(weights.device))
    kinds = {}
    for c in candidates(host.problem_of(call), call.code):
        wide = c.block_k * call.a.itemsize > 128
        kinds.setdefault((c.swap_ab, c.pingpong, c.wide_tail_tiles, c.split_k > 1, wide), c)
    return list(dict.fromkeys([chosen, *kinds.values()]))


COUNTS = {"few": [3, 0, 8, 1, 20, 64, 0, 7], "many": [0, 1, 63, 64, 65, 127, 128, 129, 300, 700]}


@pytest.mark.parametrize("name", ["plain", "biased"])
@pytest.mark.parametrize("format", KINDS)
@pytest.mark.parametrize("counts", COUNTS)
def test_every_kind_of_config_has_the_bits_of_interleaved_weights(name, format, counts, monkeypatch):
    E, P, N, K = len(COUNTS[counts]), sum(COUNTS[counts]) + 70, 2048, 640
    rows, weights, mixed = sides(format, P, N, K, E)
    offsets, operands = offsets_of(COUNTS[counts]), operands_for(HALVES[name], P, N, E)
    moved = {key: interleave_gate_up(x, -1) if key == "bias" else x for key, x in operands.items()}
    tried = configs(rows, weights, offsets, HALVES[name].ir, operands)
    assert len(tried) > 1
    for config in tried:
        monkeypatch.setattr(tune, "choose", lambda *_, config=config: config)
        got = flat(grouped_gemm(rows, weights, offsets, HALVES[name], **operands))
        want = flat(grouped_gemm(rows, mixed, offsets, PAIRS[name], **moved))
        for x, y in zip(got, want, strict=True):
            assert_same_bits(x, y)


@pytest.mark.parametrize("format", KINDS)
@pytest.mark.parametrize("M", [9, 1500])
def test_one_matrix(format, M, monkeypatch):
    rows, weights, mixed = sides(format, M, 1536, 640, 1)
    weights, mixed = pick_expert(weights, 0), pick_expert(mixed, 0)
    operands = operands_for(HALVES["biased"], M, 1536)
    moved = {key: interleave_gate_up(x, -1) if key == "bias" else x for key, x in operands.items()}
    for config in configs(rows, weights, None, HALVES["biased"].ir, operands):
        monkeypatch.setattr(tune, "choose", lambda *_, config=config: config)
        got = flat(gemm(rows, weights, HALVES["biased"], **operands))
        for x, y in zip(got, flat(gemm(rows, mixed, PAIRS["biased"], **moved)), strict=True):
            assert_same_bits(x, y)


ENDINGS = [*((format, "plain") for format in (*KINDS, "mxfp8", "mxfp4")), *(("bf16", name) for name in HALVES)]


@pytest.mark.parametrize(("format", "name"), dict.fromkeys(ENDINGS))  # mxfp8 and mxfp4 by the Triton kernels
@pytest.mark.parametrize(("counts", "N"), [([3, 0, 8, 20], 512), ([0, 200, 1, 700], 1792), ([60, 9, 130], 832)])
def test_error_is_at_most_twice_torchs(name, format, counts, N):
    if format == "fp8_block128":
        N = 768 if N == 832 else N
    E, P, K = len(counts), sum(counts), 512
    of_a, of_b = FORMATS[format]
    rows, wide = matrix(P, K, of_a, 0), normal(E, N, K, seed=1)
    wide[:, N // 2 :] *= 2.0**-6  # other factors for up than for gate
    weights = wide if of_b is None else cast_to(wide, of_b)
    operands, offsets = operands_for(HALVES[name], P, N, E), offsets_of(counts)
    got = grouped_gemm(rows, weights, offsets, HALVES[name], **operands)
    acc, exact = (torch.zeros(P, N, device="cuda", dtype=dtype) for dtype in (torch.float32, torch.float64))
    for e, first in enumerate(offsets[:-1].tolist()):
        last = first + counts[e]
        if counts[e]:
            part = cut_rows(rows, first, last)
            acc[first:last] = torchs_product(part, pick_expert(weights, e))
            exact[first:last] = oracle(part, pick_expert(weights, e))
    spread = dict(operands)
    spread_columns(HALVES[name].ir, spread, offsets, P)
    judge(HALVES[name], got, acc, exact, spread, offsets)


@pytest.mark.parametrize("counts", COUNTS)
def test_factors_of_blocks_in_powers_of_two(counts):
    E, P = len(COUNTS[counts]), sum(COUNTS[counts])
    rows, weights, _ = sides("fp8_block128", P, 1024, 640, E)
    sf = torch.exp2(torch.randint(-9, 9, weights.sf.shape, device="cuda").float())
    sf[0, 0, 0], sf[1, 1, 1] = 2.0**-127, torch.nan
    floats, powers = (QuantTensor(weights.values, x, (128, 128)) for x in (sf, sf.to(torch.float8_e8m0fnu)))
    assert not host.why_not_hopper(rows, powers, HALVES["plain"].ir)
    for ending in (HALVES["plain"], PAIRS["plain"]):
        found = [grouped_gemm(rows, x, offsets_of(COUNTS[counts]), ending) for x in (floats, powers)]
        assert_same_bits(*found)


def test_rows_of_no_expert_are_not_written():
    rows, weights, _ = sides("bf16", 200, 1024, 640, 3)
    offsets = offsets_of([60, 0, 100])
    (out,) = run_kernels(rows, weights, offsets, HALVES["plain"].ir, torch.bfloat16, {}, grouping=EXPERTS_ROWS) or ()
    assert out[160:].isnan().all()
    assert_same_bits(out[:160], grouped_gemm(rows, weights, offsets, HALVES["plain"])[:160])

"""Rows that are sent back in FP8: the bits of rows quantised in torch, on any number of ranks, and their error."""

from itertools import pairwise

import pytest
import torch

from envoi.ops.gemm.grouping import Grouping
from envoi.ops.moe.choose import l2_quantises
from envoi.ops.moe.experts import run_experts
from envoi.ops.moe.parallel import nvlink
from envoi.ops.moe.parallel.nvlink import SharedLayout
from envoi.quant import dequantize, quantize
from tests.helpers.accuracy import assert_same_bits, relative_error
from tests.helpers.slow import mostly_slow
from tests.moe.layers import make
from tests.moe.parallel import domains
from tools.oracles.moe import moe_oracle

SCHEME = "fp8_1x128"
ERROR = 0.027  # of a number in E4M3, rms: it is rounded evenly within steps of 1/16 to 1/8 of it


def run(layer, format, ends, hidden, results=SCHEME):
    """Return the layer's result over ranks whose experts end there, and these ranks' domains and experts."""
    count, num_ranks = len(layer.tokens), len(ends)
    parts = domains.split(layer, [count * (rank + 1) // num_ranks for rank in range(num_ranks)])
    packed = [layer.pack(format, first, last) for first, last in pairwise([0, *ends])]
    layout = SharedLayout(num_ranks, ends[-1], count, layer.routing.topk_ids.shape[1], hidden, format, False, results)
    opened = domains.open_all(layout, [0, *ends])
    for _ in range(min(2, num_ranks)):  # the second call uses the memory as the first one wrote it
        got = torch.cat(domains.moe(opened, parts, packed))
    return got, opened, packed


def summed(domain, experts, ids, hidden, is_apart):
    """Return the sums of the one rank's rows in slot order. is_apart: rows are rounded to bf16 and then quantised.

    Else L2 quantises them in float32, here to memory of this rank.
    """
    grouping = Grouping(write_tail=False, results=None if is_apart else SCHEME)
    rows = run_experts(domain.rows, domain.row_weights, domain.offsets, experts, grouping)
    rows = dequantize(quantize(rows, SCHEME) if is_apart else rows)[: int(domain.offsets[-1])]
    order = torch.where(ids < 0, 1 << 20, ids).flatten().sort(stable=True)[1]
    slots = torch.zeros(ids.numel(), hidden)
    slots[order[: len(rows)]] = rows
    total = torch.zeros(len(ids), hidden)
    for slot in slots.view(*ids.shape, hidden).unbind(1):
        total += slot
    return total.bfloat16()


@pytest.mark.parametrize(("format", "is_apart"), [("bf16", False), ("fp8_block128", False), ("mxfp4", True)])
@pytest.mark.parametrize("hidden", mostly_slow([128, 384, 2176], quick=[384]))
def test_the_bits_of_rows_quantised_in_torch(format, is_apart, hidden, monkeypatch):
    """Also where a kernel of its own quantises them, with NaN and huge numbers, on one rank and on three."""
    layer = make(tokens=11, experts=6, k=2, hidden=hidden, intermediate=128)
    layer.tokens[2] *= 1e6
    layer.tokens[3, 7] = torch.nan
    if is_apart:
        monkeypatch.setattr(nvlink, "l2_quantises", lambda *_: False)
    alone, (domain,), (experts,) = run(layer, format, [6], hidden)
    assert l2_quantises(experts, SCHEME)
    assert_same_bits(alone, summed(domain, experts, layer.routing.topk_ids, hidden, is_apart))
    assert_same_bits(run(layer, format, [1, 5, 6], hidden)[0], alone)


def test_the_error_that_it_adds():
    layer = make(tokens=16, experts=8, k=4, hidden=256, intermediate=128, masked=0.0)
    want = moe_oracle(layer.tokens, layer.routing.topk_weights, layer.routing.topk_ids, layer.pack("bf16"))
    exact, got = (relative_error(run(layer, "bf16", [4, 8], 256, results)[0], want) for results in (None, SCHEME))
    assert exact < got < (exact**2 + 1.2 * ERROR**2) ** 0.5


def test_rows_take_half_the_bytes():
    layouts = [SharedLayout(2, 8, 10, 2, 4096, "bf16", False, results) for results in (None, SCHEME)]
    assert [layout.slot_bytes for layout in layouts] == [8192, 4096 + 4 * 32]

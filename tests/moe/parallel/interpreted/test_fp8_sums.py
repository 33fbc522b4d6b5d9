"""Partial sums that travel in FP8: the bits of quantising them in torch, hostile ones too, and the error of a layer."""

from itertools import pairwise

import pytest
import torch

from envoi.ops.moe.parallel.nvlink import SharedLayout
from envoi.quant import dequantize, quantize
from tests.helpers.accuracy import assert_same_bits, relative_error
from tests.helpers.slow import mostly_slow
from tests.moe.layers import Layer, make
from tests.moe.parallel import domains
from tools.oracles.moe import moe_oracle

ERROR = 0.027  # of a normal number in E4M3 by a factor for 128 of them, rms: steps of 1/8 to 1/16, and rounding is even


def split_evenly(layer: Layer, num_ranks: int) -> tuple[list, list[int]]:
    """Return each rank's tokens and routing, and where ranks' experts end."""
    count, num_experts = len(layer.tokens), layer.routing.num_experts
    ends = [num_experts * (r + 1) // num_ranks for r in range(num_ranks)]
    return domains.split(layer, [count * (r + 1) // num_ranks for r in range(num_ranks)]), ends


def sums_by_torch(tokens: torch.Tensor, ids: torch.Tensor, ends: list[int], rank: int) -> torch.Tensor:
    """Sum what each rank's experts give that return the token, by operators of torch."""
    total = torch.zeros(tokens.shape)
    for source, (first, last) in enumerate(pairwise([0, *ends])):
        count = ((ids >= first) & (ids < last)).sum(1, keepdim=True)
        partial = torch.zeros(tokens.shape)
        for n in range(1, ids.shape[1] + 1):
            partial += torch.where(count >= n, tokens.float(), 0.0)
        partial = partial.bfloat16().float() if source == rank else dequantize(quantize(partial, "fp8_1x128"))
        total += torch.where(count > 0, partial, 0.0)
    return total.bfloat16()


@pytest.mark.parametrize("hidden", [128, 384, 2176])
def test_the_bits_of_torch(hidden):
    """Of tokens as they are, in more columns than a program sends or sums at once, with zeros, NaN and huge numbers."""
    layer = make(tokens=12, experts=9, k=4, hidden=hidden, intermediate=64, masked=0.2)
    layer.tokens[1] = 0.0
    layer.tokens[2] *= torch.logspace(-30, 30, hidden).bfloat16()
    layer.tokens[3, 7], layer.tokens[4, 100] = torch.nan, 1e38
    parts, ends = split_evenly(layer, 3)
    opened = domains.open_all(SharedLayout(3, 9, 12, 4, hidden, "bf16", True, True), [0, *ends])
    for _ in range(2):  # also in memory that a call has used
        got = domains.moe(opened, parts, None)
        for rank, (tokens, r) in enumerate(parts):
            assert_same_bits(got[rank], sums_by_torch(tokens, r.topk_ids, ends, rank))


@pytest.mark.parametrize(
    ("format", "num_ranks"),
    mostly_slow(
        [(f, n) for f in ("bf16", "fp8_block128", "mxfp4_mxfp8") for n in (2, 4, 8)],
        quick=[("bf16", 4), ("fp8_block128", 2)],
    ),
)
def test_the_error_that_it_adds(format, num_ranks):
    layer = make(tokens=16, experts=8, k=4, hidden=256, intermediate=128, masked=0.0)
    parts, ends = split_evenly(layer, num_ranks)
    packed = [layer.pack(format, a, b) for a, b in pairwise([0, *ends])]
    r, errors = layer.routing, []
    want = moe_oracle(layer.tokens, r.topk_weights, r.topk_ids, layer.pack(format))
    for fp8 in (False, True):
        opened = domains.open_all(SharedLayout(num_ranks, 8, 16, 4, 256, format, True, fp8), [0, *ends])
        errors.append(relative_error(torch.cat(domains.moe(opened, parts, packed)), want))
    others = 1 - 1 / num_ranks  # of what is summed comes from other ranks
    assert errors[0] < errors[1] < (errors[0] ** 2 + 1.2 * others * ERROR**2) ** 0.5

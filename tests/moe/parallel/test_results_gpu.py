"""Rows sent back in FP8 by kernels of the GPU: bits for any number of ranks, and of rows quantised by torch."""

from itertools import pairwise

import pytest
import torch

from envoi.ops.moe.choose import l2_quantises
from envoi.ops.moe.parallel.nvlink import SharedLayout
from envoi.quant import FORMATS
from envoi.types import Routing
from tests.helpers.accuracy import assert_same_bits, relative_error
from tests.moe.layers import make
from tests.moe.parallel import cases, domains

SCHEME, ERROR = "fp8_1x128", 0.027
FEW = {"tokens": 30, "experts": 8, "k": 4, "hidden": 256, "intermediate": 256}
MANY = {"tokens": 700, "experts": 8, "k": 4, "hidden": 2816, "intermediate": 512}


def result(layer, format, ends, results):
    """Return the layer's result over ranks whose experts end there, all in this process."""
    count, num_ranks, hidden = len(layer.tokens), len(ends), layer.tokens.shape[1]
    layout = SharedLayout(num_ranks, 8, count, 4, hidden, format, False, results)
    opened = domains.open_all(layout, [0, *ends], "cuda")
    packed = [layer.pack(format, first, last) for first, last in pairwise([0, *ends])]
    parts = domains.split(layer, [count * (rank + 1) // num_ranks for rank in range(num_ranks)])
    got = torch.cat(domains.moe(opened, parts, packed))
    assert_same_bits(torch.cat(domains.moe(opened, parts, packed)), got)
    return got, packed[0]


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("sizes", [FEW, MANY], ids=["few", "many"])
def test_the_bits_dont_depend_on_the_ranks(format, sizes):
    layer = cases.to(make(**sizes), "cuda")
    r = layer.routing
    layer.routing = Routing(r.topk_weights.cuda(), r.topk_ids.cuda(), r.num_experts)
    alone, experts = result(layer, format, [8], SCHEME)
    assert_same_bits(result(layer, format, [1, 5, 8], SCHEME)[0], alone)
    assert 0 < relative_error(alone, result(layer, format, [8], None)[0]) < 1.2 * ERROR
    if format in ("bf16", "fp8_row", "fp8_block128"):
        assert l2_quantises(experts, SCHEME)

"""Path of `envoi.moe` by kernels on concatenated gate and up."""

import pytest

from envoi.ops.moe import moe, reference
from envoi.ops.moe.packing import READ_AS_STORED
from tests.helpers.accuracy import assert_at_most_twice, assert_same_bits, relative_error
from tests.helpers.slow import mostly_slow
from tests.moe.interpreted.test_moe import SMALL, calls
from tests.moe.layers import make
from tests.moe.test_moe import BOUNDS, KINDS
from tools.oracles.moe import moe_oracle

__all__ = ["calls"]


@pytest.mark.parametrize("format", READ_AS_STORED)
@pytest.mark.parametrize("kind", mostly_slow(KINDS, quick=[next(iter(KINDS))]))
def test_error_is_at_most_twice_the_references(format, kind, calls):
    layer = make(**SMALL, **KINDS[kind], packed_layout="concat")
    given = layer.tokens, layer.routing.topk_weights, layer.routing.topk_ids, layer.pack(format)
    got, want = moe(layer.tokens, layer.routing, given[-1]), moe_oracle(*given)
    assert_at_most_twice(got, reference.moe(*given), want)
    assert relative_error(got, want) < 1.5 * BOUNDS[format]
    assert calls


@pytest.mark.parametrize("format", ["bf16", "fp8_row"])  # blocks of 128 rows have other factors in each layout
@pytest.mark.parametrize("kind", mostly_slow(KINDS, quick=[next(iter(KINDS))]))
def test_both_layouts_give_the_same_bits(format, kind):
    layer = make(**{**SMALL, "intermediate": 200}, **KINDS[kind])
    interleaved = moe(layer.tokens, layer.routing, layer.pack(format))
    layer.packed_layout = "concat"
    assert_same_bits(moe(layer.tokens, layer.routing, layer.pack(format)), interleaved)

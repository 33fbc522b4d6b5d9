"""Choice of presum: measurements on four H200s, and its consequences."""

import pytest

from envoi.plan.exchange import presum_pays


def sizes(hidden, num_topk, max_tokens, num_ranks=4):
    return {"hidden": hidden, "num_topk": num_topk, "max_tokens": max_tokens, "num_ranks": num_ranks}


@pytest.mark.parametrize(
    ("layer", "intermediate", "faster"),
    [
        (sizes(2048, 8, 64), 768, False),
        (sizes(2048, 8, 2048), 768, True),
        (sizes(2048, 8, 8192), 768, True),
        (sizes(4096, 6, 64), 2048, False),
        (sizes(4096, 6, 2048), 2048, False),
        (sizes(4096, 6, 8192), 2048, False),
        (sizes(7168, 8, 2048), 2048, False),
    ],
    ids=str,
)
def test_as_measured(layer, intermediate, faster):
    assert presum_pays(**layer, intermediate=intermediate, format="fp8_block128") == faster


def test_weights_that_are_widened_take_the_products_longer():
    assert not presum_pays(**sizes(4096, 8, 2048), intermediate=1024, format="mxfp4")
    assert presum_pays(**sizes(4096, 8, 2048), intermediate=1024, format="fp8_row")


def test_nothing_meets():
    assert not presum_pays(**sizes(2048, 1, 8192), intermediate=768, format="fp8_block128")
    assert not presum_pays(**sizes(2048, 8, 8192, num_ranks=1), intermediate=768, format="fp8_block128")

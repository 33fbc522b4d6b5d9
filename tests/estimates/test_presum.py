"""Choice of presum: measurements on four H200s, and its consequences."""

import pytest

from envoi.estimates.exchange import presum_pays


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

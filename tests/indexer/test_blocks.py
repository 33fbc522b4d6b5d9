"""Selection in two levels, in torch, against a float64 oracle; refusals."""

import pytest
import torch

from envoi.ops.indexer import indexer_blocks, indexer_topk, indexer_topk_in_blocks
from envoi.ops.indexer.layout import pack_cache
from tests.helpers.accuracy import assert_same_bits
from tests.indexer.blocks_oracle import wrong_blocks, wrong_tokens
from tools.oracles.indexer_workloads import one, random_fp4_cache

LENGTHS = (1500, 0, 65, 3, 128)


@pytest.mark.parametrize("fp4", [False, True])
@pytest.mark.parametrize(("block", "k", "heads"), [(8, 32, 32), (8, 512, 32), (16, 1, 4), (128, 4, 2), (64, 24, 64)])
def test_two_levels(block, k, heads, fp4):
    q, cache, weights, seq_lens, table = one(LENGTHS, num_heads=heads).tensors()
    tensors = q, random_fp4_cache(len(cache)) if fp4 else cache, weights, seq_lens, table
    blocks = indexer_blocks(*tensors, k, block)
    assert wrong_blocks(blocks, tensors, block) == {}
    for order in ("score", "position"):
        assert (
            wrong_tokens(indexer_topk_in_blocks(*tensors, blocks, 100, block, order=order), blocks, tensors, block)
            == {}
        )


def test_rows_of_a_request_have_newest_blocks_of_their_own():
    _, cache, _, seq_lens, table = one((700, 3)).tensors()
    source = torch.Generator().manual_seed(1)
    q = torch.randn(6, 32, 128, generator=source).to(torch.float8_e4m3fn)
    tensors = q, cache, torch.randn(6, 32, generator=source), seq_lens, table
    blocks = indexer_blocks(*tensors, 8, 8, 3)
    assert blocks.amax(1).tolist() == [697 // 8, 698 // 8, 699 // 8, 0, 0, 0]
    assert wrong_blocks(blocks, tensors, 8, 3) == {}
    assert wrong_tokens(indexer_topk_in_blocks(*tensors, blocks, 20, 8, 3), blocks, tensors, 8, 3) == {}


def test_all_blocks_are_no_restriction():
    tensors = one(LENGTHS, num_heads=32).tensors()
    every = torch.arange(188, dtype=torch.int32).expand(5, -1).contiguous()
    for output in ("slots", "positions"):
        in_blocks = indexer_topk_in_blocks(*tensors, every, 512, 8, output=output)
        assert_same_bits(in_blocks, indexer_topk(*tensors, k=512, output=output))


def test_a_head_without_relu_is_two():
    """Check the maximum over blocks of 128 of each head's products, as in MiniMax-M3: its head and its opposite."""
    q, cache, _, seq_lens, table = one((3000,), num_heads=4).tensors()
    heads = torch.stack((q[0], (-q[0].float()).to(q.dtype)), 1)  # [4, 2, 128]: a row for each head
    weights = torch.tensor([1.0, -1.0]).expand(4, 2).contiguous()
    out = indexer_blocks(
        heads, cache, weights, seq_lens.expand(4).contiguous(), table.expand(4, -1).contiguous(), 16, 128
    )
    from tools.oracles.indexer import keys64

    products = q[0].double() @ keys64(cache, table[0].long())[:3000].T
    pooled = torch.nn.functional.pad(products, (0, -3000 % 128), value=-torch.inf).view(4, -1, 128).amax(2)
    pooled[:, -1] = torch.inf
    assert out.tolist() == pooled.topk(16).indices.sort(1).values.tolist()


def test_nan_and_ties():
    values = torch.ones(4, 64, 128)
    values[0, 9], values[2, 5] = torch.nan, 2.0
    cache = pack_cache(values.to(torch.float8_e4m3fn), torch.ones(4, 64))
    q, weights = torch.ones(1, 32, 128).to(torch.float8_e4m3fn), torch.ones(1, 32)
    tensors = q, cache, weights, torch.tensor([250], dtype=torch.int32), torch.arange(4, dtype=torch.int32)[None]
    assert indexer_blocks(*tensors, 4, 8).tolist() == [[0, 1, 16, 31]]
    blocks = torch.tensor([[1, 16, 31, -1]], dtype=torch.int32)
    assert indexer_topk_in_blocks(*tensors, blocks, 4, 8).tolist() == [[133, 8, 10, 11]]
    assert indexer_topk_in_blocks(*tensors, blocks, 20, 8).tolist() == [
        [133, 8, *range(10, 16), *range(128, 133), 134, 135, 248, 249, 9, -1, -1]
    ]


T = one((100, 30)).tensors()
SOME = torch.zeros(2, 3, dtype=torch.int32)


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("block: expected one of 8, 16, 32, 64, 128, got 4", lambda: indexer_blocks(*T, 8, 4)),
        ("k: expected an int from 1 to 2048, got 4096", lambda: indexer_blocks(*T, 4096)),
        ("blocks: expected int32 .2, C., got int64", lambda: indexer_topk_in_blocks(*T, SOME.long())),
        ("blocks: expected int32 .2, C., got int32 .1, 3.", lambda: indexer_topk_in_blocks(*T, SOME[:1])),
        ("blocks.shape.1.: expected an int from 1", lambda: indexer_topk_in_blocks(*T, SOME[:, :0])),
        ("order: expected", lambda: indexer_topk_in_blocks(*T, SOME, order="best")),
        ("seq_lens: expected 0 to 128", lambda: indexer_blocks(*T[:3], T[3] + 99, T[4])),
    ],
)
def test_refusals(message, call):
    with pytest.raises(ValueError, match=message):
        call()


def test_operators_are_well_formed():
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.envoi.indexer_blocks.default, (*T, 5, 8, 1), test_utils=checks)
    arguments = (*T, SOME, 5, 8, 1, True, "score")
    torch.library.opcheck(torch.ops.envoi.indexer_topk_in_blocks.default, arguments, test_utils=checks)

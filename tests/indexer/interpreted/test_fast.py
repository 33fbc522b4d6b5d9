"""Kernels of the fast mode against the float64 judge, and against a full sort of their own scores."""

import pytest
import torch

from envoi.ops.indexer import fast, indexer_topk, reference
from envoi.ops.indexer.layout import pack_cache, pages_of, to_slots
from tools.oracles.indexer import judge
from tools.oracles.indexer_workloads import hostile, one, random_fp4_cache

SMALL = {name: tensors for name, tensors in hostile(32).items() if not name.startswith("length")}


def problem(tensors, k=512, next_n=1) -> fast.Problem:
    q, cache, weights, seq_lens, table = tensors
    return fast.Problem(q, cache, weights, seq_lens, table, k, next_n)


def scores(p: fast.Problem) -> torch.Tensor:
    space = fast.workspace(p)
    fast.score(p, space, 0, p.num_rows)
    return space.logits


def assert_sorted_own(tensors, k=512, output="positions"):
    """Assert that the output, which is returned, is a full, stable sort of the kernel's own scores."""
    own = scores(problem(tensors, k))
    out = indexer_topk(*tensors, k=k, mode="fast", output=output)
    for row, length in enumerate(tensors[3].tolist()):
        want = reference.best(own[row, :length], k)
        want = want if output == "positions" else to_slots(want, tensors[4][row])
        assert out[row, : len(want)].tolist() == want.tolist()
        assert bool((out[row, len(want) :] == -1).all())
    return out


@pytest.mark.parametrize("name", SMALL)
def test_hostile(name):
    q, cache, weights, seq_lens, table = SMALL[name]
    seq_lens = seq_lens.clamp(max=1200)
    out = assert_sorted_own((q, cache, weights, seq_lens, table), output="slots")
    for row in range(len(q)):
        verdict = judge(out[row], q[row], cache, weights[row], int(seq_lens[row]), table[row])
        assert verdict, verdict.problem


@pytest.mark.parametrize("next_n", [1, 2])
def test_a_set_that_is_put_in_order(next_n):
    """Check a decode as on Hopper: short rows among long ones, and a page outside the cache."""
    lengths = 1200, 3, 300, 0, 129
    q, cache, weights, seq_lens, table = one(lengths, num_heads=4, next_n=next_n).tensors()
    table[2, 4] = len(cache)
    p = problem((q, cache, weights, seq_lens, table), 128, next_n)
    own = scores(p)
    out, errors = fast.in_blocks(p, fast.score, fast.Order(slots=True, by_score=True), early=True)
    for row in range(p.num_rows):
        request, seen = row // next_n, max(lengths[row // next_n] - next_n + 1 + row % next_n, 0)
        want = to_slots(reference.best(own[row, : 0 if request == 2 else seen], 128), table[request])
        assert out[row, : len(want)].tolist() == want.tolist()
        assert bool((out[row, len(want) :] == -1).all())
        assert bool(errors[row]) == (request == 2)


@pytest.mark.parametrize(("heads", "k"), [(1, 16), (4, 128), (7, 1), (8, 256), (16, 200), (48, 1000)])
def test_heads_and_k(heads, k):
    tensors = one((1200, 3, 130), num_heads=heads).tensors()
    out = assert_sorted_own(tensors, k, output="slots")
    for row, length in enumerate((1200, 3, 130)):
        assert judge(out[row], tensors[0][row], tensors[1], tensors[2][row], length, tensors[4][row])


@pytest.mark.parametrize(("heads", "spread"), [(32, 5), (4, 110), (48, 5)])
def test_keys_in_fp4(heads, spread):
    q, cache, weights, seq_lens, table = one((1200, 3, 130), num_heads=heads).tensors()
    tensors = q, random_fp4_cache(len(cache), spread=spread), weights, seq_lens, table
    out = assert_sorted_own(tensors, 128, output="slots")
    for row, length in enumerate((1200, 3, 130)):
        assert judge(out[row], q[row], tensors[1], weights[row], length, table[row])


@pytest.mark.parametrize("order", ["score", "any", "position"])
def test_what_follows_the_weights_of_few_heads_is_not_read(order):
    """Check that a row of few heads has nothing of its neighbours: they hold NaN."""
    q, cache, weights, seq_lens, table = one((300, 700, 65), num_heads=4).tensors()
    alone = indexer_topk(q[1:2], cache, weights[1:2], seq_lens[1:2], table[1:2], 128, "fast", order=order)
    weights[0], weights[2] = torch.nan, torch.nan
    q.view(torch.uint8)[[0, 2]] = 0x7F
    assert torch.equal(indexer_topk(q, cache, weights, seq_lens, table, 128, "fast", order=order)[1:2], alone)


@pytest.mark.parametrize("lengths", [(), (0,), (1, 511, 512, 513), (0, 2500, 0, 0, 64, 65)])
def test_lengths(lengths):
    assert_sorted_own(one(lengths, num_heads=64).tensors())


@pytest.mark.parametrize("order", ["score", "position"])
def test_many_ties(order):
    """Check many ties at the boundary, after some better scores."""
    values = torch.ones(80, 64, 128)
    values[3, :20] = 2.0
    cache = pack_cache(values.to(torch.float8_e4m3fn), torch.ones(80, 64))
    q, _, weights, seq_lens, table = one((5000,), num_heads=32).tensors()
    tensors = (q, cache, weights.abs(), seq_lens, table)
    if order == "score":
        assert_sorted_own(tensors)
    else:
        want = reference.best(scores(problem(tensors))[0, :5000], 512).sort().values
        assert indexer_topk(*tensors, k=512, mode="fast", output="positions", order=order)[0].tolist() == want.tolist()


def test_nan_and_infinity():
    q, cache, weights, seq_lens, table = one((900,), num_heads=32).tensors()
    raw = cache.view(torch.uint8).view(-1, 64 * 132).clone()
    raw[:5, 7 * 128] = 0x7F  # a NaN in token 7 of a few pages
    raw[2, 8192 + 3] = 0x7F  # token 0's scale becomes huge
    assert_sorted_own((q, raw.view(cache.shape), weights, seq_lens, table))


@pytest.mark.parametrize("order", ["score", "any", "position"])
def test_outputs(order):
    tensors = one((700, 100), num_heads=32).tensors()
    settings = {"k": 512, "mode": "fast", "order": order}
    slots, positions = (indexer_topk(*tensors, **settings, output=output) for output in ("slots", "positions"))
    for row, length in enumerate((700, 100)):
        n = min(512, length)
        assert to_slots(positions[row, :n].long(), tensors[4][row]).tolist() == slots[row, :n].tolist()
        if order == "position":
            assert positions[row, :n].tolist() == sorted(positions[row, :n].tolist())
    assert torch.equal(
        positions.sort().values, indexer_topk(*tensors, k=512, mode="fast", output="positions").sort().values
    )


@pytest.mark.parametrize("many", [512, 2])
def test_newer_query_rows_see_more(monkeypatch, many):
    """Check 3 rows a request, which take turns with those of other requests, or, if they count as many, don't."""
    monkeypatch.setattr(fast, "MANY_ROWS", many)
    _, cache, _, seq_lens, table = one((600, 2, 0)).tensors()
    source = torch.Generator().manual_seed(1)
    q = torch.randn(9, 32, 128, generator=source).to(torch.float8_e4m3fn)
    weights = torch.randn(9, 32, generator=source)
    out = indexer_topk(q, cache, weights, seq_lens, table, 512, "fast", 3)
    for row in range(9):
        seen = max(0, int(seq_lens[row // 3]) - 2 + row % 3)
        assert judge(out[row], q[row], cache, weights[row], seen, table[row // 3])


def test_rows_in_turns(monkeypatch):
    tensors = one((300, 700, 0, 64, 65), num_heads=32).tensors()
    whole = indexer_topk(*tensors, k=512, mode="fast")
    monkeypatch.setattr(fast, "MAX_BLOCKS", 2)
    assert torch.equal(indexer_topk(*tensors, k=512, mode="fast"), whole)


def test_what_would_be_read_outside_is_not_read():
    q, cache, weights, seq_lens, table = one((300, 100, 700, 200), num_heads=32).tensors()
    table, seq_lens = table.clone(), seq_lens.clone()
    table[0, 2], table[2, 10] = cache.shape[0], -5
    seq_lens[1] = -1
    good = indexer_topk(q, cache, weights, seq_lens.clamp(min=0), table.clamp(0, cache.shape[0] - 1), 512, "fast")
    out, errors = indexer_topk(q, cache, weights, seq_lens, table, 512, "fast", return_errors=True)
    assert errors.tolist() == [2, 1, 2, 0]
    assert bool((out[:3] == -1).all())
    assert torch.equal(out[3], good[3])
    seq_lens[1] = table.shape[1] * 64 + 1
    assert indexer_topk(q, cache, weights, seq_lens, table, 512, "fast", return_errors=True)[1].tolist() == [2, 1, 2, 0]
    again, errors = indexer_topk(q, cache, weights, seq_lens.clamp(0, 64), table, 512, "fast", return_errors=True)
    assert errors.tolist() == [0, 0, 0, 0]
    assert (again >= 0).sum(1).tolist() == [64] * 4


def test_pages_of_the_table_behind_the_end_are_not_read():
    tensors = one((100, 30), num_heads=32).tensors()
    assert bool((tensors[4][1, pages_of(30) :] == 2**31 - 1).all())
    assert indexer_topk(*tensors, k=512, mode="fast", return_errors=True)[1].tolist() == [0, 0]

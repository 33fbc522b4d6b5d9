"""Both modes on a GPU: bits of the definition, the float64 judge, graphs, bounded memory, nothing read outside."""

import pytest
import torch

from envoi.ops.indexer import certificate, fast, indexer_topk, reference
from envoi.ops.indexer.layout import pack_cache, pages_of, unpack_pages
from tests.indexer.many import random_tensors, wrong_rows
from tests.indexer.test_indexer import definition
from tools.oracles.indexer import TENSOR_CORE_BAND, judge
from tools.oracles.indexer_workloads import hostile, one, random_fp4_cache, workloads

pytestmark = pytest.mark.gpu

HOSTILE = hostile()
LENGTHS = (1, 2, 3, 17, 31, 32, 33, 64, 128, 129, 132, 160, 176, 177, 180, 256, 257, 2047, 2048, 2049, 5806, 131072)


def on_gpu(tensors):
    return tuple(x.cuda() for x in tensors)


def by_torch(mode):
    """Tell whether torch's operators run: this GPU's torch has no certificate."""
    return mode == "exact" and certificate.orders(torch.device("cuda", torch.cuda.current_device()), 64) is None


@pytest.fixture
def uncertified(monkeypatch):
    """Take the certificate away that this GPU's torch may have."""
    monkeypatch.setattr(certificate, "orders", lambda device, num_heads: None)


def assert_no_graph(tensors):
    """Assert that torch's operators refuse to be captured, and do nothing else to the next call."""
    want = indexer_topk(*tensors, mode="exact")
    message = "mode='exact': expected no CUDA graph to be captured, since torch's operators run"
    with pytest.raises(RuntimeError, match=message), torch.cuda.graph(torch.cuda.CUDAGraph()):
        indexer_topk(*tensors, mode="exact")
    assert torch.equal(indexer_topk(*tensors, mode="exact"), want)


def with_bad_rows(tensors):
    """Return lengths of which row 1's is negative, and a table of which rows 0 and 2 have pages outside the cache."""
    lengths, table = tensors[3].clone(), tensors[4].clone()
    lengths[1], table[0, 2], table[2, 10] = -1, 2**31 - 1, -5
    return lengths, table


def assert_outside_is_refused(tensors):
    """Assert that torch's operators refuse lengths and pages that would read outside, also with `return_errors`."""
    q, cache, weights, seq_lens, table = tensors
    lengths, bad = with_bad_rows(tensors)
    want = indexer_topk(*tensors, mode="exact")
    most = table.shape[1] * 64
    for of_lengths, of_table, message in (
        (lengths, table, rf"seq_lens: expected 0 to {most} \(what block_table holds\), got -1 for request 1"),
        (seq_lens + most, table, f"seq_lens: expected 0 to {most} .*, got {most + 300} for request 0"),
        (seq_lens, bad, f"block_table: expected pages from 0 to {len(cache) - 1}, got {2**31 - 1} for request 0"),
        (seq_lens[1:], bad[1:], f"block_table: expected pages from 0 to {len(cache) - 1}, got -5 for request 1"),
    ):
        rows = len(of_lengths)
        given = q[-rows:], cache, weights[-rows:], of_lengths, of_table
        for return_errors in (False, True):
            with pytest.raises(ValueError, match=message):
                indexer_topk(*given, mode="exact", return_errors=return_errors)
    assert torch.equal(indexer_topk(*tensors, mode="exact"), want)


def assert_as_defined(tensors, k=2048):
    out, errors = indexer_topk(*tensors, k=k, mode="exact", return_errors=True)
    want = definition(*tensors, k).cuda()
    wrong = [int(tensors[3][row]) for row in range(len(out)) if not torch.equal(out[row], want[row])]
    assert not wrong, f"rows of {wrong} tokens differ"
    assert not bool(errors.any())


def assert_right(out, tensors, next_n=1):
    host = [x.cpu() for x in (out, *tensors)]
    out, q, cache, weights, seq_lens, table = host
    for row in range(len(q)):
        seen = max(0, int(seq_lens[row // next_n]) - next_n + 1 + row % next_n)
        verdict = judge(out[row], q[row], cache, weights[row], seen, table[row // next_n], TENSOR_CORE_BAND)
        assert verdict, f"row of {seen}: {verdict.problem}"


def assert_sorted_own(tensors, k=2048):
    """Assert that the output is a full, stable sort of the kernel's own scores, and by position the same set."""
    p = fast.Problem(*tensors, k, 1)
    space = fast.workspace(p)
    fast.score(p, space, 0, fast.rows_at_once(p))
    own = space.logits.clone()
    for order in ("score", "any", "position"):
        out = indexer_topk(*tensors, k=k, mode="fast", output="positions", order=order)
        for row in range(fast.rows_at_once(p)):
            want = reference.best(own[row, : int(tensors[3][row])], k)
            found = out[row, : len(want)].long()
            if order == "any":
                found = found.sort().values
            assert torch.equal(found, want if order == "score" else want.sort().values)
            assert bool((out[row, len(want) :] == -1).all())


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_exact_workloads(seed, part):
    for workload in workloads(seed)[part::4]:
        assert_as_defined(workload.tensors("cuda"))


@pytest.mark.parametrize("heads", [32, 64])
def test_exact_lengths(heads):
    for length in LENGTHS:
        assert_as_defined(on_gpu(one((length,), num_heads=heads).tensors()))


@pytest.mark.parametrize("name", HOSTILE)
def test_exact_hostile(name):
    assert_as_defined(on_gpu(HOSTILE[name]))


def test_exact_ties_of_few_tokens():
    """Check short rows with ties: torch sorts up to 32 values by a network that doesn't keep ties in order."""
    for length in range(1, 40):
        q, _, weights, seq_lens, table = one((length,), num_heads=32).tensors()
        kinds = torch.randint(0, 3, (pages_of(length), 64, 1), generator=torch.Generator().manual_seed(length))
        cache = pack_cache(kinds.expand(-1, -1, 128).to(torch.float8_e4m3fn), torch.ones(kinds.shape[:2]))
        assert_as_defined(on_gpu((q, cache, weights, seq_lens, table)), 512)


@pytest.mark.parametrize("name", HOSTILE)
def test_fast_hostile(name):
    tensors = on_gpu(HOSTILE[name])
    assert_right(indexer_topk(*tensors, mode="fast"), tensors)
    assert_sorted_own(tensors)


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("k", [512, 1024, 2048])
def test_fast_random(heads, k):
    draw = torch.Generator().manual_seed(k + heads)
    for seed in range(6):
        lengths = (2 ** (13 * torch.rand(12, generator=draw))).long().tolist()
        tensors = on_gpu(one(tuple(lengths), seed, heads).tensors())
        out = indexer_topk(*tensors, k=k, mode="fast")
        assert_right(out, tensors)
        assert torch.equal(out, indexer_topk(*tensors, k=k, mode="fast"))


@pytest.mark.parametrize("heads", [1, 4, 7, 8, 16, 48])
def test_other_heads_and_k(heads):
    """Check drawn rows of few heads and of any k, in each order."""
    source = torch.Generator("cuda").manual_seed(heads)
    for k in (1, 16, 128, 200, 256, 1000):
        for next_n, requests, order in ((1, 60, "score"), (2, 24, "any"), (4, 11, "position"), (1, 2, "any")):
            tensors = random_tensors(requests, 4 * max(k, 700), heads, next_n, source)
            out, errors = indexer_topk(*tensors, k=k, next_n=next_n, order=order, return_errors=True)
            wrong = wrong_rows(out, tensors, next_n) | (errors != 0)
            assert not bool(wrong.any()), f"{int(wrong.sum())} rows, k {k}, next_n {next_n}"


@pytest.mark.parametrize("spread", [0, 5, 20, 40, 110])
@pytest.mark.parametrize("heads", [4, 16, 32, 64])
def test_keys_in_fp4(heads, spread):
    source = torch.Generator("cuda").manual_seed(heads + spread)
    for k in (128, 512, 2048):
        for next_n, requests, order in ((1, 60, "score"), (2, 24, "any"), (4, 11, "position")):
            tensors = random_tensors(requests, 4 * k, heads, next_n, source, spread)
            out, errors = indexer_topk(*tensors, k=k, next_n=next_n, order=order, return_errors=True)
            wrong = wrong_rows(out, tensors, next_n) | (errors != 0)
            assert not bool(wrong.any()), f"{int(wrong.sum())} rows, k {k}, next_n {next_n}"


def test_keys_in_fp4_have_the_bits_of_other_kernels_where_sums_are_exact(monkeypatch):
    """Check small whole numbers, whose scores are exact in any order, against the portable kernel and the reference."""
    q, cache, weights, seq_lens, table = on_gpu(one((3000, 700, 65), num_heads=32).tensors())
    q, weights = q.float().sign().to(torch.float8_e4m3fn), weights.round()
    cache = random_fp4_cache(len(cache), "cuda", 1)
    p = fast.Problem(q, cache, weights, seq_lens, table, 512, 1)
    space = fast.workspace(p)
    fast.score(p, space, 0, 3)
    own = space.logits.clone()
    monkeypatch.setattr(fast, "implementation", lambda device: "triton")
    fast.score(p, space, 0, 3)
    for row, n in enumerate((3000, 700, 65)):
        values, scales = unpack_pages(cache, table[row, : pages_of(n)])
        want = reference.score_fast(q[row].cpu(), values[:n].cpu(), scales[:n].cpu(), weights[row].cpu())
        assert torch.equal(own[row, :n].cpu(), want)
        assert torch.equal(space.logits[row, :n].cpu(), want)


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize(("next_n", "lengths"), [(4, (5000, 3, 0, 40000)), (601, (601, 5000, 5)), (1024, (9000,))])
def test_rows_of_keys_in_fp4_share_tiles(next_n, lengths, heads):
    assert_blocks_as_single_rows(next_n, lengths, heads, fp4=True)


@pytest.mark.parametrize("seed", range(8))
def test_fast_10000_random_rows(seed):
    """Check 1284 rows a seed, a call for each k, number of heads and rows a request."""
    source = torch.Generator("cuda").manual_seed(seed)
    for heads in (32, 64):
        for k in (512, 1024, 2048):
            for next_n, requests in ((1, 120), (2, 24), (4, 11), (1, 2)):
                tensors = random_tensors(requests, 4 * k, heads, next_n, source)
                order = ("score", "any", "position")[(seed + next_n) % 3]
                out, errors = indexer_topk(*tensors, k=k, mode="fast", next_n=next_n, order=order, return_errors=True)
                wrong = wrong_rows(out, tensors, next_n) | (errors != 0)
                assert not bool(wrong.any()), f"{int(wrong.sum())} rows, k {k}, {heads} heads, next_n {next_n}"


@pytest.mark.parametrize("seed", range(8))
def test_sets_of_10000_long_rows(seed):
    """Check 1455 rows a seed that clusters of each size select from; a few rows are selected from in other ways."""
    source = torch.Generator("cuda").manual_seed(seed)
    for heads, spread in ((64, None), (32, None), (16, None), (64, 20), (32, 40)):
        for k in (200, 512, 2048):
            for next_n, requests in ((1, 61), (2, 12), (4, 6), (1, 5), (1, 2)):
                share = float(torch.rand(1, generator=source, device="cuda"))
                most = int(8194 * 16**share)
                tensors = random_tensors(requests, most, heads, next_n, source, spread, least=8193)
                order = ("any", "position")[(seed + next_n + k // 512) % 2]
                out, errors = indexer_topk(*tensors, k=k, mode="fast", next_n=next_n, order=order, return_errors=True)
                wrong = wrong_rows(out, tensors, next_n) | (errors != 0)
                assert not bool(wrong.any()), f"{int(wrong.sum())} rows of up to {most}, k {k}, {heads} heads"


@pytest.mark.parametrize("seed", range(8))
def test_best_first_of_10000_rows(seed):
    """Check 1296 rows a seed, of one program or a cluster, against a sort of the kernels' own scores."""
    source = torch.Generator("cuda").manual_seed(seed)
    for most in (2500, 8192, 40000):
        for heads in (16, 64):
            for k in (200, 512, 2048):
                for next_n, requests in ((1, 60), (2, 6)):
                    tensors = random_tensors(requests, most, heads, next_n, source)
                    given = {"mode": "fast", "next_n": next_n, "output": "positions", "order": "score"}
                    wrong = (indexer_topk(*tensors, k=k, **given) != sorted_own(tensors, k, next_n)).any(1)
                    assert not bool(wrong.any()), f"{int(wrong.sum())} rows of up to {most}, k {k}, {heads} heads"


@pytest.mark.parametrize(("least", "most"), [(1, 3000), (1, 20000), (90000, 170000)])
@pytest.mark.parametrize(("requests", "next_n"), [(3, 1), (40, 1), (90, 1), (30, 2)])
def test_tables_wider_than_most_rows(requests, next_n, least, most):
    """Check rows that are far shorter than their row of the table, beside some that no cluster holds."""
    source = torch.Generator("cuda").manual_seed(most)
    q, cache, weights, lengths, table = random_tensors(requests, most, 64, next_n, source, least=least)
    assert requests == 3 or bool((lengths > 131072).any()) == (most > 131072)
    for columns in (2048, 2560, 5000) if most < 131072 else (2660, 5000):
        wide = torch.nn.functional.pad(table, (0, max(0, columns - table.shape[1])), value=2**31 - 1)
        tensors = q, cache, weights, lengths, wide
        for k in (512, 2048):
            given = {"k": k, "mode": "fast", "next_n": next_n, "output": "positions", "return_errors": True}
            want = sorted_own(tensors, k, next_n)
            best, errors = indexer_topk(*tensors, order="score", **given)
            assert torch.equal(best, want) and not bool(errors.any())
            chosen, errors = indexer_topk(*tensors, order="any", **given)
            assert torch.equal(by_position(chosen), by_position(want)) and not bool(errors.any())


@pytest.mark.parametrize("columns", [2048, 2660])
@pytest.mark.parametrize("order", ["any", "score"])
def test_bad_requests_in_wide_tables(order, columns):
    """Check that a bad request fails alone, where rows share clusters and some are too long for one."""
    most = 64 * columns
    source = torch.Generator("cuda").manual_seed(columns)
    q, cache, weights, lengths, table = random_tensors(40, most, 64, 1, source, least=5000)
    lengths[1], lengths[2], lengths[3], lengths[4], lengths[5] = most, most - 70, 7000, 20000, 1000
    table = torch.rand(40, len(cache), generator=source, device="cuda").argsort(1)[:, :columns].int()
    given = {"k": 2048, "mode": "fast", "output": "positions", "order": order, "return_errors": True}
    want, errors = indexer_topk(q, cache, weights, lengths, table, **given)
    assert not bool(errors.any())
    bad_lengths, bad_pages = lengths.clone(), table.clone()
    bad_lengths[6], bad_lengths[8] = -3, most + 1
    bad_pages[2:6, 9] = len(cache)
    out, errors = indexer_topk(q, cache, weights, bad_lengths, bad_pages, **given)
    wanted = torch.zeros(40, dtype=torch.int32, device="cuda")
    wanted[6], wanted[8], wanted[2:6] = 1, 1, 2
    assert torch.equal(errors, wanted)
    assert torch.equal(out, want.masked_fill((wanted != 0)[:, None], -1))


def by_position(chosen):
    """Return positions in ascending order, -1 last."""
    return chosen.masked_fill(chosen < 0, 2**31 - 1).sort(1).values


def sorted_own(tensors, k, next_n):
    """Return positions of the k best of the kernels' own scores, equal ones ascending, then -1."""
    p = fast.Problem(*tensors, k, next_n)
    space = fast.workspace(p, "clusters")
    tokens, found = torch.arange(p.max_length, device="cuda"), []
    for first, num_rows in fast.launches(p, len(space.logits)):
        fast.score(p, space, first, num_rows)
        rows = torch.arange(first, first + num_rows, device="cuda")
        seen = p.seq_lens[rows // next_n, None] - next_n + 1 + rows[:, None] % next_n
        own = space.logits[:num_rows].masked_fill(tokens >= seen, -torch.inf)
        best = own.sort(dim=1, descending=True, stable=True).indices.int().masked_fill(tokens >= seen, -1)
        found.append(torch.nn.functional.pad(best, (0, max(0, k - p.max_length)), value=-1)[:, :k])
    return torch.cat(found)


@pytest.mark.parametrize(
    "lengths", [(131072,), (4000,) * 40, (0,) * 300 + (100, 5000), (1_000_000,)], ids=["long", "40", "302", "million"]
)
def test_fast_long_and_many(lengths):
    assert_sorted_own(on_gpu(one(lengths).tensors()))


def test_the_portable_scores(monkeypatch):
    monkeypatch.setattr(fast, "implementation", lambda device: "triton")
    assert_sorted_own(on_gpu(one((700, 3, 0, 5000)).tensors()))


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_newer_query_rows_see_more(mode):
    _, cache, _, seq_lens, table = on_gpu(one((700, 3, 0, 2500)).tensors())
    source = torch.Generator("cuda").manual_seed(1)
    q = torch.randn(12, 64, 128, generator=source, device="cuda").to(torch.float8_e4m3fn)
    weights = torch.randn(12, 64, generator=source, device="cuda")
    out = indexer_topk(q, cache, weights, seq_lens, table, 512, mode, 3)
    assert_right(out, (q, cache, weights, seq_lens, table), 3)
    if mode == "exact":
        assert torch.equal(out, reference.indexer_topk(q, cache, weights, seq_lens, table, 512, mode, 3, True, "score"))


def assert_as_single_rows(tensors, k, next_n):
    """Assert that rows of requests get what each gets as a request of its own, bit for bit, in each order."""
    q, cache, weights, seq_lens, table = tensors
    rows = torch.arange(len(q), device="cuda")
    seen = (seq_lens.repeat_interleave(next_n) - next_n + 1 + rows % next_n).clamp(min=0).int()
    alone = q, cache, weights, seen, table.repeat_interleave(next_n, 0)
    for order in ("score", "any", "position"):
        out, errors = indexer_topk(*tensors, k, "fast", next_n, order=order, return_errors=True)
        assert torch.equal(out, indexer_topk(*alone, k, "fast", order=order))
        assert not bool(errors.any())


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize(("next_n", "lengths"), [
    (2, (5000, 1, 0, 2049, 40000)), (3, (5000, 2, 17000)), (4, (5000, 3, 0, 40000)), (3, (9000,)), (599, (9000,)),
    (600, (600, 5000, 5, 17000)), (601, (601, 5000, 5, 17000)), (4096, (4096,)), (1023, (140000,)),
])  # fmt: skip
def test_rows_that_share_tiles_of_keys(next_n, lengths, heads):
    assert_blocks_as_single_rows(next_n, lengths, heads)


@pytest.mark.parametrize(("next_n", "lengths", "heads"), [
    (1200, (9000, 1500), 16), (601, (40000, 601), 16), (1202, (9000, 20000), 4), (800, (16900, 700), 48),
    (514, (70000,), 64), (1024, (33000, 16640, 8400), 64), (1024, (540000,), 64),
])  # fmt: skip
def test_rows_that_share_tiles_of_few_heads_and_of_long_requests(next_n, lengths, heads):
    """Check blocks of 8 and 16 rows, and of fewer at the end of a request, by digits and by bounds of their groups."""
    assert_blocks_as_single_rows(next_n, lengths, heads)


def assert_blocks_as_single_rows(next_n, lengths, heads, fp4=False):
    _, cache, _, seq_lens, table = on_gpu(one(lengths, num_heads=heads).tensors())
    if fp4:
        cache = random_fp4_cache(len(cache), "cuda")
    else:  # negative scales in some tiles, of some tokens
        cache.view(torch.uint8).view(len(cache), -1)[::3, 8195::8] ^= 128
    source = torch.Generator("cuda").manual_seed(next_n)
    rows = len(lengths) * next_n
    q = (2 * torch.randn(rows, heads, 128, generator=source, device="cuda")).to(torch.float8_e4m3fn)
    weights = torch.randn(rows, heads, generator=source, device="cuda")
    assert_as_single_rows((q, cache, weights, seq_lens, table), 512, next_n)


@pytest.mark.parametrize("fp4", [False, True], ids=["fp8", "fp4"])
@pytest.mark.parametrize("heads", [64, 48, 32, 4])
@pytest.mark.parametrize("next_n", [2, 4, 6])
def test_few_rows_of_many_requests_share_tiles(next_n, heads, fp4):
    """Check blocks of 2 and 4 rows: a role of `kernel_prefill` has one or two of them."""
    lengths = tuple(torch.randint(0, 3000, (300,), generator=torch.Generator().manual_seed(next_n)).tolist())
    assert_blocks_as_single_rows(next_n, (1, 0, 2, 17000, *lengths), heads, fp4)


@pytest.mark.parametrize("k", [512, 1024, 2048])
def test_prefill_is_judged_right(k):
    tensors = random_tensors(2, 4 * k, 64, 700, torch.Generator("cuda").manual_seed(k))
    tensors[3].copy_(torch.tensor([4 * k, 700]))
    tensors[4][:, :] = torch.randperm(len(tensors[1]), device="cuda")[: tensors[4].numel()].view(2, -1)
    out, errors = indexer_topk(*tensors, k=k, mode="fast", next_n=700, return_errors=True)
    assert not bool((wrong_rows(out, tensors, 700) | (errors != 0)).any())


def test_bad_requests_of_many_rows():
    q, cache, weights, seq_lens, table = random_tensors(3, 3000, 64, 601, torch.Generator("cuda").manual_seed(1))
    seq_lens.copy_(torch.tensor([3000, table.shape[1] * 64 + 1, 2000]))
    table[:, :] = torch.randperm(len(cache), device="cuda")[: table.numel()].view(3, -1)
    table[2, 30] = len(cache)
    out, errors = indexer_topk(q, cache, weights, seq_lens, table, 512, "fast", 601, return_errors=True)
    seen_bad = (torch.arange(601) + 2000 - 600 > 30 * 64).int() * 2
    assert errors.tolist() == [0] * 601 + [1] * 601 + seen_bad.tolist()
    assert bool((out[errors != 0] == -1).all())
    good = indexer_topk(q[:601], cache, weights[:601], seq_lens[:1], table[:1], 512, "fast", 601)
    assert torch.equal(out[:601], good)


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_graph_with_other_lengths(mode):
    q, cache, weights, seq_lens, table = tensors = on_gpu(one((3000, 5000)).tensors())
    if by_torch(mode):
        assert_no_graph(tensors)
        return
    indexer_topk(q, cache, weights, seq_lens, table, mode=mode)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, errors = indexer_topk(q, cache, weights, seq_lens, table, mode=mode, return_errors=True)
    for lengths in ((3000, 5000), (64, 2049), (0, 1), (3000, 4999)):
        seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        assert torch.equal(out, indexer_topk(q, cache, weights, seq_lens, table, mode=mode))
        assert not bool(errors.any())


def test_no_graph_without_a_certificate(uncertified):
    assert_no_graph(on_gpu(one((3000, 5000)).tensors()))


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_what_would_be_read_outside_is_not_read(mode):
    q, cache, weights, seq_lens, table = tensors = on_gpu(one((300, 100, 700, 200)).tensors())
    if by_torch(mode):
        assert_outside_is_refused(tensors)
        return
    lengths, bad = with_bad_rows(tensors)
    want = indexer_topk(q, cache, weights, seq_lens, table, mode=mode)
    out, errors = indexer_topk(q, cache, weights, lengths, bad, mode=mode, return_errors=True)
    assert errors.tolist() == [2, 1, 2, 0]
    assert bool((out[:3] == -1).all())
    assert torch.equal(out[3], want[3])
    assert torch.equal(indexer_topk(q, cache, weights, seq_lens, table, mode=mode), want)


def test_what_would_be_read_outside_is_refused_without_a_certificate(uncertified):
    assert_outside_is_refused(on_gpu(one((300, 100, 700, 200)).tensors()))


def test_memory_is_bounded():
    tensors = on_gpu(one((131072,)).tensors())
    indexer_topk(*tensors, mode="fast")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = indexer_topk(*tensors, mode="fast")
    assert torch.cuda.max_memory_allocated() - before - out.numel() * 4 <= 16 << 20

"""Indexer in torch: layout, the definition's bits, the fast mode's guarantees, refusals; and the judge itself."""

from functools import partial
from itertools import product

import pytest
import torch

from envoi.ops.indexer import fast, indexer_topk, kernel_fp4
from envoi.ops.indexer.layout import PAGE_BYTES, PAGE_SIZE, VALUE_BYTES, pack_cache, pages_of, to_slots, unpack_pages
from envoi.ops.indexer.reference import best, score_fast
from envoi.quant.bits import e2m1_decode
from envoi.runtime.launch import key_of
from tests.helpers.accuracy import assert_same_bits
from tests.indexer.many import random_tensors, wrong_rows
from tools.kernel_cases.indexer import call_of_fast
from tools.kernel_cases.planning import launches_of
from tools.oracles.indexer import TENSOR_CORE_BAND, judge, keys64, scores64
from tools.oracles.indexer_workloads import NUM_PAGES, hostile, one, random_cache, random_fp4_cache, workloads

HOSTILE = hostile()


def verdicts(out, tensors, next_n=1):
    q, cache, weights, seq_lens, table = tensors
    found = []
    for row in range(len(q)):
        request, seen = row // next_n, int(seq_lens[row // next_n]) - next_n + 1 + row % next_n
        found.append(judge(out[row], q[row], cache, weights[row], max(seen, 0), table[request]))
    return found


def test_pages_hold_all_values_and_then_all_scales():
    values = torch.randn(3, PAGE_SIZE, 128).to(torch.float8_e4m3fn)
    scales = torch.rand(3, PAGE_SIZE)
    cache = pack_cache(values, scales)
    assert (cache.shape, cache.dtype) == ((3, 64, 1, 132), torch.int8)
    raw = cache.view(torch.uint8).view(3, PAGE_BYTES)
    assert raw[1, 5 * 128 + 7] == values.view(torch.uint8)[1, 5, 7]
    assert_same_bits(raw[2, VALUE_BYTES + 4 * 9 : VALUE_BYTES + 4 * 10].clone().view(torch.float32), scales[2, 9:10])
    back, back_scales = unpack_pages(cache, torch.tensor([2, 0]))
    assert_same_bits(back.view(torch.uint8), values.view(torch.uint8)[[2, 0]].flatten(0, 1))
    assert_same_bits(back_scales, scales[[2, 0]].flatten())
    # A reader misled by the shape [64, 1, 132] would take 132 bytes a token, which gives other values.
    a_token = raw[0, 132 : 132 + 128]
    assert not torch.equal(a_token, values.view(torch.uint8)[0, 1])


def test_pages_in_fp4_hold_all_values_and_then_all_factors():
    source = torch.Generator().manual_seed(0)
    values, factors = (torch.randint(0, 255, (3, PAGE_SIZE, n), dtype=torch.uint8, generator=source) for n in (64, 4))
    cache = pack_cache(values, factors.view(torch.float8_e8m0fnu))
    assert (cache.shape, cache.dtype) == ((3, 64, 1, 68), torch.int8)
    raw = cache.view(torch.uint8).view(3, 64 * 68)
    assert raw[1, 5 * 64 + 7] == values[1, 5, 7]
    assert raw[2, 64 * 64 + 4 * 9 + 3] == factors[2, 9, 3]
    pages = torch.tensor([2, 0])
    back, ones = unpack_pages(cache, pages)
    assert back.dtype == torch.float32 and bool((ones == 1).all())
    keys = keys64(cache, pages)  # by other arithmetic
    assert_same_bits(back, keys.float())
    low, high, factor = values[2, 5, 20] % 16, values[2, 5, 20] // 16, 2.0 ** (int(factors[2, 5, 1]) - 127)
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert keys[5, 40:42].abs().tolist() == [magnitudes[code % 8] * factor for code in (int(low), int(high))]


def test_operands_of_keys_in_fp4():
    """Check the parts of the widening on Hopper that are arithmetic: the values' order, and the tables of E5M2."""
    columns = kernel_fp4.value_of.fn(torch.arange(128)).value
    assert columns.sort().values.tolist() == list(range(128))
    assert columns[:4].tolist() == [0, 1, 2, 3] and columns[4:8].tolist() == [32, 33, 34, 35]
    magnitudes = e2m1_decode(torch.arange(8, dtype=torch.uint8)).double()
    for index in range(27):
        words = torch.tensor(kernel_fp4.tables_of.fn(index), dtype=torch.int32)
        numbers = words.view(torch.uint8).view(torch.float8_e5m2).double()
        assert numbers.tolist() == (magnitudes * 2.0 ** (index - 13)).tolist()


@pytest.mark.parametrize("spread", [0, 5, 110])
@pytest.mark.parametrize(("heads", "k"), [(32, 512), (4, 128), (64, 1000)])
def test_keys_in_fp4_are_judged_right(heads, k, spread):
    q, cache, weights, seq_lens, table = one((1500, 0, 65, 3), num_heads=heads).tensors()
    tensors = q, random_fp4_cache(len(cache), spread=spread), weights, seq_lens, table
    for order in ("score", "any", "position"):
        assert all(verdicts(indexer_topk(*tensors, k=k, order=order), tensors))


def test_a_factor_that_is_nan_never_wins():
    q, cache, weights, seq_lens, table = one((300,), num_heads=32).tensors()
    cache = random_fp4_cache(len(cache)).clone()
    cache.view(torch.uint8).view(-1, 64 * 68)[:, 4096 + 4 * 7 + 2] = 255  # token 7 of each page
    out = indexer_topk(q, cache, weights, seq_lens, table, 300 - 5, output="positions")
    assert not set(out[0].tolist()) & {7, 71, 135, 199, 263}


def definition(q, k_cache, weights, seq_lens, block_table, k):
    """Compute the published definition, one request after the other."""
    raw = k_cache.view(torch.uint8).flatten(1)
    out = torch.full((len(q), k), -1, dtype=torch.int32)
    for b, length in enumerate(seq_lens.tolist()):
        if length == 0:
            continue
        pages = block_table[b, : -(-length // 64)].long()
        values = raw[pages, :8192].contiguous().view(torch.float8_e4m3fn).float().view(-1, 128)
        scales = raw[pages, 8192:].contiguous().view(torch.float32).view(-1, 1)
        keys = (values * scales)[:length]
        scores = (torch.relu(q[b].float() @ keys.T) * weights[b][:, None]).sum(dim=0)
        chosen = torch.topk(scores, min(k, length)).indices
        out[b, : len(chosen)] = (pages[chosen // 64] * 64 + chosen % 64).to(torch.int32)
    return out


@pytest.mark.parametrize("name", HOSTILE)
def test_exact_mode_has_the_bits_and_the_order_of_the_definition(name):
    assert_same_bits(indexer_topk(*HOSTILE[name], mode="exact"), definition(*HOSTILE[name], 2048))


@pytest.mark.parametrize(("heads", "k"), [(1, 16), (4, 128), (16, 2048), (48, 1000), (64, 1)])
def test_exact_mode_is_the_definition_for_any_heads_and_k(heads, k):
    tensors = one((2500, 64, 0, 33), num_heads=heads).tensors()
    assert_same_bits(indexer_topk(*tensors, k=k, mode="exact"), definition(*tensors, k))


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_inputs_are_judged_right(name, mode):
    found = verdicts(indexer_topk(*HOSTILE[name], mode=mode), HOSTILE[name])
    assert all(found), [verdict.problem for verdict in found]


def test_fast_selection_is_a_full_sort_of_its_own_scores():
    q, cache, weights, seq_lens, table = HOSTILE["ties at the boundary"]
    out = indexer_topk(q, cache, weights, seq_lens, table, k=512, mode="fast", output="positions")
    for row, length in enumerate(seq_lens.tolist()):
        values, scales = unpack_pages(cache, table[row, : pages_of(length)])
        scores = score_fast(q[row], values[:length], scales[:length], weights[row]).tolist()
        want = sorted(range(length), key=lambda j: (-scores[j], j))[:512]
        assert [j for j in out[row].tolist() if j >= 0] == want


def test_nan_scores_never_beat_numbers():
    scores = torch.tensor([torch.nan, -5.0, torch.nan, 3.0, -torch.inf])
    assert best(scores, 2).tolist() == [3, 1]


def test_fast_mode_moves_scales_of_any_sign_out():
    values, scales = torch.randn(50, 128).to(torch.float8_e4m3fn), torch.randn(50)
    q, weights = torch.randn(64, 128).to(torch.float8_e4m3fn), torch.randn(64)
    want = scores64(q, values.double() * scales.double()[:, None], weights)
    torch.testing.assert_close(score_fast(q, values, scales, weights).double(), want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_positions_slots_and_order(mode):
    tensors = one((900, 100)).tensors()
    slots = indexer_topk(*tensors, k=512, mode=mode)
    positions = indexer_topk(*tensors, k=512, mode=mode, output="positions")
    ascending = indexer_topk(*tensors, k=512, mode=mode, output="positions", order="position")
    in_any_order = indexer_topk(*tensors, k=512, mode=mode, output="positions", order="any")
    for row, length in enumerate((900, 100)):
        n = min(length, 512)
        assert_same_bits(to_slots(positions[row, :n], tensors[4][row]), slots[row, :n])
        assert ascending[row, :n].tolist() == sorted(positions[row, :n].tolist())
        assert bool((ascending[row, n:] == -1).all())
        assert sorted(in_any_order[row, :n].tolist()) == ascending[row, :n].tolist()
        assert bool((in_any_order[row, n:] == -1).all())


def test_an_unsigned_cache_is_the_same():
    q, cache, *rest = one((300,)).tensors()
    assert_same_bits(indexer_topk(q, cache.view(torch.uint8), *rest), indexer_topk(q, cache, *rest))


def test_errors_beside_the_output():
    tensors = one((300, 0)).tensors()
    out, errors = indexer_topk(*tensors, return_errors=True)
    assert_same_bits(out, indexer_topk(*tensors))
    assert errors.tolist() == [0, 0]


def test_the_128_workloads_are_as_described():
    found = workloads()
    assert len(found) == 128
    assert [sum(low <= w.width <= high for w in found) for low, high in ((1, 32), (33, 45), (82, 91))] == [69, 39, 20]
    assert {w.num_pages for w in found} == {NUM_PAGES}
    assert all(1 <= len(w.lengths) <= 31 and min(w.lengths) >= 1 and max(w.lengths) <= 5806 for w in found)
    long = [w for w in found if w.width > 32]
    assert all(sum(pages_of(length) > 32 for length in w.lengths) == 1 for w in long)
    scattered = sum(w.scattered[w.lengths.index(max(w.lengths))] for w in long)
    assert abs(scattered / len(long) - 0.71) < 0.01
    assert workloads() == found
    assert workloads(1) != found


def test_workloads_are_the_same_each_time_and_hold_no_nan():
    first, second = one((100, 65), seed=3).tensors(), one((100, 65), seed=3).tensors()
    for x, y in zip(first, second, strict=True):
        assert torch.equal(x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x, y.view(x.dtype).view(
            torch.uint8) if x.dtype == torch.float8_e4m3fn else y)  # fmt: skip
    values, scales = unpack_pages(random_cache(50), torch.arange(50))
    assert not bool(values.float().isnan().any())
    assert bool((scales > 0).all())
    assert first[4][1, 2:].tolist() == [] or bool((first[4][1, 2:] > 1e6).all())


def test_the_judge_finds_what_is_wrong():
    tensors = one((3000,)).tensors()
    q, cache, weights, _, table = tensors
    out = indexer_topk(*tensors, k=512)[0]

    def problem(changed):
        return judge(changed, q[0], cache, weights[0], 3000, table[0]).problem

    assert problem(out) == ""
    everyone = indexer_topk(*tensors, k=2048)[0]
    loser = everyone[2000]
    assert "clearly better" in problem(torch.cat((out[1:], loser[None])))
    assert "more often" in problem(torch.cat((out[:-1], out[:1])))
    assert "isn't one of the request's" in problem(torch.cat((out[:-1], torch.tensor([10**6], dtype=torch.int32))))
    assert "expected 512 slots" in problem(torch.cat((out[:-1], torch.tensor([-1], dtype=torch.int32))))
    shuffled = torch.cat((torch.tensor([-1], dtype=torch.int32), out[:-1]))
    assert "expected 512 slots" in problem(shuffled)
    verdict = judge(out, q[0], cache, weights[0], 3000, table[0])
    assert verdict.num_in_band < 20


def test_the_judge_compares_tokens_by_their_own_bands():
    """Check scores 0.36, of large terms, 0.34 and 0.31: the best may fall behind both others, not between them."""
    q, weights = torch.zeros(2, 128), torch.tensor([1.0, -0.9999])
    q[0, 0], q[1, 1] = 8.0, 8.0
    values = torch.zeros(1, 64, 128)
    values[0, :3, :2] = torch.tensor([[448.0, 448.0], [11 / 256, 0.0], [10 / 256, 0.0]])
    q, cache = q.to(torch.float8_e4m3fn), pack_cache(values.to(torch.float8_e4m3fn), torch.ones(1, 64))
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    for slots, right in (([0, 1], True), ([1, 2], True), ([0, 2], False)):
        out = torch.tensor([slots], dtype=torch.int32)
        assert bool(judge(out[0], q, cache, weights, 3, table[0], TENSOR_CORE_BAND)) is right
        assert bool(wrong_rows(out, (q[None], cache, weights[None], lengths, table), 1)) is not right


@pytest.mark.parametrize("next_n", [1, 2])
def test_the_judge_of_many_rows_finds_the_same(next_n):
    tensors = random_tensors(20, 3000, 32, next_n, torch.Generator().manual_seed(next_n))
    out = indexer_topk(*tensors, k=512, mode="fast", next_n=next_n)
    q, cache, weights, seq_lens, table = tensors
    row = int(seq_lens.argmax()) * next_n
    pages = table[row // next_n, : int(seq_lens.max()) // PAGE_SIZE]  # full ones
    left = set((pages[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten().tolist()) - set(out[row].tolist())
    changes = [None, (row, 0, -1), (row, 5, int(out[row, 4])), (row, 0, 10**6), (row, 0, min(left))]
    for change in changes:
        changed = out.clone()
        if change is not None:
            changed[change[0], change[1]] = change[2]
        want = []
        for r in range(len(q)):
            seen = max(0, int(seq_lens[r // next_n]) - next_n + 1 + r % next_n)
            want.append(not judge(changed[r], q[r], cache, weights[r], seen, table[r // next_n], TENSOR_CORE_BAND))
        assert wrong_rows(changed, tensors, next_n).tolist() == want
        assert any(want) == (change is not None)


def test_operator_is_well_formed_and_compiles():
    tensors = one((70, 0)).tensors()
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    # torch's own check of the schema can't compare float8 arguments.
    torch.library.opcheck(
        torch.ops.envoi.indexer_topk.default, (*tensors, 512, "fast", 1, True, "score"), test_utils=checks
    )
    compiled = torch.compile(lambda *x: indexer_topk(*x, k=512) + 1, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(*tensors), indexer_topk(*tensors, k=512) + 1)


Q, CACHE, WEIGHTS, LENGTHS, TABLE = one((100, 30)).tensors()
FP4_CACHE = random_fp4_cache(len(CACHE))


def with_entry(table: torch.Tensor, row: int, column: int, value: int) -> torch.Tensor:
    table = table.clone()
    table[row, column] = value
    return table


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("q: expected float8_e4m3fn .B . next_n, H, 128., got bfloat16", {"q": Q.bfloat16()}),
        ("q: expected .* got float8_e4m3fn .2, 64, 96.", {"q": Q[..., :96].contiguous()}),
        ("q.shape.1.: expected H from 1 to 64 heads, got 128", {"q": Q.repeat(1, 2, 1), "weights": WEIGHTS}),
        ("q.shape.1.: expected H from 1 to 64 heads, got 0", {"q": Q[:, :0], "weights": WEIGHTS[:, :0]}),
        ("q.shape.0.: expected a multiple of next_n = 3, got 2", {"next_n": 3}),
        ("next_n: expected an int of at least 1, got 0", {"next_n": 0}),
        ("k: expected an int from 1 to 2048, got 0", {"k": 0}),
        ("k: expected an int from 1 to 2048, got 2049", {"k": 2049}),
        ("k: expected an int from 1 to 2048, got 512.0", {"k": 512.0}),
        ("k: expected an int from 1 to 2048, got True", {"k": True}),
        ("ordered: expected True or False, got str 'no'", {"ordered": "no"}),
        ("return_errors: expected True or False, got int 1", {"return_errors": 1}),
        ("k_cache: expected int8 or uint8 .num_pages, 64, 1, 132., got", {"k_cache": CACHE.view(-1, 32, 1, 132)}),
        ("k_cache: expected int8 or uint8 .num_pages, 64, 1, 132., got", {"k_cache": CACHE[..., :67].contiguous()}),
        ("k_cache: expected .* got int8 .3, 64, 1, 72.", {"k_cache": CACHE[..., :72].contiguous()}),
        ("mode: expected 'fast' with keys in FP4, .*, got 'exact'", {"k_cache": FP4_CACHE, "mode": "exact"}),
        ("k_cache: expected int8 or uint8 .*, got float32", {"k_cache": CACHE.float()}),
        ("k_cache: expected a contiguous tensor", {"k_cache": CACHE.transpose(0, 1).contiguous().transpose(0, 1)}),
        ("weights: expected float32 .2, 64., got bfloat16", {"weights": WEIGHTS.bfloat16()}),
        ("seq_lens: expected int32 .2., got int64 .2.", {"seq_lens": LENGTHS.long()}),
        ("seq_lens: expected a tensor on cpu .*, got one on meta", {"seq_lens": LENGTHS.to("meta")}),
        ("block_table: expected int32 .2, P., got int32 .1, 2.", {"block_table": TABLE[:1]}),
        ("mode: expected one of 'fast', 'exact', got 'quick'", {"mode": "quick"}),
        ("output: expected one of 'slots', 'positions', got 'pages'", {"output": "pages"}),
        ("seq_lens: expected 0 to 128 .*, got 129 for request 0", {"seq_lens": LENGTHS + 29}),
        ("seq_lens: expected 0 to 128 .*, got -1 for request 1", {"seq_lens": LENGTHS - 31}),
        ("block_table: expected pages from 0 to 2, got 3 for request 1", {"block_table": with_entry(TABLE, 1, 0, 3)}),
        ("block_table: expected pages from 0 to 2, got -7 for request 0", {"block_table": with_entry(TABLE, 0, 1, -7)}),
        ("block_table: expected no pages, since k_cache has none, got 1 for request 0", {"k_cache": CACHE[:0]}),
    ],
)  # fmt: skip
def test_refusals(message, changes):
    given_ = {"q": Q, "k_cache": CACHE, "weights": WEIGHTS, "seq_lens": LENGTHS, "block_table": TABLE}
    with pytest.raises(ValueError, match=message):
        indexer_topk(**(given_ | changes))


def test_the_default_is_the_fast_mode_best_first():
    tensors = one((900, 100)).tensors()
    assert_same_bits(indexer_topk(*tensors, k=512), indexer_topk(*tensors, k=512, mode="fast", order="score"))


@pytest.mark.parametrize(("ordered", "order"), [(True, "score"), (False, "position")])
def test_the_old_name_of_the_order_warns(ordered, order):
    tensors = one((900, 100)).tensors()
    with pytest.warns(DeprecationWarning, match=f'ordered={ordered} is order="{order}" now'):
        found = indexer_topk(*tensors, k=512, output="positions", ordered=ordered)
    assert_same_bits(found, indexer_topk(*tensors, k=512, output="positions", order=order))
    with pytest.raises(ValueError, match=f"order: expected none beside ordered={ordered}, got 'any'"):
        indexer_topk(*tensors, k=512, order="any", ordered=ordered)


@pytest.mark.parametrize("next_n", [1, 2, 3, 4, 6, 511, 512, 513, 514, 516, 4096, 4097])
def test_launches_of_many_rows(next_n):
    """Check that launches take every row once, in order, and no block of rows belongs to two requests."""
    several = max(5, -(-128 // next_n))  # 128 rows or more
    for requests, width, heads in product((0, 1, 3, several), (1, 64, 256, 1024, 16384, 1 << 20), (64, 48, 32, 4)):
        rows = requests * next_n
        q, cache = torch.empty(rows, heads, 128, device="meta"), torch.empty(1, 64, 1, 132, device="meta")
        table = torch.empty(requests, width, device="meta")
        p = fast.Problem(q, cache, q, table, table, 512, next_n)
        block, most = fast.rows_of_block(p), fast.rows_at_once(p)
        taken = [(first, first + num) for first, num in fast.launches(p, most)]
        assert [row for first, end in taken for row in range(first, end)] == list(range(rows))
        assert all(end - first <= most for first, end in taken)
        for first, end in taken:
            assert all(row // next_n == (min(row + block, end) - 1) // next_n for row in range(first, end, block))
        many = rows > fast.MANY_ROWS
        words = p.max_length if many else p.max_length + fast.NUM_GROUPS + fast.list_words(p)
        assert most == 1 or 4 * most * words <= (fast.LARGE_BYTES if many else fast.WORKSPACE_BYTES)
        share = {64: 8, 48: 8, 32: 8, 4: 16}[heads]  # their heads fill the 128 columns of two products, or of four
        of_few = max(n for n in (1, 2, 4, 8, 16) if next_n % n == 0 and n <= share)
        large = rows >= 128 and rows * width >= 16384 and width <= 256  # pages; longer rows of few have groups
        alone = not (many or large)
        assert block == (1 if alone else share if next_n > fast.MANY_ROWS and next_n % share else of_few)


@pytest.mark.parametrize("way", ["radix", "candidates", "clusters"])
def test_rows_whose_groups_are_read_share_no_tiles(way):
    """Check 64 requests of four rows of 8192 and of 32768 tokens, and of more than a cluster holds."""
    q, cache = torch.empty(256, 64, 128, device="meta"), torch.empty(1, 64, 1, 132, device="meta")
    for width in (128, 512, 2560):
        table = torch.empty(64, width, device="meta")
        p = fast.Problem(q, cache, q, table, table, 512, 4)
        alone = way == "candidates" or width == 2560 or (way == "radix" and width == 512)
        assert fast.workspace(p, way).block == fast.rows_of_block(p, way) == (1 if alone else 4)


@pytest.mark.parametrize(
    ("rows", "width", "by_score", "early", "expected"),
    [
        (513, 64, False, True, True), (513, 65, False, True, False), (513, 64, True, True, False),
        (1, 256, False, False, False), (1, 64, True, False, False),
    ],
)  # fmt: skip
def test_code_for_long_rows_is_left_out_where_that_is_faster(rows, width, by_score, early, expected):
    """Check the rule; width: pages of 64 tokens."""
    q, table = torch.empty(rows, 64, 128, device="meta"), torch.empty(rows, width, device="meta")
    p = fast.Problem(q, torch.empty(1, 64, 1, 132, device="meta"), q, table, table, 512, 1)
    assert fast.at_once(p, fast.Order(slots=True, by_score=by_score), early, has_groups=True) is expected


@pytest.mark.parametrize(
    ("rows", "width", "order", "expected"),
    [
        (1, 64, "any", "set_kernel"), (512, 129, "position", "set_kernel"), (513, 129, "any", "select_kernel"),
        (1, 2048, "any", "set_kernel"), (2, 2049, "any", "rank_kernel"), (2, 2049, "position", "select_kernel"),
        (3, 2049, "any", "select_kernel"), (1, 128, "score", "set_kernel"), (512, 129, "score", "best_kernel"),
        (1, 2048, "score", "best_kernel"), (4, 2049, "score", "rank_kernel"), (5, 2049, "score", "select_kernel"),
        (513, 64, "score", "select_kernel"), (3, 2049, "score", "rank_kernel"), (3, 4097, "score", "select_kernel"),
    ],
)  # fmt: skip
def test_sets_of_a_decode_are_chosen_in_registers(rows, width, order, expected):
    """Check by which kernel a call ends; width: pages of 64 tokens."""
    launched = launches_of(partial(call_of_fast, order, width, rows), "sm_90")
    assert launched[-1].kernel.fn.__name__ == expected


@pytest.mark.parametrize(
    ("rows", "width", "order", "expected"),
    [
        (200, 1024, "any", ["scores", "set"]), (256, 2048, "any", ["scores", "set"]),
        (257, 2048, "any", 2 * ["scores", "set"]), (64, 2560, "any", ["scores", "set", "select"]),
        (64, 2560, "score", ["scores", "set", "best", "select"]),
    ],
)  # fmt: skip
def test_a_decode_in_wide_tables_takes_few_launches(rows, width, order, expected):
    """Check the kernels; width: pages of 64 tokens."""
    launched = launches_of(partial(call_of_fast, order, width, requests=rows), "sm_90")
    assert [launch.kernel.fn.__name__.removesuffix("_kernel") for launch in launched] == expected
    longest = 131072 if width > 2048 else 0  # of the rows that clusters hold, where the table has room for longer ones
    for launch, kernel in zip(launched, expected, strict=True):
        given = dict(zip(launch.kernel.arg_names, launch.arguments, strict=True))
        wanted = {
            "scores": {"GROUPED": longest}, "best": {"LONGEST": longest}, "select": {"ABOVE": longest},
            "set": {"SHARED": given["num_rows"] > 1, "LEAVES": longest > 0},
        }[kernel]  # fmt: skip
        assert {name: given[name] for name in wanted} == wanted


@pytest.mark.parametrize("rows, width, scored", [(64, 32, False), (64, 33, True), (600, 32, False), (600, 33, True)])
def test_selection_overlaps_with_scores_alone(rows, width, scored):
    """Check that selection isn't launched before the end of what was before, where no row has to be scored."""
    launched = launches_of(partial(call_of_fast, "any", width, requests=rows), "sm_90")
    assert any("scores" in launch.kernel.fn.__name__ for launch in launched) == scored
    assert bool(launched[-1].options.get("launch_pdl")) == scored


def test_prefill_of_other_lengths_takes_the_same_kernels():
    def kernels(next_n: int) -> set:
        call = partial(call_of_fast, "any", 1024, next_n)
        return {key_of(step.kernel, step.arguments, step.options) for step in launches_of(call, "sm_90")}

    assert kernels(2050) == kernels(3071) == kernels(4097)


def test_an_unknown_order_is_refused():
    with pytest.raises(ValueError, match="order: expected"):
        indexer_topk(*one((100,)).tensors(), k=512, order="best")


def keys_of(means: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a cache of keys [n, 128] in FP8, its table [1, pages], and the keys as they are stored, in float64."""
    pages = pages_of(len(means))
    padded = torch.nn.functional.pad(means, (0, 0, 0, pages * PAGE_SIZE - len(means)))
    scales = (padded.abs().amax(1) / 448).clamp(min=1e-6)
    values = (padded / scales[:, None]).to(torch.float8_e4m3fn)
    cache = pack_cache(values.view(pages, PAGE_SIZE, 128), scales.view(pages, PAGE_SIZE))
    return (
        cache,
        torch.arange(pages, dtype=torch.int32)[None],
        (values.double() * scales.double()[:, None])[: len(means)],
    )


def test_pools_of_keys():
    """The 20 of 70 pools of 16 tokens by the ReLU of their mean's products with 32 heads, which have no weights."""
    source = torch.Generator().manual_seed(3)
    tokens = torch.randn(70 * 16, 128, generator=source)
    cache, table, keys = keys_of(tokens.view(70, 16, 128).mean(1))
    q = torch.randn(1, 32, 128, generator=source).to(torch.float8_e4m3fn)
    lengths = torch.tensor([70], dtype=torch.int32)
    out = indexer_topk(q, cache, torch.ones(1, 32), lengths, table, k=20, output="positions", order="position")
    scores = [sum(max(0.0, float(head @ key)) for head in q[0].double()) for key in keys]
    assert out[0].tolist() == sorted(sorted(range(70), key=lambda i: -scores[i])[:20])


def test_queries_of_keys_for_several_tokens():
    """A key for 4 tokens: the query at position p sees (p + 1) // 4 keys, so each is a request of its own."""
    source = torch.Generator().manual_seed(4)
    cache, table, keys = keys_of(torch.randn(90, 128, generator=source))
    positions = torch.arange(345, 355)
    q = torch.randn(10, 32, 128, generator=source).to(torch.float8_e4m3fn)
    weights = torch.randn(10, 32, generator=source)
    seen = (positions + 1) // 4
    assert seen.unique().tolist() == [86, 87, 88]
    out = indexer_topk(q, cache, weights, seen.int(), table.repeat(10, 1), k=8, output="positions")
    for row, length in enumerate(seen.tolist()):
        scores = scores64(q[row], keys[:length], weights[row])
        assert out[row].tolist() == sorted(range(length), key=lambda i, scores=scores: -scores[i])[:8]

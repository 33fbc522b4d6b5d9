"""The fuzz oracles catch wrong answers: a wrong id, an element just outside its interval, a wrong scale factor."""

from dataclasses import replace

import pytest
import torch

import envoi
from envoi.types import ExpertWeights, QuantTensor
from tests.fuzz import approx, experts, formats, indexer, outputs, parallel, routing, run
from tests.fuzz.approx import Approx
from tests.fuzz.draw import Draw
from tests.fuzz.formats import round_to, ulp

SEEDS = range(40)
MODULES = {
    "gemm": outputs,
    "grouped_gemm": outputs,
    "epilogue": outputs,
    "moe": experts,
    "expert_parallel": parallel,
    "route": routing,
}


def case_of(operator: str, seed: int):
    draw, case = run.draw_case(operator, seed, "small", "cpu")
    return case, run.OPERATORS[operator].run([draw], [case])[0]


@pytest.fixture
def compared(monkeypatch):
    """Record what is compared: (output, interval, dtype) of each call of `approx.wrong`."""
    found = []

    def spy(got, want, dtype=None, name="output"):
        found.append((got, want, dtype or got.dtype))
        return approx.wrong(got, want, dtype, name)

    for module in set(MODULES.values()):
        monkeypatch.setattr(module, "wrong", spy)
    return found


def off_by_four_ulps(got: torch.Tensor, want: Approx, dtype: torch.dtype) -> torch.Tensor | None:
    """Move one element 4 ulps beyond the largest right value; None if no element is finite and bounded."""
    bounded = (want.mid.isfinite() & want.err.isfinite() & (want.mid.abs() < 1e4)).flatten().nonzero()[:, 0]
    if not len(bounded):
        return None
    place = bounded[len(bounded) // 2]
    high = (want.mid + want.err).flatten()[place]
    moved = got.detach().clone().contiguous()
    if dtype not in formats.FLOATS:
        moved.view(-1)[place] = high * 1.001 + 1e-3
    else:
        high = round_to(high, dtype)
        moved.view(-1)[place] = (high + 4 * ulp(high, dtype)).to(moved.dtype)
    return moved


@pytest.mark.parametrize("operator", MODULES)
def test_an_element_just_outside_is_caught(operator, compared):
    caught = 0
    for seed in SEEDS if operator != "expert_parallel" else range(3):
        case, result = case_of(operator, seed)
        compared.clear()
        if run.judged(case, result) or case.refused:
            assert case.refused
            continue
        for got, want, dtype in list(compared):
            moved = off_by_four_ulps(got, want, dtype)
            if moved is not None:
                said = approx.wrong(moved, want, dtype)
                assert ": 1 of" in said, (seed, case.text, said)
                caught += 1
    assert caught >= (3 if operator == "expert_parallel" else 20)


@pytest.mark.parametrize(("operator", "most"), [("gemm", 1.0), ("grouped_gemm", 1.0), ("epilogue", 2.0), ("moe", 6.0)])
def test_intervals_are_narrow(operator, most, compared):
    """Half of the intervals of the outputs, each in its case's dtype of 8 or 11 bits, are within a few ulps."""
    widths = []
    for seed in SEEDS:
        case, result = case_of(operator, seed)
        if not case.refused:
            compared.clear()
            case.judge(result)
            for _, want, dtype in compared:
                if dtype in (torch.bfloat16, torch.float16) and want.mid.numel():
                    widths.append(float((2 * want.err / ulp(want.mid, dtype)).flatten().median()))
    assert len(widths) > 10
    assert torch.tensor(widths).median() <= most


def doubled(x: QuantTensor, place: int = 0) -> QuantTensor:
    """Return a matrix one of whose scale factors, the largest, is twice what it was."""
    sf = x.sf.clone().contiguous()
    wide = formats.decode_sf(sf.cpu()).nan_to_num(0.0).flatten()
    at = int(wide.argmax())
    if sf.dtype == torch.float32:
        sf.view(-1)[at] *= 2
    else:  # the next power of two; for E4M3, 8 codes are a factor of two
        sf.view(torch.uint8).view(-1)[at] += 1 if sf.dtype == torch.float8_e8m0fnu else -8
    return replace(x, sf=sf)


def flat(outputs) -> torch.Tensor:
    """Return all numbers of a result in float64, NaN and infinities as numbers."""
    parts = outputs if isinstance(outputs, (tuple, list)) else [outputs]
    stored = [part for x in parts for part in ((x.values, x.sf) if isinstance(x, QuantTensor) else (x,))]
    return torch.cat([part.double().flatten().nan_to_num(0.5, 1e39, -1e39) for part in stored])


def assert_caught(operator: str, monkeypatch, changed, seeds, least: int) -> None:
    """Assert that each case is found wrong whose result differs since `changed` changed the call's arguments.

    changed(arguments, done) -> arguments; appends to `done` if it did. least: of such cases there must be.
    """
    original, caught = getattr(envoi, operator), 0
    for seed in seeds:
        case, right = case_of(operator, seed)
        done = []
        monkeypatch.setattr(envoi, operator, lambda *given, done=done, **more: original(*changed(given, done), **more))
        result = run.attempt(case)
        monkeypatch.setattr(envoi, operator, original)
        if done and not isinstance(result, Exception) and not torch.equal(flat(result), flat(right)):
            assert case.judge(result), (seed, case.text)
            caught += 1
    assert caught >= least


@pytest.mark.parametrize("operator", ["gemm", "grouped_gemm"])
def test_a_wrong_scale_factor_is_caught(operator, monkeypatch):
    def changed(given, done):
        a, *rest = given
        if isinstance(a, QuantTensor) and a.values.numel() and rest[0].values.numel():
            done.append(1)
            a = doubled(a)
        return a, *rest

    assert_caught(operator, monkeypatch, changed, range(80), 15)


def test_a_wrong_scale_factor_of_an_expert_is_caught(monkeypatch):
    def changed(given, done):
        tokens, routing, packed = given
        if isinstance(packed.down, QuantTensor) and bool((routing.topk_ids >= 0).any()):
            done.append(1)
            all_sf = packed.down.sf.clone().contiguous()  # those of a used expert
            used = int(routing.topk_ids[routing.topk_ids >= 0][0])
            one = doubled(replace(packed.down, values=packed.down.values[used], sf=all_sf[used]))
            all_sf.view(torch.uint8)[used] = one.sf.view(torch.uint8)
            packed = replace(packed, down=replace(packed.down, sf=all_sf))
        assert isinstance(packed, ExpertWeights)
        return tokens, routing, packed

    assert_caught("moe", monkeypatch, changed, range(60), 15)


def test_swapped_routing_weights_are_caught(monkeypatch):
    def changed(given, done):
        tokens, routing, packed = given
        weights, ids = routing.topk_weights, routing.topk_ids
        if (
            weights.dim() == 2
            and len(weights) > 1
            and bool((ids >= 0).all())
            and not torch.equal(weights[0], weights[1])
        ):
            done.append(1)
            weights = weights[[1, 0, *range(2, len(weights))]]
        return tokens, replace(routing, topk_weights=weights), packed

    assert_caught("moe", monkeypatch, changed, range(60), 8)


def with_ids(got, ids):
    return replace(got, topk_ids=ids.to(torch.int32))


def test_a_wrong_expert_is_caught():
    flipped = swapped = 0
    for seed in range(200):
        case, got = case_of("route", seed)
        if case.refused or ", normal," not in case.text or "table True" in case.text or "alpha 0.0" in case.text:
            continue
        ids, N = got.topk_ids.long(), got.num_experts
        rows = (ids >= 0).all(1).nonzero()[:, 0]
        if not len(rows):
            continue
        row, k = rows[0], ids.shape[1]
        others = [i for i in range(N) if i not in ids[row].tolist()]
        if others:
            wrong_ids = ids.clone()
            wrong_ids[row, k - 1] = others[seed % len(others)]
            assert case.judge(with_ids(got, wrong_ids)), case.text
            flipped += 1
        if k > 1:
            wrong_ids = ids.clone()
            wrong_ids[row, [0, k - 1]] = wrong_ids[row, [k - 1, 0]]
            assert case.judge(with_ids(got, wrong_ids)), case.text
            swapped += 1
    assert flipped >= 10 and swapped >= 6


def test_the_larger_id_of_a_tie_is_caught():
    logits = torch.zeros(1, 8, dtype=torch.float64)
    given = routing.Given(approx.exact(logits), None, None, routing.Rule("sigmoid"), 3, True, approx.Arithmetic())
    keys = routing.keys_of(given, given.logits, routing.score_of(given.logits, given.rule))
    assert routing.misplaced(keys, 0, [0, 1, 2], 3, given.rule) == ""
    assert "expert 2 must be chosen before 3" in routing.misplaced(keys, 0, [0, 1, 3], 3, given.rule)
    assert "expert 0 must be before 1" in routing.misplaced(keys, 0, [1, 0, 2], 3, given.rule)
    groups = routing.Rule("sigmoid", 4, 2, "top2_sum")
    keys = routing.keys_of(replace(given, rule=groups), given.logits, routing.score_of(given.logits, groups))
    assert routing.misplaced(keys, 0, [0, 1, 2], 3, groups) == ""
    assert "groups that don't compete" in routing.misplaced(keys, 0, [4, 5, 6], 3, groups)
    assert "an expert twice" in routing.misplaced(keys, 0, [0, 0, 1], 3, groups)
    assert "2 experts chosen" in routing.misplaced(keys, 0, [0, 1, -1], 3, groups)


def test_wrong_counts_and_dense_weights_are_caught():
    seen = set()
    for seed in range(60):
        case, got = case_of("route", seed)
        for name in ("dense", "num_tokens_per_expert", "expert_offsets"):
            table = None if case.refused else getattr(got, name)
            if table is not None and table.numel():
                wrong_table = table.clone()
                wrong_table.view(-1)[-1] += 1
                assert name.partition("_")[0] in case.judge(replace(got, **{name: wrong_table}))
                seen.add(name)
    assert len(seen) == 3


def test_a_wrong_token_is_caught():
    caught = dict.fromkeys(("left out", "twice", "order", "count", "error"), 0)
    for seed in range(70):
        case, result = case_of("indexer_topk", seed)
        if case.refused or "zeros" in case.text or isinstance(result, Exception) or "same tokens" in case.text:
            continue
        out, errors = result
        given = indexer.drawn(draw := Draw("indexer_topk", seed, "small"), draw.one(indexer.KINDS))
        for row in range(len(out)):
            score = indexer.scores(given, row, False)
            length = len(score.mid)
            if length < 3 or bool(score.mid.isnan().any()):
                continue
            for kind, (changed, code) in mutations(given, out, errors, row, score).items():
                assert case.judge((changed, code)), (seed, kind, case.text)
                caught[kind] += 1
    assert min(caught.values()) >= 3, caught


def mutations(given, out, errors, row, score):
    """Return wrong results: the worst token for the best, one twice, the ends swapped, one less, an error code."""
    length, found = len(score.mid), {}
    want = min(given.k, length)
    twice, fewer, code = out.clone(), out.clone(), errors.clone()
    twice[row, want - 1] = twice[row, 0]
    fewer[row, want - 1] = -1
    code[row] = 1
    found |= {"twice": (twice, errors), "count": (fewer, errors), "error": (out, code)}
    ranked = score.mid.argsort(descending=True)
    apart = score.mid[ranked[0]] - score.mid[ranked[-1]] > 2 * (score.err[ranked[0]] + score.err[ranked[-1]])
    if not apart:
        return found
    if given.order == "score":
        swapped = out.clone()
        swapped[row, [0, want - 1]] = out[row, [want - 1, 0]]
        found["order"] = (swapped, errors)
    if length > want and not given.slots:
        worst = out.clone()
        best = (worst[row] == int(ranked[0])).nonzero()
        if len(best):
            worst[row, best[0]] = int(ranked[-1])
            if not bool((out[row] == int(ranked[-1])).any()):
                found["left out"] = (worst, errors)
    return found


def test_a_wrong_bit_of_a_quantisation_is_caught():
    tried = 0
    for seed in SEEDS:
        case, (values, sf, wide) = case_of("quantise", seed)
        finite = not bool(formats.decode_sf(sf).isnan().any())
        if not values.numel() or not finite:
            continue
        for part in (0, 1):
            changed = [values.clone(), sf.clone()]
            stored = changed[part].contiguous()
            stored.view(torch.uint8).view(-1)[0] ^= 1
            changed[part] = stored
            assert case.judge((changed[0], changed[1], wide)), case.text
        assert case.judge((values, sf, wide * (1 + 1e-9) + 1e-30)), case.text
        tried += 1
    assert tried >= 20


def test_tables_are_the_formats():
    """Every code of the small floats, against torch's own conversions, which Envoi's CPU path uses."""
    codes = torch.arange(256, dtype=torch.uint8)
    for dtype, decode in ((torch.float8_e4m3fn, formats.decode_e4m3), (torch.float8_e8m0fnu, formats.decode_e8m0)):
        torchs, mine = codes.view(dtype).double(), decode(codes)
        assert torch.equal(torchs.isnan(), mine.isnan())
        assert torch.equal(torchs[~mine.isnan()], mine[~mine.isnan()])
    assert formats.decode_e2m1(torch.tensor([0x71, 0xF8], dtype=torch.uint8)).tolist() == [0.5, 6.0, -0.0, -6.0]


@pytest.mark.parametrize("dtype", formats.FLOATS)
def test_rounding_is_torchs(dtype):
    x = torch.randn(10000, generator=torch.Generator().manual_seed(0)).double()
    x = torch.cat((x, x * 2.0**-14, x * 2.0**-24, x * 1e4, x * 2.0**126, x * 2.0**-140, torch.zeros(1), -x[:1] * 0))
    x = x.float()  # torch rounds float64 twice
    assert torch.equal(round_to(x.double(), dtype), x.to(dtype).double())


def test_the_nearest_code_breaks_ties_to_even():
    x = torch.tensor([0.25, 0.75, 1.25, 2.5, 5.0, 7.0, -0.2, torch.nan], dtype=torch.float64)
    assert formats.nearest(x, formats.E2M1).tolist() == [0.0, 1.0, 1.0, 2.0, 4.0, 6.0, -0.0, 0.0]
    assert formats.nearest(torch.tensor([1e9, 2.0**-10, 3 * 2.0**-10]), formats.E4M3).tolist() == [448, 0, 2.0**-8]


def test_quantising_an_interval_holds_what_its_values_become():
    draw = Draw("gemm", 0)
    for name in ("fp8_row", "fp8_1x128", "mxfp8", "mxfp4", "nvfp4"):
        mid = draw.values("spread", 8, 256).double()
        err = 1e-3 * mid.abs()
        interval = approx.requantised(Approx(mid, err), formats.SCHEMES[name])
        for _ in range(20):
            x = round_to(mid + err * (2 * draw.uniform(8, 256).double() - 1) * 0.999, torch.float32)
            assert not approx.wrong(formats.quantise(x, formats.SCHEMES[name]).x, interval)

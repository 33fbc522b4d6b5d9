"""The fuzz oracles catch wrong answers: a wrong id, an element just outside its interval, a wrong scale factor."""

from dataclasses import replace

import pytest
import torch

import envoi
from envoi.types import Routing
from tests.fuzz import approx, experts, formats, outputs, parallel, routing, run
from tests.fuzz.approx import Approx
from tests.fuzz.draw import Draw
from tests.fuzz.formats import FORMATS, round_to, ulp

SEEDS = range(20)
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
    assert caught >= (3 if operator == "expert_parallel" else 12)


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
    assert len(widths) > 6
    assert torch.tensor(widths).median() <= most


# Of formats whose kernels round h to bf16 before FP8, and of others: what 14.578125 in a row with 384 becomes, in bf16.
TWICE, ONCE = ("fp8_row", "fp8_block128", "mxfp4_fp8"), {"bf16": 14.5625, "mxfp4": 14.5625}


def near_a_tie(format: str) -> experts.Layer:
    """Make a layer of one row: h is 384, then 14.578125 in each column, and down copies it.

    With the row's scale factor, 6 / 7, that is 17.008, whose nearest number of E4M3 is 18; but in bf16 it is 14.5625,
    and so 16.990, whose nearest is 16.
    """
    tokens = torch.zeros(1, 128, dtype=torch.bfloat16)
    tokens[0, :6] = torch.tensor([448.0, 384.0, 32.0, 14.0, 0.5625, 2.0**-6])  # E4M3's, with a scale factor of 1
    gate_up = torch.zeros(1, 256, 128)
    gate_up[0, :128, 2] = 1.0  # a gate of 32, which SiLU keeps
    gate_up[0, 128, 1] = 2.0**-5
    gate_up[0, 129:, 3:6] = 2.0**-5
    routed = Routing(torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32), 1)
    return experts.Layer(format, tokens, routed, gate_up, torch.eye(128)[None], None, "concat", "swiglu", None)


def judge_near_a_tie(format: str, kernels: bool) -> None:
    """Run it on the CPU: kernels and torch give two numbers in some formats, and the oracle knows which."""
    layer = near_a_tie(format)
    got = envoi.moe(layer.tokens, layer.routing, layer.pack("cpu"))
    own, other = (experts.oracle(layer, experts.Device(kernels=either)) for either in (kernels, not kernels))
    assert layer.stored[2] == approx.wrong(got, own) == ""
    assert bool(approx.wrong(got, other)) == (format in TWICE)
    if format != "nvfp4":  # which doesn't hold the weights exactly
        number = (13.6875 if kernels else 15.4375) if format in TWICE else ONCE.get(format, 15.0)
        assert got[0, 1:].tolist() == [number] * 127


@pytest.mark.parametrize("format", FORMATS)
def test_a_layer_rounds_its_rows_as_often_as_the_oracle(format):
    judge_near_a_tie(format, kernels=False)


@pytest.mark.parametrize("format", FORMATS)
def test_the_oracle_knows_which_formats_a_gpu_sums_in_14_bits(format):
    """By them h may be on either side of the tie; rows of mxfp4 and mxfp4_mxfp8 a GPU splits into two of FP8."""
    x = experts.oracle(near_a_tie(format), experts.Device(gpu=True, kernels=True))[0, 1:]
    assert bool((x.err > 0.01).all()) == (format in (*TWICE, "mxfp4", "mxfp4_mxfp8"))


def with_ids(got, ids):
    return replace(got, topk_ids=ids.to(torch.int32))


def test_a_wrong_expert_is_caught():
    flipped = swapped = 0
    for seed in range(100):
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
    assert flipped >= 5 and swapped >= 3


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
    assert tried >= 10


def test_ranks_in_one_process_convert_their_outputs_on_the_device(monkeypatch):
    """Where `moe` on one rank does, whose bits are compared: a CPU makes another NaN of fp16 than a GPU."""
    draws = (Draw("expert_parallel", seed, "small") for seed in range(100))
    draw = next(x for x in draws if parallel.setting(parallel.replace_draw(x)).layer.tokens.dtype == torch.float16)
    brought = []
    monkeypatch.setattr(parallel.domains, "open_all", lambda *_: [])
    monkeypatch.setattr(parallel.domains, "moe", lambda *_: [torch.zeros(2, 8, dtype=torch.bfloat16)] * 2)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: brought.append(x.dtype) or x)
    out, _ = parallel.attempt_in_one_process(draw)
    assert out.shape == (4, 8)
    assert (out.dtype, brought) == (torch.float16, [torch.float16])

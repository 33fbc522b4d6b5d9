"""Router's kernels on a GPU: hostile logits, every model, every size, independence of batch, tiling and launch."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from envoi.ops.moe.router import PRESETS, Rule, host, reference, route
from envoi.ops.moe.router.choose_tiling import APART_ROWS, apart_candidates, candidates, choose_shares, choose_tiling
from envoi.ops.moe.router.tiling import TILE
from envoi.runtime import workspace
from tests.helpers.accuracy import assert_same_bits
from tests.helpers.inputs import LOGITS, logits, normal
from tests.moe.router.sides import (
    EVERYTHING,
    Given,
    as_product,
    assert_meant,
    assert_same_routing,
    judge,
    judge_logits,
    looked_up,
    preset_call,
    random_call,
)
from tests.moe.router.test_exact import (
    bar_groups,
    distinct_presets,
    distinct_rules,
    hard_rows,
    ranking_key,
    wrong_rows,
)
from tests.moe.router.test_selection import RULES

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("tidy_gpu")]
HALVES = [torch.bfloat16, torch.float16]
FLOATS = [*HALVES, torch.float32]
KERNELS = ["own", "triton"]  # the kernel for this GPU; the portable one
MANY_ROWS = 100_000
BATCHES = (1, 16, 63, 64, 65, 200, 4096, 16384)
NUM_RUNS = 100
NUM_SMS = 132
FINITE = [kind for kind in LOGITS if bool(logits(kind, 8, 16, 4).isfinite().all())]


@pytest.fixture(params=KERNELS)
def kernel(request, monkeypatch):
    """Run the test with each of the two kernels."""
    use(request.param, monkeypatch)
    return request.param


def use(kernel, monkeypatch):
    if kernel == "triton":
        monkeypatch.setattr(host, "takes_hopper", lambda call: False)


def gpu_call(*args, **rest) -> Given:
    return random_call(*args, device="cuda", **rest)


# Selection


def judge_product(x, dtype, rule, expert_bias=None):
    tokens, gate = (side.cuda() for side in as_product(x, dtype))
    given = Given(tokens, gate, 5, rule, expert_bias=expert_bias)
    got = given.route()
    judge(given, got)
    return got.logits


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("biased", [False, True])
def test_hostile_logits(rule, biased, kernel):
    bias = normal(32, seed=7, device="cuda") * 0.2 if biased else None
    for kind in LOGITS:
        x = logits(kind, 37, 32, 5)
        got = judge_product(x, torch.bfloat16, RULES[rule], bias)
        assert_meant(got, x)


@pytest.mark.parametrize("biased", [False, True])
def test_the_identity_gives_the_logits_themselves(biased, kernel):
    bias = normal(160, seed=7, device="cuda") if biased else None
    given = gpu_call(300, 160, 512, 8, RULES["identity"], torch.bfloat16, expert_bias=bias)
    given.gate[7], given.tokens[4, 1] = given.gate[3], torch.nan
    got = given.route()
    chosen = got.logits.gather(1, got.topk_ids.clamp(min=0).long())
    assert_same_bits(got.topk_weights, chosen.masked_fill(got.topk_ids < 0, 0.0))
    assert bool((got.topk_ids[4] == -1).all())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rule", RULES)
def test_weights_are_rounded_once(rule, dtype, kernel):
    given = gpu_call(70, 32, 64, 5, RULES[rule], torch.bfloat16)
    want, got = given.route(), given.route(**EVERYTHING, weights_dtype=dtype)
    assert_same_bits(got.topk_weights, want.topk_weights.to(dtype))
    assert_same_bits(got.dense, want.dense.to(dtype))
    for name in ("topk_ids", "logits", "expert_offsets"):
        assert_same_bits(getattr(got, name), getattr(want, name))


@pytest.mark.parametrize("rule", ["softmax", "sigmoid, groups by two"])
def test_operands_that_are_not_finite(rule, kernel):
    given = gpu_call(100, 32, 64, 5, RULES[rule], torch.bfloat16)
    given.tokens[5], given.tokens[6], given.tokens[7, 3] = torch.nan, torch.inf, -torch.inf
    given.gate[9], given.gate[10, 0], given.gate[11] = torch.nan, torch.inf, 3e38
    got = given.route()
    judge(given, got)
    assert bool((got.topk_ids[5:7] == -1).all())
    assert not bool((got.topk_ids == 9).any())


@pytest.mark.parametrize("center", [-30.0, -2.7, 40.0, 5000.0])
def test_roots_that_a_bias_brings_together(center, kernel):
    """Check scores that differ by less than the error of fast ones, where these are small, and where they are large."""
    n, rows = 96, 2000
    x = center + normal(rows, n, seed=3) * 1e-5 * max(1.0, abs(center))
    rule = RULES["sqrt(softplus)"]
    judge_product(
        x, torch.bfloat16, rule, torch.full((n,), -float(reference.scores(x[:1], rule).mean()), device="cuda")
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_hostile_logits_of_other_dtypes(dtype):
    for kind in FINITE if dtype == torch.float16 else LOGITS:
        x = logits(kind, 37, 32, 5)
        got = judge_product(x, dtype, RULES["sigmoid, groups by two"], normal(32, seed=7, device="cuda") * 0.2)
        assert_meant(got, x)


@pytest.mark.parametrize(
    ("name", "kernel"),
    [*((name, "own") for name in distinct_presets()), *((name, "triton") for name in distinct_rules())],
)
def test_not_one_wrong_id(name, kernel, monkeypatch):
    use(kernel, monkeypatch)
    chosen = PRESETS[name]
    rule = chosen.rule
    tokens, gate = (x.cuda().bfloat16() for x in hard_rows(chosen.num_experts, MANY_ROWS))
    bias = normal(chosen.num_experts, seed=1, device="cuda") * 0.05 if chosen.has_expert_bias else None
    got = route(tokens, gate, chosen.num_topk, rule=name, expert_bias=bias, return_logits=True)
    score = reference.scores(got.logits, rule)
    key = ranking_key(got.logits, rule, bias)
    if rule.num_groups > 1:
        key = bar_groups(key, rule)
    wrong = wrong_rows(key, got.topk_ids.cpu().numpy().astype(np.int64))
    assert not wrong.any(), f"{wrong.sum()} of {len(wrong)} rows, the first is {wrong.argmax()}"
    weights = reference.weigh(got.logits, score, got.topk_ids.long(), rule)
    torch.testing.assert_close(got.topk_weights, weights, rtol=4e-6, atol=1e-36)


@pytest.mark.parametrize("rule", ["softmax", "sigmoid, groups by two"])
@pytest.mark.parametrize("ints", [torch.int32, torch.int64])
def test_hash_routing(rule, ints, kernel):
    """Check that tokens outside the table and experts outside the gate give -1, without a wait of the host."""
    source = torch.Generator().manual_seed(6)
    table = torch.stack([torch.randperm(32, generator=source)[:3] for _ in range(20)]).to(ints)
    table[3, 1], table[4, 0], table[5, 2] = 32, -1, 2**31 - 1
    token_ids = torch.arange(-2, 98).to(ints) % 23
    token_ids[:2], token_ids[-1] = -1, 2**31 - 1
    bias = normal(32, seed=5)
    bias[2] = torch.nan  # an expert of the table without a finite logit
    bias[table[6].long()] = -120.0  # a token whose experts all score 0
    lookup = {"token_ids": token_ids.cuda(), "hash_table": table.cuda(), "logit_bias": bias.cuda()}
    given = gpu_call(100, 32, 64, 3, RULES[rule], torch.bfloat16, **lookup)
    got = given.route()
    judge(given, got)
    want = looked_up(token_ids, table, 32)
    assert_same_bits(got.topk_ids.cpu().long(), want.masked_fill(want == 2, -1))


# Logits and sizes


@pytest.mark.parametrize(
    ("m", "n", "hidden", "dtype"),
    [
        (1, 1, 8, torch.bfloat16), (35, 31, 72, torch.float16), (130, 130, 1032, torch.bfloat16),
        (65, 513, 200, torch.bfloat16), (7, 1024, 3080, torch.float16), (512, 8, 128, torch.float16),
        (64, 160, 2048, torch.bfloat16), (16, 384, 7168, torch.bfloat16), (2048, 512, 4096, torch.bfloat16),
        (16384, 256, 7168, torch.float16),
    ],
)  # fmt: skip
def test_sizes(m, n, hidden, dtype, kernel):
    given = gpu_call(m, n, hidden, min(n, 32), Rule("sigmoid"), dtype)
    got = given.route()
    judge_logits(given, got.logits)
    judge(given, got)


@pytest.mark.parametrize("for_tokens", FLOATS)
@pytest.mark.parametrize("for_gate", FLOATS)
def test_dtypes(for_tokens, for_gate):
    given = gpu_call(200, 64, 2056, 6, Rule())
    given = replace(given, tokens=given.tokens.to(for_tokens), gate=given.gate.to(for_gate))
    got = given.route()
    judge_logits(given, got.logits)
    judge(given, got)


@pytest.mark.parametrize(("m", "n", "hidden"), [(1, 256, 7168), (4096, 256, 7168), (300, 896, 1000)])
def test_float32_stays_float32(m, n, hidden):
    given = gpu_call(m, n, hidden, 8, Rule("sigmoid"), torch.float32)
    got = given.route(return_logits=True)
    judge_logits(given, got.logits)


# Independence of a token's bits from its batch and the tiling


@pytest.mark.parametrize(
    ("n", "hidden", "k", "rule", "biased"),
    [(256, 7168, 8, "deepseek-v3", True), (512, 4096, 10, "qwen3-next", False), (128, 1000, 4, "gpt-oss-120b", False)],
)
def test_a_tokens_bits_are_its_own(n, hidden, k, rule, biased, kernel):
    """Check slices of one large batch, a hundred runs of each."""
    bias = normal(n, seed=2, device="cuda") * 0.1 if biased else None
    given = gpu_call(max(BATCHES), n, hidden, k, PRESETS[rule].rule, torch.bfloat16, expert_bias=bias)
    whole = given.route(return_logits=True)
    for m in BATCHES:
        for first in (0, max(BATCHES) - m):
            rows = slice(first, first + m)
            part = replace(given, tokens=given.tokens[rows])
            assert_same_routing(part.route(return_logits=True), whole, rows)
        want = part.route(return_logits=True)
        runs = [part.route(return_logits=True) for _ in range(NUM_RUNS)]
        different = [
            torch.cat([(x.topk_ids != want.topk_ids).flatten(), bits(x.topk_weights) != bits(want.topk_weights),
                       bits(x.logits) != bits(want.logits)]).any()
            for x in runs
        ]  # fmt: skip
        assert not bool(torch.stack(different).any()), f"{m} tokens: runs differ"


def bits(x):
    return x.flatten().view(torch.int32)


@pytest.mark.parametrize("quarter", range(4))
def test_every_cut_gives_the_same_bits(quarter):
    """Check all tilings that the model of time chooses among."""
    if host.implementation(torch.device("cuda")) != "hopper":
        return
    given = gpu_call(130, 96, 2504, 6, Rule("sigmoid"), torch.bfloat16)
    want = given.route()
    spec = host.spec_of(96, 6, given.rule, None, None, False, (True, True, True))
    call = host.Call(given.tokens, given.gate, spec, 1.0, 1.0, None, None, None, None)
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    for tiling in list(candidates(130, 2504, replace(spec, gluon=True), num_sms))[quarter::4]:
        outputs = host.empty_outputs(call)
        for _ in range(3):
            host._run_hopper(call, outputs, tiling)
        for got, field in ((outputs["logits"], "logits"), (outputs["ids"], "topk_ids"), (outputs["dense"], "dense")):
            assert_same_bits(got, getattr(want, field))
        assert_same_bits(outputs["counts"][1], want.expert_offsets)


@pytest.mark.parametrize(("n", "rule"), [
    (100, "qwen3-moe"), (150, "qwen3-coder-480b"), (160, "qwen3-coder-480b"), (160, "deepseek-v2"),
    (192, "minimax-m2"), (288, "step-3.7"), (300, "kimi-k2"), (384, "kimi-k2"), (512, "qwen3-next"), (896, "kimi-k3"),
])  # fmt: skip
def test_every_cut_for_many_rows_gives_the_same_bits(n, rule):
    """Check tiles of 128 rows, turns, two widths and two launches, with rows routed again, NaN, a last tile of few."""
    if host.implementation(torch.device("cuda")) != "hopper":
        return
    x = torch.stack([logits(kind, 65, n, 8) for kind in ("randn", "crowded around 1", "NaN")], 1).flatten(0, 1)
    tokens, gate = (y.cuda() for y in as_product(x, torch.bfloat16))
    bias = normal(n, seed=7, device="cuda") * 0.1 if PRESETS[rule].has_expert_bias else None
    given = Given(tokens, gate, 8, PRESETS[rule].rule, expert_bias=bias)
    want = given.route()
    judge(given, want)
    spec = host.spec_of(n, 8, given.rule, None, bias, False, (True, True, True))
    call = host.Call(tokens, gate, spec, 1.0, given.rule.routed_scale, None, bias, None, None)
    given_sizes = len(x), tokens.shape[1], replace(spec, gluon=True), NUM_SMS
    chosen = [t for t in candidates(*given_sizes) if t.turns > 1 or t.tile > TILE or t.rest_n]
    chosen += apart_candidates(APART_ROWS, *given_sizes[1:])
    assert chosen
    for tiling in chosen:
        outputs = host.empty_outputs(call)
        for _ in range(3):
            host._run_hopper(call, outputs, tiling)
        for name, field in (("weights", "topk_weights"), ("ids", "topk_ids"), ("logits", "logits"), ("dense", "dense")):
            assert_same_bits(outputs[name], getattr(want, field))
        assert_same_bits(outputs["counts"][1], want.expert_offsets)


@pytest.mark.parametrize(
    ("m", "hidden", "name"), [(2000, 2048, "qwen3-next"), (4259, 7168, "deepseek-v3"), (5000, 2048, "kimi-k3")]
)
def test_several_launches_are_one_call(m, hidden, name):
    """Check a call of several launches against one launch, eagerly and in a graph."""
    if host.implementation(torch.device("cuda")) != "hopper":
        return
    given = preset_call(name, m, hidden, torch.bfloat16, "cuda")
    want = given.route()
    judge(given, want)
    spec = host.spec_of(len(given.gate), given.k, given.rule, None, given.expert_bias, False, (True, True, True))
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    shares = choose_shares(m, hidden, replace(spec, gluon=True), num_sms)
    assert num_sms != NUM_SMS or len(shares) > 1 or shares[0].tiling.apart
    call = host.Call(
        given.tokens, given.gate, spec, 1.0, given.rule.routed_scale, None, given.expert_bias, None, None
    )  # fmt: skip
    outputs = host.empty_outputs(call)
    host._run_hopper(call, outputs, choose_tiling(m, hidden, replace(spec, gluon=True), num_sms)[0])
    for field, key in (("topk_weights", "weights"), ("topk_ids", "ids"), ("logits", "logits"), ("dense", "dense")):
        assert_same_bits(outputs[key], getattr(want, field))
    assert_same_bits(outputs["counts"][0], want.num_tokens_per_expert)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [given.route() for _ in range(3)]
    for _ in range(3):
        graph.replay()
    for found in got:
        assert_same_routing(found, want)


@pytest.mark.parametrize(
    ("m", "hidden", "name"),
    [(2283, 2048, "qwen3-next"), (1385, 6144, "glm-5"), (12360, 7168, "deepseek-v3"), (2050, 7168, "kimi-k2")],
)
def test_sums_in_any_order_are_right(m, hidden, name):
    """Check calls without batch invariance: logits in float64, the choice by them, and bits from run to run."""
    given = preset_call(name, m, hidden, torch.bfloat16, "cuda")
    found = [given.route(**EVERYTHING, batch_invariant=False) for _ in range(3)]
    exact = given.tokens.double() @ given.gate.double().T
    assert (found[0].logits - exact).abs().max() < 2e-5 * exact.abs().max()
    _, ids = reference.select(found[0].logits, given.k, given.rule, given.expert_bias)
    if given.rule.score != "softmax":  # the bits of a sum of exponentials aren't the reference's
        assert_same_bits(found[0].topk_ids, ids)
    judge(given, found[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found.append(given.route(**EVERYTHING, batch_invariant=False))
    graph.replay()
    for got in found[1:]:
        assert_same_routing(got, found[0])


def test_rows_that_are_done_again_beside_others_in_every_cut():
    """Check near keys, ties, NaN in one row of five each, against the reference and, bit for bit, in all tilings."""
    kinds = ("randn", "crowded around 1", "few distinct", "NaN", "ties at the boundary")
    x = torch.stack([logits(kind, 220, 256, 8) for kind in kinds], 1).flatten(0, 1)
    tokens, gate = (y.cuda() for y in as_product(x, torch.bfloat16))
    bias = normal(256, seed=7, device="cuda") * 0.1
    for rule in (PRESETS["deepseek-v3"].rule, Rule(renormalize=False)):
        given = Given(tokens, gate, 8, rule, expert_bias=bias if rule.score == "sigmoid" else None)
        want = given.route()
        judge(given, want)
        if host.implementation(torch.device("cuda")) != "hopper":
            continue
        spec = host.spec_of(256, 8, rule, None, given.expert_bias, False, (True, True, True))
        call = host.Call(tokens, gate, spec, 1.0, rule.routed_scale, None, given.expert_bias, None, None)
        num_sms = torch.cuda.get_device_properties(0).multi_processor_count
        for tiling in candidates(len(x), tokens.shape[1], replace(spec, gluon=True), num_sms):
            outputs = host.empty_outputs(call)
            host._run_hopper(call, outputs, tiling)
            for name, field in (("weights", "topk_weights"), ("ids", "topk_ids"), ("dense", "dense")):
                assert_same_bits(outputs[name], getattr(want, field))
            assert_same_bits(outputs["counts"][1], want.expert_offsets)


def test_strides_and_addresses_change_nothing(kernel):
    given = gpu_call(144, 48, 64, 4, Rule("sigmoid"), torch.bfloat16, expert_bias=normal(48, device="cuda"))
    want = given.route()
    wide = torch.randn(144, 211, device="cuda").bfloat16()
    wide[:, 3:67] = given.tokens
    odd = torch.empty(48 * 64 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(48, 64).copy_(given.gate)
    twice = torch.stack((given.expert_bias, given.expert_bias), 1)
    for changes in (
        {"tokens": wide[:, 3:67]}, {"tokens": given.tokens.T.contiguous().T}, {"gate": given.gate.T.contiguous().T},
        {"tokens": torch.stack((given.tokens, given.tokens), 1)[:, 1], "gate": odd}, {"expert_bias": twice[:, 1]},
    ):  # fmt: skip
        assert_same_routing(replace(given, **changes).route(), want)
    one = replace(given, tokens=given.tokens[:1].expand(16, -1)).route()
    assert_same_bits(one.topk_ids, want.topk_ids[:1].expand(16, -1).contiguous())


# Launches


@pytest.mark.parametrize("m", [4, 300, 4096])
def test_a_graph_is_replayed_with_other_inputs(m, kernel):
    given = preset_call("deepseek-v3", m, 2048, torch.bfloat16, "cuda")
    given.route()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first, second = given.route(), replace(given, tokens=given.tokens[: m // 2]).route()
    for seed in range(3):
        given.tokens.copy_(normal(m, 2048, seed=seed, device="cuda") * 2)
        given.expert_bias.copy_(normal(256, seed=seed, device="cuda") * 0.1)
        graph.replay()
        graph.replay()
        want = given.route()
        judge(given, want)
        assert_same_routing(first, want)
        assert_same_bits(second.topk_ids, want.topk_ids[: m // 2])
        assert second.expert_offsets[-1] == m // 2 * given.k


def test_graphs_of_many_calls_side_by_side(kernel):
    calls = [preset_call("deepseek-v3", m, 7168, torch.bfloat16, "cuda") for m in (1, 16, 100, 3)]
    wants = [given.route() for given in calls]
    torch.cuda.synchronize()
    streams, graphs, outs = [torch.cuda.Stream() for _ in range(2)], [], []
    for stream in streams:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=stream):
            outs.append([given.route() for given in calls * 3])
    for _ in range(20):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for found in outs:
        for got, want in zip(found, wants * 3, strict=True):
            assert_same_routing(got, want)


def test_streams_side_by_side(kernel):
    calls = [preset_call(name, m, 2048, torch.bfloat16, "cuda") for name, m in (("deepseek-v3", 48), ("kimi-k2", 512))]
    wants = [given.route() for given in calls]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    found = [[], []]
    for _ in range(50):
        for given, stream, mine in zip(calls, streams, found, strict=True):
            with torch.cuda.stream(stream):
                mine.append(given.route())
    torch.cuda.synchronize()
    for mine, want in zip(found, wants, strict=True):
        for got in mine:
            assert_same_routing(got, want)


def test_calls_back_to_back(kernel):
    """Check calls with no wait between them: a counter not reset by one would spoil the next."""
    sizes = (("deepseek-v3", 48), ("kimi-k2", 512), ("mixtral", 144), ("deepseek-v3", 4096), ("kimi-k2", 16))
    calls = [preset_call(name, m, 2048, torch.bfloat16, "cuda") for name, m in sizes]
    for given in calls:  # compiled first
        given.route()
    found = [given.route() for given in (*calls, *calls[::-1], *calls)]
    for given, got in zip((*calls, *calls[::-1], *calls), found, strict=True):
        judge(given, got)


def test_wanted_outputs_change_nothing(kernel):
    given = preset_call("deepseek-v3", 144, 2048, torch.bfloat16, "cuda")
    whole = given.route()
    for wish in EVERYTHING:
        assert_same_routing(given.route(**{wish: True}), whole)


@pytest.mark.parametrize("m", [16, 4096])
def test_compiled_by_torch_into_graphs(m):
    """Check graphs before any other call: the workspace allocated now mustn't be in the graphs' memory."""
    given = preset_call("deepseek-v3", m, 7168, torch.bfloat16, "cuda")
    workspace._counters, workspace._blanks = workspace.Kept(0), workspace.Kept(workspace.BLANK)

    def step(tokens, gate, bias):
        got = route(tokens, gate, 8, rule="deepseek-v3", expert_bias=bias, **EVERYTHING)
        return got.topk_weights, got.topk_ids, got.expert_offsets

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, mode="reduce-overhead")
    for seed in range(5):
        tokens = normal(m, 7168, seed=seed, device="cuda").bfloat16()
        torch.compiler.cudagraph_mark_step_begin()
        found = [x.clone() for x in compiled(tokens, given.gate, given.expert_bias)]
        for got, want in zip(found, step(tokens, given.gate, given.expert_bias), strict=True):
            assert_same_bits(got, want)

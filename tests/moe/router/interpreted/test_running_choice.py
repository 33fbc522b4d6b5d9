"""Choice of experts as their logits come by in chunks, as the Blackwell kernel makes it in each thread's rows."""

from itertools import product

import pytest
import torch
import triton
import triton.language as tl

from envoi.ops.moe.router import PRESETS, Rule, reference
from envoi.ops.moe.router.device_types import Args, Outputs, Positions, Scalars, Tables
from envoi.ops.moe.router.host import spec_of
from envoi.ops.moe.router.running_choice import choose_running
from tests.helpers.accuracy import assert_same_bits
from tests.helpers.inputs import LOGITS, logits, normal
from tests.helpers.slow import mostly_slow
from tests.moe.router.sides import Given, assert_as_good
from tests.moe.router.test_exact import distinct_presets
from tests.moe.router.test_selection import RULES

ROWS, TILE, CHUNK = 13, 16, 32
QUICK = ["qwen3-moe", "step-3.7", "gpt-oss-20b", "deepseek-v2", "beam"]


@triton.jit
def chunk_of(products, i):
    """Load a chunk of products [TILE, columns], which are in memory."""
    pointers, width = products
    at = tl.arange(0, 16)[:, None] * width + i * 32 + tl.arange(0, 32)[None, :]
    return tl.load(pointers + at)


@triton.jit
def rows_kernel(products, width, num_rows, scalars, tables, outputs, NUM_CHUNKS: tl.constexpr, spec: tl.constexpr):
    """Choose experts of rows by products that are in memory, where Blackwell's are in tensor memory."""
    rows = tl.arange(0, 16)
    positions = Positions(tl.arange(0, 32)[None, :], tl.arange(0, spec.slots)[None, :], None)
    args = Args(scalars, tables, outputs)
    choose_running((products, width), rows, rows < num_rows, positions, args, chunk_of, NUM_CHUNKS, spec)


def chosen(x, k, rule, alpha=1.0, logit_bias=None, expert_bias=None):
    """Return weights, ids, logits, dense weights and counts of experts of products x [ROWS, N]."""
    rows, n = x.shape
    spec = spec_of(n, k, rule, logit_bias, expert_bias, False, (True, True, True))
    num_chunks = -(-n // CHUNK)
    products = torch.full((TILE, num_chunks * CHUNK), 7.0)  # of columns and rows that don't exist
    products[:rows, :n] = x
    weights, ids = torch.full((TILE, k), torch.nan), torch.full((TILE, k), -7, dtype=torch.int32)
    stored, dense = torch.full((rows, n), torch.nan), torch.full((rows, n), torch.nan)
    counts = torch.zeros(n, dtype=torch.int32)
    rows_kernel[(1,)](
        products, products.shape[1], rows, Scalars(alpha, rule.routed_scale, k),
        Tables(logit_bias, expert_bias, None, None, 0), Outputs(weights, ids, stored, dense, counts), num_chunks, spec,
    )  # fmt: skip
    assert bool((ids[rows:] == -7).all()), "rows that don't exist were stored"
    return weights[:rows], ids[:rows], stored, dense, counts


def judge(x, k, rule, alpha=1.0, logit_bias=None, expert_bias=None):
    """Assert the reference's experts, weights to a few roundings, and the dense weights and counts that these imply."""
    weights, ids, stored, dense, counts = chosen(x, k, rule, alpha, logit_bias, expert_bias)
    want = x * alpha if logit_bias is None else x * alpha + logit_bias
    assert_same_bits(stored, want)
    best, want_ids = reference.select(want, k, rule, expert_bias)
    if rule.score == "softmax" and expert_bias is not None:
        given = Given(x, x, k, rule, expert_bias=expert_bias)
        assert_as_good(given, want, ids, want_ids)
        best = reference.weigh(want, reference.scores(want, rule), ids.long(), rule)
    else:
        assert_same_bits(ids, want_ids)
    torch.testing.assert_close(weights, best, rtol=4e-6, atol=1e-36)
    assert_same_bits(dense, reference.to_dense(weights, ids, x.shape[1]))
    assert_same_bits(counts, reference.count_tokens(ids, x.shape[1]))


@pytest.mark.parametrize("name", mostly_slow(distinct_presets(), QUICK))
def test_models(name):
    known = PRESETS[name]
    n = known.num_experts
    judge(
        normal(ROWS, n), known.num_topk, known.rule, known.alpha, normal(n, seed=3) if known.has_logit_bias else None,
        normal(n, seed=2) * 0.1 if known.has_expert_bias else None,
    )  # fmt: skip


IN_TURN = [
    (kind, rule, i % 2 == 0) for i, kind in enumerate(LOGITS) for j, rule in enumerate(RULES) if (i // 2 + j) % 4 == 0
]


@pytest.mark.parametrize(("kind", "rule", "biased"), mostly_slow(product(LOGITS, RULES, [False, True]), IN_TURN))
def test_hostile_logits(kind, rule, biased):
    """Check ties across chunks, mixed signs, logits that aren't finite, a barred expert."""
    n, k = 40, 5
    bias = normal(n, seed=7).mul(0.2).index_fill(0, torch.tensor(3), -torch.inf) if biased else None
    judge(logits(kind, ROWS, n, k), k, RULES[rule], expert_bias=bias)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (8, 8), (33, 3), (64, 32), (130, 9)])
def test_sizes(n, k):
    for kind in ("crowded around 1", "ties at the boundary"):
        judge(logits(kind, ROWS, n, k), k, Rule("sigmoid"), expert_bias=normal(n) * 0.01)
        judge(logits(kind, ROWS, n, k), k, Rule(renormalize=False))


def test_biases_and_alpha():
    bias = normal(40, seed=5)
    bias[7], bias[8], bias[9] = torch.nan, torch.inf, -torch.inf
    for rule in (Rule("sqrt_softplus"), Rule("softmax_over_topk", renormalize=False)):
        judge(normal(ROWS, 40), 5, rule, -3.0, bias)
    weights, ids, *_, counts = chosen(normal(ROWS, 40), 5, Rule(), float("nan"))
    assert bool((ids == -1).all()) and bool((weights == 0).all()) and not bool(counts.any())

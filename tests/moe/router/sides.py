"""Judges of the router's kernels, and tokens and gates whose products are given logits."""

from dataclasses import dataclass
from typing import Any

import torch

from envoi.ops.moe.router import PRESETS, Rule, reference, route
from envoi.types import Routing
from tests.helpers.accuracy import assert_same_bits, relative_error
from tests.helpers.inputs import normal

EVERYTHING = {"return_logits": True, "return_dense": True, "return_counts": True}
FIELDS = ("topk_weights", "topk_ids", "logits", "dense", "num_tokens_per_expert", "expert_offsets")
PIECES = 3  # bf16 numbers that make up a float32
SPACING = 64  # columns between the pieces, so that no tensor core adds two of them before it rounds
TOKEN = 16.0
OVERFLOW = 3e38  # times TOKEN it is infinite
ROUNDINGS = 1.2e-6  # error of Hopper's tensor cores where torch's kernel rounds every sum, as for N = 130


@dataclass(frozen=True)
class Given:
    """Arguments of one call of `envoi.route`."""

    tokens: torch.Tensor
    gate: torch.Tensor
    k: int
    rule: Rule
    alpha: float = 1.0
    logit_bias: torch.Tensor | None = None
    expert_bias: torch.Tensor | None = None
    token_ids: torch.Tensor | None = None
    hash_table: torch.Tensor | None = None

    def route(self, **wanted: Any) -> Routing:
        """Call `envoi.route`, for all outputs unless some are named."""
        return route(
            self.tokens, self.gate, self.k, self.alpha, rule=self.rule, logit_bias=self.logit_bias,
            expert_bias=self.expert_bias, token_ids=self.token_ids, hash_table=self.hash_table,
            **(wanted or EVERYTHING),
        )  # fmt: skip


def random_call(
    m: int, n: int, hidden: int, k: int, rule: Rule, dtype=torch.float32, device: str = "cpu", **rest
) -> Given:
    """Make normal tokens and a gate whose logits are about as large."""
    tokens, gate = normal(m, hidden, device=device), normal(n, hidden, seed=1, device=device) / hidden**0.5
    return Given(tokens.to(dtype), gate.to(dtype), k, rule, **rest)


def preset_call(name: str, m: int, hidden: int, dtype=torch.float32, device: str = "cpu") -> Given:
    """Make a call of a model's router, with the biases that it has, of normal tokens."""
    chosen = PRESETS[name]
    n = chosen.num_experts
    biases = {
        "expert_bias": normal(n, seed=2, device=device) * 0.1 if chosen.has_expert_bias else None,
        "logit_bias": normal(n, seed=3, device=device) if chosen.has_logit_bias else None,
    }
    return random_call(m, n, hidden, chosen.num_topk, chosen.rule, dtype, device, **biases)


def as_product(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Make tokens and a gate whose product is x [R, N], also where not finite (but for fp16, which can't overflow).

    A token is zero but for a few columns of its own, in which the gate has the pieces of its logits. If products
    aren't rounded before they are added, a NaN becomes an infinity.
    """
    rows, spacing = x.shape[0], -(-x.shape[0] // SPACING) * SPACING
    tokens, gate = torch.zeros(rows, PIECES * spacing), torch.zeros(x.shape[1], PIECES * spacing)
    left = torch.where(x.isfinite(), x / TOKEN, 0.0)
    for p in range(PIECES):
        columns = torch.arange(rows) + p * spacing
        tokens[torch.arange(rows), columns] = TOKEN
        piece = left.to(dtype).float()
        left = left - piece
        if p == 0:
            piece = torch.where(x.isinf(), x.sign() * OVERFLOW, torch.where(x.isnan(), OVERFLOW, piece))
        if p == 1:
            piece = torch.where(x.isnan(), -OVERFLOW, piece)
        gate[:, columns] = piece.T
    return tokens.to(dtype), gate.to(dtype)


def assert_meant(logits: torch.Tensor, x: torch.Tensor) -> None:
    """Assert that these are the logits that `as_product` was given."""
    logits, finite = logits.to(x.device), x.isfinite()
    assert torch.equal(logits.isfinite(), finite)
    torch.testing.assert_close(logits[finite], x[finite], rtol=2e-6, atol=1e-6)


def expected(given: Given, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and ids by the reference, from the kernel's own logits."""
    if given.token_ids is None or given.hash_table is None:
        return reference.select(logits, given.k, given.rule, given.expert_bias)
    chosen = looked_up(given.token_ids, given.hash_table, logits.shape[1])
    chosen = chosen.masked_fill(~logits.isfinite().gather(1, chosen.clamp(min=0)), -1)
    return reference.weigh(logits, reference.scores(logits, given.rule), chosen, given.rule), chosen.int()


def looked_up(token_ids: torch.Tensor, hash_table: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Look up the table's experts, int64; -1 for a token outside the table or an expert outside the gate."""
    inside = (token_ids >= 0) & (token_ids < len(hash_table))
    ids = hash_table[torch.where(inside, token_ids, 0).long()].long()
    return torch.where(inside[:, None] & (ids >= 0) & (ids < num_experts), ids, -1)


def judge(given: Given, got: Routing) -> None:
    """Assert exact experts, weights to a few roundings, and all other outputs exactly as these imply."""
    num_experts = given.gate.shape[0]
    assert got.logits is not None
    assert got.num_tokens_per_expert is not None
    weights, ids = expected(given, got.logits)
    if given.rule.score == "softmax" and given.expert_bias is not None and given.token_ids is None:
        assert_as_good(given, got.logits, got.topk_ids, ids)
        weights = reference.weigh(got.logits, reference.scores(got.logits, given.rule), got.topk_ids.long(), given.rule)
    else:
        assert_same_bits(got.topk_ids, ids)
    torch.testing.assert_close(got.topk_weights, weights, rtol=4e-6, atol=1e-36)
    assert_same_bits(got.dense, reference.to_dense(got.topk_weights, got.topk_ids, num_experts))
    counts = reference.count_tokens(got.topk_ids, num_experts)
    assert_same_bits(got.num_tokens_per_expert, counts)
    assert_same_bits(got.expert_offsets, reference.exclusive_offsets(counts))


def assert_as_good(given: Given, logits: torch.Tensor, ids: torch.Tensor, want: torch.Tensor) -> None:
    """Assert that the chosen have the right keys, to a few roundings: a softmax's sum depends on its order."""
    assert_same_bits(ids < 0, want < 0)
    key = reference.selection_key(logits, reference.scores(logits, given.rule), given.rule, given.expert_bias)
    if given.rule.num_groups > 1:
        key = reference.keep_best_groups(key, given.rule)
    for row in ids.tolist():
        chosen = [i for i in row if i >= 0]
        assert len(set(chosen)) == len(chosen)
    mine, theirs = (key.gather(1, x.long().clamp(min=0)) for x in (ids, want))
    torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=2e-7)


def judge_logits(given: Given, logits: torch.Tensor) -> None:
    """Assert at most twice the error of torch's own product, summed in float32."""
    bias = 0.0 if given.logit_bias is None else given.logit_bias
    exact = given.alpha * (given.tokens.double() @ given.gate.double().T) + bias
    torchs = given.alpha * torchs_product(given.tokens, given.gate) + bias
    mine, theirs = relative_error(logits, exact), relative_error(torchs, exact)
    assert mine <= 2 * theirs + ROUNDINGS, f"error {mine:.3g}, torch's {theirs:.3g}"


def torchs_product(tokens: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Multiply by torch, float32; on a GPU by the tensor cores that the kernels use."""
    if tokens.is_cuda and tokens.dtype == gate.dtype and tokens.dtype != torch.float32:
        return torch.mm(tokens, gate.T, out_dtype=torch.float32)
    return tokens.float() @ gate.float().T


def assert_same_routing(got: Routing, want: Routing, rows: slice = slice(None)) -> None:
    """Assert equal bits in all outputs that both have; of outputs by token, with `rows` of `want`."""
    for name in FIELDS:
        mine, theirs = getattr(got, name), getattr(want, name)
        if mine is not None and theirs is not None:
            assert_same_bits(mine, theirs if name in FIELDS[4:] else theirs[rows])

"""Public function `envoi.route`: check the arguments, call the operator, wrap the result; and steps after it."""

import re
from typing import Any

import torch

from envoi.check import describe, expect_bool, expect_float32, expect_int, expect_tensor
from envoi.ops.moe.router import host, reference
from envoi.ops.moe.router.presets import named
from envoi.ops.moe.router.spec import Rule
from envoi.runtime.custom_op import operator
from envoi.runtime.prepared import exactly, prepared
from envoi.types import Routing, expect_routing

MAX_EXPERTS = 1024
MAX_TOPK = 32
DEFAULT_RULE = Rule()
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def _given(
    tokens, gate, k, alpha=None, *, rule=DEFAULT_RULE, logit_bias=None, expert_bias=None, token_ids=None,
    hash_table=None, return_logits=False, return_dense=False, return_counts=False, weights_dtype=torch.float32,
    batch_invariant=True,
):  # fmt: skip
    scale = exactly(rule.routed_scale) if type(rule) is Rule else None
    constants = exactly(k), exactly(alpha), rule, scale, return_logits, return_dense, return_counts, weights_dtype
    constants += (exactly(batch_invariant),)
    return constants, (tokens, gate, logit_bias, expert_bias, token_ids, hash_table)


@prepared(_given)
def route(
    tokens: torch.Tensor, gate: torch.Tensor, k: int, alpha: float | None = None, *,
    rule: Rule | str = DEFAULT_RULE, logit_bias: torch.Tensor | None = None, expert_bias: torch.Tensor | None = None,
    token_ids: torch.Tensor | None = None, hash_table: torch.Tensor | None = None, return_logits: bool = False,
    return_dense: bool = False, return_counts: bool = False, weights_dtype: torch.dtype = torch.float32,
    batch_invariant: bool = True, out: Routing | None = None, workspace: torch.Tensor | None = None,
    num_sms: int | None = None,
) -> Routing:  # fmt: skip
    """Choose k experts for each token: GEMM, score, selection and weights in one operator.

    tokens [M, hidden] and gate [N, hidden], each bf16, fp16 or fp32; products are summed in fp32. N from 1 to 1024,
    k from 1 to 32, hidden any multiple of 8, M from 0. Tokens [B, S, hidden] are M = B * S tokens, row by row: all
    fields of the Routing have M rows. In torch.autocast nothing is cast: rounded logits would choose other experts.
    alpha: multiplies the product before anything else; None is 1, or what the model that `rule` names has.
    rule: a Rule, or a model's name ("deepseek-v3"); the default is softmax, top-k, renormalised: weights are divided by
        (their sum + 1e-20), so that a sum as small as that, of underflowed scores, doesn't become 1.
    logit_bias [N] float: added to the logits (gpt-oss). expert_bias [N] float: added to the score for selection only
    (DeepSeek-V3); -inf there disables an expert. Each is one for all tokens. Where they differ (image tokens of
    DeepSeek-V4.1), call once with each and choose rows with torch.where: a token's result is its own.
    token_ids [M] or [B, S], int32 or int64, with hash_table [vocabulary, k] int32 or int64: experts are looked up by
    token instead of selected (DeepSeek-V4's first layers); weights come from the scores as always. -1 in the table is
    a slot without an expert.
    out, workspace, num_sms: as in `envoi.gemm`.
    return_logits, return_dense, return_counts: also fill those fields (counts: `num_tokens_per_expert`
        and `expert_offsets`).
    weights_dtype: float32, bf16 or fp16, of the fields topk_weights and dense; each weight is rounded once, to nearest.
        An fp16 weight beyond 65504, which only unscaled logits or a large routed_scale give, is infinite.
    batch_invariant: give a token the same bits whatever other tokens there are and however many. False may be faster
        on Hopper with 1024 tokens and more of 129 experts and more (docs/routers.md): logits may then be summed in
        another order (they err by up to 1e-5 of the largest, not 1e-6), so that the last bits of weights, and experts
        whose logits are that near, may depend on the number of tokens.

    Selection is exact for the fp32 logits, and the smaller id wins a tie. Logits that are NaN or infinite never win;
    slots without an expert get id -1 and weight 0.
    On a GPU it is one kernel. On Hopper bf16 or fp16 tokens with a gate of the same dtype have a kernel of their own,
    many tokens of many experts two, which overlap; float32, mixed dtypes and other GPUs run on a Triton kernel, rules
    of more than 32 groups and CPUs on the torch reference.
    Raises ValueError for wrong dtypes, shapes or devices, k > N, groups that don't divide N, names of several models or
    of a router that no Rule describes. A token id outside the table, an id in it that isn't from -1 to N - 1, or one
    twice in a row, is a ValueError too where the reference runs; kernels, whose values the host doesn't see, give the
    slot of the first two id -1 and weight 0, and take the last as it is, for a Routing whose ids aren't distinct.
    Source of the rules: the models' own published code; of their numbers: see `envoi.router.PRESETS`.
    """
    tokens, token_ids = _rows(tokens, token_ids)
    chosen, alpha = check_arguments(
        tokens, gate, k, alpha, rule, logit_bias, expert_bias, token_ids, hash_table, return_logits, return_dense,
        return_counts, weights_dtype, batch_invariant,
    )  # fmt: skip
    outputs = _route(
        tokens, gate, k, alpha, chosen.score, chosen.num_groups, chosen.num_topk_groups,
        chosen.group_score, chosen.renormalize, float(chosen.routed_scale), logit_bias, expert_bias, token_ids,
        hash_table, return_logits, return_dense, return_counts, weights_dtype, batch_invariant,
    )  # fmt: skip
    wanted = ("logits",) * return_logits + ("dense",) * return_dense
    wanted += ("num_tokens_per_expert", "expert_offsets") * return_counts
    return Routing(outputs[0], outputs[1], gate.shape[0], **dict(zip(wanted, outputs[2:], strict=True)))


def replay(
    tokens: torch.Tensor, gate: torch.Tensor, topk_ids: torch.Tensor, alpha: float | None = None, *,
    rule: Rule | str = DEFAULT_RULE, **options: Any,
) -> Routing:  # fmt: skip
    """Weigh experts that were chosen before: routing replay, as reinforcement learning has it.

    A trainer and a sampler whose gates differ by rounding choose different experts for a few tokens, and the ratio of
    their probabilities explodes there. With the sampler's recorded ids the trainer computes the same experts; weights,
    and what else is asked for, come from this gate and this rule, as `route` computes them.

    topk_ids [M, k] or [B, S, k], int32 or int64: experts of each token, in the order of slots. -1 is a slot without an
    expert and stays one, with weight 0. tokens, gate, alpha, rule, options: as in `route`, without token_ids and
    hash_table, which this fills: row m of the table belongs to token m.
    Raises ValueError as `route` does, and if topk_ids isn't one row of k for each token.
    """
    tokens, _ = _rows(expect_tensor("tokens", tokens, FLOATS), None)
    given = expect_tensor("topk_ids", topk_ids, (torch.int32, torch.int64))
    recorded = given.flatten(0, 1) if given.dim() == 3 else given
    if recorded.dim() != 2 or recorded.shape[0] != tokens.shape[0]:
        rows = f"a row of k for each of {tokens.shape[0]} tokens"
        raise ValueError(f"topk_ids: expected {rows}, got {describe(topk_ids)}")
    names = torch.arange(tokens.shape[0], device=tokens.device, dtype=torch.int32)
    k = recorded.shape[1]
    try:
        return route(tokens, gate, k, alpha, rule=rule, token_ids=names, hash_table=recorded, **options)
    except ValueError as error:  # the caller knows the table by another name
        raise ValueError(re.sub("^hash_table:", "topk_ids:", str(error))) from None


def _rows(tokens: Any, token_ids: Any) -> tuple[Any, Any]:
    """Flatten tokens [B, S, hidden] to [B * S, hidden], and their ids alike; return anything else unchanged."""
    if not isinstance(tokens, torch.Tensor) or tokens.dim() != 3:
        return tokens, token_ids
    if isinstance(token_ids, torch.Tensor) and token_ids.shape == tokens.shape[:2]:
        token_ids = token_ids.flatten()
    return tokens.flatten(0, 1), token_ids


def check_arguments(
    tokens, gate, k, alpha, rule, logit_bias, expert_bias, token_ids, hash_table, return_logits, return_dense,
    return_counts, weights_dtype=torch.float32, batch_invariant=True,
) -> tuple[Rule, float]:  # fmt: skip
    """Return rule and alpha, those of a model's name too; raise ValueError unless all are as `route` takes them."""
    usual = 1.0
    if isinstance(rule, str):
        model = named("rule", rule)
        rule, usual = model.rule, model.alpha
    _check_tensors(tokens, gate, k, rule, logit_bias, expert_bias, token_ids, hash_table)
    expect_bool("return_logits", return_logits)
    expect_bool("return_dense", return_dense)
    expect_bool("return_counts", return_counts)
    expect_bool("batch_invariant", batch_invariant)
    if weights_dtype not in FLOATS:
        raise ValueError(f"weights_dtype: expected torch.bfloat16, float16 or float32, got {weights_dtype!r}")
    return rule, usual if alpha is None else float(expect_float32("alpha", alpha))


def _check_tensors(tokens, gate, k, rule, logit_bias, expert_bias, token_ids, hash_table) -> None:
    expect_tensor("tokens", tokens, FLOATS, ("num_tokens", "hidden"))
    expect_tensor("gate", gate, FLOATS, ("num_experts", tokens.shape[1]), tokens.device)
    num_experts, hidden = gate.shape
    if hidden % 8 or hidden == 0:
        raise ValueError(f"tokens.shape[1]: expected hidden to be a positive multiple of 8, got {hidden}")
    expect_int("gate.shape[0]", int(num_experts), 1, MAX_EXPERTS, "num_experts")
    expect_int("k", k, 1, MAX_TOPK)
    if k > num_experts:
        raise ValueError(f"k: expected at most num_experts = {num_experts}, got {k}")
    if not isinstance(rule, Rule):
        raise ValueError(f"rule: expected a Rule or a model's name, got {type(rule).__name__}")
    rule.check_num_experts(num_experts, k)
    for name, bias in (("logit_bias", logit_bias), ("expert_bias", expert_bias)):
        if isinstance(bias, torch.Tensor) and bias.dim() == 2:
            raise ValueError(
                f"{name}: expected one bias for all tokens, [{num_experts}], got {describe(bias)}; "
                "call route once with each bias and choose rows with torch.where"
            )
        if bias is not None:
            expect_tensor(name, bias, FLOATS, (num_experts,), tokens.device)
    if (token_ids is None) != (hash_table is None):
        raise ValueError("token_ids, hash_table: expected both or neither, got one of them")
    if token_ids is not None:
        ints = (torch.int32, torch.int64)
        expect_tensor("token_ids", token_ids, ints, (tokens.shape[0],), tokens.device)
        expect_tensor("hash_table", hash_table, ints, ("vocabulary", k), tokens.device)


def _route_fake(tokens, gate, k, alpha, score, num_groups, num_topk_groups, group_score, renormalize, routed_scale,
                logit_bias, expert_bias, token_ids, hash_table, return_logits, return_dense, return_counts,
                weights_dtype, batch_invariant=True):  # fmt: skip
    num_tokens, num_experts = tokens.shape[0], gate.shape[0]
    outputs = [
        tokens.new_empty(num_tokens, k, dtype=weights_dtype),
        tokens.new_empty(num_tokens, k, dtype=torch.int32),
    ]
    for wanted, dtype in ((return_logits, torch.float32), (return_dense, weights_dtype)):
        if wanted:
            outputs.append(tokens.new_empty(num_tokens, num_experts, dtype=dtype))
    if return_counts:
        outputs.append(tokens.new_empty(num_experts, dtype=torch.int32))
        outputs.append(tokens.new_empty(num_experts + 1, dtype=torch.int32))
    return outputs


def _route_flops(tokens, gate, *arguments):
    return 2 * tokens.shape[0] * gate.numel()


@operator("route", _route_fake, _route_flops)
def _route(
    tokens: torch.Tensor, gate: torch.Tensor, k: int, alpha: float, score: str, num_groups: int, num_topk_groups: int,
    group_score: str, renormalize: bool, routed_scale: float, logit_bias: torch.Tensor | None,
    expert_bias: torch.Tensor | None, token_ids: torch.Tensor | None, hash_table: torch.Tensor | None,
    return_logits: bool, return_dense: bool, return_counts: bool, weights_dtype: torch.dtype,
    batch_invariant: bool = True,
) -> list[torch.Tensor]:  # fmt: skip
    rule = Rule(score, num_groups, num_topk_groups, group_score, renormalize, routed_scale)
    num_experts = gate.shape[0]
    if host.supported(tokens.device, rule):
        wanted = return_logits, return_dense, return_counts
        spec = host.spec_of(num_experts, k, rule, logit_bias, expert_bias, token_ids is not None, wanted)
        tables = logit_bias, expert_bias, token_ids, hash_table
        return host.run_router(
            host.Call(tokens, gate, spec, alpha, routed_scale, *tables, weights_dtype, batch_invariant)
        )
    logits = reference.router_logits(tokens, gate, alpha, logit_bias)
    if token_ids is None or hash_table is None:
        weights, ids = reference.select(logits, k, rule, expert_bias)
    else:
        chosen = _look_up(token_ids, hash_table, num_experts)
        chosen = chosen.masked_fill(~logits.isfinite().gather(1, chosen.clamp(min=0)), -1)
        weights = reference.weigh(logits, reference.scores(logits, rule), chosen, rule)
        ids = chosen.to(torch.int32)
    weights = weights.to(weights_dtype)
    outputs = [weights, ids]
    if return_logits:
        outputs.append(logits)
    if return_dense:
        outputs.append(reference.to_dense(weights, ids, num_experts))
    if return_counts:
        counts = reference.count_tokens(ids, num_experts)
        outputs += [counts, reference.exclusive_offsets(counts)]
    return outputs


def _look_up(token_ids: torch.Tensor, hash_table: torch.Tensor, num_experts: int) -> torch.Tensor:
    checked = (("token_ids", token_ids, 0, hash_table.shape[0]), ("hash_table", hash_table, -1, num_experts))
    for name, values, least, bound in checked:
        if values.numel() and (int(values.min()) < least or int(values.max()) >= bound):
            span = f"{int(values.min())} to {int(values.max())}"
            raise ValueError(f"{name}: expected values from {least} to {bound - 1}, got values from {span}")
    chosen = hash_table[token_ids.long()].long()
    ordered = chosen.sort(1).values
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1)
    if twice.any():
        raise ValueError(f"hash_table: expected distinct experts in a row, got {chosen[twice][0].tolist()}")
    return chosen


# Steps after `route`, for models whose gate has rows that are no routed experts


def split_identity(routing: Routing, num_experts: int) -> tuple[Routing, torch.Tensor]:
    """Split a routing whose experts from id num_experts on are the identity (LongCat-Flash's zero-computation experts).

    Returns the Routing of the first num_experts, in which slots of the others are masked (id -1, weight 0; no logits,
    dense weights or counts), and each token's weight of the others together, [M] float32. With both:

        real, identity = split_identity(routing, 512)
        y = (envoi.moe(tokens, real, experts) + identity[:, None] * tokens).to(tokens.dtype)  # added in float32

    Raises ValueError unless num_experts is from 1 to routing.num_experts.
    """
    expect_routing(routing)
    expect_int("num_experts", num_experts, 1, routing.num_experts, "those of the routing")
    others = routing.topk_ids >= num_experts
    identity = routing.topk_weights.masked_fill(~others, 0.0).sum(1, dtype=torch.float32)
    weights, ids = routing.topk_weights.masked_fill(others, 0.0), routing.topk_ids.masked_fill(others, -1)
    return Routing(weights, ids, num_experts), identity


def weigh_with_shared(routing: Routing, num_shared: int, scale: float = 1.0) -> tuple[Routing, torch.Tensor]:
    """Weigh the chosen and the shared experts by their sigmoids, divided by the sum of all of them (Inkling).

    The shared experts are the gate's last num_shared rows, and must be kept from being chosen: give `envoi.route` that
    gate, an expert_bias that is -inf there, and return_logits=True. The weights of the routing aren't read.

        weight_i = scale * sigmoid(logit_i) / (sum of sigmoids of the chosen + sum of sigmoids of the shared)

    Returns the Routing of the other experts, with these weights, and the weights of the shared ones, [M, num_shared]
    float32. Sums are of logarithms, so that tiny sigmoids add up to scale too. Source: Inkling's published model code.
    Raises ValueError unless the routing has logits and num_shared is from 1 to routing.num_experts - 1.
    """
    expect_routing(routing)
    expect_int("num_shared", num_shared, 1, routing.num_experts - 1, "the routing's experts, less one")
    expect_float32("scale", scale)
    if routing.logits is None:
        raise ValueError("routing.logits: expected the router logits, got None; call route with return_logits=True")
    masked, num_experts = routing.topk_ids < 0, routing.num_experts - num_shared
    logits = expect_tensor("routing.logits", routing.logits, torch.float32, (len(masked), routing.num_experts))
    chosen = logits.gather(1, routing.topk_ids.clamp(min=0).long()).masked_fill(masked, -torch.inf)
    both = torch.cat((chosen, logits[:, num_experts:]), 1)
    weights = torch.nn.functional.logsigmoid(both).softmax(1) * scale
    k = masked.shape[1]
    return Routing(weights[:, :k].masked_fill(masked, 0.0), routing.topk_ids, num_experts), weights[:, k:]

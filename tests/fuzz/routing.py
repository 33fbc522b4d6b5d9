"""Cases of `envoi.route`: rules, groups, biases, tables, hostile logits.

An order of experts is wrong only if float32 can't have found it: i is surely before j if its key is larger by more than
both keys' errors, or if both have equal logits and biases, so equal keys, and i < j.
"""

from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch

import envoi
from envoi.ops.moe.router.host import supported
from envoi.ops.moe.router.spec import RANKED_BY_LOGITS, SCORES, Rule
from tests.fuzz import approx
from tests.fuzz.approx import Approx, Arithmetic, exact, wrong
from tests.fuzz.draw import KINDS, Case, Draw, host
from tests.fuzz.formats import round_to

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
EPS = 1e-20  # added to the sum that weights are divided by
U = 2.0**-22
MOST_CHOICES = 300  # sets of groups that are tried where rounding may have chosen any of them


@dataclass(frozen=True)
class Given:
    """Arguments of a case in float64: logits with their error, biases, the experts of a table [M, k] or None."""

    logits: Approx
    expert_bias: torch.Tensor | None
    table: torch.Tensor | None
    rule: Rule
    k: int
    has_logits: bool
    arithmetic: Arithmetic


def route(draw: Draw) -> Case:
    """Draw a case."""
    M = draw.rows(1, draw.most(10, 60, 400), 0.04)
    N, k, rule = drawn_rule(draw)
    hidden = draw.form.size(8, draw.most(64, 512, 2048), 8)
    kind = draw.one((*KINDS, "same experts", "few experts"))
    gpu = draw.device.type == "cuda"
    tokens, gate = inputs(draw, kind, M, N, hidden)
    alpha = draw.one((1.0, 1.0, 0.125, -1.0, 30.0, 1e-3, 0.0))
    logit_bias, expert_bias = bias(draw, N, 0.3), bias(draw, N, 0.4)
    token_ids, table, outside = hashed(draw, M, N, k) if draw.form.chance(0.12) else (None, None, False)
    kernels = supported(draw.device, rule)
    wants = {name: draw.form.chance(share) for name, share in (("logits", 0.8), ("dense", 0.5), ("counts", 0.5))}
    text = (
        f"M {M} N {N} k {k} hidden {hidden}, {kind}, {tokens.dtype} x {gate.dtype}, alpha {alpha}, {rule}, logit bias "
        f"{logit_bias is not None}, expert bias {expert_bias is not None}, table {table is not None}"
    )
    placed = {
        "tokens": draw.placed(tokens), "gate": draw.placed(gate), "k": k, "alpha": alpha, "rule": rule,
        **{f"return_{name}": wanted for name, wanted in wants.items()},
    }  # fmt: skip
    for name, x in (("logit_bias", logit_bias), ("expert_bias", expert_bias)):
        placed[name] = None if x is None else x.to(draw.device)
    if table is not None and token_ids is not None:
        placed |= {"token_ids": token_ids.to(draw.device), "hash_table": table.to(draw.device)}

    def judge(got: Any) -> str:
        arithmetic = Arithmetic(gpu)
        logits = logits_of(host(tokens), host(gate), alpha, logit_bias, arithmetic)
        looked_up = None
        if table is not None and token_ids is not None:
            ids = token_ids.long()
            inside = (ids >= 0) & (ids < len(table))
            rows = table.long()[torch.where(inside, ids, 0)].masked_fill(~inside[:, None], -1)
            looked_up = rows.masked_fill((rows < 0) | (rows >= N), -1)
        wide = None if expert_bias is None else host(expert_bias)
        return judge_routing(got, Given(logits, wide, looked_up, rule, k, wants["logits"], arithmetic), wants)

    return Case(text, lambda: envoi.route(**placed), judge, refused=outside and not kernels)


def drawn_rule(draw: Draw) -> tuple[int, int, Rule]:
    """Draw the number of experts, k and a rule that allows them."""
    draw = draw.form
    groups = draw.one((1, 1, 1, 2, 3, 4, 8, 40))
    size = draw.size(2 if groups > 1 else 1, max(2, draw.most(64, 300, 1024) // groups))
    N = groups * size
    kept = draw.random.randint(1, groups)
    k = draw.one((1, min(32, kept * size), draw.random.randint(1, min(32, kept * size))))
    score, group_score, renormalize = draw.one(SCORES), draw.one(("max", "top2_sum")), draw.chance(0.5)
    rule = Rule(score, groups, kept, group_score, renormalize and score != "identity", draw.one((1.0, 2.5, -1.0)))
    return N, k, rule


def inputs(draw: Draw, kind: str, M: int, N: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw tokens and gate of some dtypes; "same experts" has equal rows in the gate, "few experts" NaN in most."""
    tokens = draw.values(kind if kind in KINDS else "normal", M, hidden)
    gate = draw.values("whole" if kind == "whole" else draw.one(KINDS[:4]), N, hidden)
    gate = gate * draw.one((1.0, hidden**-0.5)) if kind != "whole" else gate
    if kind == "same experts":
        gate = gate[draw.ints(0, max(0, N // 3), N)]
    if kind == "few experts":
        gate[draw.uniform(N) < draw.one((0.5, 0.9, 1.0))] = draw.one((torch.nan, torch.inf))
    elif draw.chance(0.15):
        tokens = draw.poisoned(tokens)
    form = draw.form
    dtype = form.one(FLOATS)
    return tokens.to(dtype), gate.to(dtype if form.chance(0.8) else form.one(FLOATS))


def bias(draw: Draw, N: int, share: float) -> torch.Tensor | None:
    """Draw a bias [N], rarely with numbers that aren't finite; None but for a share."""
    if not draw.form.chance(share):
        return None
    x = draw.values(draw.one(("normal", "whole", "ties", "zeros")), N)
    if draw.chance(0.3):
        x[draw.uniform(N) < 0.2] = -torch.inf
    return (draw.poisoned(x) if draw.chance(0.1) else x).to(draw.form.one(FLOATS))


def hashed(draw: Draw, M: int, N: int, k: int) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Draw token ids [M] and a table [vocabulary, k], and whether a value is outside, which torch refuses."""
    vocabulary = draw.random.randint(1, 40)
    table = torch.stack([draw.uniform(N).argsort()[:k] for _ in range(vocabulary)])
    ids, outside = draw.ints(0, vocabulary - 1, M), False
    if M and draw.chance(0.3):
        if draw.chance(0.5):
            ids[draw.random.randrange(M)], outside = draw.one((-1, vocabulary)), True
        else:
            expert = draw.one((-1, N))  # -1 is a slot without an expert
            table[draw.random.randrange(vocabulary), 0], outside = expert, expert == N
    ints = (torch.int32, torch.int64)
    return ids.to(draw.form.one(ints)), table.to(draw.form.one(ints)), outside


def logits_of(tokens, gate, alpha: float, logit_bias: torch.Tensor | None, arithmetic: Arithmetic) -> Approx:
    """Return the logits [M, N]."""
    product = approx.matmul(tokens, gate, arithmetic)
    factor = exact(float(torch.tensor(alpha, dtype=torch.float32)))
    exactly = not bool(product.err.any()) and alpha in (1.0, -1.0)
    logits = product if exactly and alpha == 1.0 else factor * product
    return logits if logit_bias is None else logits + exact(logit_bias)


def score_of(logits: Approx, rule: Rule) -> Approx:
    """Return the scores [M, N] of finite logits; 0 for others."""
    finite = logits.mid.isfinite()
    x = logits.mid.masked_fill(~finite, 0.0)
    if rule.score == "identity":
        return Approx(x, logits.err.masked_fill(~finite, 0.0))
    if rule.score == "softmax":
        top = logits.mid.masked_fill(~finite, -torch.inf).amax(1, keepdim=True).nan_to_num(0.0, 0.0, 0.0)
        exps = (x - top).clamp(max=0).exp().masked_fill(~finite, 0.0)
        mid = exps / exps.sum(1, keepdim=True).clamp(min=EPS)
        reach = (x - top).abs() + x.shape[1] / 8
    elif rule.score == "sqrt_softplus":
        mid, reach = torch.nn.functional.softplus(x, threshold=60.0).clamp(min=0).sqrt(), x.abs() * torch.sigmoid(-x)
        mid = torch.where(x < -30, (x / 2).exp(), mid)
    else:
        mid, reach = torch.sigmoid(x), x.abs() * torch.sigmoid(-x)
    # A score changes by at most twice its logit's error, relatively, but for a softmax's other logits.
    spare = logits.err.masked_fill(~finite, 0.0)
    spare = spare + (spare.amax(1, keepdim=True) if rule.score == "softmax" else 0.0)
    err = mid * (torch.expm1(2 * spare) + (16 + 2 * reach) * U) + approx.TINY
    # sqrt of a softplus that underflows: its square may be 0.
    err = err + (2.0**-60 if rule.score == "sqrt_softplus" else 0.0)
    return Approx(mid.masked_fill(~finite, 0.0), err.masked_fill(~finite, 0.0).nan_to_num(torch.inf))


@dataclass(frozen=True)
class Keys:
    """Keys [M, N] with errors, -inf for experts that can't be chosen; marks [M, N, 2] that only equal keys share."""

    key: Approx
    marks: torch.Tensor


def keys_of(given: Given, logits: Approx, score: Approx) -> Keys:
    """Return what experts are ranked by."""
    rule, with_bias = given.rule, given.expert_bias is not None
    sums = rule.num_groups > 1 and rule.group_score == "top2_sum"
    key = logits if rule.score in RANKED_BY_LOGITS or not (with_bias or sums) else score
    bias = torch.zeros(logits.mid.shape[1], dtype=torch.float64) if given.expert_bias is None else given.expert_bias
    if with_bias:
        key = key + exact(bias)
    usable = logits.mid.isfinite() & bias.isfinite()
    marks = torch.stack((logits.mid, bias.expand_as(logits.mid)), -1)
    # Equal marks are equal keys only where the logits themselves are known.
    marks = marks + torch.where(logits.err > 0, torch.arange(logits.mid.shape[1]) * torch.pi, 0.0)[..., None]
    masked = Approx(key.mid.masked_fill(~usable, -torch.inf), key.err.masked_fill(~usable, 0.0))
    return Keys(masked, marks)


def surely_before(keys: Keys, row: int, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    """Tell for experts i [a] and j [b] of a row which i any float32 ranks before which j: [a, b]."""
    key, err, marks = keys.key.mid[row], keys.key.err[row], keys.marks[row]
    larger = key[i][:, None] - key[j] > (err[i][:, None] + err[j])
    equal = (marks[i][:, None] == marks[j]).all(-1)
    return torch.where(equal, i[:, None] < j, larger)


def kept_groups(keys: Keys, row: int, rule: Rule, seen: set[int]) -> list[set[int]]:
    """Return the sets of groups that may compete in a row and contain those seen; [] if there is none."""
    if rule.num_groups == 1:
        return [{0}]
    key, err = (x[row].view(rule.num_groups, -1) for x in (keys.key.mid, keys.key.err))
    best = key.sort(-1, descending=True)
    value, spare = best.values[:, 0], err.amax(-1)
    marks = keys.marks[row].view(*key.shape, 2)
    top = best.indices[:, :1]
    if rule.group_score == "top2_sum":
        second = best.values[:, 1]
        value = value + second.masked_fill(second == -torch.inf, 0.0)
        spare, top = 2 * spare + U * value.abs().nan_to_num(0.0, 0.0, 0.0), best.indices[:, :2]
    mark = marks.gather(1, top[..., None].expand(*top.shape, 2)).flatten(1)
    equal = (mark[:, None] == mark[None]).all(-1)
    numbers = torch.arange(rule.num_groups)
    larger = value[:, None] - value > spare[:, None] + spare
    larger = larger | ((value > -torch.inf)[:, None] & (value == -torch.inf))
    before = torch.where(equal, numbers[:, None] < numbers, larger)
    must = {g for g in range(rule.num_groups) if int((~before[g]).sum()) - 1 < rule.num_topk_groups}
    never = {g for g in range(rule.num_groups) if int(before[:, g].sum()) >= rule.num_topk_groups}
    free = [g for g in range(rule.num_groups) if g not in must | never]
    need = rule.num_topk_groups - len(must)
    found = []
    for number, some in enumerate(combinations(free, need)):
        kept = must | set(some)
        if number == MOST_CHOICES:
            return [*found, must | seen]  # too many: the rest aren't tried, and the chosen must only be in order
        others = [g for g in free if g not in kept]
        if seen <= kept and not bool(before[others][:, sorted(kept)].any()):
            found.append(kept)
    return found


def misplaced(keys: Keys, row: int, ids: list[int], k: int, rule: Rule) -> str:
    """Return what is wrong with the chosen experts of a row, -1 for none."""
    chosen = [i for i in ids if i >= 0]
    if ids != chosen + [-1] * (k - len(chosen)):
        return f"row {row}: a masked slot before an expert: {ids}"
    if len(set(chosen)) != len(chosen):
        return f"row {row}: an expert twice: {ids}"
    usable = keys.key.mid[row] > -torch.inf
    if any(i >= len(usable) or not usable[i] for i in chosen):
        return f"row {row}: an expert that can't be chosen: {ids}"
    mine = torch.tensor(chosen, dtype=torch.long)
    disorder = surely_before(keys, row, mine, mine).tril()
    if bool(disorder.any()):
        later, earlier = (chosen[int(i)] for i in disorder.nonzero()[0])
        return f"row {row}: expert {later} must be before {earlier}: {gap(keys, row, later, earlier)}"
    size = len(usable) // rule.num_groups
    possible = kept_groups(keys, row, rule, {i // size for i in chosen})
    if not possible:
        return f"row {row}: experts {ids} are in groups that don't compete"
    said = ""
    for groups in possible:
        inside = torch.tensor([g in groups for g in range(rule.num_groups)]).repeat_interleave(size)
        rest = usable & inside
        rest[mine] = False
        others = rest.nonzero()[:, 0]
        if len(chosen) < k and len(others):
            said = f"row {row}: {len(chosen)} experts chosen, {len(others)} more can be"
            continue
        ahead = surely_before(keys, row, others, mine)
        if not bool(ahead.any()):
            return ""
        other, last = (int(i) for i in ahead.nonzero()[0])
        said = f"row {row}: expert {int(others[other])} must be chosen before {chosen[last]}: " + gap(
            keys, row, int(others[other]), chosen[last]
        )
    return said


def gap(keys: Keys, row: int, i: int, j: int) -> str:
    """Return the distance of two keys in words."""
    key, err = keys.key.mid[row], keys.key.err[row]
    return f"key {float(key[i]):.9g} against {float(key[j]):.9g}, errors {float(err[i] + err[j]):.3g}"


def weights_of(given: Given, logits: Approx, score: Approx, ids: torch.Tensor) -> Approx:
    """Return the weights [M, k] of chosen ids."""
    rule, masked = given.rule, ids < 0
    at = ids.clamp(min=0)
    if rule.score == "softmax_over_topk":
        chosen = logits.mid.gather(1, at).masked_fill(masked, -torch.inf)
        spare = logits.err.gather(1, at).masked_fill(masked, 0.0)
        chosen_score = score_of(Approx(chosen, spare), Rule("softmax"))
    else:
        chosen_score = Approx(score.mid.gather(1, at), score.err.gather(1, at))
    mid, err = (x.masked_fill(masked, 0.0) for x in (chosen_score.mid, chosen_score.err))
    if rule.renormalize:
        total = mid.sum(1, keepdim=True) + EPS
        err = (err + mid * (err.sum(1, keepdim=True) / total)) / total
        # An error as large as the sum itself: the sum may be anything down to EPS.
        loose = chosen_score.err.masked_fill(masked, 0.0).sum(1, keepdim=True) > total / 4
        mid, err = mid / total, err.masked_fill(loose, torch.inf)
    scale = rule.routed_scale
    return approx.approx(mid * scale, (err + mid.abs() * (8 + ids.shape[1]) * U + approx.TINY) * abs(scale))


def judge_routing(got: Any, given: Given, wants: dict[str, bool]) -> str:
    """Return what is wrong with a Routing."""
    logits, N = given.logits, given.logits.mid.shape[1]
    M = len(logits.mid)
    if (got.topk_ids.dtype, tuple(got.topk_ids.shape)) != (torch.int32, (M, given.k)):
        return f"topk_ids: expected int32 {[M, given.k]}, got {got.topk_ids.dtype} {list(got.topk_ids.shape)}"
    said = wrong(got.logits, logits, name="logits") if given.has_logits else ""
    if said:
        return said
    logits = exact(got.logits) if given.has_logits else logits.rounded(torch.float32)
    overflows = logits.mid.isfinite() & ~round_to(logits.mid, torch.float32).isfinite()
    unsure = (logits.err.isinf() | overflows).any(1)
    ids = host(got.topk_ids)
    if bool(((ids < -1) | (ids >= N)).any()):
        return f"topk_ids: expected -1 to {N - 1}, got {int(ids.min())} to {int(ids.max())}"
    score = score_of(logits, given.rule)
    if given.table is not None:
        finite = logits.mid.isfinite().gather(1, given.table.clamp(min=0)) & (given.table >= 0)
        want = given.table.masked_fill(~finite, -1)
        if not bool(((ids == want) | unsure[:, None]).all()):
            row = int((ids != want).any(1).nonzero()[0])
            return f"topk_ids: row {row} {ids[row].tolist()}, expected {want[row].tolist()}"
    else:
        keys = keys_of(given, logits, score)
        for row in range(M):
            said = "" if unsure[row] else misplaced(keys, row, ids[row].tolist(), given.k, given.rule)
            if said:
                return f"topk_ids: {said}"
    want = weights_of(given, logits, score, ids)
    said = wrong(got.topk_weights, want.freed(unsure[:, None]), name="topk_weights")
    return said or judge_tables(got, ids, N, wants)


def judge_tables(got: Any, ids: torch.Tensor, N: int, wants: dict[str, bool]) -> str:
    """Return what is wrong with the dense weights and the counts, which follow from ids and weights."""
    if bool(((ids < 0) & (got.topk_weights.cpu() != 0)).any()):
        return "topk_weights: not 0 in a masked slot"
    if wants["dense"]:
        want = torch.zeros(len(ids), N + 1)
        want.scatter_(1, torch.where(ids < 0, N, ids), got.topk_weights.cpu())
        if not torch.equal(got.dense.cpu(), want[:, :N]):
            return f"dense: {int((got.dense.cpu() != want[:, :N]).sum())} of {want.numel()} differ from the weights"
    if wants["counts"]:
        counts = torch.bincount(ids[ids >= 0], minlength=N)
        offsets = torch.cat((torch.zeros(1, dtype=torch.long), counts.cumsum(0)))
        for name, right in (("num_tokens_per_expert", counts), ("expert_offsets", offsets)):
            found = getattr(got, name)
            if found.dtype != torch.int32 or not torch.equal(found.cpu().long(), right):
                return f"{name}: {found.tolist()}, expected {right.tolist()}"
    return ""

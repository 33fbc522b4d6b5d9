"""Oracle of selections: judges them in float64, with a band within which rounding may decide either way."""

from dataclasses import dataclass

import torch

from envoi.ops.indexer.layout import PAGE_SIZE, is_fp4, unpack_pages

# float32 sums of 128 products and of H heads, each with a few roundings; see `band`.
RELATIVE_BAND = 64 * 2.0**-24
# Hopper's FP8 tensor cores align 32 products, and the sum so far, to 14 bits before they add them.
TENSOR_CORE_BAND = 2.0**-14


@dataclass(frozen=True)
class Verdict:
    """Verdict on a row. problem: "" if it is right, else the error. num_in_band: tokens that rounding may decide."""

    problem: str
    num_in_band: int = 0

    def __bool__(self) -> bool:
        return not self.problem


def keys64(k_cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Return the keys of pages, by ids [n], in float64 [n * 64, 128]; of FP4 by arithmetic of their bits."""
    if not is_fp4(k_cache):
        values, scales = unpack_pages(k_cache, pages)
        return values.double() * scales.double().unsqueeze(1)
    raw = k_cache.view(torch.uint8).flatten(1)[pages.long()].long()
    values, factors = raw[:, : PAGE_SIZE * 64].reshape(-1, 64), raw[:, PAGE_SIZE * 64 :].reshape(-1, 4)
    codes = torch.stack((values % 16, values // 16), 2).flatten(1)
    exponent, mantissa = codes % 8 // 2, codes % 2
    magnitude = torch.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent - 1)).double()
    powers = torch.where(factors == 255, torch.nan, 2.0 ** (factors - 127).double())
    return magnitude * (1 - 2 * (codes // 8)) * powers.repeat_interleave(32, 1)


def scores64(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Compute the definition's scores [L] in float64. keys: [L, 128] float64."""
    return (torch.relu(q.double() @ keys.T) * weights.double().unsqueeze(1)).sum(dim=0)


def band(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, relative: float = RELATIVE_BAND) -> torch.Tensor:
    """Return the most [L] by which a float32 score may err: proportional to the sum of all its terms' magnitudes."""
    magnitude = ((q.double().abs() @ keys.abs().T) * weights.double().abs().unsqueeze(1)).sum(dim=0)
    return magnitude * relative


def bounds(scores: torch.Tensor, eps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least and the most that a float32 score may be; -inf and inf where there is no telling."""
    inf = torch.inf
    return (scores - eps).nan_to_num(-inf, inf, -inf), (scores + eps).nan_to_num(inf, inf, -inf)


def judge(
    slots: torch.Tensor, q: torch.Tensor, k_cache: torch.Tensor, weights: torch.Tensor, length: int,
    block_table: torch.Tensor, relative: float = RELATIVE_BAND,
) -> Verdict:  # fmt: skip
    """Judge a query row's slots [k]: none left out is clearly better, the right count, no duplicate, none foreign.

    Of any two tokens the bands decide, not those of a token and of the threshold: where a token with a wide band falls
    below the next best, which has a narrow one, both are right.
    q [H, 128], weights [H], length: tokens that the row sees, block_table [P] of its request, relative: see `band`.
    """
    chosen = slots[slots != -1].long()
    want = min(len(slots), max(length, 0))
    if len(chosen) != want or bool((slots[len(chosen) :] != -1).any()):
        return Verdict(f"expected {want} slots and then -1, got {len(chosen)} slots")
    if want == 0:
        return Verdict("")
    pages = block_table[: -(-length // PAGE_SIZE)].long()
    reachable = (pages.unsqueeze(1) * PAGE_SIZE + torch.arange(PAGE_SIZE, device=pages.device)).flatten()[:length]
    foreign = chosen[~torch.isin(chosen, reachable)]
    if len(foreign):
        return Verdict(f"slot {int(foreign[0])} isn't one of the request's {length} tokens")
    available = torch.bincount(reachable, minlength=int(reachable.max()) + 1)
    used = torch.bincount(chosen, minlength=len(available))
    if bool((used > available).any()):
        return Verdict(f"slot {int((used > available).nonzero()[0])} was chosen more often than it occurs")
    return _judge_scores(chosen, reachable, used, q, k_cache, weights, pages, length, want, relative)


def _judge_scores(chosen, reachable, used, q, k_cache, weights, pages, length: int, want: int, relative) -> Verdict:
    keys = keys64(k_cache, pages)[:length]
    least, most = bounds(scores64(q, keys, weights), band(q, keys, weights, relative))
    left_out = least.masked_fill(used[reachable] > 0, -torch.inf)
    taken = most.masked_fill(~torch.isin(reachable, chosen), torch.inf)
    if bool(left_out.max() > taken.min()):
        better, worse = int(left_out.argmax()), int(taken.argmin())
        return Verdict(f"position {better} is clearly better than {worse} and was left out")
    in_band = (most >= least.topk(want).values[-1]) & (least <= most.topk(want).values[-1])
    return Verdict("", int(in_band.sum()))

"""Cases of `envoi.indexer_topk`: lengths, pages, modes, ties, numbers that aren't finite.

Small whole numbers with powers of two as scales have exact scores in float32, so every tie is a tie there too, and the
fast mode's order is known. Elsewhere two positions may be in either order within the errors of their scores.
"""

from dataclasses import dataclass
from typing import Any

import torch

import envoi
from envoi.ops.indexer import certificate
from envoi.runtime.devices import implementation
from tests.fuzz import formats
from tests.fuzz.approx import TINY, Approx, Arithmetic, approx, matmul
from tests.fuzz.draw import Case, Draw, host

PAGE, DIM = 64, 128
HEADS = (1, 4, 7, 8, 16, 32, 32, 48, 64, 64)
WIDER = (0, 0, 0, 0, 130, 600, 1100, 2100)  # columns of the table beyond the longest request's: rows share clusters
KINDS = ("normal", "normal", "whole", "whole", "same tokens", "bytes", "zeros", "spread")


@dataclass
class Given:
    """Arguments of a case on the CPU; values [pages, 64, 128] uint8, scales [pages, 64] float32.

    factors: None, or of keys in FP4 [pages, 64, 4] uint8; values are then nibbles, and there are no scales.
    """

    q: torch.Tensor
    values: torch.Tensor
    scales: torch.Tensor
    factors: torch.Tensor | None
    weights: torch.Tensor
    lengths: list[int]
    table: torch.Tensor
    k: int
    mode: str
    next_n: int
    slots: bool
    order: str
    bad: dict[int, int]  # request: error code

    @property
    def text(self) -> str:
        """Describe the case in one line."""
        keys = "" if self.factors is None else "FP4 "
        return (
            f"{self.mode} {keys}k {self.k} heads {self.q.shape[1]} next_n {self.next_n} lengths {self.lengths} "
            f"slots {self.slots} order {self.order} bad {self.bad}"
        )

    def cache(self) -> torch.Tensor:
        """Lay the cache out as pages of values and then scales, [pages, 64, 1, 132], or factors, [pages, 64, 1, 68]."""
        pages = len(self.values)
        if self.factors is not None:
            packed = self.values[..., 0::2] | (self.values[..., 1::2] << 4)
            return torch.cat((packed.flatten(1), self.factors.flatten(1)), 1).view(pages, PAGE, 1, DIM // 2 + 4)
        scales = self.scales.contiguous().view(torch.uint8).view(pages, 4 * PAGE)
        return torch.cat((self.values.reshape(pages, PAGE * DIM), scales), 1).view(pages, PAGE, 1, DIM + 4)


def indexer_topk(draw: Draw) -> Case:
    """Draw a case."""
    kind = draw.one(KINDS)
    given = drawn(draw, kind)
    device = draw.device
    cache = given.cache().to(device)
    cache = cache.view(torch.int8) if draw.chance(0.5) else cache
    q = draw.placed(given.q.view(torch.float8_e4m3fn), draw.one(("plain", "rows")))
    weights, table = draw.placed(given.weights), draw.placed(given.table)
    lengths = torch.tensor(given.lengths, dtype=torch.int32, device=device)
    options = {"output": "slots" if given.slots else "positions", "order": given.order, "return_errors": True}
    # Kernels give error codes; torch's operators refuse, as in the exact mode where no certificate is.
    has_kernels = certificate.has_kernels(q.shape[1], given.k)
    uncertified = device.type == "cpu" or not has_kernels or certificate.orders(q.device, q.shape[1]) is None
    by_torch = implementation(device) == "torch" or (given.mode == "exact" and uncertified)

    def call() -> Any:
        return envoi.indexer_topk(
            q, cache, weights, lengths, table, given.k, given.mode, given.next_n, **options
        )  # fmt: skip

    refused = bool(given.bad) and by_torch
    return Case(f"{kind}, {given.text}", call, lambda got: judge(got, given, device.type == "cuda"), refused)


def drawn(draw: Draw, kind: str) -> Given:
    """Draw the tensors and options."""
    form = draw.form
    heads, next_n = form.one(HEADS), form.one((1, 1, 2, 3))
    k, most = form.one((1, 16, 128, 200, 256, 512, 512, 1024, 1500, 2048)), draw.most(640, 1400, 6000)
    in_fp4 = form.chance(0.3)
    beyond = form.one(WIDER) if draw.sizes == "large" else 0
    most = min(most, 3000) if beyond else most
    requests = draw.random.randint(0, 40 if beyond else draw.most(2, 4, 8))
    lengths = [draw.one((0, 1, 64, 65, k - 1, k, k + 1, k + 65, draw.random.randint(1, most))) for _ in range(requests)]
    lengths = [min(length, most) for length in lengths]
    width = max([1, *(-(-length // PAGE) for length in lengths)]) + (beyond or draw.one((0, 0, 3)))
    num_pages = max(1, sum(-(-length // PAGE) for length in lengths)) + 2
    rows = requests * next_n
    q, values, scales, weights = tensors(draw, kind, rows, heads, num_pages)
    factors = None
    if in_fp4:
        values, factors = keys_in_fp4(draw, kind, num_pages)
    mode = "fast" if factors is not None else draw.one(("exact", "fast"))
    pages = draw.uniform(num_pages).argsort().tolist()
    table = torch.full((requests, width), 2**31 - 1, dtype=torch.int32)
    for request, length in enumerate(lengths):
        for column in range(-(-length // PAGE)):
            table[request, column] = pages.pop()
    bad = {}
    if requests and draw.chance(0.06):
        request = draw.random.randrange(requests)
        bad[request] = draw.one((1, 2) if lengths[request] else (1,))
        if bad[request] == 1:
            lengths[request] = draw.one((-1, width * PAGE + 1, 2**31 - 1))
        else:
            table[request, 0] = draw.one((-1, num_pages, 2**31 - 1))
    return Given(
        q, values, scales, factors, weights, lengths, table, k, mode, next_n, draw.chance(0.5),
        draw.one(("score", "score", "any", "position")), bad,
    )  # fmt: skip


def tensors(draw: Draw, kind: str, rows: int, heads: int, num_pages: int) -> tuple[torch.Tensor, ...]:
    """Draw q, values (bytes of E4M3), scales and weights of a kind."""
    shapes = (rows, heads, DIM), (num_pages, PAGE, DIM)
    if kind in ("whole", "zeros"):
        q, values = (bytes_of(draw.ints(-2, 2, *shape).double()) for shape in shapes)
        values = values * (kind == "whole")
        scales = torch.exp2(draw.ints(-1, 1, num_pages, PAGE).float())
        weights = draw.ints(-2, 3, rows, heads).float()
    elif kind == "bytes":  # any number but NaN, of any size
        q, values = (draw.ints(0, 255, *shape).to(torch.uint8) for shape in shapes)
        q, values = (torch.where(x % 128 == 127, x - 1, x) for x in (q, values))
        scales, weights = draw.normal(num_pages, PAGE), draw.normal(rows, heads)
    else:
        q, values = (bytes_of(2 * draw.normal(*shape).double()) for shape in shapes)
        scales = 0.01 + 0.02 * draw.uniform(num_pages, PAGE)
        weights = draw.values("spread" if kind == "spread" else "normal", rows, heads)
    if kind == "same tokens":
        values = values[:, :1].expand(shapes[1]).clone()
    if draw.chance(0.3):
        scales = scales * torch.where(draw.uniform(num_pages, PAGE) < 0.3, -1.0, 1.0)
    if draw.chance(0.15):
        weights = -weights.abs()
    if draw.chance(0.15):  # NaN in some tokens, by their values or by their scales
        if draw.chance(0.5):
            values[draw.uniform(num_pages, PAGE) < 0.2, 5] = draw.one((127, 255))
        else:
            scales[draw.uniform(num_pages, PAGE) < 0.2] = torch.nan
    return q, values, scales, weights


def keys_in_fp4(draw: Draw, kind: str, num_pages: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw nibbles [pages, 64, 128] and factors [pages, 64, 4], at most 2^26 apart in a key, which all kernels keep."""
    groups = num_pages, PAGE, 4
    values = draw.ints(0, 15, num_pages, PAGE, DIM).to(torch.uint8)
    if kind in ("zeros", "same tokens"):
        values = values * 0 if kind == "zeros" else values[:, :1].expand(num_pages, PAGE, DIM).clone()
    spread = 0 if kind == "whole" else draw.one((1, 5, 26))
    factors = (draw.ints(120, 130, num_pages, PAGE, 1) * (kind != "whole") + 127 * (kind == "whole")).expand(groups)
    factors = factors - draw.ints(0, spread, *groups)
    if draw.chance(0.15):
        factors = torch.where(draw.uniform(*groups) < 0.1, 255, factors)
    return values, factors.to(torch.uint8)


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    """Round float64 to the bytes of E4M3."""
    return formats.nearest_code(x, formats.E4M3).to(torch.uint8)


def keys_of(given: Given, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values [tokens, 128] and scales [tokens] of pages, float64; of FP4 times their factors, and ones."""
    values = given.values[pages].reshape(-1, DIM)
    if given.factors is None:
        return formats.decode_e4m3(values), given.scales[pages].reshape(-1).double()
    factors = formats.decode_e8m0(given.factors[pages].reshape(-1, 4)).repeat_interleave(DIM // 4, 1)
    keys = torch.cat((formats.E2M1, -formats.E2M1))[values.long()] * factors
    return keys, torch.ones(len(keys), dtype=torch.float64)


def scores(given: Given, row: int, gpu: bool) -> Approx:
    """Return the scores [L] of what a row sees."""
    request = row // given.next_n
    length = max(0, given.lengths[request] - given.next_n + 1 + row % given.next_n)
    pages = given.table[request, : -(-length // PAGE)].long()
    values, scales = keys_of(given, pages)
    values, scales = values[:length], scales[:length]
    q, weights = formats.decode_e4m3(given.q[row]), given.weights[row].double()
    # Products of the unscaled values; a scale is one more rounding, and a negative one turns the sign within the ReLU.
    products = matmul(q, values, Arithmetic(gpu, gpu, 8))
    mid = (products.mid * scales).clamp(min=0) * weights[:, None]
    err = products.err * scales.abs() * weights.abs()[:, None]
    size = (q.abs() @ values.abs().T * scales.abs() * weights.abs()[:, None]).sum(0)
    total, spare = mid.sum(0), err.sum(0)
    whole = bool((err == 0).all()) and all(bool((x * 4 == (x * 4).round()).all()) for x in (scales, weights))
    if not (whole and bool((size < 2.0**20).all())):
        spare = spare + size * (DIM + len(q) + 16) * (2.0**-23 if gpu else 2.0**-24) + TINY
    return approx(total, spare)


def judge(got: Any, given: Given, gpu: bool) -> str:
    """Return what is wrong with the chosen tokens of any row."""
    out, errors = (host(x) for x in got)
    if (got[0].dtype, tuple(out.shape)) != (torch.int32, (len(given.q), given.k)):
        return f"expected int32 {[len(given.q), given.k]}, got {got[0].dtype} {list(out.shape)}"
    for row in range(len(out)):
        request = row // given.next_n
        code = given.bad.get(request, 0)
        if code == 2 and given.lengths[request] - given.next_n + 1 + row % given.next_n <= 0:
            code = 0  # the row sees no token, so no page of it is looked at
        if int(errors[row]) != code:
            return f"row {row}: error {int(errors[row])}, expected {code}"
        if code:
            said = "" if bool((out[row] == -1).all()) else "tokens of an invalid request"
        else:
            said = judge_row(out[row], given, row, gpu)
        if said:
            return f"row {row}: {said}"
    return ""


def judge_row(out: torch.Tensor, given: Given, row: int, gpu: bool) -> str:
    """Return what is wrong with one row's tokens [k]."""
    score = scores(given, row, gpu)
    length = len(score.mid)
    want = min(given.k, length)
    positions = out[:want]
    if bool((out[want:] != -1).any()) or bool((positions < 0).any()):
        return f"{int((out >= 0).sum())} tokens, expected {want} and then -1"
    if not want:
        return ""
    if given.slots:
        pages = given.table[row // given.next_n, : -(-length // PAGE)].long()
        slots = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()[:length]
        order = slots.argsort()
        place = torch.searchsorted(slots[order], positions).clamp(max=length - 1)
        if bool((slots[order][place] != positions).any()):
            return f"slot {int(positions[slots[order][place] != positions][0])} isn't one of the request's"
        positions = order[place]
    if int(positions.max()) >= length:
        return f"position {int(positions.max())} of {length} tokens"
    if len(positions.unique()) != want:
        return "a token twice"
    return misplaced(positions, score, given)


def misplaced(positions: torch.Tensor, score: Approx, given: Given) -> str:
    """Return which token was left out, chosen or placed though its score, beyond errors, says otherwise."""
    # The definition's top-k puts NaN first; the fast mode last.
    nan = torch.inf if given.mode == "exact" else -torch.inf
    mid, err = score.mid.masked_fill(score.mid.isnan(), nan), score.err
    chosen = torch.zeros(len(mid), dtype=torch.bool)
    chosen[positions] = True
    low, high = mid - err, mid + err
    least = int(positions[high[positions].argmin()])
    ahead = ~chosen & (low > high[least])
    if given.mode == "fast":  # an exact tie goes to the lower position
        last = positions[high[positions] == high[least]].max()
        tied = ~chosen & (err == 0) & (err[least] == 0) & (mid == mid[least]) & mid.isfinite()
        ahead = ahead | (tied & (torch.arange(len(mid)) < last))
    if bool(ahead.any()):
        other = int(ahead.nonzero()[0])
        return f"position {other} left out: {off(mid, err, other, least)}"
    if given.order == "any":
        return ""
    if given.order == "position":
        return "" if bool((positions[1:] > positions[:-1]).all()) else "positions aren't ascending"
    # The largest score that can still follow each place must not surely be above the score there.
    following = low[positions].flip(0).cummax(0).values.flip(0)
    late = (following[1:] > high[positions][:-1]).nonzero()
    if len(late):
        place = int(late[0])
        return f"place {place}, position {int(positions[place])}: a better one follows"
    if given.mode == "fast":
        first, second = positions[:-1], positions[1:]
        tied = (mid[first] == mid[second]) & (err[first] == 0) & (err[second] == 0) & mid[first].isfinite()
        if bool((tied & (first > second)).any()):
            return f"position {int(second[tied & (first > second)][0])} after a higher one of equal score"
    return ""


def off(mid: torch.Tensor, err: torch.Tensor, i: int, j: int) -> str:
    """Return the distance of two scores in words."""
    return f"score {float(mid[i]):.9g}, chosen {j} with {float(mid[j]):.9g}, errors {float(err[i] + err[j]):.3g}"

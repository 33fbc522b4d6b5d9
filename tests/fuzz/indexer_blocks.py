"""Cases of `envoi.indexer_blocks` and, of the blocks that it chooses, `envoi.indexer_topk_in_blocks`."""

from dataclasses import replace
from typing import Any

import torch

import envoi
from envoi.runtime.devices import implementation
from tests.fuzz import indexer
from tests.fuzz.approx import Approx
from tests.fuzz.draw import Case, Draw, host
from tests.fuzz.indexer import PAGE, Given


def indexer_blocks(draw: Draw) -> Case:
    """Draw a case: both levels of a call."""
    kind = draw.one(indexer.KINDS)
    given = replace(indexer.drawn(draw, kind), mode="fast")
    block, num = draw.form.one((8, 8, 16, 32, 64, 128)), draw.form.one((1, 3, 16, 40, 200, 2048))
    device = draw.device
    q = draw.placed(given.q.view(torch.float8_e4m3fn), draw.one(("plain", "rows")))
    lengths = torch.tensor(given.lengths, dtype=torch.int32, device=device)
    tensors = q, given.cache().to(device), draw.placed(given.weights), lengths, draw.placed(given.table)
    options: dict[str, Any] = {"output": "slots" if given.slots else "positions", "order": given.order}

    def call() -> Any:
        blocks, errors = envoi.indexer_blocks(*tensors, num, block, given.next_n, return_errors=True)
        tokens = envoi.indexer_topk_in_blocks(*tensors, blocks, given.k, block, given.next_n, **options)
        return blocks, errors, tokens

    text = f"{kind}, {given.text}, {num} blocks of {block}"
    refused = bool(given.bad) and implementation(device) == "torch"
    return Case(text, call, lambda got: judge(got, given, num, block, device.type == "cuda"), refused)


def judge(got: Any, given: Given, num: int, block: int, gpu: bool) -> str:
    """Return what is wrong with the chosen blocks or tokens of any row."""
    blocks, errors, tokens = (host(x) for x in got)
    for row in range(len(blocks)):
        request = row // given.next_n
        seen = given.lengths[request] - given.next_n + 1 + row % given.next_n
        code = given.bad.get(request, 0)
        if int(errors[row]) != (0 if code == 2 and seen <= 0 else code):
            return f"row {row}: error {int(errors[row])}, expected {code}"
        if code:
            said = "" if bool((blocks[row] == -1).all() & (tokens[row] == -1).all()) else "blocks of an invalid request"
        else:
            score = indexer.scores(given, row, gpu)
            score = Approx(score.mid.masked_fill(score.mid.isnan(), -torch.inf), score.err)
            said = of_blocks(blocks[row], score, num, block) or of_tokens(
                tokens[row], blocks[row], score, given, row, block
            )
        if said:
            return f"row {row}: {said}"
    return ""


def of_blocks(chosen: torch.Tensor, score: Approx, num: int, block: int) -> str:
    """Return what is wrong with a row's blocks [num]."""
    length = len(score.mid)
    num_blocks = -(-length // block)
    want = min(num, num_blocks)
    own = chosen[:want].long()
    if bool((chosen[want:] != -1).any() | (own < 0).any() | (own >= num_blocks).any() | (own[1:] <= own[:-1]).any()):
        return f"{chosen[: want + 1].tolist()[:8]} aren't {want} ascending blocks of {num_blocks}"
    if not want:
        return ""
    if int(own[-1]) != num_blocks - 1:
        return "the newest block was left out"
    pad = (0, num_blocks * block - length)
    low, high = (
        torch.nn.functional.pad(x, pad, value=-torch.inf).view(-1, block).amax(1)[:-1]
        for x in (score.mid - score.err, score.mid + score.err)
    )
    mask = torch.zeros(num_blocks - 1, dtype=torch.bool)
    mask[own[:-1]] = True
    if not bool(mask.any()):
        return ""
    least = high[mask].min()
    last = int((mask & (high == least)).nonzero()[-1])
    ahead = ~mask & (low > least)
    if low[last] == least:  # an exact tie goes to the lower block
        ahead = ahead | (~mask & (low == high) & (low == least) & (torch.arange(len(mask)) < last))
    return f"block {int(ahead.nonzero()[0])} left out" if bool(ahead.any()) else ""


def of_tokens(out: torch.Tensor, blocks: torch.Tensor, score: Approx, given: Given, row: int, block: int) -> str:
    """Return what is wrong with a row's tokens [k] of its blocks."""
    candidates = (blocks[blocks >= 0].long()[:, None] * block + torch.arange(block)).flatten()
    candidates = candidates[candidates < len(score.mid)]
    want = min(given.k, len(candidates))
    if bool((out[want:] != -1).any() | (out[:want] < 0).any()):
        return f"{int((out >= 0).sum())} tokens, expected {want} and then -1"
    if not want:
        return ""
    names = candidates
    if given.slots:
        pages = given.table[row // given.next_n].long()
        names = pages[candidates // PAGE] * PAGE + candidates % PAGE
    order = names.argsort()
    place = torch.searchsorted(names[order], out[:want].long()).clamp(max=len(names) - 1)
    if bool((names[order][place] != out[:want]).any()):
        return "a token of no chosen block"
    places = order[place]
    if len(places.unique()) != want:
        return "a token twice"
    return indexer.misplaced(places, Approx(score.mid[candidates], score.err[candidates]), given)

"""Command `envoi indexer certify`: find the orders of the exact mode's kernels in which this GPU's torch adds.

    for each number of heads, each length below NUM_ORDERS, and a sample of longer ones:
        order = the first whose scores have the bits of the PyTorch definition, on fresh inputs each time
    ties: torch.topk takes the lower position first, or its network for at most 32 values

Only a device whose every order was found gets a certificate; on others the exact mode uses torch's own operators.
"""

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from envoi.ops.indexer import certificate, exact, fast, reference
from envoi.ops.indexer.certificate import HEADS, NUM_ORDERS, SHARED
from envoi.ops.indexer.layout import PAGE_SIZE, pack_cache, pages_of

PARTS = (1, 4, 16, 2, 8)
LONGER = (1000, 2047, 2048, 4096, 5806, 16384, 32767, 65536, 131072)
NUM_LONGER = 120
NUM_SEEDS = 3
TOPK = 2048


def run(args: argparse.Namespace) -> int:
    """Search for certificates, print them, write them. Returns 1 if a search fails.

    Raises ValueError without a GPU, or if what was found can't be written.
    """
    if not torch.cuda.is_available():
        raise ValueError("indexer certify: expected a CUDA device, this machine has none that torch can use")
    device = torch.device("cuda", torch.cuda.current_device())
    name, found = certificate.name_of(device), {}
    for num_heads in HEADS:
        known, problems = search(num_heads, device)
        print(f"{name}, {num_heads} heads: {known or 'no certificate'}", *problems, sep="\n  ")
        if known is None:
            return 1
        found[str(num_heads)] = known
    if args.write:
        try:
            print(f"written to {certificate.write(name, found)}")
        except OSError as error:
            raise ValueError(f"indexer certify: nothing was kept: {error}; ENVOI_CACHE_DIR names a folder") from error
    return 0


def search(num_heads: int, device: torch.device) -> tuple[dict[str, Any] | None, list[str]]:
    """Search the certificate of a number of heads; return it, or None and the problems found."""
    with _ieee():
        by_length = {length: _orders(num_heads, length, device) for length in _lengths()}
    missing = [length for length, orders in by_length.items() if not orders]
    if missing:
        return None, [f"no order has torch's bits for {len(missing)} lengths, among them {missing[:8]}"]
    known = summarize(by_length)
    wrong = [n for n, orders in by_length.items() if certificate.order_of(known, n) not in orders]
    if wrong:
        return None, [f"the orders follow no rule at {len(wrong)} lengths, among them {wrong[:8]}"]
    untidy = [n for n in (*range(1, 140), 1000, 2049, 20000, 131072) if not _ties_are_alike(known, n, device)]
    return (None, [f"torch.topk orders ties otherwise at {untidy[:8]}"]) if untidy else (known, [])


def summarize(by_length: dict[int, set[int]]) -> dict[str, Any]:
    """Return the rule that agrees with the orders fitting at each length, with the fewest changes along the lengths."""
    lengths = sorted(by_length)
    parts: list[list[int]] = []
    for length in lengths:
        fitting = {order % SHARED for order in by_length[length]}
        if not parts or parts[-1][1] not in fitting:
            parts.append([length, min(fitting)])
    parts[0][0] = 1
    lone = [n for n in lengths if n % 4 == 0 and all(order < SHARED for order in by_length[n])]
    shared = [n for n in lengths if n % 4 == 0 and all(order >= SHARED for order in by_length[n])]
    first = min(shared, default=None)
    return {"parts": parts, "shared_from": None if first is None or max(lone, default=0) > first else first}


def _lengths() -> Iterable[int]:
    """List all lengths below NUM_ORDERS but 0 and 1, whose order has no effect, and some longer ones."""
    draw = torch.Generator().manual_seed(0)
    sample = (2 ** (9 + 8 * torch.rand(NUM_LONGER, generator=draw))).long().tolist()
    return sorted({*range(2, NUM_ORDERS), *LONGER, *sample, *(n // 4 * 4 for n in sample)})


def _orders(num_heads: int, length: int, device: torch.device) -> set[int]:
    """Return all orders that give torch's bits on several inputs of that length."""
    left = {parts + shared for parts in PARTS for shared in (0, SHARED)}
    for seed in range(NUM_SEEDS):
        p, want = _inputs(num_heads, length, seed, device)
        left = {order for order in left if torch.equal(_scores(p, length, order), want)}
    return left


def _inputs(num_heads: int, length: int, seed: int, device: torch.device) -> tuple[fast.Problem, torch.Tensor]:
    """Make a request of that length, and compute its scores by torch."""
    source = torch.Generator(device).manual_seed(seed * 1_000_003 + length)
    num_pages = pages_of(length)

    def normal(*shape: int) -> torch.Tensor:
        return (2 * torch.randn(*shape, generator=source, device=device)).to(torch.float8_e4m3fn)

    q, values = normal(1, num_heads, 128), normal(num_pages, PAGE_SIZE, 128)
    scales = torch.rand(num_pages, PAGE_SIZE, generator=source, device=device) * 0.02 + 0.01
    weights = torch.randn(1, num_heads, generator=source, device=device)
    want = reference.score_exact(q[0], values.view(-1, 128)[:length], scales.view(-1)[:length], weights[0])
    return _problem(q, pack_cache(values, scales), weights, length, device), want


def _problem(q, k_cache, weights, length: int, device: torch.device) -> fast.Problem:
    table = torch.arange(pages_of(length), dtype=torch.int32, device=device)[None]
    return fast.Problem(q, k_cache, weights, torch.tensor([length], dtype=torch.int32, device=device), table, TOPK, 1)


def _scores(p: fast.Problem, length: int, order: int) -> torch.Tensor:
    space = fast.workspace(p)
    exact.score(torch.full((NUM_ORDERS + 4,), order, dtype=torch.int32, device=p.q.device), p, space, 0, 1)
    return space.logits[0, :length]


def _ties_are_alike(known: dict[str, Any], length: int, device: torch.device) -> bool:
    """Tell whether a request with few different scores is put in the order of torch.topk."""
    kinds = torch.randint(0, 4, (pages_of(length), PAGE_SIZE, 1), generator=torch.Generator().manual_seed(length))
    values = kinds.expand(-1, -1, 128).to(device).to(torch.float8_e4m3fn)
    q = torch.ones(1, HEADS[0], 128, device=device).to(torch.float8_e4m3fn)
    cache = pack_cache(values, torch.ones(values.shape[:2], device=device))
    p = _problem(q, cache, torch.ones(1, HEADS[0], device=device), length, device)
    got, _ = exact.topk(p, certificate.expand(known).to(device), fast.Order(slots=False, by_score=True))
    scores = kinds.view(-1)[:length].float().to(device)
    want = torch.topk(scores, min(TOPK, length)).indices
    return torch.equal(got[0, : len(want)].long(), want)


class _ieee:  # noqa: N801
    """Context in which torch multiplies float32 without TF32, as the definition says."""

    def __enter__(self) -> None:
        self.before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False

    def __exit__(self, *_: Sequence) -> None:
        torch.backends.cuda.matmul.allow_tf32 = self.before

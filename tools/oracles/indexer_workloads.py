"""Inputs for tests and benchmarks of the indexer: 128 workloads in the contest's proportions, and hostile ones.

The contest's own files are not public here. These are generated from a fixed seed to its description: 1 to 31
requests, block tables 1 to 91 pages wide (69 workloads up to 32, 39 from 33 to 45, 20 from 82 to 91), lengths from 1
to 5806, one long request in each long workload, 71 % of the long requests on scattered pages, a cache of 11923 pages
without NaN.
"""

import random
from dataclasses import dataclass
from functools import lru_cache

import torch

from envoi.ops.indexer.layout import FP4_GROUP, HEAD_DIM, PAGE_SIZE, pack_cache, pages_of

NUM_PAGES = 11923
MAX_LENGTH = 5806
MAX_REQUESTS = 31
WIDTHS = ((69, 1, 32), (39, 33, 45), (20, 82, 91))  # how many workloads have block tables from .. to .. pages wide
LONG_PAGES = 33
SCATTERED_SHARE = 0.71

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Workload:
    """Sizes of an input. lengths: tokens of each request; scattered: pages out of order; num_pages: of the cache.

    next_n: query rows of each request; fp4: keys in FP4; room: tokens that a row of the block table has columns for, if
    they are more than the longest request has.
    """

    lengths: tuple[int, ...]
    scattered: tuple[bool, ...]
    seed: int
    num_pages: int = NUM_PAGES
    num_heads: int = 64
    next_n: int = 1
    fp4: bool = False
    room: int = 0

    @property
    def width(self) -> int:
        """Number of columns of the block table: pages of the longest request or of `room`, at least 1."""
        return max(1, pages_of(max((self.room, *self.lengths))))

    def tensors(self, device: torch.device | str = "cpu") -> Tensors:
        """Make q, k_cache, weights, seq_lens, block_table for `envoi.indexer_topk`; caches of a size are shared."""
        source = torch.Generator().manual_seed(self.seed)
        rows = len(self.lengths) * self.next_n
        q = (2 * torch.randn(rows, self.num_heads, HEAD_DIM, generator=source)).to(torch.float8_e4m3fn)
        weights = torch.randn(rows, self.num_heads, generator=source)
        seq_lens = torch.tensor(self.lengths, dtype=torch.int32)
        table = block_table(self.lengths, self.scattered, self.num_pages, self.width, self.seed)
        rest = (x.to(device) for x in (weights, seq_lens, table))
        cache = (random_fp4_cache if self.fp4 else random_cache)(self.num_pages, str(device))
        return (q.to(device), cache, *rest)  # pyright: ignore[reportReturnType]


def one(
    lengths: tuple[int, ...], seed: int = 0, num_heads: int = 64, next_n: int = 1, fp4: bool = False, room: int = 0
) -> Workload:
    """Make a workload of these lengths on scattered pages, in a cache no larger than it needs."""
    num_pages = max(1, sum(map(pages_of, lengths)))
    return Workload(lengths, (True,) * len(lengths), seed, num_pages, num_heads, next_n, fp4, room)


@lru_cache(maxsize=4)
def random_fp4_cache(num_pages: int, device: str = "cpu", spread: int = 5) -> torch.Tensor:
    """Make a cache [num_pages, 64, 1, 68] of keys in FP4, factors of a key at most 2^spread apart, one in 16 zero."""
    source = torch.Generator(device).manual_seed(num_pages)
    groups = num_pages, PAGE_SIZE, HEAD_DIM // FP4_GROUP

    def ints(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, generator=source, device=device)

    values = ints(0, 256, *groups, FP4_GROUP // 2).masked_fill(ints(0, 16, *groups, 1) == 0, 0).flatten(2)
    factors = ints(118, 122, num_pages, PAGE_SIZE, 1) - ints(0, spread + 1, *groups)
    return pack_cache(values, factors.view(torch.float8_e8m0fnu))


@lru_cache(maxsize=2)
def random_cache(num_pages: int, device: str = "cpu") -> torch.Tensor:
    """Make a cache [num_pages, 64, 1, 132] of normal values and positive scales, equal in every call."""
    source = torch.Generator(device).manual_seed(num_pages)
    values = torch.randn(num_pages, PAGE_SIZE, HEAD_DIM, generator=source, device=device).mul_(2)
    scales = torch.rand(num_pages, PAGE_SIZE, generator=source, device=device).mul_(0.02).add_(0.01)
    return pack_cache(values.to(torch.float8_e4m3fn), scales)


def block_table(
    lengths: tuple[int, ...], scattered: tuple[bool, ...], num_pages: int, width: int, seed: int
) -> torch.Tensor:
    """Make a block table [B, width] int32, no page twice; unused entries are ids outside the cache."""
    draw = random.Random(seed)
    needs = [pages_of(length) for length in lengths]
    runs = sum(need for need, out_of_order in zip(needs, scattered, strict=True) if not out_of_order)
    pool = list(range(runs, num_pages))
    draw.shuffle(pool)
    table = torch.full((len(lengths), width), 2**31 - 1, dtype=torch.int32)
    next_run = 0
    for request, (need, out_of_order) in enumerate(zip(needs, scattered, strict=True)):
        pages = [pool.pop() for _ in range(need)] if out_of_order else list(range(next_run, next_run + need))
        next_run += 0 if out_of_order else need
        table[request, :need] = torch.tensor(pages, dtype=torch.int32)
    return table


@lru_cache(maxsize=8)
def workloads(seed: int = 0) -> tuple[Workload, ...]:
    """Make the 128 workloads of a seed."""
    draw = random.Random(seed)
    widths = [draw.randint(low, high) for count, low, high in WIDTHS for _ in range(count)]
    num_long = sum(width >= LONG_PAGES for width in widths)
    order = [place < round(SCATTERED_SHARE * num_long) for place in range(num_long)]
    draw.shuffle(order)
    found = []
    for number, width in enumerate(widths):
        longest = draw.randint((width - 1) * PAGE_SIZE + 1, min(width * PAGE_SIZE, MAX_LENGTH))
        others = draw.randint(0, MAX_REQUESTS - 1)
        most = min(longest, (LONG_PAGES - 1) * PAGE_SIZE)
        lengths = [longest, *(round(most ** draw.random()) for _ in range(others))]
        scattered = [order.pop() if width >= LONG_PAGES else draw.random() < SCATTERED_SHARE]
        scattered += [draw.random() < SCATTERED_SHARE for _ in range(others)]
        turn = draw.randrange(len(lengths))  # the long request isn't always the first
        lengths, scattered = lengths[-turn:] + lengths[:-turn], scattered[-turn:] + scattered[:-turn]
        found.append(Workload(tuple(lengths), tuple(scattered), seed * len(widths) + number))
    return tuple(found)


def hostile(num_heads: int = 64) -> dict[str, Tensors]:
    """Make small inputs chosen to break a selection, by name, on the CPU. `one((131072,))` makes a long one."""
    found = {
        f"length {length}": one((length,), num_heads=num_heads).tensors() for length in (0, 1, 2047, 2048, 2049, 2113)
    }
    q, cache, weights, seq_lens, table = one((2500, 64, 3000), num_heads=num_heads).tensors()
    shape = cache.shape[0], PAGE_SIZE
    ones, unit = torch.ones(*shape, HEAD_DIM), torch.ones(shape)
    few = torch.randint(0, 3, (*shape, 1), generator=torch.Generator().manual_seed(1)).expand(*shape, HEAD_DIM)
    spike = torch.randn(*shape, HEAD_DIM, generator=torch.Generator().manual_seed(2))
    spike[1, 7] = 448.0

    def of(values: torch.Tensor, scales: torch.Tensor = unit) -> torch.Tensor:
        return pack_cache(values.to(torch.float8_e4m3fn), scales)

    found["all scores equal"] = (q, of(ones), weights, seq_lens, table)
    found["ties at the boundary"] = (q, of(few.float()), weights.abs(), seq_lens, table)
    found["one huge value"] = (q, of(spike), weights, seq_lens, table)
    found["all weights negative"] = (q, cache, -weights.abs(), seq_lens, table)
    found["all weights zero"] = (q, cache, weights * 0, seq_lens, table)
    found["subnormal values"] = (q, of(spike.clamp(-1, 1) * 2**-8), weights, seq_lens, table)
    found["subnormal scales"] = (q, of(spike, unit * 1e-41), weights, seq_lens, table)
    found["negative scales"] = (q, of(spike, unit - 2 * (few[..., 0] == 1)), weights, seq_lens, table)
    shared = table.clone()
    shared[1, 0] = shared[0, 0]  # two requests on one page
    shared[2, 1] = shared[2, 0]  # one request twice on one
    found["shared pages"] = (q, cache, weights, seq_lens, shared)
    return found

"""Indexer compared with its PyTorch definition, one workload after the other; times and bytes are means over workloads.

On a GPU Envoi's call is replayed from a CUDA graph, like in an engine; the definition waits for the device and can't
be. Other baselines: the same call launched by Python, with order="any", a device copy of as many bytes, and the
scores of vLLM's DeepGEMM with torch's top-k and with vLLM's own, from CUDA graphs, if that library is installed (keys
in FP8, no blocks). vLLM's own give a set of positions in any order, as Envoi does in cases named set and prefill: their
names end in "_set". One that misses more than a hundredth of the best isn't timed. In a prefill the peers get their
keys in one piece, not in pages, and the definition isn't timed.

Error: the fraction of the k best slots by float64 scores that were missed, over the first few workloads. Rounding may
decide near the k-th score either way, so a few in a thousand are no fault.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import cast

import torch

from bench import libraries
from bench.shapes import Case, IndexerShape
from bench.suites.peers import vllm_prefill, vllm_topk
from bench.timing import Clock, Run, Timing, mean_timing
from bench.trial import Bench, Trial, copy_of, time_rounds
from envoi.ops.indexer import indexer_blocks, indexer_topk
from envoi.ops.indexer.certificate import orders
from envoi.ops.indexer.layout import (
    BYTES_PER_TOKEN,
    FP4_BYTES_PER_TOKEN,
    HEAD_DIM,
    PAGE_SIZE,
    is_fp4,
    pages_of,
    unpack_pages,
)
from tools.oracles.indexer import keys64, scores64
from tools.oracles.indexer_workloads import Workload

MAX_ERROR_WORKLOADS = 8
MAX_ERROR_REQUESTS = 4
MAX_PEER_MISSED = 0.01
PEERS = {
    "vllm_torch_topk": "torch_topk",
    "vllm_cooperative_topk_set": "cooperative_topk",
    "vllm_persistent_topk_set": "persistent_topk",
}
PREFILL_PEERS = PEERS | {"vllm_per_row_topk_set": "top_k_per_row_prefill"}


@dataclass(frozen=True)
class Inputs:
    """Arguments of `envoi.indexer_topk` or `envoi.indexer_blocks`. lengths: seq_lens on the host."""

    q: torch.Tensor
    k_cache: torch.Tensor
    weights: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    lengths: tuple[int, ...]
    next_n: int
    order: str
    k: int
    block: int

    def rows(self) -> Sequence[tuple[int, int, int]]:
        """Return (row, its request, how many tokens it sees) of all rows."""
        return [
            (request * self.next_n + nth, request, max(length - self.next_n + 1 + nth, 0))
            for request, length in enumerate(self.lengths)
            for nth in range(self.next_n)
        ]


def measure(case: Case, bench: Bench) -> Trial:
    """Measure all workloads of a case, in the mode that its suite names."""
    shape = cast(IndexerShape, case.shape)
    mode = case.suite.removeprefix("indexer_")
    ours: list[Timing] = []
    theirs: dict[str, list[Timing]] = {}
    missing: dict[str, str] = {}
    errors: dict[str, list[float]] = {"ours": [], "torch": []}
    for number, workload in enumerate(shape.workloads):
        x = make_inputs(workload, bench.device, shape)
        timing, baselines, missing = time_rounds(
            bench.clock, _captured(x, mode, bench.clock), _baselines(x, mode, bench.clock)
        )
        for name, found in baselines.items():
            theirs.setdefault(name, []).append(found)
        ours.append(timing)
        if number < MAX_ERROR_WORKLOADS:
            errors["ours"].append(missed(x, slots_of(x, mode)))
            errors["torch"].append(missed(x, definition(x)))
    num_bytes, flops = ideal_work(shape.workloads, shape.k)
    return Trial(
        mean_timing(ours),
        {name: mean_timing(found) for name, found in theirs.items() if len(found) == len(ours)},
        {name: mean(values) for name, values in errors.items()},
        num_bytes,
        flops,
        "fp8" if mode == "fast" else "fp32",
        missing,
        libraries.versions(theirs, bench.peer_versions),
    )


def ideal_work(workloads: Sequence[Workload], k: int = IndexerShape.k) -> tuple[float, float]:
    """Return the bytes and FLOPs of a call, means over workloads. Keys count once, however many rows see them."""
    w = workloads[0]
    tokens = mean(sum(workload.lengths) for workload in workloads)
    rows = mean(len(workload.lengths) for workload in workloads) * w.next_n
    unseen = w.next_n * (w.next_n - 1) // 2 * len(w.lengths) if w.next_n > 1 else 0
    num_bytes = tokens * bytes_per_token(w.fp4) + rows * (w.num_heads * (HEAD_DIM + 4) + 4 * k)
    return num_bytes, 2.0 * (tokens * w.next_n - unseen) * w.num_heads * HEAD_DIM


def bytes_per_token(fp4: bool) -> int:
    """Return the bytes of a key with its scale or factors."""
    return FP4_BYTES_PER_TOKEN if fp4 else BYTES_PER_TOKEN


def definition(x: Inputs) -> torch.Tensor:
    """Run the published definition step by step: the whole cache to float32, then each request in its own operators."""
    keys = whole_cache(x.k_cache)
    out = torch.full((len(x.q), x.k), -1, dtype=torch.int32, device=x.q.device)
    for row, request, _ in x.rows():
        length = max(int(x.seq_lens[request]) - x.next_n + 1 + row % x.next_n, 0)
        pages = x.block_table[request, : pages_of(length)].long()
        scores = torch.relu(x.q[row].float() @ keys[pages].flatten(0, 1)[:length].T)
        _, chosen = best_of((scores * x.weights[row].unsqueeze(1)).sum(0), pages, x)
        out[row, : len(chosen)] = chosen.to(torch.int32)
    return out


def whole_cache(k_cache: torch.Tensor) -> torch.Tensor:
    """Widen a cache to float32 [pages, 64, 128]."""
    if is_fp4(k_cache):
        return unpack_pages(k_cache, torch.arange(len(k_cache), device=k_cache.device))[0].view(-1, PAGE_SIZE, HEAD_DIM)
    raw = k_cache.view(torch.uint8).flatten(1)
    values = raw[:, : PAGE_SIZE * HEAD_DIM].contiguous().view(torch.float8_e4m3fn).float()
    scales = raw[:, PAGE_SIZE * HEAD_DIM :].contiguous().view(torch.float32)
    return values.view(-1, PAGE_SIZE, HEAD_DIM) * scales.unsqueeze(-1)


def best_of(scores: torch.Tensor, pages: torch.Tensor, x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a row's best scores, descending, and their slots; or blocks, the newest of which is always chosen."""
    if x.block:
        pad = -len(scores) % x.block
        blocks = torch.nn.functional.pad(scores, (0, pad), value=-torch.inf).view(-1, x.block).amax(1)
        blocks[-1:] = torch.inf
        return blocks.topk(min(x.k, len(blocks)))
    values, best = scores.topk(min(x.k, len(scores)))
    return values, pages[best // PAGE_SIZE] * PAGE_SIZE + best % PAGE_SIZE


def slots_of(x: Inputs, mode: str, order: str | None = None) -> torch.Tensor:
    """Run Envoi's call. order: None for that of the case."""
    tensors = x.q, x.k_cache, x.weights, x.seq_lens, x.block_table
    if x.block:
        return cast(torch.Tensor, indexer_blocks(*tensors, x.k, x.block, next_n=x.next_n))
    return cast(torch.Tensor, indexer_topk(*tensors, x.k, mode, x.next_n, order=order or x.order))


def _captured(x: Inputs, mode: str, clock: Clock) -> Run:
    """Return Envoi's call in a CUDA graph; uncaptured on a CPU, and if the exact mode waits for the device."""
    run = partial(slots_of, x, mode)
    waits = mode == "exact" and clock.device.type == "cuda" and orders(clock.device, x.q.shape[1]) is None
    return run if waits else clock.graph(run)


def _baselines(x: Inputs, mode: str, clock: Clock) -> dict[str, Callable[[], Run]]:
    found: dict[str, Callable[[], Run]] = {}
    if x.next_n == 1 or x.q.device.type == "cpu":
        found["pytorch"] = lambda: partial(definition, x)
    if x.q.device.type == "cuda":
        num_bytes = max(1, sum(x.lengths)) * bytes_per_token(is_fp4(x.k_cache))
        found |= {"launched": lambda: partial(slots_of, x, mode), "copy": lambda: copy_of(num_bytes, x.q.device)}
        if mode == "fast" and x.order != "any":
            found["unordered"] = lambda: clock.graph(partial(slots_of, x, mode, order="any"))
        if mode == "fast" and not x.block and not is_fp4(x.k_cache):
            peers = PEERS if x.next_n == 1 else PREFILL_PEERS
            found |= {name: partial(_peer, x, select, clock) for name, select in peers.items()}
    return found


def _peer(x: Inputs, select: str, clock: Clock) -> Run:
    """Return another library's call in a CUDA graph. Raises RuntimeError if its result is wrong."""
    if x.next_n == 1:
        run = vllm_topk(select, x.q, x.k_cache, x.weights, x.seq_lens, x.block_table, x.k, max(x.lengths))
    else:
        keys, scales = unpack_pages(x.k_cache, x.block_table[0])
        keys, scales = keys[: x.lengths[0]].contiguous(), scales[: x.lengths[0]].contiguous()
        seen = torch.tensor([n for *_, n in x.rows()], dtype=torch.int32, device=x.q.device)
        run = vllm_prefill(select, x.q, keys, scales, x.weights, seen, x.k)
    if (wrong := missed(x, to_slots(x, run()))) > MAX_PEER_MISSED:
        raise RuntimeError(f"its result misses {wrong:.1e} of the best")
    return clock.graph(run)


def to_slots(x: Inputs, positions: torch.Tensor) -> torch.Tensor:
    """Return the cache's slots of positions [rows, k]; -1 for those before the first and past a row's last."""
    at = positions.long().clamp(min=0)
    table, lengths = (t.repeat_interleave(x.next_n, 0) for t in (x.block_table.long(), x.seq_lens))
    seen = lengths - x.next_n + 1 + torch.arange(len(lengths), device=lengths.device) % x.next_n
    slots = table.gather(1, at // PAGE_SIZE) * PAGE_SIZE + at % PAGE_SIZE
    return torch.where((positions >= 0) & (positions < seen.unsqueeze(1)), slots, -1)


def make_inputs(workload: Workload, device: torch.device, shape: IndexerShape | None = None) -> Inputs:
    """Make a workload's tensors, for a shape's call or for one of its defaults."""
    shape = shape or IndexerShape((workload,))
    tensors = workload.tensors(device)
    return Inputs(*tensors, workload.lengths, workload.next_n, shape.order, shape.k, shape.block)


def missed(x: Inputs, slots: torch.Tensor) -> float:
    """Return the fraction of the best slots or blocks that were missed, over the rows that see the most.

    Those as good as the last of them don't count: others may be chosen in their place.
    """
    wrong = []
    longest_first = sorted(x.rows(), key=lambda entry: -entry[2])
    for row, request, length in longest_first[:MAX_ERROR_REQUESTS]:
        pages = x.block_table[request, : pages_of(length)].long()
        scores = scores64(x.q[row], keys64(x.k_cache, pages)[:length], x.weights[row])
        values, best = best_of(scores, pages, x)
        missed = ~torch.isin(best, slots[row].long()) & (values > values[-1:])
        wrong.append(float(missed.double().mean()))
    return mean(wrong)

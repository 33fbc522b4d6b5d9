"""Indexer compared with its PyTorch definition, one workload after the other; times and bytes are means over workloads.

On a GPU Envoi's call is replayed from a CUDA graph, like in an engine; the definition waits for the device and can't
be. Other baselines: the same call launched by Python, with order="any", a device copy of as many bytes, and the
scores of vLLM's DeepGEMM with torch's top-k and with vLLM's own, from CUDA graphs, if that library is installed. vLLM's
own give a set of positions in any order, Envoi's slots best first: their names end in "_set". One that misses more than
a hundredth of the best isn't timed.

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
from bench.suites.peers import vllm_topk
from bench.timing import Clock, Run, Timing, mean_timing
from bench.trial import Bench, Trial, copy_of, time_rounds
from envoi.ops.indexer import indexer_topk
from envoi.ops.indexer.certificate import orders
from envoi.ops.indexer.layout import BYTES_PER_TOKEN, HEAD_DIM, PAGE_SIZE, pages_of
from tools.oracles.indexer import keys64, scores64
from tools.oracles.indexer_workloads import Workload

TOPK = 2048
MAX_ERROR_WORKLOADS = 8
MAX_ERROR_REQUESTS = 4
MAX_PEER_MISSED = 0.01
PEERS = {
    "vllm_torch_topk": "torch_topk",
    "vllm_cooperative_topk_set": "cooperative_topk",
    "vllm_persistent_topk_set": "persistent_topk",
}


@dataclass(frozen=True)
class Inputs:
    """Arguments of `envoi.indexer_topk`. lengths: seq_lens on the host."""

    q: torch.Tensor
    k_cache: torch.Tensor
    weights: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    lengths: tuple[int, ...]


def measure(case: Case, bench: Bench) -> Trial:
    """Measure all workloads of a case, in the mode that its suite names."""
    shape = cast(IndexerShape, case.shape)
    mode = case.suite.removeprefix("indexer_")
    ours: list[Timing] = []
    theirs: dict[str, list[Timing]] = {}
    missing: dict[str, str] = {}
    errors: dict[str, list[float]] = {"ours": [], "torch": []}
    for number, workload in enumerate(shape.workloads):
        x = make_inputs(workload, bench.device)
        timing, baselines, missing = time_rounds(
            bench.clock, _captured(x, mode, bench.clock), _baselines(x, mode, bench.clock)
        )
        for name, found in baselines.items():
            theirs.setdefault(name, []).append(found)
        ours.append(timing)
        if number < MAX_ERROR_WORKLOADS:
            errors["ours"].append(missed(x, slots_of(x, mode)))
            errors["torch"].append(missed(x, definition(x)))
    num_bytes, flops = ideal_work(shape.workloads)
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


def ideal_work(workloads: Sequence[Workload]) -> tuple[float, float]:
    """Return the bytes and FLOPs of a call, means over workloads."""
    tokens = mean(sum(workload.lengths) for workload in workloads)
    rows = mean(len(workload.lengths) for workload in workloads)
    num_heads = workloads[0].num_heads
    num_bytes = tokens * BYTES_PER_TOKEN + rows * (num_heads * (HEAD_DIM + 4) + 4 * TOPK)
    return num_bytes, 2.0 * tokens * num_heads * HEAD_DIM


def definition(x: Inputs) -> torch.Tensor:
    """Run the published definition step by step: the whole cache to float32, then each request in its own operators."""
    raw = x.k_cache.view(torch.uint8).flatten(1)
    values = raw[:, : PAGE_SIZE * HEAD_DIM].contiguous().view(torch.float8_e4m3fn).float()
    scales = raw[:, PAGE_SIZE * HEAD_DIM :].contiguous().view(torch.float32)
    keys = values.view(-1, PAGE_SIZE, HEAD_DIM) * scales.unsqueeze(-1)
    out = torch.full((len(x.lengths), TOPK), -1, dtype=torch.int32, device=x.q.device)
    for request in range(len(x.lengths)):
        length = int(x.seq_lens[request])
        pages = x.block_table[request, : pages_of(length)].long()
        k = keys[pages].flatten(0, 1)[:length]
        scores = torch.relu(x.q[request].float() @ k.T)
        ranked = (scores * x.weights[request].unsqueeze(1)).sum(0)
        chosen = ranked.topk(min(TOPK, length)).indices
        slots = pages[chosen // PAGE_SIZE] * PAGE_SIZE + chosen % PAGE_SIZE
        out[request, : len(chosen)] = slots.to(torch.int32)
    return out


def slots_of(x: Inputs, mode: str, order: str = "score") -> torch.Tensor:
    """Run Envoi's call."""
    found = indexer_topk(x.q, x.k_cache, x.weights, x.seq_lens, x.block_table, TOPK, mode, order=order)
    return cast(torch.Tensor, found)


def _captured(x: Inputs, mode: str, clock: Clock) -> Run:
    """Return Envoi's call in a CUDA graph; uncaptured on a CPU, and if the exact mode waits for the device."""
    run = partial(slots_of, x, mode)
    waits = mode == "exact" and clock.device.type == "cuda" and orders(clock.device, x.q.shape[1]) is None
    return run if waits else clock.graph(run)


def _baselines(x: Inputs, mode: str, clock: Clock) -> dict[str, Callable[[], Run]]:
    found: dict[str, Callable[[], Run]] = {"pytorch": lambda: partial(definition, x)}
    if x.q.device.type == "cuda":
        num_bytes = max(1, sum(x.lengths)) * BYTES_PER_TOKEN
        found |= {"launched": lambda: partial(slots_of, x, mode), "copy": lambda: copy_of(num_bytes, x.q.device)}
        if mode == "fast":
            found["unordered"] = lambda: clock.graph(partial(slots_of, x, mode, order="any"))
            found |= {name: partial(_peer, x, select, clock) for name, select in PEERS.items()}
    return found


def _peer(x: Inputs, select: str, clock: Clock) -> Run:
    """Return another library's call in a CUDA graph. Raises RuntimeError if its result is wrong."""
    run = vllm_topk(select, x.q, x.k_cache, x.weights, x.seq_lens, x.block_table, TOPK, max(x.lengths))
    if (wrong := missed(x, to_slots(x, run()))) > MAX_PEER_MISSED:
        raise RuntimeError(f"its result misses {wrong:.1e} of the best")
    return clock.graph(run)


def to_slots(x: Inputs, positions: torch.Tensor) -> torch.Tensor:
    """Return the cache's slots of positions [B, k]; -1 for those before the first and past a request's last."""
    at = positions.long().clamp(min=0)
    slots = x.block_table.long().gather(1, at // PAGE_SIZE) * PAGE_SIZE + at % PAGE_SIZE
    return torch.where((positions >= 0) & (positions < x.seq_lens.unsqueeze(1)), slots, -1)


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    """Make a workload's tensors."""
    return Inputs(*workload.tensors(device), workload.lengths)


def missed(x: Inputs, slots: torch.Tensor) -> float:
    """Return the fraction of the best slots that were missed, over the longest requests."""
    wrong = []
    longest_first = sorted(enumerate(x.lengths), key=lambda entry: -entry[1])
    for request, length in longest_first[:MAX_ERROR_REQUESTS]:
        pages = x.block_table[request, : pages_of(length)].long()
        scores = scores64(x.q[request], keys64(x.k_cache, pages)[:length], x.weights[request])
        best = scores.topk(min(TOPK, length)).indices
        want = pages[best // PAGE_SIZE] * PAGE_SIZE + best % PAGE_SIZE
        missed = ~torch.isin(want, slots[request].long())
        wrong.append(float(missed.double().mean()))
    return mean(wrong)

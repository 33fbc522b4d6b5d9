"""Steps of a warm-up: find all kernels that calls can need, compile them in processes, prepare calls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from envoi.check import expect_bool, expect_int
from envoi.ops.moe.api import moe
from envoi.ops.moe.choose import has_kernels
from envoi.progress import Progress
from envoi.runtime.devices import Target
from envoi.runtime.planned_kernels import Call, Site, compile_at, compile_here, find
from envoi.runtime.program import without_memory
from envoi.runtime.workers import Workers
from envoi.types import ExpertWeights, QuantTensor, Routing

# Up to so many tokens calls are prepared too; above, multiples of eight, to which servers pad. With still more tokens
# the GPU takes longer than the host.
PREPARED_EACH, PREPARED_EIGHTHS = 64, 256
ROUTED = torch.int32, torch.float32  # ids and weights from `envoi.route`
CHUNK = 128  # numbers of tokens that a process looks at in one go


@dataclass(frozen=True)
class LayerCall:
    """Call of `envoi.moe` for a number of tokens. experts: without memory. dtypes: of the routing's ids and weights."""

    experts: ExpertWeights
    num_topk: int
    dtypes: tuple[torch.dtype, torch.dtype] = ROUTED

    def __call__(self, num_tokens: int) -> None:
        """Make the call."""
        ids, weights = (without_memory((num_tokens, self.num_topk), dtype) for dtype in self.dtypes)
        routing = Routing(weights, ids, self.experts.num_local_experts)
        moe(without_memory((num_tokens, self.experts.hidden), torch.bfloat16), routing, self.experts)


def check_jobs(jobs: int | None, progress: bool) -> None:
    """Raise ValueError unless these are a number of processes, or None, and a bool."""
    if jobs is not None:
        expect_int("jobs", jobs, 1)
    expect_bool("progress", progress)


def compiles(device: torch.device) -> bool:
    """Tell whether calls on this device compile kernels: not on a CPU, also in Triton's interpreter."""
    return device.type == "cuda" and has_kernels(device)


def without_tensors(value: Any) -> Any:
    """Return an argument with tensors that have no memory in the place of its tensors."""
    if isinstance(value, ExpertWeights | QuantTensor):
        return value._map(without_tensors)  # not `.to`, which may reorder weights for another device's kernels
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def compile_calls(
    calls: Sequence[Call], target: Target, numbers: Sequence[int], jobs: int | None, progress: bool, for_launch: bool,
    start: float = 0.0,
) -> list[Site]:  # fmt: skip
    """Compile what calls with these numbers of tokens launch, into Triton's disk cache; return a site of each kernel.

    for_launch: also what Triton needs to launch them. start: which kernel is the first, as a fraction of all of them in
    the order of their digests: of callers that begin at different ones each finds in the cache what others have
    compiled.
    What a worker fails to compile is compiled by this one, so that the error is one here. Raises RuntimeError.
    """
    try:
        with Workers(target.arch, jobs) as workers:
            sites, failed = _compile_by(workers, calls, target, numbers, progress, for_launch, start)
    except (OSError, RuntimeError):  # they can't be started, or have ended
        sites = failed = sorted_by_digest(find(calls, target, numbers))
    for site in failed:
        try:
            compile_here(calls, target, site)
        except Exception as error:
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            said = f"warm_up: {site.name} for {site.num_tokens} tokens can't be compiled: {text}"
            raise RuntimeError(said) from error
    return sites


def _compile_by(
    workers: Workers, calls: Sequence[Call], target: Target, numbers: Sequence[int], progress: bool, for_launch: bool,
    start: float,
) -> tuple[list[Site], list[Site]]:  # fmt: skip
    """Return the sites of all kernels, and of those that the workers couldn't compile."""
    found: dict[str, Site] = {}
    chunks = [numbers[first : first + CHUNK] for first in range(0, len(numbers), CHUNK)]
    for chunk, sites in workers.map(partial(find, calls, target), chunks):
        for digest, site in (sites or find(calls, target, chunk)).items():
            found[digest] = min(site, found.get(digest, site))  # the order in which chunks are done mustn't matter
    sites = sorted_by_digest(found)
    first = int(start * len(sites))
    failed = []
    with Progress(len(sites), quiet=not progress) as bar:
        for site, error in workers.map(partial(compile_at, calls, target, for_launch), sites[first:] + sites[:first]):
            bar.step(site.name)
            if error != "":
                failed.append(site)
    return sites, failed


def sorted_by_digest(found: dict[str, Site]) -> list[Site]:
    """Return the sites in the order of their digests, which all processes share."""
    return [site for _, site in sorted(found.items())]


def prepare(
    call: Callable[[torch.Tensor, Routing], Any], experts: ExpertWeights, num_experts: int, max_tokens: int,
    num_topk: int, dtypes: tuple[torch.dtype, torch.dtype] = ROUTED,
) -> None:  # fmt: skip
    """Make calls with few tokens, after which they are prepared: see `envoi.runtime.prepared`."""
    most = min(PREPARED_EIGHTHS, max_tokens)
    tokens = torch.zeros(most, experts.hidden, dtype=torch.bfloat16, device=experts.device)
    ids = torch.arange(most * num_topk, dtype=dtypes[0], device=experts.device).view(most, num_topk) % num_experts
    weights = torch.zeros(most, num_topk, dtype=dtypes[1], device=experts.device)

    def run(count: int) -> None:
        call(tokens[:count], Routing(weights[:count], ids[:count], num_experts))

    counts = [*range(1, min(PREPARED_EACH, most) + 1), *range(PREPARED_EACH + 8, most + 1, 8)]
    for count in reversed(counts):
        run(count)

"""Steps of a warm-up: find all kernels that calls can need, compile them in processes, prepare calls."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from envoi.check import expect_bool, expect_int
from envoi.moe.api import moe
from envoi.moe.layer import has_kernels
from envoi.progress import Progress
from envoi.runtime.compilers import DIED, Compilers
from envoi.runtime.devices import Target
from envoi.runtime.kernel_case import without_memory
from envoi.runtime.rehearsal import Call, Site, compile_at, find, rehearse
from envoi.types import ExpertWeights, QuantTensor, Routing

# Up to so many tokens calls are prepared too; above, multiples of eight, to which servers pad. With still more tokens
# the GPU takes longer than the host.
PREPARED_EACH, PREPARED_EIGHTHS = 64, 256
ROUTED = torch.int32, torch.float32  # ids and weights from `envoi.route`
CHUNK = 128  # numbers of tokens that a process looks at in one go
HERE = 1024  # up to so many are looked at by this process, while the others still import what they need


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


def jobs_for(jobs: int | None) -> int | None:
    """Return how many processes compile if so many were asked for: one where a choice is forced, as only it knows."""
    from envoi.gemm.hopper.forced import any_forced  # not at the top: `import envoi` must not import Triton

    return 1 if any_forced() else jobs


def without_tensors(value: Any) -> Any:
    """Return an argument with tensors that have no memory in the place of its tensors."""
    if isinstance(value, ExpertWeights | QuantTensor):
        return value._map(without_tensors)  # not `.to`, which may reorder weights for another device's kernels
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def compile_calls(
    calls: Sequence[Call], target: Target, max_tokens: int, jobs: int | None, progress: bool, for_launch: bool
) -> list[Site]:
    """Compile what calls with 1 to max_tokens tokens launch, into Triton's disk cache; return a site of each kernel."""
    with Compilers(target, jobs_for(jobs)) as compilers:
        compilers.before(partial(rehearse, calls[0], max_tokens, target))  # whose imports all of them need
        sites = known_sites(compilers, calls, target, max_tokens)
        compile_sites(compilers, calls, target, uncompiled(sites, target, for_launch), progress, for_launch)
    return list(sites.values())


def known_sites(
    compilers: Compilers, calls: Sequence[Call], target: Target, max_tokens: int, least: int = 1,
    here: int | None = None,
) -> dict[str, Site]:  # fmt: skip
    """Return what `find_all` returns; if an earlier process has kept it, without a look at every number of tokens."""
    from envoi.moe.known_sites import keep, place_of, recall  # not at the top: `import envoi` must not import Triton

    numbers = range(least, max_tokens + 1)
    path = place_of(calls, target, numbers)
    found = None if path is None else recall(path, calls, target)
    if found is None:
        found = find_all(compilers, calls, target, max_tokens, least, here)
        if path is not None and path == place_of(calls, target, numbers):  # nothing has changed meanwhile
            keep(path, found)
    return found


def find_all(
    compilers: Compilers, calls: Sequence[Call], target: Target, max_tokens: int, least: int = 1,
    here: int | None = None,
) -> dict[str, Site]:  # fmt: skip
    """Return a site for each kernel of `least` to max_tokens tokens, by digest, in the order of the digests.

    here: up to so many numbers of tokens are looked at by this process, HERE by default.
    """
    if max_tokens + 1 - least <= (HERE if here is None else here):
        return dict(sorted(find(calls, target, range(least, max_tokens + 1)).items()))
    chunks = [range(first, min(first + CHUNK, max_tokens + 1)) for first in range(least, max_tokens + 1, CHUNK)]
    found: dict[str, Site] = {}
    for _, sites in compilers.map(partial(find, calls, target), chunks):
        if sites is None:
            raise RuntimeError(f"warm_up: {DIED}")
        for digest, site in sites.items():
            found[digest] = min(site, found.get(digest, site))  # the order in which chunks are done mustn't matter
    return dict(sorted(found.items()))


def uncompiled(sites: Mapping[str, Site], target: Target, for_launch: bool) -> dict[str, Site]:
    """Return the sites of kernels that no warm-up has compiled into Triton's disk cache yet."""
    from envoi.runtime.compiled_marks import is_marked  # not at the top: `import envoi` must not import Triton

    return {digest: site for digest, site in sites.items() if not is_marked(digest, target, for_launch)}


def compile_sites(
    compilers: Compilers, calls: Sequence[Call], target: Target, sites: Mapping[str, Site], progress: bool,
    for_launch: bool,
) -> None:  # fmt: skip
    """Compile the kernels of these sites, by digest. Raises RuntimeError for those that can't be."""
    from envoi.runtime import triton_compat
    from envoi.runtime.compiled_marks import mark

    failed: list[str] = []
    meanwhile = partial(triton_compat.warm_up, target.arch) if for_launch else None  # which loading needs, here
    digests = {site: digest for digest, site in sites.items()}
    with Progress(len(sites), quiet=not progress) as bar:
        for site, error in compilers.map(partial(compile_at, calls, target, for_launch), [*sites.values()], meanwhile):
            bar.step(site.name)
            if error == "":
                mark(digests[site], target, for_launch)
            else:
                failed.append(f"{site.name} for {site.num_tokens} tokens: {error or DIED}")
    if failed:
        raise RuntimeError(f"warm_up: {len(failed)} kernels can't be compiled, the first is {min(failed)}")


def prepare(
    call: Callable[[torch.Tensor, Routing], Any], experts: ExpertWeights, num_experts: int, max_tokens: int,
    num_topk: int, dtypes: tuple[torch.dtype, torch.dtype] = ROUTED,
) -> None:  # fmt: skip
    """Make calls with few tokens twice, after which they are prepared: see `envoi.runtime.prepared`."""
    most = min(PREPARED_EIGHTHS, max_tokens)
    tokens = torch.zeros(most, experts.hidden, dtype=torch.bfloat16, device=experts.device)
    ids = torch.arange(most * num_topk, dtype=dtypes[0], device=experts.device).view(most, num_topk) % num_experts
    weights = torch.zeros(most, num_topk, dtype=dtypes[1], device=experts.device)
    for count in [*range(1, min(PREPARED_EACH, most) + 1), *range(PREPARED_EACH + 8, most + 1, 8)]:
        routing = Routing(weights[:count], ids[:count], num_experts)
        for _ in range(2):
            call(tokens[:count], routing)

"""Kernels of calls, for a warm-up: found by planning calls of many numbers of tokens, compiled, loaded.

    launches_of a call -> its launches                         no GPU needed
    find        calls, numbers of tokens -> Site by digest     one for each kernel that differs
    compile_at  a Site -> Triton's disk cache                  no GPU needed
    load_at     a Site -> a kernel ready on the current GPU

`compile_calls` does the first three, in processes.

A call here is a picklable function of the number of tokens: compiling processes repeat it, since launches hold
functions that Python can't send.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from envoi.progress import Progress
from envoi.runtime.devices import Target
from envoi.runtime.program import Launch, building
from envoi.runtime.workers import Workers

Call = Callable[[int], Any]
CHUNK = 128  # numbers of tokens that a process looks at in one go


class Site(NamedTuple):
    """Place of a launch: the call's number, its number of tokens, which of its launches, and the kernel's name."""

    call: int
    num_tokens: int
    launch: int
    name: str


def launches_of(call: Call, num_tokens: int, target: Target) -> list[Launch]:
    """Return what a call launches on a GPU, in order."""
    with building(target) as planned:
        call(num_tokens)
    return planned.launches


def find(calls: Sequence[Call], target: Target, numbers: Iterable[int]) -> dict[str, Site]:
    """Return for each kernel that calls of these numbers of tokens launch one place where it is launched, by digest."""
    from envoi.runtime.launch import key_of  # not at the top: `import envoi` must not import Triton

    sites: dict[str, Site] = {}
    seen: set[tuple] = set()
    for num_tokens in numbers:
        for number, call in enumerate(calls):
            for place, (kernel, _, arguments, options) in enumerate(launches_of(call, num_tokens, target)):
                key = key_of(kernel, arguments, options)
                if key not in seen:
                    seen.add(key)
                    site = Site(number, num_tokens, place, kernel.fn.__name__)
                    sites.setdefault(_digest(kernel, arguments, options, target), site)
    return sites


def _digest(kernel: Any, arguments: tuple, options: dict[str, Any], target: Target) -> str:
    from envoi.runtime import triton_compat

    source = triton_compat.source_hash(kernel, arguments, target.arch)
    return hashlib.sha256(repr((source, sorted(options.items()))).encode()).hexdigest()[:16]


def compile_at(calls: Sequence[Call], target: Target, for_launch: bool, site: Site) -> str:
    """Compile the kernel of a site into Triton's disk cache; return the error, "" if there was none.

    for_launch: also what Triton needs to launch it, on a machine with a GPU.
    """
    from envoi.runtime import triton_compat

    try:
        made = compile_here(calls, target, site)
        if for_launch:
            with suppress(Exception):  # the first launch builds it then, or says why not
                triton_compat.build_launcher(made)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ""


def compile_here(calls: Sequence[Call], target: Target, site: Site) -> Any:
    """Compile the kernel of a site into Triton's disk cache, and return it; raise the compiler's error."""
    from envoi.runtime import triton_compat

    kernel, _, arguments, options = launches_of(calls[site.call], site.num_tokens, target)[site.launch]
    return triton_compat.compile_without_driver(kernel, arguments, target.arch, options)


def load_at(calls: Sequence[Call], target: Target, site: Site) -> None:
    """Load the kernel of a site on the current GPU; what isn't in Triton's disk cache is compiled."""
    load(*launches_of(calls[site.call], site.num_tokens, target)[site.launch])


def load(kernel: Any, grid: tuple, arguments: tuple, options: dict[str, Any]) -> None:
    """Load the kernel of a launch on the current GPU."""
    from envoi.runtime import launch  # not at the top: `import envoi` must not import Triton

    launch.load(kernel, grid, arguments, options)


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
        sites, failed = compile_by_workers(calls, target, numbers, jobs, progress, for_launch, start)
    except (OSError, RuntimeError):  # they can't be started, or have ended
        sites = failed = _sorted_by_digest(find(calls, target, numbers))
    for site in failed:
        try:
            compile_here(calls, target, site)
        except Exception as error:
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            said = f"warm_up: {site.name} for {site.num_tokens} tokens can't be compiled: {text}"
            raise RuntimeError(said) from error
    return sites


def compile_by_workers(
    calls: Sequence[Call], target: Target, numbers: Sequence[int] = (0,), jobs: int | None = None,
    progress: bool = True, for_launch: bool = True, start: float = 0.0,
) -> tuple[list[Site], list[Site]]:  # fmt: skip
    """Return the sites of all kernels, and of those that couldn't be compiled; arguments as in `compile_calls`.

    Raises OSError if no worker can be started, RuntimeError if they have ended.
    """
    found: dict[str, Site] = {}
    chunks = [numbers[first : first + CHUNK] for first in range(0, len(numbers), CHUNK)]
    failed = []
    with Workers(target.arch, jobs) as workers:
        for chunk, sites in workers.map(partial(find, calls, target), chunks):
            for digest, site in (sites or find(calls, target, chunk)).items():
                found[digest] = min(site, found.get(digest, site))  # the order in which chunks are done mustn't matter
        sites = _sorted_by_digest(found)
        first = int(start * len(sites))
        todo = sites[first:] + sites[:first]
        with Progress(len(sites), quiet=not progress) as bar:
            for site, error in workers.map(partial(compile_at, calls, target, for_launch), todo):
                bar.step(site.name)
                if error != "":
                    failed.append(site)
    return sites, failed


def _sorted_by_digest(found: dict[str, Site]) -> list[Site]:
    """Return the sites in the order of their digests, which all processes share."""
    return [site for _, site in sorted(found.items())]

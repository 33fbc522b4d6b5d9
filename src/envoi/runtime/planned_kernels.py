"""Kernels of calls, for a warm-up: found by planning calls of many numbers of tokens, compiled, loaded.

    launches_of a call -> its launches                         no GPU needed
    find        calls, numbers of tokens -> Site by digest     one for each kernel that differs
    compile_at  a Site -> Triton's disk cache                  no GPU needed
    load_at     a Site -> a kernel ready on the current GPU

A call here is a picklable function of the number of tokens: compiling processes repeat it, since launches hold
functions that Python can't send.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from envoi.runtime.devices import Target
from envoi.runtime.program import Launch, building

Call = Callable[[int], Any]


class Site(NamedTuple):
    """Place of a launch: the call's number, its number of tokens, which of its launches, and the kernel's name."""

    call: int
    num_tokens: int
    launch: int
    name: str


def launches_of(call: Call, num_tokens: int, target: Target) -> list[Launch]:
    """Return what a call launches on a GPU, in order."""
    with building(target) as builder:
        call(num_tokens)
    return builder.launches


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

    for_launch: also what Triton needs to launch it, on a machine with a GPU. For a process of its own: Triton's driver
    stands for another GPU meanwhile.
    """
    from envoi.runtime import triton_compat

    try:
        kernel, _, arguments, options = launches_of(calls[site.call], site.num_tokens, target)[site.launch]
        made = triton_compat.compile_like_a_launch(kernel, arguments, target.arch, options)
        if for_launch:
            with suppress(Exception):  # the first launch builds it then, or says why not
                triton_compat.build_launcher(made)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ""


def compile_here(calls: Sequence[Call], target: Target, site: Site) -> None:
    """Compile the kernel of a site into Triton's disk cache, in a process that also does other things."""
    from envoi.runtime import triton_compat

    kernel, _, arguments, options = launches_of(calls[site.call], site.num_tokens, target)[site.launch]
    triton_compat.compile_without_driver(kernel, arguments, target.arch, options)


def load_at(calls: Sequence[Call], target: Target, site: Site) -> None:
    """Load the kernel of a site on the current GPU; what isn't in Triton's disk cache is compiled."""
    load(*launches_of(calls[site.call], site.num_tokens, target)[site.launch])


def load(kernel: Any, grid: tuple, arguments: tuple, options: dict[str, Any]) -> None:
    """Load the kernel of a launch on the current GPU."""
    from envoi.runtime import launch  # not at the top: `import envoi` must not import Triton

    launch.load(kernel, grid, arguments, options)

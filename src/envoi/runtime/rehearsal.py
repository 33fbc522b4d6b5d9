"""Rehearsed calls: what a call would launch, found by running its host path on tensors that have no memory.

    rehearse    a call -> its launches                         no GPU needed
    find        calls, numbers of tokens -> Site by digest     one for each kernel that differs
    find_most   the same from a few of the numbers             mostly all of them
    digests_at  Sites -> digests                               whether they are what they were
    compile_at  a Site -> Triton's disk cache                  no GPU needed
    load_at     a Site -> a kernel ready on the current GPU

A call here is a picklable function of the number of tokens: compiling processes repeat it, since launches hold
functions that Python can't send.
"""

import hashlib
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from envoi.runtime import observer
from envoi.runtime.devices import Target, standing_for

Call = Callable[[int], Any]
Rehearsed = tuple[Any, tuple, tuple, dict[str, Any]]  # launch: kernel, grid, arguments, options


class Site(NamedTuple):
    """Place of a launch: the call's number, its number of tokens, and which of its launches.

    name: of the kernel. size: characters of its source and of what it calls; the larger, the longer it compiles.
    """

    call: int
    num_tokens: int
    launch: int
    name: str
    size: int


def rehearse(call: Call, num_tokens: int, target: Target) -> list[Rehearsed]:
    """Return the (kernel, grid, arguments, options) that a call would launch on a GPU, in order."""
    launches: list[Rehearsed] = []
    with standing_for(target), observer.rehearsing(launches):
        call(num_tokens)
    return launches


def find(calls: Sequence[Call], target: Target, numbers: Iterable[int]) -> dict[str, Site]:
    """Return for each kernel that calls of these numbers of tokens launch one place where it is launched, by digest."""
    finder = _Finder(calls, target)
    for num_tokens in numbers:
        finder.look(num_tokens)
    return finder.sites


def find_most(calls: Sequence[Call], target: Target, numbers: range) -> dict[str, Site]:
    """Return what `find` does, without a look at every number: at some spread over them, and at each change between.

    Missed is a kernel between two numbers that launch the same, or one for integers with other divisors only.
    """
    from envoi.runtime.launch import general_key_of

    finder, last = _Finder(calls, target), numbers[-1]

    def look(num_tokens: int) -> set[tuple]:
        launches = finder.look(num_tokens)
        return {general_key_of(kernel, arguments, options) for kernel, _, arguments, options in launches}

    # Eight to an octave, as tiles change with the octave; rounded, as kernels also differ by what divides a number.
    spread = {round(2 ** (i / 8)) for i in range(8 * last.bit_length())}
    some = sorted({numbers[0], *(n for n in spread if numbers[0] < n < last), last})
    launched = {num_tokens: look(num_tokens) for num_tokens in some}
    gaps = list(pairwise(some))
    while gaps:
        low, high = gaps.pop()
        if high - low > 1 and launched[low] != launched[high]:
            middle = (low + high) // 2
            launched[middle] = look(middle)
            gaps += (low, middle), (middle, high)
    return finder.sites


class _Finder:
    """Places where kernels are launched by calls. sites: one for each kernel seen, by digest."""

    def __init__(self, calls: Sequence[Call], target: Target) -> None:
        self.calls, self.target = calls, target
        self.sites: dict[str, Site] = {}
        self._seen: set[tuple] = set()

    def look(self, num_tokens: int) -> list[Rehearsed]:
        """Add what calls with so many tokens launch, and return it."""
        from envoi.runtime.launch import key_of
        from envoi.runtime.triton_compat import source_size

        launched = []
        for number, call in enumerate(self.calls):
            launches = rehearse(call, num_tokens, self.target)
            launched += launches
            for place, (kernel, _, arguments, options) in enumerate(launches):
                key = key_of(kernel, arguments, options)
                if key not in self._seen:
                    self._seen.add(key)
                    site = Site(number, num_tokens, place, kernel.fn.__name__, source_size(kernel))
                    self.sites.setdefault(_digest(kernel, arguments, options, self.target), site)
        return launched


def digests_at(calls: Sequence[Call], target: Target, sites: Iterable[Site]) -> list[str]:
    """Return the digest of the kernel that is launched at each site. Raises LookupError if there is no such launch."""
    launches: dict[tuple[int, int], list[Rehearsed]] = {}
    found = []
    for site in sites:
        place = site.call, site.num_tokens
        if place not in launches:
            launches[place] = rehearse(calls[site.call], site.num_tokens, target)
        kernel, _, arguments, options = launches[place][site.launch]
        found.append(_digest(kernel, arguments, options, target))
    return found


def _digest(kernel: Any, arguments: tuple, options: dict[str, Any], target: Target) -> str:
    from envoi.runtime import triton_compat

    source = triton_compat.source_hash(kernel, arguments, target.arch)
    return hashlib.sha256(repr((source, sorted(options.items()))).encode()).hexdigest()[:16]


def compile_at(calls: Sequence[Call], target: Target, for_launch: bool, site: Site) -> str:
    """Compile the kernel of a site into Triton's disk cache; return the error, "" if there was none.

    for_launch: also what Triton needs to launch it, on a machine with a GPU.
    """
    from envoi.runtime import launchers, triton_compat

    made_by = launchers.compile_to_launch if for_launch else triton_compat.compile_like_a_launch
    try:
        kernel, _, arguments, options = rehearse(calls[site.call], site.num_tokens, target)[site.launch]
        made_by(kernel, arguments, target.arch, options)
    except Exception as error:
        return error_text(error)
    return ""


def error_text(error: Exception) -> str:
    """Return an error of a compilation in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def load_at(calls: Sequence[Call], target: Target, site: Site, driver: threading.Thread | None = None) -> None:
    """Load the kernel of a site on the current GPU; what isn't in Triton's disk cache is compiled, and its launcher.

    driver: the thread that loads Triton's driver. While it runs, the kernel is compiled already: that needs no driver.
    """
    from envoi.runtime import triton_compat
    from envoi.runtime.launchers import launcher_beside

    kernel, grid, arguments, options = rehearse(calls[site.call], site.num_tokens, target)[site.launch]
    with launcher_beside(kernel, arguments, target.arch):
        if driver is not None and driver.is_alive():
            triton_compat.compile_without_driver(kernel, arguments, target.arch, options)
            driver.join()
        load(kernel, grid, arguments, options)


def load(kernel: Any, grid: tuple, arguments: tuple, options: dict[str, Any]) -> None:
    """Load the kernel of a launch on the current GPU."""
    from envoi.runtime import launch  # not at the top: `import envoi` must not import Triton

    launch.load(kernel, grid, arguments, options)

"""Steps of a warm-up: find all kernels that calls can need, compile them in processes, prepare calls."""

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch

from envoi.check import expect_bool, expect_int
from envoi.moe.api import moe
from envoi.moe.layer import has_kernels
from envoi.progress import Progress
from envoi.runtime.compilers import DIED, Begun, Compilers, start_here
from envoi.runtime.devices import Target
from envoi.runtime.garbage import without_full_collections
from envoi.runtime.kernel_case import without_memory
from envoi.runtime.prepared import recording_first_calls
from envoi.runtime.rehearsal import Call, Site, compile_at, error_text, find, find_most, load_at
from envoi.types import ExpertWeights, QuantTensor, Routing

# Up to so many tokens calls are prepared too; above, multiples of eight, to which servers pad. With still more tokens
# the GPU takes longer than the host.
PREPARED_EACH, PREPARED_EIGHTHS = 64, 256
ROUTED = torch.int32, torch.float32  # ids and weights from `envoi.route`
CHUNK = 128  # numbers of tokens that a process looks at in one go
HERE = 1024  # up to so many are looked at by this process, where no others have started that compile anyway


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
    calls: Sequence[Call], target: Target, max_tokens: int, jobs: int | None, progress: bool, for_launch: bool,
    here: bool = False,
) -> list[Site]:  # fmt: skip
    """Compile what calls with 1 to max_tokens tokens launch, into Triton's disk cache; return a site of each kernel.

    for_launch: also what Triton needs to launch them. here: this process will launch them, and compiles too.
    """
    numbers = range(1, max_tokens + 1)
    with kept_warnings(), without_full_collections(), Compilers(target, jobs_for(jobs)) as compilers:
        work = Compilation(compilers, calls, target, for_launch, progress, here)
        compilers.before(work.ends(numbers))
        look = work.begin(work.most(numbers)(), numbers, HERE)
        work.compile_here()
        sites = look()
        work.add(sites)
        work.finish()
    return list(sites.values())


def begin_looking(
    compilers: Compilers, calls: Sequence[Call], target: Target, numbers: range, here: int, helps: bool = False
) -> Callable[[], dict[str, Site]]:  # fmt: skip
    """Begin to find the kernels of calls with these numbers of tokens; return what waits for a site of each, by digest.

    They are in the order of the digests. What an earlier process has kept needs no look at every number. here: up to so
    many numbers are looked at by this process, when it waits. helps: more too, until the processes have started.
    """
    from envoi.moe.known_sites import keep, place_of, recall  # not at the top: `import envoi` must not import Triton

    path = place_of(calls, target, numbers)
    known = None if path is None else recall(path, calls, target)
    if known is not None:
        return lambda: known
    find_all = begin_finding(compilers, calls, target, numbers, here, helps)

    def wait() -> dict[str, Site]:
        found = find_all()
        if path is not None and path == place_of(calls, target, numbers):  # nothing has changed meanwhile
            keep(path, found)
        return found

    return wait


def begin_finding(
    compilers: Compilers, calls: Sequence[Call], target: Target, numbers: range, here: int, helps: bool = False
) -> Callable[[], dict[str, Site]]:  # fmt: skip
    """Do what `begin_looking` does, with a look at every number."""
    if len(numbers) <= here:
        return lambda: dict(sorted(find(calls, target, numbers).items()))
    chunks = [numbers[first : first + CHUNK] for first in range(0, len(numbers), CHUNK)]
    look = partial(find, calls, target)
    results = compilers.begin(look, chunks, look if helps else None)

    def wait() -> dict[str, Site]:
        found: dict[str, Site] = {}
        for chunk, sites in results:
            if sites is None:  # its process died: most likely of a compilation, which is an error of its own
                sites = find(calls, target, chunk)
            for digest, site in sites.items():
                found[digest] = min(site, found.get(digest, site))  # the order in which chunks are done mustn't matter
        return dict(sorted(found.items()))

    return wait


def kept_warnings() -> AbstractContextManager:
    """Leave the filters of warnings as they were: Triton sets and restores them for each node, also in two threads."""
    return warnings.catch_warnings()


def uncompiled(sites: Mapping[str, Site], target: Target, for_launch: bool) -> dict[str, Site]:
    """Return the sites of kernels that no warm-up has compiled into Triton's disk cache yet."""
    from envoi.runtime.compiled_marks import is_marked  # not at the top: `import envoi` must not import Triton

    return {digest: site for digest, site in sites.items() if not is_marked(digest, target, for_launch)}


class Compilation:
    """Kernels of calls that are compiled: some are added, which begins them, later others, and then all are awaited.

    for_launch: also what Triton needs to launch them. progress: show it from the beginning.
    here: this process, which will launch them, compiles too, for it has already imported what that needs: the largest
    kernel that is added, and until the processes have started also others; with one job all of them. It loads them on
    the current GPU. begun: those added, by digest.
    """

    def __init__(
        self, compilers: Compilers, calls: Sequence[Call], target: Target, for_launch: bool, progress: bool = False,
        here: bool = False,
    ) -> None:  # fmt: skip
        self.compilers, self.calls, self.target, self.for_launch = compilers, calls, target, for_launch
        self.begun: dict[str, Site] = {}
        self._bar = Progress(0, quiet=not progress)
        self._most_here = 0 if not here else 1 if compilers.num_jobs > 1 else sys.maxsize
        self._here: list[tuple[str, Site]] = []
        self._results: list[Iterable[tuple[tuple[str, Site], str | None]]] = []
        self._before = start_here(target.arch) if here else Begun(None, None)

    def ends(self, numbers: range) -> Callable[[], dict[str, Site]]:
        """Return what finds the kernels of the two fewest and the most of some numbers of tokens.

        A process that has called it has imported all that compiling needs: calls without tokens need little of it.
        """
        return partial(find, self.calls, self.target, sorted({*numbers[:2], numbers[-1]}))

    def most(self, numbers: range) -> Callable[[], dict[str, Site]]:
        """Return what finds the kernels of some numbers of tokens, mostly those of all."""
        return partial(find_most, self.calls, self.target, numbers)

    def left(self, sites: Mapping[str, Site]) -> dict[str, Site]:
        """Return the sites of kernels that are neither begun nor in the cache by a warm-up, the largest first."""
        left = [
            found for found in uncompiled(sites, self.target, self.for_launch).items() if found[0] not in self.begun
        ]
        return dict(sorted(left, key=lambda found: (-found[1].size, found[0])))

    def begin(self, sites: Mapping[str, Site], numbers: range, few: int) -> Callable[[], dict[str, Site]]:
        """Add these kernels, begin to look at all numbers of tokens, and return what waits for that.

        Up to `few` numbers are looked at by this process, when it waits. Where it compiles too and the processes have
        something to compile, they look at the numbers instead, after they have begun to compile, which takes longer.
        """
        self.add(sites)
        few = 0 if self._most_here and self.begun and self.compilers.have_started else few
        return begin_looking(self.compilers, self.calls, self.target, numbers, few, helps=self._most_here > 0)

    def add(self, sites: Mapping[str, Site]) -> None:
        """Begin with those of these kernels that are left. RuntimeError if processes can't be started."""
        left = self.left(sites)
        self.begun |= left
        found = [*left.items()]
        self._here += found[: self._most_here]
        function = partial(_compile_found, self.calls, self.target, self.for_launch)
        here = self._compile if self._most_here else None
        self._results.append(self.compilers.begin(function, found[self._most_here :], here, urgent=True))

    def compile_here(self) -> None:
        """Compile what `add` has left to this process.

        While LLVM and the assembler work on the first of it, a thread does some of what waits for the processes.
        """
        from envoi.runtime.launchers import when_generated  # not at the top: `import envoi` must not import Triton

        if self._here and self._before.files is not None:
            self._before.files.join()
        with when_generated(self._help):
            for found in self._here:
                self._results.append([(found, self._compile(found))])
        self._here = []

    def _help(self) -> None:
        gpu = torch.cuda.device(torch.cuda.current_device()) if torch.cuda.is_initialized() else nullcontext()
        self.compilers.help_beside(gpu)

    def _compile(self, found: tuple[str, Site]) -> str:
        try:  # not as if the GPU were another: other threads may launch kernels
            load_at(self.calls, self.target, found[1], self._before.driver)
        except Exception as error:
            return error_text(error)
        return ""

    def finish(self) -> None:
        """Wait until all are compiled, and mark them. Raises RuntimeError for those that can't be."""
        from envoi.runtime.compiled_marks import mark  # not at the top: `import envoi` must not import Triton

        self.compile_here()
        failed: list[str] = []
        self._bar.total = len(self.begun)
        with self._bar as bar:
            for (digest, site), error in chain.from_iterable(self._results):
                bar.step(site.name)
                if error == "":
                    mark(digest, self.target, self.for_launch)
                else:
                    failed.append(f"{site.name} for {site.num_tokens} tokens: {error or DIED}")
        if failed:
            raise RuntimeError(f"warm_up: {len(failed)} kernels can't be compiled, the first is {min(failed)}")


def _compile_found(calls: Sequence[Call], target: Target, for_launch: bool, found: tuple[str, Site]) -> str:
    return compile_at(calls, target, for_launch, found[1])


@without_full_collections()
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
    run(counts[-1])  # for what is made once
    with recording_first_calls():
        for count in reversed(counts):
            run(count)

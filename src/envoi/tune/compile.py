"""Parallel compilation of Hopper kernels before they are measured.

Triton compiles one kernel at a time, for seconds each; the worker processes fill its cache on disk, from which the
measuring process loads them.
"""

import os
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from typing import Any, TypeVar

from envoi.ops.gemm.hopper.config import Config
from envoi.ops.gemm.hopper.host import launch_of
from envoi.runtime import triton_compat
from envoi.runtime.kernel_case import kernel_key
from envoi.runtime.workers import DIED, Workers
from envoi.tune import problems
from envoi.tune.problems import Planned, Shape

Job = tuple[Shape, Config]
Launch = tuple[Any, Any, Any, Any]  # kernel, grid, arguments, options
T = TypeVar("T", bound=Hashable)
MAX_PROCESSES = 32
ARCH = "sm_90"


def compile_all(jobs: Sequence[Job], num_sms: int, num_processes: int | None = None) -> dict[Job, str]:
    """Compile each kernel of these GEMMs once; return the compiler's errors for those that it refused."""
    return compile_distinct(jobs, partial(_launches_of, num_sms), num_sms, num_processes)


def compile_distinct(
    jobs: Sequence[T], launches_of: Callable[[T], Sequence[Launch]], num_sms: int, num_processes: int | None = None
) -> dict[T, str]:
    """Compile each kernel once; return the compiler's errors for jobs whose kernels it refused.

    launches_of: function of a job, hashable, that can be pickled; returns kernel, grid, arguments and options of each
    of its launches.
    """
    distinct: dict[tuple[str, ...], T] = {}
    for job in jobs:
        distinct.setdefault(tuple(kernel_key(*launch) for launch in launches_of(job)), job)
    todo = list(distinct.values())
    count = min(num_processes or (os.cpu_count() or 2) - 1, MAX_PROCESSES, len(todo))
    if count < 2:
        return {}
    start = time.monotonic()
    with Workers(ARCH, count) as workers:
        said = dict(workers.map(partial(_compile, launches_of), todo))
    refused = {job: DIED if said[job] is None else str(said[job]) for job in todo if said[job] != ""}
    what = f"{len(todo)} kernels compiled in {time.monotonic() - start:.0f} s by {count} processes"
    print(f"{what}, {len(refused)} refused", file=sys.stderr, flush=True)
    return refused


@cache
def _planned(shape: Shape, num_sms: int) -> Planned:
    return problems.planned(shape, num_sms)


def _launches_of(num_sms: int, job: Job) -> list[Launch]:
    shape, config = job
    return [launch_of(_planned(shape, num_sms).call, config, num_sms)]


def _compile(launches_of: Callable[[T], Sequence[Launch]], job: T) -> str:
    """Compile into the cache, in a process of the pool, without a launch. Return the error, "" if there was none."""
    try:
        for kernel, _, arguments, options in launches_of(job):
            triton_compat.compile_like_a_launch(kernel, arguments, ARCH, options)
    except Exception as error:  # the measurement will hit the error again and report it
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return ""

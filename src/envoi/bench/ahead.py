"""Parallel compilation of Hopper GEMMs before they are measured.

Triton compiles one kernel at a time, for seconds each; the worker processes fill its cache on disk, from which the
measuring process loads them.
"""

import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from typing import Any

import torch

from envoi.bench import problems
from envoi.bench.problems import Planned, Shape
from envoi.bench.shapes import Case
from envoi.gemm.hopper import host
from envoi.gemm.hopper.config import Config
from envoi.runtime import devices

Job = tuple[Shape, Config]
MAX_PROCESSES = 16


def compile_cases(cases: Iterable[Case], num_processes: int | None = None) -> None:
    """Compile the kernels that Envoi will run in these cases. Does nothing on a GPU that isn't Hopper."""
    shapes = problems.shapes_of(cases)
    if not shapes or devices.implementation(torch.device("cuda")) != "hopper":
        return
    num_sms = devices.num_sms(torch.device("cuda", 0))
    jobs: list[Job] = []
    for shape in shapes:
        try:
            jobs.append((shape, problems.planned(shape, num_sms).chosen(num_sms)))
        except ValueError:
            continue  # another kernel runs it
    compile_all(jobs, num_sms, num_processes)


def compile_all(jobs: Sequence[Job], num_sms: int, num_processes: int | None = None) -> dict[Job, str]:
    """Compile each kernel once; return the compiler's errors for those that it refused."""
    distinct: dict[Any, Job] = {}
    for shape, config in jobs:
        distinct.setdefault(kernel_key(_planned(shape, num_sms), config, num_sms), (shape, config))
    todo = list(distinct.values())
    count = min(num_processes or (os.cpu_count() or 2) - 1, MAX_PROCESSES, len(todo))
    if count < 2:
        return {}
    start = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, context) as pool:
        futures = [pool.submit(_compile, job, num_sms) for job in todo]
        said = [_outcome(future) for future in futures]
    refused = {job: text for job, text in zip(todo, said, strict=True) if text}
    what = f"{len(todo)} kernels compiled in {time.monotonic() - start:.0f} s by {count} processes"
    print(f"{what}, {len(refused)} refused", file=sys.stderr, flush=True)
    return refused


def kernel_key(planned: Planned, config: Config, num_sms: int) -> tuple:
    """Return a key that is equal for launches that share a kernel."""
    from envoi.gemm.hopper.kernel import gemm_kernel

    _, arguments = host.arguments(planned.call, config, num_sms)
    params = getattr(gemm_kernel, "params", ())
    return tuple(_specialised(value, param.is_constexpr) for value, param in zip(arguments, params, strict=True))


def _specialised(value: Any, constant: bool) -> Any:
    if constant:
        return repr(value)
    if isinstance(value, tuple):
        return tuple(_specialised(part, False) for part in value)
    if isinstance(value, torch.Tensor):
        return value.dtype
    if isinstance(value, int):
        return value == 1, value % 16 == 0
    if hasattr(value, "block_shape"):
        return value.base.dtype, tuple(value.block_shape), repr(value.layout)
    return type(value)


def _outcome(future: "Future[str]") -> str:
    try:
        return future.result()
    except BrokenProcessPool:  # a compiler crash ended its process and with it the pool
        return "the process died"


@cache
def _planned(shape: Shape, num_sms: int) -> Planned:
    return problems.planned(shape, num_sms)


def _compile(job: Job, num_sms: int) -> str:
    """Compile into the cache, in a process of the pool, without a launch. Return the error, "" if there was none."""
    from envoi.gemm.hopper.kernel import gemm_kernel

    try:
        grid, arguments = host.arguments(_planned(job[0], num_sms).call, job[1], num_sms)
        kernel: Any = gemm_kernel
        kernel.warmup(*arguments, grid=grid, num_warps=job[1].num_warps)
    except Exception as error:  # the measurement will hit the error again and report it
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return ""

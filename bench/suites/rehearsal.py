"""Parallel compilation of any operator's kernels before they are measured, by calling it once in worker processes.

`ahead.py` compiles Hopper GEMMs without running them. Other kernels have no such plan: a worker makes the case's inputs
on the GPU and makes the calls that will be measured, so that Triton's and Inductor's caches on disk have them.
"""

import os
import sys
import time
from collections.abc import Sequence
from functools import partial

import torch

from bench.shapes import Case, MoeShape
from bench.suites import module_of
from bench.suites.drawn import MAX_LAYER_ELEMENTS
from envoi.ops.gemm.hopper import tune
from envoi.runtime.devices import Target
from envoi.runtime.workers import Workers

SUITES = ("gemm_drawn", "grouped_drawn", "moe_drawn", "router_drawn", "moe", "host", "host_loop")
WORKER_BYTES = 12 << 30  # what the largest drawn layer takes while it is packed
MAX_PROCESSES = 16


def is_rehearsed(case: Case) -> bool:
    """Tell whether a case's suite says how to rehearse it, and several workers have room for its layer."""
    s = case.shape
    if isinstance(s, MoeShape) and 3 * s.num_experts * s.hidden * s.intermediate > MAX_LAYER_ELEMENTS:
        return False
    return case.suite in SUITES


def rehearse_all(
    cases: Sequence[Case], num_processes: int | None = None, tuned: bool = True, compiled: bool = True
) -> dict[str, str]:
    """Compile what the cases will run on the current GPU; return the errors by case. The measurement will say them too.

    num_processes: at most; None = by the CPUs and the GPU's memory. tuned: False for the model's configs alone.
    compiled: False without torch.compile's calls.
    """
    free, _ = torch.cuda.mem_get_info()
    count = min(num_processes or (os.cpu_count() or 2) - 1, MAX_PROCESSES, len(cases), max(1, free // WORKER_BYTES))
    if count < 2:
        return {}
    start = time.monotonic()
    failed = rehearse_with(cases, torch.device("cuda", torch.cuda.current_device()), count, tuned, compiled)
    what = f"{len(cases)} cases rehearsed in {time.monotonic() - start:.0f} s by {count} processes"
    print(f"{what}, {len(failed)} failed", file=sys.stderr, flush=True)
    return failed


def rehearse_with(
    cases: Sequence[Case], device: torch.device, count: int, tuned: bool, compiled: bool = True
) -> dict[str, str]:
    """Rehearse the cases in `count` processes; return the errors by case."""
    target = Target.of(device) if device.type == "cuda" else Target("sm_90")
    with Workers(target.arch, count) as workers:
        said = list(workers.map(partial(_rehearse, str(device), tuned, compiled), cases))
    died = "the worker process died"
    errors = {f"{case.suite} {case.name}": died if error is None else error for case, error in said}
    return {name: error for name, error in errors.items() if error}


def _rehearse(device: str, tuned: bool, compiled: bool, case: Case) -> str:
    """Rehearse a case in a process of its own. Return the error, "" if there was none."""
    try:
        tune.use_measured(tuned)
        with torch.no_grad():
            suite = module_of(case.suite)
            suite.rehearse(case, torch.device(device))
            if compiled and hasattr(suite, "rehearse_compiled"):
                suite.rehearse_compiled(case, torch.device(device))
        if device.startswith("cuda"):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return ""

"""Run a function on several real processes joined by gloo, and return the result or error of each."""

import functools
import multiprocessing as mp
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

# A guard against hangs, far longer than a busy machine needs: the remaining processes are killed and named.
GUARD_S = 600.0
MOST_RANKS = 4  # of a test on GPUs
PATIENCE = 3  # times as long for ranks that share a GPU, which they have in turn


@dataclass
class Outcome:
    """Result of a rank: its value, or its error (type name and text), or its exit code if it died."""

    value: Any = None
    error: str = ""
    text: str = ""
    seconds: float = 0.0


def run_ranks(
    num_ranks: int, fn: Callable, *args, timeout_s: float = GUARD_S, backend: str = "gloo",
    join: Callable[[int], str] | None = None,
) -> list[Outcome]:  # fmt: skip
    """Call fn(rank, num_ranks, *args) on each rank; fn must be importable. Kill and name ranks late by timeout_s.

    timeout_s: `PATIENCE` times that where ranks share a GPU.
    backend: "gloo", or "nccl" for ranks on GPUs; where ranks share one, only gloo connects them.
    join: called with the rank in its process before anything else; returns the init_method. None = a file.
    """
    # CUDA doesn't survive a fork, not even in a process that has only queried devices.
    context: Any = mp.get_context("spawn") if backend == "nccl" else forking()
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            context.Process(
                target=_worker, args=(dict(os.environ), rank, num_ranks, folder, backend, join, fn, args), daemon=True
            )
            for rank in range(num_ranks)
        ]
        for worker in workers:
            worker.start()
        timeout_s *= PATIENCE if backend == "nccl" and share_gpus(num_ranks) else 1
        end = time.monotonic() + timeout_s
        for worker in workers:
            worker.join(max(0.0, end - time.monotonic()))
        hung = [rank for rank, worker in enumerate(workers) if worker.is_alive()]
        for worker in workers:
            worker.kill()
        assert not hung, f"ranks {hung} still running after {timeout_s} s"
        return [_read(Path(folder) / str(rank), worker) for rank, worker in enumerate(workers)]


def gpu_ranks() -> int:
    """Return how many ranks a test over GPUs' memory has: one for each GPU, but several on a GPU that is alone."""
    import torch

    count = torch.cuda.device_count()
    return min(MOST_RANKS, count) if count > 1 else MOST_RANKS


def share_gpus(num_ranks: int, kind: str = "cuda") -> bool:
    """Return whether so many ranks, on GPUs if kind is "cuda", share some of them, which NCCL refuses."""
    import torch

    return kind == "cuda" and 0 < torch.cuda.device_count() < num_ranks


def calls_of_a_loop(most: int, num_ranks: int) -> int:
    """Return how many calls a test makes in a row: a tenth where ranks share a GPU, which they have in turn."""
    return most // 10 if share_gpus(num_ranks) else most


def own_device(kind: str = "cuda") -> Any:
    """Return the torch.device of this rank: its GPU, or for kind "cpu" the CPU."""
    import torch

    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


# Modules of functions that ranks run, which take longest to import.
SLOW = (
    "tests.moe.parallel.cases",
    "envoi.integrations.transformers",
    "tests.integrations.divided",
    "tests.promises.faults",
    "tests.promises.soak",
    "examples.demo.layer",
)


@functools.cache
def forking() -> Any:
    """Return a context that forks off a server, which imports slow modules once for all ranks, in one thread.

    Of these modules it imports those that this process has imported: a run of a few tests needn't wait for all.
    """
    context = mp.get_context("forkserver")
    needed = [name for name in SLOW if name in sys.modules]
    context.set_forkserver_preload(["torch.distributed", "envoi", "envoi.experts", *needed])
    forkserver.ensure_running()  # a process has one server, and others would have it import less
    return context


def _read(path: Path, worker) -> Outcome:
    if not path.exists():
        return Outcome(error="died", text=f"exit code {worker.exitcode}")
    return pickle.loads(path.read_bytes())


def _worker(
    environment: dict[str, str], rank: int, num_ranks: int, folder: str, backend: str,
    join: Callable[[int], str] | None, fn: Callable, args: tuple,
) -> None:  # fmt: skip
    os.environ.clear()
    os.environ.update(environment)  # the server was started earlier
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        if share_gpus(num_ranks):
            os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
            backend = "cpu:gloo,cuda:nccl"  # of which barriers take gloo
    guard = timedelta(seconds=GUARD_S)
    method = f"file://{folder}/store" if join is None else join(rank)
    dist.init_process_group(backend, init_method=method, rank=rank, world_size=num_ranks, timeout=guard)
    outcome, start = Outcome(), time.monotonic()
    try:
        outcome.value = fn(rank, num_ranks, *args)
    except Exception as error:
        outcome.error, outcome.text = type(error).__name__, str(error)
        traceback.print_exc()
    outcome.seconds = time.monotonic() - start
    (Path(folder) / f"{rank}.part").write_bytes(pickle.dumps(outcome))
    (Path(folder) / f"{rank}.part").rename(Path(folder) / str(rank))

"""Tasks in parallel processes within a time limit: for programs that need many kernels compiled, or crashes apart."""

import multiprocessing
import queue
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

LOOK_S = 0.2
PRELOADED = ("torch", "torch.distributed", "envoi", "triton")


@dataclass(frozen=True)
class Done:
    """Task that ended: its result, or an error's text."""

    task: Any
    result: Any = None
    error: str = ""


def in_processes(fn: Callable[[Any], Any], tasks: Sequence[Any], jobs: int, limit_s: float) -> Iterator[Done]:
    """Call fn(task) for all tasks in `jobs` processes; yield each as it ends. After limit_s no task is begun.

    fn must be importable. A task whose process dies has an error, and another process takes the rest. Tasks that the
    time didn't allow aren't yielded. Processes are forked off a server that has imported torch and no CUDA.
    """
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    next_task, said = context.Value("q", 0), context.Queue()
    end = time.time() + limit_s  # the same clock in all processes
    workers, working = {}, {}

    def start(number: int) -> None:
        workers[number] = context.Process(target=_work, args=(fn, tasks, next_task, said, number, end), daemon=True)
        workers[number].start()

    for number in range(max(1, min(jobs, len(tasks)))):
        start(number)
    while workers:
        try:
            number, place, done = said.get(timeout=LOOK_S)
        except queue.Empty:
            for number, worker in list(workers.items()):
                if worker.is_alive() or not said.empty():
                    continue
                del workers[number]
                died = f"the process died with exit code {worker.exitcode}"
                if number not in working:  # it would again
                    raise RuntimeError(f"{died} before it began a task")
                yield Done(tasks[working.pop(number)], error=died)
                start(number)
            continue
        if done is None and place is not None:
            working[number] = place
        elif done is None:
            workers.pop(number).join()
        else:
            working.pop(number, None)
            yield done


def _work(fn: Callable[[Any], Any], tasks: Sequence[Any], next_task: Any, said: Any, number: int, end: float) -> None:
    import torch

    torch.set_num_threads(1)
    while time.time() < end:
        with next_task.get_lock():
            place = next_task.value
            next_task.value += 1
        if place >= len(tasks):
            break
        said.put((number, place, None))
        try:
            done = Done(tasks[place], fn(tasks[place]))
        except Exception as error:
            traceback.print_exc()
            done = Done(tasks[place], error=f"{type(error).__name__}: {error}")
        said.put((number, place, done))
    said.put((number, None, None))

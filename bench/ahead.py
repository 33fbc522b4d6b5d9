"""Parallel compilation of the Hopper GEMMs that cases run, before they are measured."""

from collections.abc import Iterable
from dataclasses import replace

import torch

from bench.shapes import Case
from envoi.runtime import devices
from envoi.runtime.planned_kernels import compile_by_workers
from envoi.tune import problems
from envoi.tune.problems import GemmShape, GroupedShape, Shape


def shapes_of(cases: Iterable[Case]) -> list[Shape]:
    """Return the GEMMs that Envoi runs in these cases, each once; plain ones too if they are a baseline."""
    found: dict[Shape, None] = {}
    for case in cases:
        if isinstance(case.shape, (GemmShape, GroupedShape)):
            found |= {case.shape: None, replace(case.shape, epilogue="store"): None}
            if case.suite == "gemm_weights":
                found[replace(case.shape, format="bf16")] = None
    return list(found)


def compile_cases(cases: Iterable[Case], num_processes: int | None = None) -> None:
    """Compile the kernels that Envoi will run in these cases. Does nothing on a GPU that isn't Hopper."""
    shapes = shapes_of(cases)
    if not shapes or devices.implementation(torch.device("cuda")) != "hopper":
        return
    target = devices.Target.of(torch.device("cuda", 0))
    calls = []
    for shape in shapes:
        try:
            config = problems.planned(shape, target.num_sms).chosen(target.num_sms)
        except ValueError:
            continue  # another kernel runs it
        calls.append(problems.ConfigCall(shape, config, target.num_sms))
    compile_by_workers(calls, target, jobs=num_processes)

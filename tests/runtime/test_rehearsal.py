"""Kernels found by rehearsed calls: which numbers of tokens are looked at, and what none of them may multiply."""

from collections import Counter

import pytest
import torch
import triton
import triton.language as tl

from envoi.moe.parallel.command import experts_without_memory
from envoi.moe.parallel.symmetric_memory import SharedLayout
from envoi.moe.parallel.warm_up import ParallelCall
from envoi.moe.warm_up import LayerCall, without_tensors
from envoi.runtime.devices import Target, standing_for
from envoi.runtime.launch import launch
from envoi.runtime.rehearsal import find, find_most

HOPPER = Target("sm_90")


@triton.jit
def kernel(x, n, SIZE: tl.constexpr):
    """Kernel that is never compiled here."""


class Steps:
    """Call that launches another kernel from each of some numbers of tokens on; it counts the looks."""

    def __init__(self, *steps: int) -> None:
        self.steps, self.looks = steps, 0

    def __call__(self, num_tokens: int) -> None:
        self.looks += 1
        size = sum(num_tokens >= step for step in self.steps)
        launch(kernel, (1,), (torch.empty(8, device="meta"), 32 * num_tokens + 32, size), {})


@pytest.mark.parametrize("steps", [(257, 260), (683, 694), (3, 4), (5000, 5001), (1,), (8192,), (513, 514, 515, 516)])
def test_changes_are_found_however_near_to_each_other(steps):
    call = Steps(*steps)
    found = find_most([call], HOPPER, range(8193))
    assert len(found) == len(steps) + 1 and call.looks < 200
    assert found.keys() == find([call], HOPPER, range(8193)).keys()


def test_what_starts_and_ends_between_two_numbers_is_left_to_the_whole_look():
    def call(num_tokens: int) -> None:
        launch(kernel, (1,), (torch.empty(8, device="meta"), 32, num_tokens == 700), {})

    assert [len(look([call], HOPPER, range(1, 1025))) for look in (find_most, find)] == [1, 2]


def test_divisors_make_other_kernels_but_no_looks():
    looks = []

    def call(num_tokens: int) -> None:
        looks.append(num_tokens)
        launch(kernel, (1,), (torch.empty(8, device="meta"), num_tokens, 0), {})

    found = find_most([call], HOPPER, range(1, 1025))
    assert len(found) == 3 and len(looks) < 90, "1, multiples of 16, and others"


def test_few_numbers_are_looked_at_once_each():
    for numbers in (range(1, 2), range(2), range(1, 4)):
        call = Steps()
        assert len(find_most([call], HOPPER, numbers)) == 1 and call.looks == len(numbers)


def experts_of(hidden: int, intermediate: int, num_experts: int, format: str):
    with standing_for(HOPPER):
        return without_tensors(experts_without_memory(hidden, intermediate, num_experts, format, "swiglu", bias=False))


@pytest.mark.parametrize(
    ("hidden", "intermediate", "num_experts", "num_topk", "format", "most"),
    [
        (2048, 768, 128, 8, "bf16", 512), (3072, 1024, 64, 4, "fp8_row", 600), (6144, 1536, 160, 8, "bf16", 400),
        (4096, 2048, 256, 6, "bf16", 800), (2048, 1408, 64, 6, "fp8_block128", 300), (2880, 2880, 128, 4, "mxfp4", 300),
    ],
)  # fmt: skip
def test_few_looks_find_all_kernels_of_a_layer_over_ranks(hidden, intermediate, num_experts, num_topk, format, most):
    layout = SharedLayout(4, num_experts, most, num_topk, hidden, format)
    ends = tuple(num_experts // 4 * rank for rank in range(5))
    experts = experts_of(hidden, intermediate, num_experts // 4, format)
    calls = [ParallelCall(layout, num_topk, 0, ends, 10.0, experts)]
    found = find([*calls], HOPPER, range(most + 1))
    assert len(found) >= 6
    assert find_most(calls, HOPPER, range(most + 1)).keys() == found.keys()


@pytest.mark.parametrize(
    ("format", "name"),
    [("bf16", "gemm_kernel"), ("fp8_row", "gemm_kernel"), ("mxfp8", "mx_kernel"), ("mxfp4", "many_kernel")],
)
def test_what_divides_a_number_of_tokens_compiles_no_second_gemm(format, name):
    """Not the number of rows, nor that of tiles: Triton would compile up to four times as many, with equal code."""
    calls = [LayerCall(experts_of(2048, 768, 128, format), 8)]
    found = Counter(site.name for site in find(calls, HOPPER, range(600, 665)).values())
    assert found[name] == 2, "L1's and L2's"

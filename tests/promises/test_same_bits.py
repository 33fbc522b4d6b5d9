"""Same bits on CPUs by the references; that the checks fail where they should; that no choice follows M."""

import dataclasses
import random

import pytest
import torch

import envoi
from envoi.epilogues.library import absmax, store
from envoi.epilogues.lower import lower
from envoi.ops.gemm.grouping import ALL_ROWS, INVARIANT_ROWS, NOMINAL_ROWS
from envoi.ops.gemm.hopper import host
from envoi.ops.gemm.hopper.candidates import candidates
from envoi.ops.gemm.hopper.config import Problem, why_not
from envoi.ops.gemm.hopper.tune import choose, use_measured
from envoi.ops.gemm.triton import host as triton_host
from envoi.quant import quantize
from envoi.runtime.program import without_memory
from tests.promises.ranks import compare_ranks
from tests.promises.same_bits import CHECKS, ON_GPU_ONLY, Result, other_rows, run_to_run
from tests.promises.subjects import GEMM_SCHEMES, MAKERS, Sizes, Subject, square_sums, subject

BF16 = torch.bfloat16
CPU = torch.device("cpu")
NUM_SMS = 132


# A reference multiplies, by format, and then runs the epilogue: each format once, and each epilogue with two of them.
SOME = [name for name in MAKERS if "gemm" not in name or name.endswith("store") or " bf16 " in name or "block" in name]


@pytest.mark.parametrize("check", [name for name in CHECKS if name not in ON_GPU_ONLY])
@pytest.mark.parametrize("name", SOME)
def test_references(name, check):
    assert CHECKS[check](subject(name, CPU), 0, 6, CPU) == Result(6, 0)


def leaky(rows: torch.Tensor) -> Subject:
    """Make a subject whose rows depend on their number."""
    return Subject("x", "leaky", 20, lambda picked: (rows[picked],), lambda x: [x + len(x)])


def test_a_row_that_depends_on_the_others_is_found():
    result = other_rows(leaky(torch.arange(20.0)), 0, 20, CPU)
    assert result.wrong > 5
    assert "rows differ from the same rows among 20" in result.text


def test_a_call_that_depends_on_the_run_is_found():
    calls = []

    def run(x):
        calls.append(x)
        return [x + (len(calls) == 17)]

    subject = Subject("x", "moody", 20, lambda picked: (picked,), run)
    assert run_to_run(subject, 0, 20, CPU).wrong == 1


def planned(M: int, N: int, K: int, epilogue, grouping, operands=None):
    a, b = without_memory((M, K), torch.bfloat16), without_memory((N, K), torch.bfloat16)
    return host.planned(a, b, None, epilogue.ir, torch.bfloat16, operands or {}, NUM_SMS, grouping)


def drawn_sizes():
    draw = random.Random(1)
    return [(draw.randint(1, 9000), 64 * draw.randint(1, 80), 64 * draw.randint(1, 120)) for _ in range(30)]


def test_a_batch_invariant_product_never_splits_k():
    split = 0
    for M, N, K in drawn_sizes():
        for ep in (store, absmax):  # tiles as wide as needed leave a store few splits
            split += planned(M, N, K, ep, ALL_ROWS)[1].split_k > 1
            assert planned(M, N, K, ep, INVARIANT_ROWS)[1].split_k == 1
    assert split > 5  # else the promise would cost nothing and say nothing


@pytest.mark.parametrize("form", ["bf16", "fp8_row", "fp8_block128"])
def test_the_sums_over_k_of_the_programs_products_are_split(form):
    """On a GPU; else `batch_invariant` would have nothing to prove there."""
    sizes = Sizes.of(torch.device("cuda"))
    a, b = (
        x if scheme is None else quantize(x, scheme)
        for x, scheme in zip(
            (without_memory((20, sizes.long_k), BF16), without_memory((sizes.N, sizes.long_k), BF16)),
            GEMM_SCHEMES[form], strict=True,
        )
    )  # fmt: skip
    splits = [
        host.planned(a, b, None, store.ir, BF16, {}, NUM_SMS, grouping)[1].split_k > 1
        for grouping in (ALL_ROWS, INVARIANT_ROWS)
    ]
    assert splits == [True, False]


def test_measured_configs_that_split_k_are_left_aside():
    """A shipped config may split K; it isn't for a product whose bits mustn't depend on the batch."""
    code = lower(store.ir, torch.bfloat16, "gluon", False, True, frozenset())
    problem = Problem(512, 512, 7168, 2, whole_k=True)
    assert all(config.split_k == 1 for config in candidates(problem, code))
    splits = [c for c in candidates(dataclasses.replace(problem, whole_k=False), code) if c.split_k > 1]
    assert splits
    assert "don't depend on the batch" in why_not(problem, splits[0], code)
    for measured in (True, False):
        use_measured(measured)
        config = choose(problem, code, NUM_SMS)
        assert config is not None
        assert config.split_k == 1
    use_measured(True)


def test_an_epilogue_that_adds_up_rows_has_one_config_for_any_m():
    def weight(M):
        return {"weight": without_memory((M,), torch.float32)}

    found = {planned(M, 2048, 1024, square_sums, INVARIANT_ROWS, weight(M))[1] for M in (1, 17, 300, 5000)}
    assert found == {planned(NOMINAL_ROWS, 2048, 1024, square_sums, INVARIANT_ROWS, weight(NOMINAL_ROWS))[1]}
    assert len({planned(M, 2048, 1024, square_sums, ALL_ROWS, weight(M))[1] for M in (1, 17, 300, 5000)}) > 1


def test_triton_tiles_do_not_follow_m():
    code = lower(store.ir, torch.bfloat16, "triton", False, False, frozenset())

    def launched(M, grouping):
        a, b = (without_memory((rows, 256), torch.bfloat16) for rows in (M, 512))
        _, arguments, options = triton_host.product_arguments(a, b, None, code, (), [a], 128, grouping)
        return arguments[-5:], tuple(options.items())

    assert len({launched(M, INVARIANT_ROWS) for M in (1, 20, 50, 5000)}) == 1
    assert len({launched(M, ALL_ROWS) for M in (1, 20, 50, 5000)}) > 1


@pytest.mark.parametrize("call", ["gemm", "grouped_gemm", "moe"])
def test_anything_but_a_bool_is_refused(call):
    a, b = torch.zeros(2, 8, dtype=BF16), torch.zeros(4, 8, dtype=BF16)
    offsets = torch.tensor([0, 2], dtype=torch.int32)
    routing = envoi.Routing(torch.zeros(2, 1), torch.zeros(2, 1, dtype=torch.int32), 1)
    experts = envoi.experts.pack(torch.zeros(1, 16, 8, dtype=BF16), torch.zeros(1, 8, 8, dtype=BF16))
    given = {"gemm": (a, b), "grouped_gemm": (a, b[None], offsets), "moe": (a, routing, experts)}[call]
    with pytest.raises(ValueError, match="batch_invariant: expected True or False, got"):
        getattr(envoi, call)(*given, batch_invariant=1)


@pytest.mark.parametrize("format", ["bf16", "fp8_block128"])
def test_the_number_of_ranks(format):
    assert compare_ranks(format, 0, 4, CPU) == Result(4, 0)

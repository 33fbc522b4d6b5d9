"""Epilogues of halves on Hopper, without one: boxes of the weights, compiled kernels, what is refused."""

from dataclasses import replace
from math import prod

import pytest
import torch

from envoi.epilogues import epilogue, halves, library, silu
from envoi.ops.gemm.hopper import host
from envoi.ops.gemm.hopper.config import Config, why_not
from envoi.runtime.tma import halves_descriptor, tma_ready
from tests.helpers.slow import mostly_slow
from tools.kernel_cases import gemm_hopper as hopper_cases
from tools.kernel_cases.gemm_hopper import Case, Inputs
from tools.machine_code.compile import Binary, compile_launch

CONCAT, INTERLEAVED = (library.expert_l1("swiglu", None, False, None, layout) for layout in ("concat", "interleaved"))
MANY = Case("many", "expert_l1", 12288, 4096, 4096, num_experts=32, write_tail=False)
FEW = replace(MANY, name="few", M=384)
CASES = [replace(case, format=format) for case in (MANY, FEW) for format in ("bf16", "fp8_row", "fp8_block128")]
OAI = replace(MANY, epilogue="expert_l1_oai", N=5760, K=2880)
DENSE = Case("dense", "swiglu", 4096, 4096, 7168)


@epilogue
def gated(acc):
    gate, up = halves(acc)
    return silu(gate) * up


EPILOGUES = {
    "expert_l1": CONCAT, "swiglu": gated, "expert_l1_oai": library.expert_l1("swiglu_oai", 7.0, True, None, "concat"),
}  # fmt: skip


def concat(case: Case) -> Inputs:
    """Return a case's inputs with weights in the layout "concat"."""
    return replace(hopper_cases.inputs(case), epilogue=EPILOGUES[case.epilogue])


def in_powers(given: Inputs) -> Inputs:
    """Give the weights factors in UE8M0."""
    return replace(given, b=replace(given.b, sf=given.b.sf.to(torch.float8_e8m0fnu)))


def compiled(given: Inputs, config: Config | None = None) -> Binary:
    call, chosen = hopper_cases.planned(given)
    if config is not None:
        assert why_not(host.problem_of(call), config, call.code) == ""
    return compile_launch(hopper_cases.launch_with(call, config or chosen), "sm_90")


def assert_loads_boxes_of_both_halves(binary: Binary) -> None:
    assert "cp.async.bulk.tensor.3d.shared" in binary.ptx  # weights: half, row, K
    assert "cp.async.bulk.tensor.2d.shared" in binary.ptx  # tokens
    assert "wgmma.mma_async" in binary.ptx


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("experts", [(), (3,)])
def test_a_box_has_rows_of_gate_and_the_same_rows_of_up(experts, rows):
    shape = (*experts, 96, 128)
    weights = tma_ready(torch.arange(prod(shape), dtype=torch.int32).view(shape))
    described = halves_descriptor(weights, rows, 64)
    assert described.block_shape == [2, rows // 2, 64]
    halves_of = weights.as_strided(described.shape, described.strides)
    for expert, matrix in enumerate(weights.view(-1, 96, 128)):
        for first, k in ((0, 0), (8, 64)):
            box = halves_of[2 * expert : 2 * expert + 2, first : first + rows // 2, k : k + 64].reshape(rows, 64)
            gate, up = (part[first : first + rows // 2, k : k + 64] for part in matrix.chunk(2))
            assert torch.equal(box, torch.cat((gate, up)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.format}")
def test_both_layouts_run_with_the_same_config(case):
    plans = [hopper_cases.planned(given)[1] for given in (concat(case), hopper_cases.inputs(case))]
    assert plans[0] == plans[1]


@pytest.mark.compiles
@pytest.mark.default_triton  # under others a kernel may spill
@pytest.mark.parametrize(
    "case", mostly_slow([*CASES, OAI, DENSE], quick=[]), ids=lambda case: f"{case.name}-{case.format}-{case.epilogue}"
)
def test_kernels_spill_nothing(case):
    binary = compiled(concat(case))
    assert_loads_boxes_of_both_halves(binary)
    assert binary.stack_bytes == 0


@pytest.mark.compiles
@pytest.mark.parametrize("case", mostly_slow([MANY, FEW], quick=[FEW]), ids=lambda case: case.name)
def test_factors_of_blocks_in_powers_of_two(case):
    given = concat(replace(case, format="fp8_block128"))
    bytes_, floats = compiled(in_powers(given)), compiled(given)
    assert_loads_boxes_of_both_halves(bytes_)
    assert bytes_.ptx.count("ld.global.b8") > floats.ptx.count("ld.global.b8") == 0


CONFIGS = {
    "two swizzled blocks along K": ("bf16", Config(64, 1, 64, 128, 4)),
    "the narrowest tile": ("bf16", Config(64, 2, 16, 64, 4, epilogue_columns=16)),
    "eight warps": ("bf16", Config(128, 1, 128, 64, 4, num_warps=8)),
    "weights on the M side, four swizzled blocks": ("bf16", Config(64, 2, 8, 256, 3, swap_ab=True)),
    "weights on the M side, factors by row": ("fp8_row", Config(64, 2, 16, 256, 5, swap_ab=True)),
    "two blocks of scales a stage": ("fp8_block128", Config(64, 2, 64, 256, 3)),
    "weights on the M side, two blocks of scales": ("fp8_block128", Config(64, 1, 32, 256, 4, swap_ab=True)),
}


@pytest.mark.compiles
@pytest.mark.parametrize("name", mostly_slow(CONFIGS, quick=["the narrowest tile"]))
def test_other_configs_compile(name):
    format, config = CONFIGS[name]
    case = replace(FEW, format=format)  # few tokens: outputs are stored from registers, as swap_ab needs it
    assert_loads_boxes_of_both_halves(compiled(concat(case), config))


def test_configs_that_cant_take_halves():
    call, config = hopper_cases.planned(concat(DENSE))
    problem, why = host.problem_of(call), "block_y: expected at least 16, and split_k 1, for an epilogue of halves"
    assert why_not(problem, config, call.code) == ""
    assert why_not(problem, replace(config, split_k=2), call.code).startswith(why)
    narrow = Config(64, 1, 8, 64, 4, epilogue_columns=8)
    assert why_not(problem, narrow, call.code).startswith(why)
    plain, _ = hopper_cases.planned(hopper_cases.inputs(DENSE))
    assert not why_not(problem, narrow, plain.code).startswith(why)


@pytest.mark.parametrize(("rows", "reason"), [(512, ""), (384, "halves that end within a block of 128 rows")])
def test_halves_of_blocks(rows, reason):
    given = concat(replace(FEW, N=rows, format="fp8_block128"))
    for one in (given, in_powers(given)):
        assert host.why_not_hopper(one.a, one.b, CONCAT.ir) == reason
        assert host.why_not_hopper(one.a, one.b, INTERLEAVED.ir) == ""

"""Evidence for shipped kernels: each that a Hopper GPU is given has a green run on one."""

import pytest
from tools.machine_code import hopper_recipes, hopper_tuned, registry, router_recipes
from tools.machine_code.compile import compile_recipe
from tools.machine_code.router_cases import ROUTER_CASES

from envoi.runtime import triton_compat
from tests.helpers import gpu_record
from tests.helpers.launches import ptxas_version

pytestmark = pytest.mark.default_triton

ARCH = "sm_90"
HOPPER_ROUTER = [case for case in ROUTER_CASES if case.kernel == "sm90"]
ELSEWHERE = ("gemm-triton", "gemm-triton-mxfp4", "rows-triton", "indexer-scores")  # Hopper has kernels of its own
OTHERS = [
    name
    for name, entry in registry.KERNELS.items()
    if ARCH in entry.arches and name not in ELSEWHERE and not name.startswith(("gemm-sm90-", "router-sm90-"))
]


@pytest.fixture(scope="module")
def record():
    try:
        return gpu_record.read()
    except (FileNotFoundError, ValueError) as error:
        pytest.fail(str(error), pytrace=False)


def expect_nothing(said):
    if said:
        pytest.fail(said, pytrace=False)


def test_the_compiler_is_the_same(record):
    assert record.last.arch == ARCH, f"the run was on {record.last.gpu}; {gpu_record.COMMAND}"
    expect_nothing(gpu_record.other_compiler(record, triton_compat.VERSION, ptxas_version()))


@pytest.mark.parametrize("case", hopper_tuned.with_registered(), ids=lambda case: case.name)
def test_a_green_run(record, case):
    binary = compile_recipe(hopper_recipes.recipe(case), ARCH)
    expect_nothing(gpu_record.no_green_run(record, case.title, binary.ptx_sha256))


@pytest.mark.parametrize("case", HOPPER_ROUTER, ids=lambda case: case.title)
def test_a_green_run_of_the_router(record, case):
    binary = compile_recipe(router_recipes.recipe(case, ARCH), ARCH)
    expect_nothing(gpu_record.no_green_run(record, case.title, binary.ptx_sha256))


@pytest.mark.parametrize("name", OTHERS)
def test_a_green_run_of_the_others(record, name):
    binary = compile_recipe(registry.find(name).recipe(ARCH), ARCH)
    expect_nothing(gpu_record.no_green_run(record, f"{name} {ARCH}", binary.ptx_sha256))

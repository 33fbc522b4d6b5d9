"""Which GEMMs become bf16 first on Hopper, and what they launch."""

import subprocess
import sys

import pytest
import torch

import envoi
from envoi.epilogues.library import linear, store, swiglu, swiglu_fp8
from envoi.ops.gemm.backend import kernels_for
from envoi.ops.gemm.widened import why_not_widened
from envoi.quant import quantize
from envoi.runtime.devices import Target
from envoi.runtime.program import building, without_memory
from envoi.types import QuantTensor
from tests.helpers.tools import ROOT
from tools.kernel_cases.operands import operands_of
from tools.kernel_cases.planning import matrix

HOPPER = Target("sm_90", 132)
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


@pytest.mark.parametrize(
    ("for_a", "for_b", "kernels"),
    [
        ("nvfp4", "nvfp4", "widened"), ("", "nvfp4", "widened"), ("mxfp4", "mxfp4", "widened"),
        ("mxfp4", "mxfp8", "widened"), ("mxfp8", "mxfp4", "hopper_mx"), ("", "mxfp4", "hopper_mx"),
        ("", "", "hopper"), ("fp8_row", "fp8_row", "hopper"), ("fp8_row", "mxfp4", "triton"),
        ("fp8_1x128", "fp8_1x128", "triton"),
    ],
)  # fmt: skip
def test_which_formats(for_a, for_b, kernels):
    a, b = matrix(for_a, 64, 1024), matrix(for_b, 512, 1024)
    assert kernels_for("hopper", a, b, store.ir) == kernels
    assert kernels_for("triton", a, b, store.ir) == "triton"


def test_epilogues_that_the_kernels_for_mx_refuse():
    a, b = matrix("mxfp8", 64, 1024), matrix("mxfp4", 512, 1024)
    assert kernels_for("hopper", a, b, swiglu.ir) == "hopper_mx"
    assert kernels_for("hopper", a, b, swiglu_fp8.ir) == "widened"


def test_what_it_does_not_take():
    a, b = matrix("nvfp4", 64, 1024), matrix("nvfp4", 512, 1024)
    assert "experts" in why_not_widened(a, matrix("nvfp4", 4, 512, 1024), store.ir)
    assert "empty" in why_not_widened(matrix("nvfp4", 0, 1024), b, store.ir)
    assert "formats" in why_not_widened(without_memory((64, 1024), torch.float16), b, store.ir)
    assert "formats" in why_not_widened(matrix("fp8_row", 64, 1024), b, store.ir)
    assert "too large" in why_not_widened(a, matrix("nvfp4", 1 << 19, 1024), store.ir)
    assert "too large" in why_not_widened(matrix("nvfp4", 1, 1 << 26), matrix("nvfp4", 1, 1 << 26), store.ir)
    narrow = QuantTensor(without_memory((64, 1024), E4M3), without_memory((64, 256), E8M0), (1, 4))
    assert "formats" in why_not_widened(narrow, b, store.ir)
    assert why_not_widened(a, b, store.ir) == ""


@pytest.mark.parametrize(
    ("for_a", "for_b", "launched"),
    [
        ("nvfp4", "nvfp4", ["widen_kernel", "widen_kernel", "gemm_kernel"]),
        ("", "nvfp4", ["widen_kernel", "gemm_kernel"]),
    ],
)
def test_launches(for_a, for_b, launched):
    a, b = matrix(for_a, 4096, 1024), matrix(for_b, 2048, 1024)
    with building(HOPPER) as built:
        envoi.gemm(a, b, linear, **operands_of(linear.ir, 4096, 2048, ()))
    assert [launch.kernel.fn.__name__ for launch in built.launches] == launched
    widths = [launch.arguments[3] for launch in built.launches[:-1]]
    assert widths == [1024] * len(widths)


def split_of(call):
    with building(HOPPER) as built:
        call()
    (config,) = (x for x in built.launches[-1].arguments if hasattr(x, "split_k"))
    return config.split_k


def test_sums_of_mx_are_never_split():
    """A row of MX has its bits in every batch; of NVFP4, as of bf16, if the call says so."""
    found = {}
    for scheme in ("", "nvfp4", "mxfp4"):
        a, b = matrix(scheme, 64, 16384), matrix(scheme, 4096, 16384)
        found[scheme] = [split_of(lambda a=a, b=b, on=on: envoi.gemm(a, b, batch_invariant=on)) for on in (False, True)]
    assert found["nvfp4"] == found[""]
    assert found["nvfp4"][0] > found["nvfp4"][1] == 1
    assert found["mxfp4"] == [1, 1]


def test_a_scale_of_the_whole_tensor_is_the_epilogues_to_multiply_by():
    q = quantize(torch.ones(8, 64), "nvfp4")
    with pytest.raises(ValueError, match="without a scale for the whole tensor"):
        envoi.gemm(q, type(q)(q.values, q.sf, q.group, torch.ones(())))


def test_the_copies_are_the_workspace():
    plan = envoi.plan(envoi.gemm, matrix("nvfp4", 4096, 1024), matrix("nvfp4", 2048, 1024))
    assert plan.workspace_bytes == 2 * (4096 + 2048) * 1024


def test_the_first_plan_is_like_the_next():
    """The first call imports what it needs while it is planned."""
    code = (
        "import envoi; from tools.kernel_cases.planning import matrix;"
        "a, b = matrix('nvfp4', 64, 1024), matrix('nvfp4', 512, 1024);"
        "from envoi.runtime.devices import Target; from envoi.runtime.program import plan;"
        "tensors = [a.values, a.sf, b.values, b.sf];"
        "print(*(plan(envoi.gemm.__wrapped__, (a, b), {}, tensors, Target('sm_90', 132)).scratch_bytes for _ in 'ab'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    first, second = map(int, done.stdout.split())
    assert first == second == 2 * (64 + 512) * 1024

"""Barriers share their memory with nothing, at no time: PTX forbids it unless the barrier is invalidated before.

The compiler reuses memory after the last use that it sees. A barrier that is set up and never used again could share
its bytes with a buffer, and the hardware's state of the barrier could corrupt the buffer.
"""

import pytest
import torch
import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from envoi.runtime.program import Launch
from envoi.runtime.triton_compat import role_barrier
from tests.helpers.shared_memory import in_barriers
from tests.helpers.slow import mostly_slow
from tools.kernel_cases import kernel_cases
from tools.machine_code import gate
from tools.machine_code.compile import compile_launch
from tools.machine_code.count import record_of

KERNELS = [
    ("gemm-sm90-store", "sm_90"),  # roles that share a tile
    ("gemm-sm90-grouped-few", "sm_90"),  # roles that alternate
    ("gemm-sm90-gelu-residual", "sm_90"),  # operands by TMA
    ("gemm-sm90-absmax-few", "sm_90"),
    ("gemm-sm90-two-widths-halves", "sm_90"),
    ("gemm-sm90-narrowed-residual", "sm_90"),
    ("gemm-sm90-experts-l1-fp8-block128", "sm_90"),
    ("gemm-mx-sm90-mxfp4-64", "sm_90"),
    ("experts-both-gemms", "sm_90"),
    ("experts-both-gemms-few", "sm_90"),
    ("router-sm90-few-experts", "sm_90"),  # all stages at once
    ("router-sm90-one-token", "sm_90"),
    ("router-sm90-prefill", "sm_90"),
    ("router-sm90-two-widths", "sm_90"),
    ("router-sm90-two-widths-whole-softmax", "sm_90"),
    ("indexer-scores-sm90", "sm_90"),
    ("router-sm100-groups", "sm_100"),
    ("gemm-sm100-swiglu-fp8", "sm_100"),
    ("gemm-sm100-experts", "sm_100"),
]


@pytest.mark.parametrize(("name", "arch"), mostly_slow(KERNELS, [("gemm-sm90-grouped-few", "sm_90")]))
def test_memory_of_barriers(name, arch, tmp_path):
    assert in_barriers(kernel_cases()[name].launch(), arch, tmp_path) == []


@gluon.jit
def _forgotten(out):
    barrier = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier.index(0), count=1)
    role_barrier()
    ids = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    buffer = gl.allocate_shared_memory(gl.int32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    buffer.store(ids)
    role_barrier()
    gl.store(out + ids, buffer.load(ids.type.layout))


FORGOTTEN = Launch(_forgotten, (1,), (torch.zeros(128, dtype=torch.int32),), {})


def test_a_forgotten_barrier_is_found(tmp_path):
    found = in_barriers(FORGOTTEN, "sm_90", tmp_path)
    assert len(found) == 1 and "128xi32" in found[0]


def test_the_gate_names_it():
    binary = compile_launch(FORGOTTEN, "sm_90")
    assert binary.forgotten == ("%barrier",)
    assert "barriers set up and never used, whose memory is reused: %barrier" in gate.broken(*record_of(binary), {})
    assert compile_launch(kernel_cases()["gemm-sm90-grouped-few"].launch(), "sm_90").forgotten == ()

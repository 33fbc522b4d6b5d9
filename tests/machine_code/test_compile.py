"""Compilation for absent GPUs: required counts, hashes, and refusals that name the reason."""

from types import SimpleNamespace

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from envoi.runtime import triton_compat
from envoi.runtime.program import Launch, without_memory
from tests.machine_code import kernels
from tools.kernel_cases import kernel_cases
from tools.machine_code.compile import CompilerRefusesError, compile_launch
from tools.machine_code.count import record_of


def of(binary):
    return record_of(binary)[0]


def product(arch):
    a, b, out = (without_memory((256, 256), torch.bfloat16) for _ in range(3))
    boxes = [TensorDescriptor.from_tensor(x, box) for x, box in ((a, [128, 64]), (b, [128, 64]), (out, [128, 128]))]
    options = {"num_warps": 8, "num_stages": 3, "launch_pdl": True}
    return compile_launch(Launch(kernels.product, (2, 2), (*boxes, 256, 128, 128, 64), options), arch)


@pytest.mark.parametrize(
    ("arch", "core", "accumulator_loads"), [("sm_90", "HGMMA", 0), ("sm_100", "UTCHMMA", 1), ("sm_103", "UTCHMMA", 1)]
)
def test_a_product(arch, core, accumulator_loads):
    binary = product(arch)
    record = of(binary)
    assert binary.arch == record.arch == arch
    assert (binary.name, record.kernel, record.num_warps) == ("product", "product", binary.num_warps)
    assert {name.partition(".")[0] for name in record.families["tensor core"]} == {core}
    assert record.families["TMA load"].keys() == {"UTMALDG.2D"}
    assert record.families["TMA store"].keys() == {"UTMASTG.2D"}
    assert record.total("barrier") > 0
    assert (record.total("tensor memory load") > 0) == accumulator_loads
    assert record.total("local load (spill)") == binary.stack_bytes == 0
    assert record.shared_bytes == binary.shared_bytes > 3 * 2 * 128 * 64 * 2  # three stages of two operands
    assert 24 < record.registers == binary.registers <= 255
    assert record.instructions > sum(map(record.total, record.families))


def test_spills_are_seen():
    roomy, tight = (compile_launch(kernels.crowded_launch(8192, **limit), "sm_90") for limit in ({}, {"maxnreg": 40}))
    assert roomy.stack_bytes == of(roomy).total("local store (spill)") == 0
    assert tight.registers <= 40
    assert tight.stack_bytes > 0
    assert of(tight).total("local store (spill)") > 0
    assert of(tight).total("local load (spill)") > 0
    assert roomy.ptx_sha256 != tight.ptx_sha256


def test_a_triton_without_its_tools_takes_those_of_path(monkeypatch, tmp_path):
    class Lacking:
        def __getattr__(self, name):
            raise RuntimeError(f"Cannot find {name}")

    monkeypatch.setattr(triton_compat, "knobs", SimpleNamespace(nvidia=Lacking()))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="Cannot find cuobjdump"):
        triton_compat.bundled_tool("cuobjdump")
    tool = tmp_path / "cuobjdump"
    tool.touch(mode=0o755)
    assert triton_compat.bundled_tool("cuobjdump") == tool


def test_what_the_architecture_lacks_is_a_refusal(capfd):
    # Until 3.8 Triton's compiler aborts, since then it says what is wrong.
    words = r"for sm_90: (LLVM ERROR|'ttng.tmem_alloc' op requires tcgen05 support)"
    with pytest.raises(CompilerRefusesError, match=f"gemm_kernel: the compiler refuses it {words}"):
        compile_launch(kernel_cases()["gemm-sm100"].launch(), "sm_90")
    assert capfd.readouterr() == ("", "")

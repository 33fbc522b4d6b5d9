"""Compilation for absent GPUs: required counts, hashes, and refusals that name the reason."""

import importlib.util
import os

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from envoi.runtime import triton_compat
from envoi.runtime.program import Launch, without_memory
from tests.machine_code import kernels
from tools.kernel_cases import kernel_cases
from tools.machine_code import isolate, ptx
from tools.machine_code.compile import CompilerRefusesError, arguments_of, compile_launch
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


@pytest.mark.parametrize(("first", "suffix", "loads"), [(1, "E", 8), (0, "128", 2)])
def test_alignment_decides_the_width(first, suffix, loads):
    x = torch.zeros(1025)[first:]
    launch = Launch(kernels.scale_rows, (1,), (x, x, 0.5, 1024 + first, 1024), {})
    record = of(compile_launch(launch, "sm_90"))
    for family in ("global load", "global store"):
        assert [opcode.rpartition(".")[2] for opcode in record.families[family]] == [suffix]
        assert record.total(family) == loads
    assert record.registers < 40


def test_spills_are_seen():
    roomy, tight = (compile_launch(kernels.crowded_launch(8192, **limit), "sm_90") for limit in ({}, {"maxnreg": 40}))
    assert roomy.stack_bytes == of(roomy).total("local store (spill)") == 0
    assert tight.registers <= 40
    assert tight.stack_bytes > 0
    assert of(tight).total("local store (spill)") > 0
    assert of(tight).total("local load (spill)") > 0
    assert roomy.ptx_sha256 != tight.ptx_sha256


def load_source(path, text):
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.shift


def test_the_hash_ignores_where_the_source_stands(tmp_path):
    head = "import triton\nimport triton.language as tl\n"
    body = """
@triton.jit
def shift(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at) + 1.0)
"""
    folders = [tmp_path / name for name in ("here", "elsewhere")]
    for folder in folders:
        folder.mkdir()
    texts = (head + body, head + "\n\n# moved\n" * 9 + body, (head + body).replace("+ 1.0", "+ 2.0"))
    paths = (folders[0] / "one.py", folders[1] / "two.py", folders[0] / "three.py")
    x = torch.zeros(256)
    here, moved, other = (
        compile_launch(Launch(load_source(path, text), (1,), (x, x, 256), {}), "sm_90")
        for path, text in zip(paths, texts, strict=True)
    )
    assert here.ptx != moved.ptx
    assert here.ptx_sha256 == moved.ptx_sha256
    assert here.ptx_sha256 != other.ptx_sha256
    assert not {".loc", ".file", "//", ".debug_"} & set(ptx.without_lines(here.ptx).split())
    assert "st.global" in ptx.without_lines(here.ptx)


def test_a_tuple_is_compiled_as_a_launch_would():
    x = torch.zeros(1024)
    launch = Launch(kernels.with_operands, (1,), (x, (x, 0.5, None), x, 1024), {"num_warps": 2})
    signature, constants, aligned, *_ = arguments_of(launch, "sm_100")
    assert signature == {"x": "*fp32", "operands": ("*fp32", "fp32", "constexpr"), "out": "*fp32", "BLOCK": "constexpr"}
    assert constants == {(1, 2): None, (3,): 1024}
    assert {path for path, hints in aligned.items() if hints} == {(0,), (1, 0), (2,)}
    record = of(compile_launch(launch._replace(arguments=(x, (x, 0.5, 1.0), x, 1024)), "sm_100"))
    assert (record.num_warps, record.total("global load")) == (2, 8)


def test_what_the_architecture_lacks_is_a_refusal(capfd):
    # Until 3.8 Triton's compiler aborts, since then it says what is wrong.
    words = r"for sm_90: (LLVM ERROR|'ttng.tmem_alloc' op requires tcgen05 support)"
    with pytest.raises(CompilerRefusesError, match=f"gemm_kernel: the compiler refuses it {words}"):
        compile_launch(kernel_cases()["gemm-sm100"].launch(), "sm_90")
    assert capfd.readouterr() == ("", "")


def abort(*args):
    os.write(2, b"LLVM ERROR: out of ideas\nStack dump:\n")
    os.abort()


def diagnose(*args):
    os.write(2, b"k.py:1:1: error: 'op' is odd\nk.py:2:1: note: it is even here\n")
    raise RuntimeError("PassManager::run failed")


@pytest.mark.parametrize(
    ("compiler", "words"), [(abort, "LLVM ERROR: out of ideas"), (diagnose, "'op' is odd; it is even here")]
)
def test_the_compilers_own_words_are_passed_on(monkeypatch, capfd, compiler, words):
    monkeypatch.setattr(triton_compat, "compile_for", compiler)
    with pytest.raises(CompilerRefusesError, match=f"crowded: the compiler refuses it for sm_90: {words}$"):
        compile_launch(kernels.crowded_launch(256), "sm_90")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("kernel", "arch", "words"),
    [
        (kernels.crowded, "sm_91", "arch: expected one of sm_90, sm_100, sm_103, got 'sm_91'"),
        (len, "sm_90", "kernel: expected a function under triton.jit or gluon.jit, got builtin"),
    ],
)
def test_what_cannot_be_compiled(kernel, arch, words):
    with pytest.raises(ValueError, match=words):
        compile_launch(kernels.crowded_launch(64)._replace(kernel=kernel), arch)


def test_a_child_brings_back_what_happens():
    def fail():
        raise KeyError("reason")

    def leave():
        raise SystemExit(3)

    assert isolate.call(lambda: {"a": 1}).value == {"a": 1}
    assert isolate.call(fail).reason == "'reason'"
    assert isolate.call(leave).ended == "raised"
    died = isolate.call(lambda: __import__("os")._exit(7))
    assert (died.ended, died.reason) == ("died", "the process ended with status 7")
    unpicklable = isolate.call(lambda: lambda: None)
    assert unpicklable.ended == "died"


def test_every_kernel_is_listed_once():
    assert len(kernel_cases()) > 100
    assert all(case.about and case.arches for case in kernel_cases().values())

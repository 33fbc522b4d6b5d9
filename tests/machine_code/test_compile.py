"""Compilation for absent GPUs: required counts, hashes, and refusals that name the reason."""

import importlib.util
import os

import pytest
import torch
import triton.experimental.gluon.language as gl
from tools.machine_code import isolate, ptx, sweep, tmem_sweep, tools
from tools.machine_code.compile import (
    CompilerRefusesError,
    Recipe,
    compile_kernel,
    compile_recipe,
    descriptor_type,
    recipe_of_call,
)
from tools.machine_code.record import of_binary
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from envoi.runtime import triton_compat
from tests.machine_code import kernels


def of(binary):
    return of_binary(binary)[0][0]


def total(record, family):
    return sum(record.families.get(family, {}).values())


def product(arch):
    box = descriptor_type("bf16", (128, 64))
    return compile_kernel(
        kernels.product,
        {"a_desc": box, "b_desc": box, "out_desc": descriptor_type("bf16", (128, 128)), "K": "i32:16"},
        {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64},
        arch,
        num_warps=8,
        num_stages=3,
    )


@pytest.mark.parametrize(
    ("arch", "core", "accumulator_loads"),
    [("sm_90", "HGMMA.64x64x16.F32.BF16", 0), ("sm_100", "UTCHMMA", 1), ("sm_103", "UTCHMMA", 1)],
)
def test_a_product(arch, core, accumulator_loads):
    binary = product(arch)
    record = of(binary)
    assert tools.arch_of(binary.cubin) == binary.arch == record.arch == arch
    assert (binary.name, record.kernel, record.num_warps) == ("product", "product", binary.num_warps)
    assert any(name.partition(".")[0] == core.partition(".")[0] for name in record.families["tensor core"])
    assert record.families["TMA load"].keys() == {"UTMALDG.2D"}
    assert record.families["TMA store"].keys() == {"UTMASTG.2D"}
    assert total(record, "barrier") > 0
    assert (total(record, "tensor memory load") > 0) == accumulator_loads
    assert total(record, "local load (spill)") == binary.stack_bytes == 0
    assert record.shared_bytes == binary.shared_bytes > 3 * 2 * 128 * 64 * 2  # three stages of two operands
    assert 24 < record.registers == binary.registers <= 255
    assert record.instructions > sum(map(sum, map(dict.values, record.families.values())))


@pytest.mark.parametrize(("hint", "loads"), [("", {"32 bit": 8}), (":16", {"128 bit": 2})])
def test_alignment_decides_the_width(hint, loads):
    signature = {"x": f"*fp32{hint}", "out": f"*fp32{hint}", "scale": "fp32", "num_columns": f"i32{hint}"}
    record = of(compile_kernel(kernels.scale_rows, signature, {"BLOCK": 1024}, "sm_90"))
    assert record.families["global load"] == record.families["global store"] == loads
    assert record.registers < 40


def test_spills_are_seen():
    signature = {"x": "*fp32:16", "out": "*fp32:16"}
    roomy, tight = (
        compile_kernel(kernels.crowded, signature, {"BLOCK": 8192}, "sm_90", maxnreg=limit) for limit in (None, 40)
    )
    assert roomy.stack_bytes == total(of(roomy), "local store (spill)") == 0
    assert tight.registers <= 40
    assert tight.stack_bytes > 0
    assert total(of(tight), "local store (spill)") > 0
    assert total(of(tight), "local load (spill)") > 0
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
    here, moved, other = (
        compile_kernel(load_source(path, text), {"x": "*fp32:16", "out": "*fp32:16"}, {"BLOCK": 256}, "sm_90")
        for path, text in zip(paths, texts, strict=True)
    )
    assert here.ptx != moved.ptx
    assert here.ptx_sha256 == moved.ptx_sha256
    assert here.ptx_sha256 != other.ptx_sha256
    assert not {".loc", ".file", "//", ".debug_"} & set(ptx.without_lines(here.ptx).split())
    assert "st.global" in ptx.without_lines(here.ptx)


def test_a_call_gives_the_recipe_of_its_launch():
    x, bias = torch.zeros(1024), torch.zeros(1024)
    recipe = recipe_of_call(kernels.with_operands, (x, (bias, 0.5, None), x, 1024), "sm_90", num_warps=2)
    assert recipe.signature == {
        "x": "*fp32:16", "operands": ("*fp32:16", "fp32", "constexpr"), "out": "*fp32:16", "BLOCK": "constexpr",
    }  # fmt: skip
    assert recipe.constexprs == {(1, 2): None, (3,): 1024}
    by_hand = Recipe(
        kernels.with_operands, {**recipe.signature}, {(1, 2): 1.0, "BLOCK": 1024}, {"num_warps": 2}
    )  # fmt: skip
    del by_hand.signature["BLOCK"]
    record = of(compile_recipe(by_hand, "sm_100"))
    assert (record.num_warps, record.families["global load"]) == (2, {"128 bit": 8})


def test_a_call_of_a_gluon_kernel():
    layout = gl.NVMMASharedLayout.get_default_for([128, 64], gl.bfloat16)
    tensor = torch.zeros(256, 128, dtype=torch.bfloat16)
    a = TensorDescriptor.from_tensor(tensor, [128, 64], layout)
    b = TensorDescriptor.from_tensor(tensor, [256, 64], gl.NVMMASharedLayout.get_default_for([256, 64], gl.bfloat16))
    case = tmem_sweep.Case("32x32b", 32)
    arguments = (a, b, torch.zeros(256), tensor, 0.5, 128, 256, 128, 256, 64, 32, "32x32b")
    recipe = recipe_of_call(tmem_sweep.tmem_load_tile, arguments, "sm_100", num_warps=4)
    assert compile_recipe(recipe, "sm_100").ptx_sha256 == compile_recipe(tmem_sweep.recipe(case), "sm_100").ptx_sha256


def test_the_width_of_a_sub_tile_is_the_width_of_the_loads():
    cases = [
        tmem_sweep.Case("32x32b", 8),
        tmem_sweep.Case("32x32b", 128),
        tmem_sweep.Case("16x256b", 64),
        tmem_sweep.Case("16x256b", 4),
        tmem_sweep.Case("16x32bx2", 64, block_m=64),
    ]
    rows = sweep.run("sm_100", cases)
    loads = [row.record.families["tensor memory load"] for row in rows[:3]]
    assert loads == [{"32x32b.x8": 32}, {"32x32b.x128": 2}, {"16x256b.x8": 8}]
    narrow, wide = (row.record for row in rows[:2])
    assert narrow.registers < 48 < 128 < wide.registers
    assert narrow.instructions > wide.instructions
    assert narrow.families["tensor core"] == {"UTCHMMA": 4}
    assert [row.record for row in rows[3:]] == [None, None]
    text = sweep.table(rows)
    assert text.count("refused, see below") == 2
    assert "16x256b, 128 rows, 4 warps, 4 columns: TMEM layout '16x256b' unsupported" in text
    assert "16x32bx2 is inferred implicitly and cannot be requested" in rows[4].reason
    with pytest.raises(ValueError, match="sm_90 has no tensor memory"):
        sweep.run("sm_90", cases)


def test_all_cases_are_planned():
    planned = list(tmem_sweep.cases())
    assert len(planned) == len(set(planned)) == 7 * 9 + 1
    assert {case.shape for case in planned} == {"32x32b", "16x64b", "16x128b", "16x256b", "32x32b_splitn", "16x32bx2"}


def test_what_the_architecture_lacks_is_a_refusal(capfd):
    # Until 3.8 Triton's compiler aborts, since then it says what is wrong.
    words = r"for sm_90: (LLVM ERROR|'ttng.tmem_alloc' op requires tcgen05 support)"
    with pytest.raises(CompilerRefusesError, match=f"tmem_load_tile: the compiler refuses it {words}"):
        compile_recipe(tmem_sweep.recipe(tmem_sweep.Case("32x32b", 32)), "sm_90")
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
        compile_kernel(kernels.crowded, {"x": "*fp32", "out": "*fp32"}, {"BLOCK": 256}, "sm_90")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"arch": "sm_91"}, "arch: expected one of sm_90, sm_100, sm_103, got 'sm_91'"),
        ({"function": len}, "function: expected a function under triton.jit or gluon.jit, got builtin"),
        (
            {"constexprs": {}},
            "scale_rows: expected each of x, out, scale, num_columns, BLOCK in signature or constexprs",
        ),
        ({"constexprs": {"BLOCK": 64, "x": 1}}, "expected each of x, out, scale"),
        ({"signature": {"x": "*fp32"}}, "got x and BLOCK"),
    ],
)
def test_arguments_that_do_not_fit(change, words):
    call = {
        "function": kernels.scale_rows, "constexprs": {"BLOCK": 64}, "arch": "sm_90",
        "signature": {"x": "*fp32", "out": "*fp32", "scale": "fp32", "num_columns": "i32"},
    }  # fmt: skip
    with pytest.raises(ValueError, match=words):
        compile_kernel(**(call | change))


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

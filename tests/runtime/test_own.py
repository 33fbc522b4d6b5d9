"""Kernels of Envoi have its changes of PTX and stable keys; another kernel that is compiled meanwhile has neither."""

import threading

import pytest
import torch
import triton
import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon._runtime import GluonASTSource

from envoi.runtime import ptx_changes, triton_compat
from envoi.runtime.program import without_memory
from envoi.runtime.ptx_changes import remark
from tests.helpers.compiling_driver import compile_like_a_launch
from tests.helpers.fresh import run

TARGET = triton_compat.target_of("sm_90")
MARK = gl.constexpr("// test remark 1 $0")
TYPES = {"x": "*i32"}


@gluon.jit
def marked(x):
    remark(MARK)
    gl.store(x, 1)


@gluon.jit
def launched(x):
    remark(MARK)
    gl.store(x, 3)


@gluon.jit
def theirs(x):
    remark(MARK)
    gl.store(x, 2)


@pytest.fixture
def seen(monkeypatch, tmp_path) -> list[str]:
    """Return the names of the kernels whose PTX is changed; nothing is in the cache."""
    names: list[str] = []

    def change(ptx: str) -> str:
        names.append(next(line.split()[-1].strip("(") for line in ptx.splitlines() if ".entry" in line))
        return ptx

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(ptx_changes, "_changes", [*ptx_changes._changes, change])
    return names


def compile_theirs() -> None:
    """Compile a kernel as another library in the process does."""
    triton.compile(GluonASTSource(theirs, TYPES), target=TARGET)


def compile_marked():
    return triton_compat.compile_for(marked, TYPES, {}, {}, "sm_90", {})


def test_only_own_kernels_are_changed(seen):
    compile_theirs()
    assert seen == []
    compile_marked()
    assert seen == ["marked"]
    compile_theirs()
    assert seen == ["marked"]


def test_another_threads_kernel_is_not_changed_meanwhile(monkeypatch, seen):
    def compile_beside(ptx: str) -> str:
        beside = threading.Thread(target=compile_theirs)
        beside.start()
        beside.join()
        return ptx

    monkeypatch.setattr(ptx_changes, "_changes", [*ptx_changes._changes, compile_beside])
    compile_marked()
    assert seen == ["marked"]


def test_a_launch_compiles_with_the_changes(seen):
    compile_like_a_launch(launched, (without_memory((4,), torch.int32),), {})
    assert seen == ["launched"]


@pytest.mark.parametrize("debug", [False, True])
def test_a_launch_finds_what_was_compiled_without_a_driver(debug, monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "debug", debug)
    arguments = (without_memory((4,), torch.int32),)
    made = triton_compat.compile_without_driver(launched, arguments, "sm_90", {})
    assert compile_like_a_launch(launched, arguments, {}).hash == made.hash


def test_both_ways_have_one_key(seen):
    made = compile_marked()
    again = triton.compile(GluonASTSource(marked, TYPES), target=TARGET, options=triton_compat.FP_FUSION)
    assert again.hash == made.hash and seen == ["marked"], "the second is read from the cache"


KEYS = """
import sys
from envoi.ops.gemm.hopper.kernel import gemm_kernel
from envoi.ops.moe.one_launch.kernel import fused_kernel
from envoi.runtime import triton_compat
kernels = [fused_kernel, gemm_kernel]
if sys.argv[1] == "hashed before, the other first":
    for kernel in kernels:
        kernel.cache_key
    kernels.reverse()
for kernel in kernels:
    triton_compat.own(kernel)
print(fused_kernel.cache_key, gemm_kernel.cache_key)
"""


def test_keys_are_the_same_in_every_process():
    found = [run(KEYS, how) for how in ("one first", "hashed before, the other first")]
    assert [done.returncode for done in found] == [0, 0], found[0].stderr
    assert len({done.stdout for done in found}) == 1 and len(found[0].stdout) > 100

"""What Envoi leaves as it is in a process: Triton's compiler, its driver, and Python's settings."""

from tests.helpers.fresh import run

CODE = """
import gc, sys, threading, warnings
import torch, triton
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import compiler
from triton.runtime import driver, jit
from triton.runtime.interpreter import InterpreterBuilder

def state():
    parts = CUDABackend.make_ptx, CUDABackend.make_llir, CUDABackend.make_cubin, compiler.compile, compiler.make_backend
    parts += jit.DependenciesFinder._update_hash, InterpreterBuilder.create_splat, triton.compile
    settings = sys.getswitchinterval(), gc.get_threshold(), gc.get_freeze_count(), threading.active_count()
    hooks = [(name, str(value)) for name, value in sorted(vars(triton.knobs.runtime).items()) if "hook" in name]
    return *parts, *settings, list(warnings.filters), driver._active, hooks

gc.unfreeze()  # what this process was forked with
before = state()
import envoi
from envoi.ops.moe import warm_up
from envoi.ops.moe.support import experts_without_memory
from envoi.runtime import planned_kernels, triton_compat
from envoi.runtime.devices import Target, standing_for
assert state() == before, "an import"
target = Target("sm_90")
with standing_for(target):
    calls = [warm_up.LayerCall(experts_without_memory(256, 128, 4, "bf16", "swiglu", False), 2)]
sites = planned_kernels.compile_calls(calls, target, range(1, 3), 1, progress=False, for_launch=True)
assert len(sites) >= 3
assert state() == before, "a warm-up"
planned_kernels.compile_here(calls, target, sites[0])
assert state() == before, "a compilation in this process"
"""


def test_imports_and_a_warm_up_change_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    done = run(CODE)
    assert done.returncode == 0, done.stderr

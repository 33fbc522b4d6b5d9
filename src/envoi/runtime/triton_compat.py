"""Compatibility layer for the supported Triton releases, 3.6 (torch 2.11) to 3.9 (torch 2.15)."""

import inspect
import math
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import triton
import triton.experimental.gluon.language as gl
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler.compiler import ASTSource, CompiledKernel, make_backend
from triton.experimental import gluon
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia import blackwell
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.runtime.cache import triton_key
from triton.runtime.jit import DependenciesFinder, JITFunction, create_function_from_signature

from envoi.runtime.ptx_changes import changed

VERSION = triton.__version__

# Option of every launch: a * b + c may become one instruction. The default, but 3.9 warns that 3.10 changes it.
FP_FUSION = {"enable_fp_fusion": True}

# pyright: reportAttributeAccessIssue=false
# Device functions. An older name is looked up only in releases that lack the newer one.

# A barrier of the warps that run the current role: `thread_barrier` until 3.6, `barrier` since 3.7.
role_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier

# In every GEMM the producer gives consumers more registers: the compiler since 3.7 keeps more values alive.
MORE_REGISTERS = gl.constexpr(not VERSION.startswith("3.6."))

# Whether numbers that were just cast to E4M3 may be cast back, else they are rounded by arithmetic. The assembler of
# 3.8 (CUDA 12.9) may move the cast back before the other, where its register still holds something else. Of the other
# releases only 3.6's machine code was searched for that, without a find: `tools.machine_code.operands`.
CASTS_BACK = gl.constexpr(VERSION.startswith("3.6."))

# Whether requests for weights have to be kept where they are written (`hopper_w4a16.kernel_few.pin_loads`). 3.9 leaves
# them there; kept as well, they take registers that it then spills in the loop.
PINS_LOADS = gl.constexpr(not VERSION.startswith("3.9."))

# TMA: (descriptor, corner, barrier, buffer, pred=True) and (descriptor, corner, buffer). Renamed in 3.8.
# `tma.store_wait` keeps its name; its new argument defaults to read_only=True, its behaviour in all releases.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

# cp.async of Ampere: (buffer, pointers, mask=). Renamed in 3.8.
async_load = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared

# Whether a view of shared memory may go on after the end of what it begins in.
LARGER_VIEWS = VERSION.startswith(("3.6.", "3.7."))

# Whether a view of shared memory must be as large as the buffer. `reinterpret` then returns more matrices than asked
# for, so a whole number of them has to fill the buffer.
WHOLE_VIEWS = VERSION.startswith("3.8.")


@builtin
def reinterpret(buffer, dtype, shape, layout, _semantic=None):
    """Return a view of shared memory, from its start, as a buffer of another dtype, shape and layout."""
    if hasattr(buffer, "reinterpret"):  # since 3.9
        return buffer.reinterpret(dtype, shape, layout, _semantic=_semantic)
    if WHOLE_VIEWS:
        _, *matrix = map(_plain, _plain(shape))
        bits = math.prod(buffer.shape) * buffer.dtype.primitive_bitwidth
        shape = [bits // (math.prod(matrix) * _plain(dtype).primitive_bitwidth), *matrix]
    return buffer._reinterpret(dtype, shape, layout, _semantic=_semantic)


def _plain(x: Any) -> Any:
    return x.value if isinstance(x, gl.constexpr) else x


@gluon.constexpr_function
def tmem_layout(dtype, shape, part, num_warps, instr_variant="32x32b"):
    """Return the register layout to which `num_warps` warps load a part of tensor memory of this shape and layout.

    A function of Triton until 3.7, a method of the descriptor's type since 3.8.
    """
    if hasattr(blackwell, "get_tmem_reg_layout"):
        return blackwell.get_tmem_reg_layout(dtype, shape, part, num_warps, instr_variant)
    kind = blackwell.tensor_memory_descriptor_type(dtype, shape, part, shape)
    return kind.get_reg_layout(num_warps=num_warps, instr_variant=instr_variant)


def target_of(arch: str) -> GPUTarget:
    """Return the compiler's target for a name such as `sm_90`."""
    return GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)


class _Backend(CUDABackend):
    """Triton's compiler, with `ptx_changes` between it and the assembler. Keys in the disk cache don't differ."""

    def make_ptx(self, *arguments: Any, **options: Any) -> str:
        """Return a kernel's PTX."""
        return changed(super().make_ptx(*arguments, **options))


def _backend_for(target: GPUTarget) -> Any:
    return _Backend(target) if target.backend == "cuda" else make_backend(target)


# Triton's own `compile`, but for its backend. A copy: Triton has no hook that is one kernel's alone.
_compile = FunctionType(
    triton.compile.__code__, {**triton.compile.__globals__, "make_backend": _backend_for}, "compile",
    triton.compile.__defaults__,
)  # fmt: skip
_owned: set[Any] = set()  # functions of kernels; a JITFunction's hash is that of its source
_settled: set[Any] = set()  # functions whose keys are the same in every process
_settling = threading.RLock()


def own(kernel: Any) -> None:
    """Have a kernel compiled as Envoi's are: with its changes of PTX, under the same key of Triton's in every process.

    Nothing is changed but the kernel, and keys of the functions that it calls. Interpreted functions are left alone.
    """
    if not isinstance(kernel, JITFunction) or kernel.fn in _owned:
        return
    settled_key(kernel)
    bind: Any = kernel.device_caches.default_factory

    def bind_and_own() -> Any:
        bound = bind()  # sets the kernel's `compile` to Triton's
        kernel.compile = _compile
        return bound

    kernel.device_caches.default_factory = bind_and_own
    kernel.compile = _compile
    _owned.add(kernel.fn)


class _Callees(DependenciesFinder):
    """Visitor of a function's source that adds what it calls to a dict, each function after those that it calls."""

    def __init__(self, function: Any, found: dict[Any, Any]) -> None:
        nonlocals = inspect.getclosurevars(function.fn).nonlocals
        super().__init__(function._fn_name, function.__globals__, nonlocals, function.src)
        self.found = found

    def _update_hash(self, func: Any) -> None:
        _collect(getattr(func, "__func__", func), self.found)  # a bound one has another


def _collect(function: Any, found: dict[Any, Any]) -> None:
    if function.fn not in found:
        found[function.fn] = None
        _Callees(function, found).visit(function.parse())
        found[function.fn] = found.pop(function.fn) or function  # the last one now


def settled_key(function: Any) -> str:
    """Return a function's key in Triton's disk cache: the same in every process, whatever was compiled there before.

    The key has the constants that a called function uses, and functions may call each other in a circle. Triton lists
    the constants before it looks into that function, so that they are missing unless another kernel that calls it was
    hashed earlier in the process; and where it enters a circle depends on that. Here all is found anew, callees first.
    """
    if isinstance(function, JITFunction) and function.fn not in _settled:
        with _settling:
            found: dict[Any, Any] = {}
            _collect(function, found)
            for callee in found.values():
                if not callee.fn.__module__.startswith("triton."):
                    callee.hash, callee.used_global_vals = None, {}
            for callee in found.values():
                callee.cache_key  # noqa: B018
            _settled.add(function.fn)
    return function.cache_key


def compile_for(
    function: JITFunction,
    signature: Mapping[str, Any],
    constexprs: Mapping[tuple[int, ...], Any],
    attributes: Mapping[tuple[int, ...], Any],
    arch: str,
    options: Mapping[str, Any],
) -> CompiledKernel:
    """Compile a Triton or Gluon function without a device. Keys are paths: (3,) is argument 3, (3, 0) its part 0."""
    own(function)
    kind = GluonASTSource if function.is_gluon() else ASTSource
    source = kind(function, dict(signature), constexprs=dict(constexprs), attrs=dict(attributes))
    return _compile(source, target=target_of(arch), options={**FP_FUSION, **options})


def specialize(
    function: JITFunction, arguments: Sequence[Any], arch: str
) -> tuple[dict[str, Any], dict[tuple[int, ...], Any], dict[tuple[int, ...], Any]]:
    """Return the signature, constexprs and attributes that a launch with these arguments compiles; needs no device."""
    backend = make_backend(target_of(arch))
    bind = create_function_from_signature(function.signature, function.params, backend)
    bound, specialization, options = bind(*arguments)
    _, signature, constexprs, attributes = function._pack_args(backend, dict(FP_FUSION), bound, specialization, options)
    return signature, constexprs, attributes


def source_hash(function: JITFunction, arguments: Sequence[Any], arch: str) -> str:
    """Return a hash of a kernel's source and of what a launch with these arguments compiles it for, in any process."""
    return source_of(function, arguments, arch).hash()


def source_of(function: JITFunction, arguments: Sequence[Any], arch: str) -> ASTSource:
    """Return what a launch with these arguments compiles; needs no device."""
    own(function)
    signature, constexprs, attributes = specialize(function, arguments, arch)
    kind = GluonASTSource if function.is_gluon() else ASTSource
    return kind(function, signature, constexprs=constexprs, attrs=attributes)


def compile_without_driver(
    kernel: JITFunction, arguments: Sequence[Any], arch: str, options: Mapping[str, Any]
) -> CompiledKernel:  # fmt: skip
    """Compile the kernel that a launch on a GPU of this architecture would, into Triton's disk cache; no GPU needed.

    Triton's driver stays as it is: other threads may launch by it.
    """
    # What a launch adds to its options, which are a part of the cache's key.
    added = {
        "debug": bool(options.get("debug", kernel.debug) or knobs.runtime.debug),
        "instrumentation_mode": knobs.compilation.instrumentation_mode,
    }
    return compile_for(kernel, *specialize(kernel, arguments, arch), arch, {**options, **added})


def build_launcher(kernel: CompiledKernel) -> None:
    """Build what Triton calls to launch a kernel, into its disk cache; needs the CUDA driver's library, but no GPU."""
    from triton.backends.nvidia import driver

    if driver.PyCUtensorMap is None:
        # A launcher looks the type up when it is first loaded, and in 3.6 keeps it for the process: None, where no
        # driver was made yet, and its launches with descriptors then fail.
        driver.CudaUtils()
    driver.CudaLauncher(kernel.src, kernel.metadata)


def loaded_kernel(
    kernel: JITFunction, grid: Sequence[int], arguments: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Return the kernel that a launch on the current GPU would run, loaded there; None if a hook compiles instead."""
    own(kernel)
    found = compiled_kernel(kernel.warmup(*arguments, grid=grid, **FP_FUSION, **options))
    if found is not None:
        found._init_handles()
    return found


def compiled_kernel(launched: Any) -> Any:
    """Return the compiled kernel of what `function[grid](..)` returned: since 3.7 a promise inside an AsyncCompileMode.

    None if a hook of Triton's has taken the compilation over.
    """
    return launched.result() if hasattr(launched, "result") else launched


def tensor_map(descriptor: Any, form: dict) -> Any:
    """Encode a TMA descriptor as a launch does: a `PyCUtensorMap`. form: of the kernel's `metadata.tensordesc_meta`."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    rest = [None] * (make_tensordesc_arg.__code__.co_argcount - 2)  # since 3.8 a third, for other GPUs
    return make_tensordesc_arg(descriptor, form, *rest)[0]


def has_launch_hooks() -> bool:
    """Tell whether a profiler of Triton's observes launches."""
    return bool(knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls)


def hash_files(arch: str) -> None:
    """Compute the hashes of the compiler's files in this process, so that its forks needn't."""
    triton_key()
    make_backend(target_of(arch)).hash()


def bundled_tool(name: str) -> Path:
    """Return the path of `nvdisasm` or `cuobjdump`: the one in its TRITON_*_PATH variable, Triton's own, or of PATH.

    Raises RuntimeError if there is none; a Triton that was packaged anew may lack its own.
    """
    try:
        return Path(getattr(knobs.nvidia, name).path)
    except RuntimeError:
        found = shutil.which(name)
        if found is None:
            raise
        return Path(found)


def _mend_interpreter() -> None:
    """Let Triton's CPU interpreter broadcast the comparison of two scalars as a boolean.

    It keeps the type of what was compared, so a mask that takes part in such a comparison becomes one of integers,
    which loads refuse since 3.9.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    splat = InterpreterBuilder.create_splat

    def create_splat(self: Any, type_: Any, value: Any) -> Any:
        return splat(self, type_, TensorHandle(value.data, tl.int1) if value.data.dtype == bool else value)

    InterpreterBuilder.create_splat = create_splat


if knobs.runtime.interpret:
    _mend_interpreter()

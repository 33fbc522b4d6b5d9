"""What differs between the supported Triton releases, 3.6 (torch 2.11) to 3.9 (torch 2.15)."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import triton
import triton.experimental.gluon.language as gl
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, CompiledKernel, make_backend
from triton.experimental import gluon
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia import blackwell
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.runtime import driver
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction, create_function_from_signature

VERSION = triton.__version__

# An option of every launch: a * b + c may become one instruction. The default, but 3.9 warns that 3.10 changes it.
FP_FUSION = {"enable_fp_fusion": True}

# pyright: reportAttributeAccessIssue=false
# Device functions. Names that a release lacks are looked up only where it has none of the newer ones.

# A barrier of the warps that run the current role: `thread_barrier` until 3.6, `barrier` since 3.7.
role_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier

# Whether two roles that multiply take more registers from the one that loads in every GEMM: since 3.7 more stays alive.
WIDE_ROLES = gl.constexpr(not VERSION.startswith("3.6."))

# TMA: (descriptor, corner, barrier, buffer, pred=True) and (descriptor, corner, buffer). Renamed in 3.8.
# `tma.store_wait` keeps its name; its new argument read_only=True, the default, is what it always did.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


# Whether a view of shared memory must be as large as the buffer. `reinterpret` then returns more matrices than asked
# for, so a whole number of them has to fill the buffer.
WHOLE_VIEWS = VERSION.startswith("3.8.")


@builtin
def reinterpret(buffer, dtype, shape, layout, _semantic=None):
    """A view of shared memory from its beginning as a buffer of another dtype, shape and layout; private until 3.8."""
    if hasattr(buffer, "reinterpret"):
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
    """The registers that threads of `num_warps` warps load a part of tensor memory to: its shape, and its layout.

    A function until 3.7, a method of the descriptor's type since 3.8.
    """
    if hasattr(blackwell, "get_tmem_reg_layout"):
        return blackwell.get_tmem_reg_layout(dtype, shape, part, num_warps, instr_variant)
    kind = blackwell.tensor_memory_descriptor_type(dtype, shape, part, shape)
    return kind.get_reg_layout(num_warps=num_warps, instr_variant=instr_variant)


def target_of(arch: str) -> GPUTarget:
    """`sm_90` as the compiler wants it."""
    return GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)


def compile_for(
    function: JITFunction,
    signature: Mapping[str, Any],
    constexprs: Mapping[tuple[int, ...], Any],
    attributes: Mapping[tuple[int, ...], Any],
    arch: str,
    options: Mapping[str, Any],
) -> CompiledKernel:
    """Compile a Triton or Gluon function with no device. Keys are paths: (3,) is argument 3, (3, 0) its first part."""
    kind = GluonASTSource if function.is_gluon() else ASTSource
    source = kind(function, dict(signature), constexprs=dict(constexprs), attrs=dict(attributes))
    return triton.compile(source, target=target_of(arch), options={**FP_FUSION, **options})


def specialize(
    function: JITFunction, arguments: Sequence[Any], arch: str
) -> tuple[dict[str, Any], dict[tuple[int, ...], Any], dict[tuple[int, ...], Any]]:
    """Signature, constexprs and attributes that a launch with these arguments compiles; no device is needed."""
    backend = make_backend(target_of(arch))
    bind = create_function_from_signature(function.signature, function.params, backend)
    bound, specialization, options = bind(*arguments)
    _, signature, constexprs, attributes = function._pack_args(backend, dict(FP_FUSION), bound, specialization, options)
    return signature, constexprs, attributes


@contextmanager
def pretending(arch: str) -> Iterator[None]:
    """Inside, whatever asks the driver for its GPU gets `arch`: 3.7's descriptors of FP4 in padded bytes do."""
    found, driver._active = driver._active, _Pretended(target_of(arch))  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        driver._active = found


class _Pretended:
    """As much of a driver as that takes."""

    def __init__(self, target: GPUTarget) -> None:
        self.get_current_target = lambda: target


def compiled_kernel(launched: Any) -> Any:
    """What `function[grid](..)` returned as the compiled kernel: since 3.7 it is a promise inside an AsyncCompileMode.

    None where a hook of Triton's has taken the compilation over.
    """
    return launched.result() if hasattr(launched, "result") else launched


def warm_up(arch: str) -> None:
    """Let this process compute what it would otherwise compute in each of its forks: hashes of the compiler's files."""
    triton_key()
    make_backend(target_of(arch)).hash()


def bundled_tool(name: str) -> Path:
    """`nvdisasm` or `cuobjdump` as Triton brings it, or as its TRITON_*_PATH variable says."""
    return Path(getattr(knobs.nvidia, name).path)


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

"""What differs between the supported Triton releases, 3.6 (torch 2.11) and 3.7 (torch 2.13)."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import triton
import triton.experimental.gluon.language as gl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, CompiledKernel, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime import driver
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction, create_function_from_signature

VERSION = triton.__version__

# A barrier of the warps that run the current role: `thread_barrier` until 3.6, `barrier` since.
role_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # pyright: ignore[reportAttributeAccessIssue]


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
    return triton.compile(source, target=target_of(arch), options=dict(options))


def specialize(
    function: JITFunction, arguments: Sequence[Any], arch: str
) -> tuple[dict[str, Any], dict[tuple[int, ...], Any], dict[tuple[int, ...], Any]]:
    """Signature, constexprs and attributes that a launch with these arguments compiles; no device is needed."""
    backend = make_backend(target_of(arch))
    bind = create_function_from_signature(function.signature, function.params, backend)
    bound, specialization, options = bind(*arguments)
    _, signature, constexprs, attributes = function._pack_args(backend, {}, bound, specialization, options)
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


def warm_up(arch: str) -> None:
    """Let this process compute what it would otherwise compute in each of its forks: hashes of the compiler's files."""
    triton_key()
    make_backend(target_of(arch)).hash()


def bundled_tool(name: str) -> Path:
    """`nvdisasm` or `cuobjdump` as Triton brings it, or as its TRITON_*_PATH variable says."""
    return Path(getattr(knobs.nvidia, name).path)

"""Kernels compiled together with what Triton launches them by.

In Triton 3.6 that is C of its own for each kernel, and compiling it takes a fifth as long as the largest kernel. Its
text follows from the arguments and the form of their descriptors, so it is compiled while LLVM and the assembler still
work:

    code generation -> passes of Triton -> LLVM -> PTX -> machine code
                                       \\-> the launcher
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from types import SimpleNamespace
from typing import Any

from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction

from envoi.runtime import triton_compat
from envoi.runtime.scoped import scoped


class _ThisThread(threading.local):
    """Compilation of this thread.

    begin: takes the kernel's metadata before LLVM's part, and returns the thread that builds the launcher.
    beside: that thread, from LLVM's part to the end of the assembler's; None otherwise.
    generated: called when code generation is done, which is Python; what follows leaves Python to other threads.
    """

    begin: Callable[[Mapping[str, Any]], threading.Thread] | None = None
    beside: threading.Thread | None = None
    generated: Callable[[], object] | None = None


class _Metadata(SimpleNamespace):
    """Metadata of a kernel that isn't compiled yet."""

    def __getattr__(self, name: str) -> int:
        """Return 0 for what isn't known yet: sizes of scratch memory, which the launcher's text doesn't have."""
        return 0


_this_thread = _ThisThread()


def compile_to_launch(
    kernel: JITFunction, arguments: Sequence[Any], arch: str, options: Mapping[str, Any]
) -> None:  # fmt: skip
    """Compile as `compile_like_a_launch` does, and build the launcher, where a driver is installed."""
    with launcher_beside(kernel, arguments, arch):
        made = triton_compat.compile_like_a_launch(kernel, arguments, arch, options)
    _build(made)


def _build(kernel: Any) -> None:
    with suppress(Exception):  # the first launch builds it then, or says why not
        triton_compat.build_launcher(kernel)


@contextmanager
def launcher_beside(kernel: JITFunction, arguments: Sequence[Any], arch: str) -> Iterator[None]:
    """Build the launcher in another thread, if the kernel of a launch is compiled within the context, by this one."""

    def begin(metadata: Mapping[str, Any]) -> threading.Thread:
        source = triton_compat.source_of(kernel, arguments, arch)
        thread = threading.Thread(target=_build, args=(SimpleNamespace(src=source, metadata=_Metadata(**metadata)),))
        thread.start()
        return thread

    with scoped(_this_thread, begin=begin if triton_compat.LAUNCHERS_IN_C else None, beside=None):
        try:
            yield
        finally:
            _join()


def when_generated(function: Callable[[], object]) -> AbstractContextManager[None]:
    """Call a function when the code of the first kernel that this thread compiles within the context is generated."""
    return scoped(_this_thread, generated=function)


def _join() -> None:
    if _this_thread.beside is not None:
        _this_thread.beside.join()
        _this_thread.beside = None


def _step_in() -> None:
    """Have every compilation begin the launcher before LLVM's part, and wait for it after the assembler's."""
    make_llir, make_cubin = CUDABackend.make_llir, CUDABackend.make_cubin

    def with_a_launcher(self: Any, src: Any, metadata: dict[str, Any], *rest: Any, **options: Any) -> str:
        generated, _this_thread.generated = _this_thread.generated, None
        if generated is not None:
            generated()
        if _this_thread.begin is not None:
            with suppress(RuntimeError):  # no more threads
                _this_thread.beside = _this_thread.begin(metadata)
        return make_llir(self, src, metadata, *rest, **options)

    def and_it(self: Any, src: Any, *rest: Any, **options: Any) -> Any:
        made = make_cubin(self, src, *rest, **options)
        _join()
        return made

    CUDABackend.make_llir = with_a_launcher
    CUDABackend.make_cubin = and_it


_step_in()

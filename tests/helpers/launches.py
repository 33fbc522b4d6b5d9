"""Observer of Envoi's kernel launches, by the hash of their PTX."""

import difflib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from triton.runtime.jit import JITFunction

from envoi.runtime import launch, prepared, triton_compat
from envoi.runtime.program import Launch
from tools.machine_code import ptx
from tools.machine_code.compile import compile_launch

PACKAGE = "envoi."


@contextmanager
def watched(note: Callable[[str, Any], None]) -> Iterator[None]:
    """Call `note(sha256, kernel)` when a launch within the context loads its kernel; its `asm` has the PTX."""
    original: Any = JITFunction.run
    known: dict[int, tuple[str, Any]] = {}  # keeps the kernel too, so that its id is not reused

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = triton_compat.compiled_kernel(original(self, *args, **kwargs))
        if kernel is not None and self.fn.__module__.startswith(PACKAGE):
            if id(kernel) not in known:
                known[id(kernel)] = ptx.sha256(kernel.asm["ptx"]), kernel
            note(*known[id(kernel)])
        return kernel

    launch._compiled.clear()  # kernels found in this cache, or prepared calls, would bypass the observer
    prepared.clear()
    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = original


def assert_same_code(title: str, offline: Launch, launched: Mapping[str, str]) -> None:
    """Assert that the code counted without a GPU is among the code launched on one, {sha256: PTX}."""
    binary = compile_launch(offline, "sm_90")
    if binary.ptx_sha256 not in launched:
        one, *_ = launched.values()
        texts = [ptx.without_lines(text).splitlines() for text in (binary.ptx, one)]
        lines = list(difflib.unified_diff(*texts, "compiled without a GPU", "launched", n=1))
        pytest.fail(f"{title}: {len(lines)} lines of difference, the first:\n" + "\n".join(lines[:40]))

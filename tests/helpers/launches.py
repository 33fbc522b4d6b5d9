"""Which kernels of Envoi are launched, seen from outside: by the hash of their PTX."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from triton import knobs
from triton.runtime.jit import JITFunction

from envoi.sass import ptx

PACKAGE = "envoi."


def ptxas_version() -> str:
    """Of the assembler that Triton uses; the PTX depends on it."""
    return knobs.nvidia.ptxas.version


@contextmanager
def watched(note: Callable[[str, Any], None]) -> Iterator[None]:
    """Inside, `note(sha256, kernel)` hears of each launch; the kernel's `asm` has its PTX."""
    original: Any = JITFunction.run
    known: dict[int, tuple[str, Any]] = {}  # the kernel too, lest another gets its id

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = original(self, *args, **kwargs)
        if kernel is not None and not kwargs.get("warmup") and self.fn.__module__.startswith(PACKAGE):
            if id(kernel) not in known:
                known[id(kernel)] = ptx.sha256(kernel.asm["ptx"]), kernel
            note(*known[id(kernel)])
        return kernel

    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = original

"""Compilation of a launch for an architecture that needn't be present."""

import re
from dataclasses import dataclass
from typing import Any

from triton.runtime.jit import JITFunction

from envoi import env
from envoi.runtime import triton_compat
from envoi.runtime.program import Launch
from tools.kernel_cases import EVERY_ARCH
from tools.machine_code import arrivals, barriers, isolate, ptx

RESOURCES = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)")


class CompilerRefusesError(ValueError):
    """Compiler error; the message ends with the compiler's reason."""

    def __init__(self, name: str, arch: str, reason: str) -> None:
        super().__init__(f"{name}: the compiler refuses it for {arch}: {reason}")


@dataclass(frozen=True)
class Binary:
    """Compiled kernel.

    shared_bytes: total of a launch, the static part and the dynamic part. stack_bytes: local memory per thread, which
    holds spilled registers. forgotten: barriers that are set up and never used.
    """

    name: str
    arch: str
    cubin: bytes
    ptx: str
    num_warps: int
    registers: int
    shared_bytes: int
    stack_bytes: int
    forgotten: tuple[str, ...] = ()

    @property
    def unordered(self) -> tuple[str, ...]:
        """Accesses of shared memory that no barrier orders before an arrival."""
        return arrivals.unordered(self.ptx)

    @property
    def ptx_sha256(self) -> str:
        """Hash of the PTX without line information, comments and debug sections."""
        return ptx.sha256(self.ptx)


def compile_launch(launch: Launch, arch: str) -> Binary:
    """Compile the kernel of a launch for `arch` in a child process. CompilerRefusesError has the compiler's reason."""
    arguments = arguments_of(launch, arch)
    name = launch.kernel.fn.__name__

    def compile_there() -> tuple[str, bytes, str, int, int, tuple[str, ...]]:
        kernel = triton_compat.compile_for(launch.kernel, *arguments)
        made = kernel.metadata
        unused = barriers.forgotten(kernel.asm["ttgir"])
        return made.name, kernel.asm["cubin"], kernel.asm["ptx"], made.num_warps, made.shared, unused

    triton_compat.hash_files(arch)
    outcome = isolate.call(compile_there, explain=_python_reason)
    if outcome.ended != "returned":
        raise CompilerRefusesError(name, arch, _reason(outcome))
    entry, cubin, text, num_warps, dynamic_bytes, unused = outcome.value
    done = isolate.run_on(triton_compat.bundled_tool("cuobjdump"), ("--dump-resource-usage",), cubin)
    used = {function: tuple(map(int, numbers)) for function, *numbers in RESOURCES.findall(done.stdout)}
    if entry not in used:
        raise ValueError(
            f"{name}: cuobjdump doesn't report its registers: {done.stderr.strip() or done.stdout.strip()}"
        )
    registers, stack_bytes, static_bytes = used[entry]
    return Binary(entry, arch, cubin, text, num_warps, registers, static_bytes + dynamic_bytes, stack_bytes, unused)


def arguments_of(launch: Launch, arch: str) -> tuple[Any, ...]:
    """Return the arguments of `triton_compat.compile_for` after the function. Raises ValueError for what isn't one."""
    if arch not in EVERY_ARCH:
        raise ValueError(f"arch: expected one of {', '.join(EVERY_ARCH)}, got {arch!r}")
    if not isinstance(launch.kernel, JITFunction):
        why = " (TRITON_INTERPRET=1 is set)" if env.interpreting() else ""
        kind = type(launch.kernel).__name__
        raise ValueError(f"kernel: expected a function under triton.jit or gluon.jit, got {kind}{why}")
    # Attributes of the launch don't change the compiled code.
    options = {name: value for name, value in launch.options.items() if not name.startswith("launch_")}
    return (*triton_compat.specialize(launch.kernel, launch.arguments, arch), arch, options)


def _python_reason(error: BaseException) -> str:
    """Return the innermost cause's message, without the source lines that Triton puts around it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(getattr(error, "error_message", None) or error)


def _reason(outcome: isolate.Outcome) -> str:
    """Return the compiler's own diagnosis if it printed one, else the exception, else how the process ended."""
    for pattern in (r"LLVM ERROR: .*", r"(?<= error: ).*", r"ptxas .*?(?:error|fatal).*"):
        found = re.search(pattern, f"{outcome.said}\n{outcome.reason}")
        if found:
            notes = re.findall(r"(?<= note: ).*", outcome.said)
            return "; ".join([found.group().strip(), *dict.fromkeys(note.strip() for note in notes)])
    return outcome.reason.strip().splitlines()[0] if outcome.reason.strip() else "it gave no reason"

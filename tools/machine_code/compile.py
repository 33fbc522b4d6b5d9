"""Compilation of a Triton or Gluon function for an architecture that needn't be present."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from triton.runtime.jit import JITFunction

from envoi import env
from envoi.runtime import triton_compat
from tools.machine_code import isolate, ptx, tools

ARCHES = ("sm_90", "sm_100", "sm_103")
ALIGNED = ":16"
DIVISIBLE_BY_16 = [["tt.divisibility", 16]]


class CompilerRefusesError(ValueError):
    """Compiler error; the message ends with the compiler's reason, which is also `reason`."""

    def __init__(self, name: str, arch: str, reason: str) -> None:
        super().__init__(f"{name}: the compiler refuses it for {arch}: {reason}")
        self.reason = reason


@dataclass(frozen=True)
class Recipe:
    """Input of a compilation.

    `signature` names the types of the run-time arguments as Triton does: "*bf16", "i32", "fp32", `descriptor_type(...)`
    for TMA, or a tuple of them for a tuple argument. ":16" after a pointer or an integer says that 16 divides it, as
    Triton finds out at each launch. `constexprs` holds the others: by name, or by path for an entry of a tuple, which
    then is "constexpr" in the signature. `options`: num_warps, num_stages, maxnreg.
    """

    function: Any  # decorated with triton.jit or gluon.jit
    signature: Mapping[str, Any]
    constexprs: Mapping[Any, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Binary:
    """Compiled kernel.

    `shared_bytes`: total of a launch, the static part and the dynamic part, which only the compiler's metadata state.
    `stack_bytes`: local memory per thread, which holds spilled registers.
    """

    name: str
    arch: str
    cubin: bytes
    ptx: str
    num_warps: int
    registers: int
    shared_bytes: int
    stack_bytes: int

    @property
    def ptx_sha256(self) -> str:
        """Hash of the PTX without line information, comments and debug sections."""
        return ptx.sha256(self.ptx)


def compile_kernel(
    function: Any,
    signature: Mapping[str, Any],
    constexprs: Mapping[Any, Any],
    arch: str,
    num_warps: int = 4,
    num_stages: int | None = None,
    maxnreg: int | None = None,
) -> Binary:
    """Compile `function` for `arch` in a child process; see `Recipe` for the arguments.

    Raises ValueError for arguments that don't fit, CompilerRefusesError with the compiler's reason.
    """
    check_arch(arch)
    if not isinstance(function, JITFunction):
        why = " (TRITON_INTERPRET=1 is set)" if env.interpreting() else ""
        kind = type(function).__name__
        raise ValueError(f"function: expected a function under triton.jit or gluon.jit, got {kind}{why}")
    name = function.fn.__name__
    types, constants, attributes = bind(function, signature, constexprs)
    options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": maxnreg}
    options = {key: value for key, value in options.items() if value is not None}

    def compile_there() -> tuple[str, bytes, str, int, int]:
        kernel = triton_compat.compile_for(function, types, constants, attributes, arch, options)
        made = kernel.metadata
        return made.name, kernel.asm["cubin"], kernel.asm["ptx"], made.num_warps, made.shared

    triton_compat.warm_up(arch)
    outcome = isolate.call(compile_there, explain=_python_reason)
    if outcome.ended != "returned":
        raise CompilerRefusesError(name, arch, _reason(outcome))
    entry, cubin, text, total_warps, dynamic_bytes = outcome.value
    used = tools.resources(cubin)[entry]
    shared_bytes = used.shared_bytes + dynamic_bytes
    return Binary(entry, arch, cubin, text, total_warps, used.registers, shared_bytes, used.stack_bytes)


def compile_recipe(recipe: Recipe, arch: str) -> Binary:
    """Call `compile_kernel` for a recipe."""
    return compile_kernel(recipe.function, recipe.signature, recipe.constexprs, arch, **recipe.options)


def recipe_of_call(function: Any, arguments: Sequence[Any], arch: str, **options: Any) -> Recipe:
    """Return the recipe of what `function[grid](*arguments, **options)` compiles on `arch`; CPU tensors will do."""
    signature, constexprs, attributes = triton_compat.specialize(function, arguments, check_arch(arch))
    signature = {
        name: _with_hints(kind, (index,), attributes) for index, (name, kind) in enumerate(signature.items())
    }  # fmt: skip
    return Recipe(function, signature, constexprs, options)


def descriptor_type(dtype: str, block_shape: Sequence[int], layout: Any = None) -> str:
    """Return a TMA descriptor's argument type: `descriptor_type("bf16", (128, 64), layout)`; layout: Gluon only."""
    block = f"{dtype}[{','.join(map(str, block_shape))}]"
    return f"tensordesc<{block}>" if layout is None else f"tensordesc<{block},{layout!r}>"


def check_arch(arch: str) -> str:
    """Return `arch` if kernels can be compiled for it; else raise ValueError."""
    if arch not in ARCHES:
        raise ValueError(f"arch: expected one of {', '.join(ARCHES)}, got {arch!r}")
    return arch


def bind(function: JITFunction, signature: Mapping[str, Any], constexprs: Mapping[Any, Any]):
    """Return types by name, constants and attributes by path, of all arguments; ValueError if one is missing."""
    names = function.arg_names
    by_name = {key for key in constexprs if isinstance(key, str)}
    given = set(signature) | by_name
    if given != set(names) or by_name & {name for name, kind in signature.items() if kind != "constexpr"}:
        raise ValueError(
            f"{function.fn.__name__}: expected each of {', '.join(names)} in signature or constexprs, "
            f"got {', '.join(sorted(signature))} and {', '.join(sorted(by_name))}"
        )
    whole = {**signature, **dict.fromkeys(by_name, "constexpr")}
    types = {name: _map_types(whole[name], lambda kind: kind.removesuffix(ALIGNED)) for name in names}
    constants = {(names.index(key),) if isinstance(key, str) else key: value for key, value in constexprs.items()}
    leaves = [leaf for index, name in enumerate(names) for leaf in _leaves(whole[name], (index,))]
    return types, constants, {path: DIVISIBLE_BY_16 for path, kind in leaves if kind.endswith(ALIGNED)}


def _leaves(kind: Any, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], str]]:
    if isinstance(kind, str):
        yield path, kind
        return
    for index, part in enumerate(kind):
        yield from _leaves(part, (*path, index))


def _map_types(kind: Any, change: Callable[[str], str]) -> Any:
    if isinstance(kind, str):
        return change(kind)
    return _like(kind, [_map_types(part, change) for part in kind])


def _like(kind: tuple, parts: list) -> tuple:
    """Build a tuple of the type of `kind` from `parts`: kernels read a NamedTuple's fields by name."""
    return type(kind)(*parts) if hasattr(kind, "_fields") else tuple(parts)


def _with_hints(kind: Any, path: tuple[int, ...], attributes: Mapping[tuple[int, ...], Any]) -> Any:
    if isinstance(kind, str):
        return kind + ALIGNED if attributes.get(path) else kind
    return _like(kind, [_with_hints(part, (*path, index), attributes) for index, part in enumerate(kind)])


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

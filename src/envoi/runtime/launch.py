"""Kernel launches with less host time than Triton's own.

Triton inspects every argument at every launch, which takes longer than a small kernel runs. The machine code depends
on few properties of each argument; they form the key under which the compiled kernel is found again.
"""

from collections.abc import Callable
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from envoi import log
from envoi.runtime import program, shortcuts, timeline, triton_compat
from envoi.runtime.compiling import compiling

ALIGNMENT = 16

_compiled: dict[tuple, Any] = {}  # by key; None if a hook of Triton's compiles, which gives no kernel to launch
_parts: dict[Any, tuple[Callable[[Any], Any], ...]] = {}  # for each kernel function, what makes a key of its arguments


def launch(kernel: Any, grid: tuple[int, ...], arguments: tuple, options: dict[str, Any]) -> None:
    """Launch like `kernel[grid](*arguments, **options)`. arguments: one for each parameter, in order.

    All kernels of the product are launched here. While a call is planned, its program takes the launch instead.
    """
    recorder = timeline.current()
    if recorder is not None:
        arguments = recorder.joined(kernel, grid, arguments)
    planned = program.current()
    if planned is None:
        run(kernel, grid, arguments, options)
    else:
        planned.launches.append(program.Launch(kernel, grid, arguments, options))


def launch_with_dependent(first: tuple[Any, tuple[int, ...], tuple, dict], second: tuple) -> None:
    """Launch two kernels, each given as `launch` takes it, of which the second starts before the first ends.

    The second waits, by `wait_for_grid`, for the end of the launch right before it. It may read what the first writes
    only because nothing is launched between the two; whatever else launches, such as allocating its arguments, is over.
    """
    kernel, grid, arguments, options = second
    launch(*first)
    launch(kernel, grid, arguments, {**options, "launch_pdl": True})


def run(kernel: Any, grid: tuple[int, ...], arguments: tuple, options: dict[str, Any]) -> None:
    """Launch now, whether a call is planned or not."""
    log.launch(kernel, grid, arguments, options)
    compiled = None
    if shortcuts.ENABLED and isinstance(kernel, JITFunction):
        compiled = load(kernel, grid, arguments, options)
    else:
        triton_compat.own(kernel)
    if compiled is None:
        kernel[grid](*arguments, **triton_compat.FP_FUSION, **options)
    else:
        compiled[(*grid, 1, 1)[:3]](*arguments)


def load(kernel: Any, grid: tuple[int, ...], arguments: tuple, options: dict[str, Any]) -> Any:
    """Return the kernel of a launch, loaded on the current GPU: compiled, or read from Triton's cache, the first time.

    None if a hook of Triton's compiles, which gives no kernel to launch. Tensors needn't have memory.
    """
    key = torch.cuda.current_device(), *key_of(kernel, arguments, options)
    found = _compiled.get(key)
    if found is None:
        with compiling():
            found = _compiled[key] = triton_compat.loaded_kernel(kernel, grid, arguments, options)
    return found


def key_of(kernel: JITFunction, arguments: tuple, options: dict[str, Any]) -> tuple:
    """Return a key that launches on one GPU share only if they run one compiled kernel."""
    return kernel.fn, *options.items(), *[part(x) for part, x in zip(_parts_of(kernel), arguments, strict=True)]


def kind_of(x: Any) -> Any:
    """Return the properties of an argument that Triton compiles for.

    Tensor: dtype, whether its address is a multiple of 16. Integer: whether it is 1, a multiple of 16, within 32 bits.
    TMA descriptor: everything but its base.
    """
    kind = type(x)
    if kind is torch.Tensor:  # nearly all arguments are of the first three kinds
        return x.dtype, x.data_ptr() % ALIGNMENT == 0
    if kind is int or kind is bool:
        return kind, x == 1, x % ALIGNMENT == 0, -(2**31) <= x < 2**31
    if x is None or kind is float:
        return kind
    if isinstance(x, tuple):
        return tuple([kind_of(y) for y in x])
    if isinstance(x, torch.Tensor):
        return x.dtype, x.data_ptr() % ALIGNMENT == 0
    if isinstance(x, int):  # an enum
        return kind, x == 1, x % ALIGNMENT == 0, -(2**31) <= x < 2**31
    return kind if isinstance(x, float) else (x.base.dtype, x.layout, *x.block_shape)  # a TMA descriptor


def range_of(x: Any) -> Any:
    """Return the properties of an argument for which Triton compiles where it mustn't specialize."""
    return (int, -(2**31) <= x < 2**31) if type(x) is int else kind_of(x)


def _itself(x: Any) -> Any:
    return x


def _parts_of(kernel: JITFunction) -> tuple[Callable[[Any], Any], ...]:
    found = _parts.get(kernel.fn)  # a function's hash is its address, a JITFunction's that of its source
    if found is None:
        found = _parts[kernel.fn] = tuple(
            _itself if p.is_constexpr else range_of if p.do_not_specialize else kind_of for p in kernel.params
        )
    return found

"""Launches that cost the host less than Triton's own.

Triton looks at every argument at every launch, which takes longer than a small kernel runs. A kernel that doesn't
specialize on its integers is the same machine code whenever its constants are the same and its tensors lie on 16
bytes, so the compiled kernel is found by those.
"""

from functools import cache
from typing import Any

import torch
from triton.runtime.jit import JITFunction

ALIGNMENT = 16

_compiled: dict[tuple, Any] = {}


def launch(kernel: Any, grid: tuple[int, ...], arguments: tuple, options: dict[str, Any]) -> None:
    """`kernel[grid](*arguments, **options)`. kernel: constants last, all its integers in `do_not_specialize`."""
    aligned = all(x.data_ptr() % ALIGNMENT == 0 for x in arguments if isinstance(x, torch.Tensor))
    if not aligned or not isinstance(kernel, JITFunction):
        kernel[grid](*arguments, **options)
        return
    key = kernel.fn, torch.cuda.current_device(), arguments[-_num_constants(kernel) :], *options.items()
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[grid](*arguments, **options)
    else:
        compiled[(*grid, 1, 1)[:3]](*arguments)


@cache
def _num_constants(kernel: JITFunction) -> int:
    return sum(parameter.is_constexpr for parameter in kernel.params)

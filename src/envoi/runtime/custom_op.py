"""Registration of torch custom operators in the namespace `envoi`.

`torch.library.custom_op` does the same and more, but its wrapper costs tens of microseconds a call and loads the whole
compiler at the first; a router takes five. The dispatcher alone costs as much for operators of a dozen arguments, so
that calls in which nobody else has an interest don't go through it.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from envoi.runtime import shortcuts

_library = torch.library.Library("envoi", "FRAGMENT")
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU).add(torch._C.DispatchKey.AutocastCUDA)
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def operator(name: str, fake: Callable) -> Callable[[Callable], Callable]:
    """Decorator: make `torch.ops.envoi.<name>` of a function of tensors and plain values, with type annotations.

    The operator changes none of its arguments, returns none of them, and has no gradient. It runs on every device.
    fake: takes the same arguments, and returns empty tensors of the shapes and dtypes that the function would return.

    What stands in the function's place calls the operator; where that would make no difference, the function itself.
    """

    def register(function: Callable) -> Callable:
        @functools.wraps(function)
        def kernel(*arguments):
            # Nothing inside is differentiated, or cast by an autocast around the call.
            with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
                return function(*arguments)

        schema = torch.library.infer_schema(function, mutates_args=())
        _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, kernel, "CompositeExplicitAutograd")
        _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
        torch.library.register_fake(f"envoi::{name}", fake, lib=_library)
        dispatched = getattr(torch.ops.envoi, name).default

        @functools.wraps(function)
        def call(*arguments):
            if torch.compiler.is_compiling() or watched() or not all(map(plain, arguments)):
                return dispatched(*arguments)
            return kernel(*arguments)

        return call

    return register


def watched() -> bool:
    """Whether something wants to see the operators that are called: a mode, a transform, a tracer, a profiler; or
    whether shortcuts are off.

    Of profilers only this thread's; one of all threads doesn't see them.
    """
    return (
        not shortcuts.ENABLED
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch)
        or torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]
        or torch._C._get_tracing_state() is not None
        or torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]
    )


def plain(x: Any) -> bool:
    """False for what the dispatcher has to look at: tensors of other classes, or without memory."""
    if isinstance(x, torch.Tensor):
        return type(x) in _PLAIN and x.device.type != "meta"
    return not isinstance(x, list) or all(map(plain, x))

"""Registration of torch custom operators in the namespace `envoi`.

`torch.library.custom_op` does this and more, but its wrapper costs tens of microseconds a call, and its first call
loads the whole compiler; a router's kernel takes five. The dispatcher alone costs as much for operators with a dozen
arguments, so calls that no mode, transform, tracer or profiler observes bypass it.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from envoi import log
from envoi.check import expect_no_gradients
from envoi.runtime import program, shortcuts
from envoi.spans import NVTX, span

_library = torch.library.Library("envoi", "FRAGMENT")
_AUTOCAST_KEYS = torch._C.DispatchKey.AutocastCPU, torch._C.DispatchKey.AutocastCUDA
_AUTOCAST = torch._C.DispatchKeySet(_AUTOCAST_KEYS[0]).add(_AUTOCAST_KEYS[1])
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch


def operator(
    name: str, fake: Callable, flops: Callable[..., int], batch: Callable | None = None
) -> Callable[[Callable], Callable]:
    """Decorate an annotated function of tensors and plain values to register it as `torch.ops.envoi.<name>`.

    The operator changes none of its arguments, returns none of them, and has no gradient: where autograd would need
    one, the call is refused. It runs on every device.
    fake: takes the function's arguments, returns empty tensors of the shapes and dtypes that the function would return.
    flops: takes the function's arguments, returns the count for `torch.utils.flop_counter.FlopCounterMode`.
    batch: the rule of `torch.func.vmap`, as in `torch.library.register_vmap`; None = batching is refused.
    The decorated function calls the operator, or the function directly where that makes no difference.
    """

    def register(function: Callable) -> Callable:
        names = tuple(inspect.signature(function).parameters)

        @functools.wraps(function)
        def kernel(*arguments):
            log.call(name, names, arguments)
            # Inside, autograd and an autocast around the call are off.
            with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
                return function(*arguments)

        @functools.wraps(function)
        def spanned(*arguments):
            with span(name):
                return kernel(*arguments)

        direct = spanned if NVTX else kernel  # a call under torch's profiler is never direct
        schema = torch.library.infer_schema(function, mutates_args=())
        _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, spanned, "CompositeExplicitAutograd")
        _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
        torch.library.register_fake(f"envoi::{name}", fake, lib=_library)
        torch.library.register_vmap(f"envoi::{name}", batch or _refuse_batch(name), lib=_library)
        packet = getattr(torch.ops.envoi, name)
        register_flop_formula(packet, get_raw=True)(_without_output(flops))
        dispatched = packet.default

        @functools.wraps(function)
        def call(*arguments):
            if program.current() is not None:  # its tensors have no memory: the dispatcher would launch nothing
                return function(*arguments)
            expect_no_gradients(names, arguments)
            if torch.compiler.is_compiling() or not plain(arguments):
                expect_memory(names, arguments)
                return dispatched(*arguments)
            return dispatched(*arguments) if watched() else direct(*arguments)

        return call

    return register


def watched() -> bool:
    """Tell whether a mode, a transform, a tracer or a profiler observes operator calls, or shortcuts are off.

    Only this thread's profilers count: a profiler of all threads doesn't record direct calls.
    """
    return (
        not shortcuts.ENABLED
        or torch._C._len_torch_function_stack() > 0
        or traced()
        or torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]
    )


def traced() -> bool:
    """Tell whether a dispatch mode, a transform or a tracer sees what a call does, perhaps on tensors without values.

    torch.compile isn't counted: `torch.compiler.is_compiling` tells.
    """
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._dispatch_tls_is_dispatch_key_included(_PRE_DISPATCH)
        or torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]
        or torch._C._get_tracing_state() is not None
    )


def plain(values: Iterable[Any]) -> bool:
    """Return False if the dispatcher has to handle one of the values: a tensor of another class, without memory, or
    whose memory holds the negative or the conjugate of its elements."""
    for x in values:
        kind = type(x)
        if kind in _PLAIN:
            if x.is_meta or x.is_neg() or x.is_conj():
                return False
        elif (kind is list and not plain(x)) or isinstance(x, torch.Tensor):
            return False
    return True


def expect_memory(names: Sequence[str], values: Sequence[Any]) -> None:
    """Raise ValueError, naming it, if a tensor is on meta and another isn't: the dispatcher would compute nothing.

    Tensors without dimensions may be anywhere.
    """
    found: dict[bool, tuple[str, torch.Tensor]] = {}
    for name, value in zip(names, values, strict=True):
        for x in value if type(value) is list else (value,):
            if isinstance(x, torch.Tensor) and x.dim():
                found.setdefault(x.is_meta, (name, x))
    if len(found) == 2:
        (name, _), (other, x) = found[True], found[False]
        raise ValueError(
            f"{name}: expected a tensor on {x.device}, as {other} is, got one on meta, which has no values"
        )


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype to which an autocast around the call casts operands of products on this device, or None.

    Inside an operator there is no autocast.
    """
    if not torch._C._is_any_autocast_enabled() or device.type not in ("cpu", "cuda"):
        return None
    if not torch.compiler.is_compiling() and torch._C._dispatch_tls_is_dispatch_key_excluded(_AUTOCAST_KEYS[0]):
        return None
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _without_output(flops: Callable[..., int]) -> Callable[..., int]:
    def formula(*arguments, out_val=None):
        return flops(*arguments)

    return formula


def _refuse_batch(name: str) -> Callable:
    def rule(info, in_dims, *arguments):
        raise ValueError(
            f"torch.func.vmap: envoi.{name} can't be batched; call it once with all rows, or in a loop over the batch"
        )

    return rule

"""Registration of torch custom operators in the namespace `envoi`.

`torch.library.custom_op` does the same and more, but its wrapper costs tens of microseconds a call and loads the whole
compiler at the first; a router takes five.
"""

import functools
from collections.abc import Callable

import torch

_library = torch.library.Library("envoi", "FRAGMENT")
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU).add(torch._C.DispatchKey.AutocastCUDA)


def operator(name: str, fake: Callable) -> Callable[[Callable], Callable]:
    """Decorator: make `torch.ops.envoi.<name>` of a function of tensors and plain values, with type annotations.

    The operator changes none of its arguments, returns none of them, and has no gradient. It runs on every device.
    fake: takes the same arguments, and returns empty tensors of the shapes and dtypes that the function would return.
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
        return function

    return register

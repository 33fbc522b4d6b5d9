"""Shortcuts through private parts of torch and Triton, which save host time a call and can be turned off.

    where                shortcut                                         instead, with ENVOI_SAFE_LAUNCH=1
    launch.launch        a compiled kernel is found by a short key        Triton's launch inspects all arguments
    tma.descriptor       a checked descriptor is copied for a matrix      `TensorDescriptor` checks each one
    custom_op.operator   an unobserved call runs the function itself      the call goes through torch's dispatcher
    prepared             a planned call's kernels are launched again      each call decides anew what it launches

ENVOI_PREPARED=0 turns off the last alone.

Results are bitwise equal either way. If a release of torch or Triton changes what these rely on, the variable helps
until Envoi is updated; `envoi` reads both once, when it is imported.
"""

from typing import Any

import torch

from envoi import env

# Of torch's compiler: what it checks tensors with, and how it allocates them. None where torch is built without.
GUARDS: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)

ENABLED = not env.safe_launch()
PREPARED = ENABLED and env.prepared()


def rebase(described: Any, x: torch.Tensor) -> Any:
    """Return a copy of a `TensorDescriptor` for x, whose shape, strides and dtype must be the ones described.

    Its constructor would check them again, which takes longer than the rest of a launch.
    """
    if not ENABLED:
        kind, layout = type(described), described.layout
        return kind(x, list(described.shape), list(described.strides), list(described.block_shape), layout)
    found = object.__new__(type(described))
    found.__dict__.update(described.__dict__, base=x)
    return found

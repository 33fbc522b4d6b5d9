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

"""Named state of the Gluon kernels here."""

from typing import Any

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.language.core import _aggregate

# A field that may be known when the kernel is compiled: integers that are 1, and None, arrive as constants.
Scalar = gl.tensor | gl.constexpr


def aggregate(cls: type) -> Any:
    """Class decorator: a Triton aggregate whose constructor takes the annotated fields in their order.

    Triton wants that constructor written out for each class, and hashes its source for the compile cache, where only
    functions of its own count.
    """
    names = list(cls.__annotations__)

    def build(self, *values):
        for name, value in zip(names, values, strict=True):
            # Attributes of a constant arrive as plain values.
            setattr(self, name, value if hasattr(value, "type") else gl.constexpr(value))

    cls.__init__ = build  # pyright: ignore[reportAttributeAccessIssue]
    made: Any = _aggregate(cls)
    made.hash_attrs = [gluon.constexpr_function(build), *made.hash_attrs[1:]]
    return made

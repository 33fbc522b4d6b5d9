"""Base class of the constants that kernels are compiled for, whose text is their identity."""

import dataclasses


class Constant:
    """Base of the dataclasses that kernels take as constants.

    Triton caches machine code on disk under the kernel's source and `str()` of each constant. That text has to
    distinguish everything that a kernel can read: the fields, and what the class derives from them, which may change
    with a release. The text for people is another method's, `label`.
    """

    def __str__(self) -> str:
        """Return every field, property and class attribute by name."""
        known = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # pyright: ignore[reportArgumentType]
        for base in type(self).__mro__:
            for name, value in vars(base).items():
                if not name.startswith("_") and (isinstance(value, property) or not callable(value)):
                    known.setdefault(name, getattr(self, name))
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in known.items())})"

"""The identity of what kernels are compiled for."""

import dataclasses


class Constant:
    """Base of the dataclasses that kernels take as constants.

    Triton files machine code on disk under the kernel's source and `str()` of each constant. That text has to tell
    apart all that a kernel can read: the fields, and what the class makes of them, which may change with a release.
    What is shown to people is another method's, `label`.
    """

    def __str__(self) -> str:
        """Every field, property and class attribute by name."""
        known = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # pyright: ignore[reportArgumentType]
        for base in type(self).__mro__:
            for name, value in vars(base).items():
                if not name.startswith("_") and (isinstance(value, property) or not callable(value)):
                    known.setdefault(name, getattr(self, name))
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in known.items())})"

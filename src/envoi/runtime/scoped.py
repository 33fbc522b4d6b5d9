"""Values that hold in one thread for as long as a context lasts."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def scoped(local: threading.local, **values: Any) -> Iterator[None]:
    """Set attributes of a thread's own values inside the context; they are as before after it, whatever happens."""
    before = {name: getattr(local, name) for name in values}
    local.__dict__.update(values)
    try:
        yield
    finally:
        local.__dict__.update(before)

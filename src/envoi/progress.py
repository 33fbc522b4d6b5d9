"""Progress bar, shown only if the work takes longer than two seconds."""

import sys
import time
from types import TracebackType
from typing import Any

DELAY_S = 2.0


class Progress:
    """Progress bar on stderr, by tqdm if installed: `with Progress(12) as bar: bar.step("gemm 256x512x512")`."""

    def __init__(self, total: int, quiet: bool = False):
        self.total, self.done, self.quiet = total, 0, quiet
        self.start = time.monotonic()
        self.bar: Any = None if quiet else _tqdm(total)

    def step(self, label: str) -> None:
        """Show the label of the next step; everything before it is done."""
        if self.bar is not None:
            self.bar.set_postfix_str(label, refresh=False)
            self.bar.update(self.done - self.bar.n)
        elif not self.quiet and time.monotonic() - self.start > DELAY_S:
            print(f"\r[{self.done}/{self.total}] {label[:60]:<60}", end="", file=sys.stderr, flush=True)
        self.done += 1

    def note(self, text: str) -> None:
        """Print a line on stderr without breaking the bar."""
        if self.bar is not None:
            self.bar.write(text, file=sys.stderr)
        elif not self.quiet:
            print(text, file=sys.stderr)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.close()
        elif not self.quiet and time.monotonic() - self.start > DELAY_S:
            print(f"\r{'':<80}\r", end="", file=sys.stderr, flush=True)


def _tqdm(total: int) -> Any:
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        return None
    return tqdm(total=total, leave=False, delay=DELAY_S, file=sys.stderr)

"""Progress on stderr, shown only if the work takes longer than two seconds."""

import sys
import time

DELAY_S = 2.0


class Progress:
    """Counter of steps in one line: `with Progress(12) as bar: bar.step("gemm 256x512x512")`."""

    def __init__(self, total: int, quiet: bool = False):
        self.total, self.done, self.quiet = total, 0, quiet
        self.start = time.monotonic()

    def step(self, label: str) -> None:
        """Show the label of the next step; everything before it is done."""
        self._show(f"[{self.done}/{self.total}] {label[:60]:<60}")
        self.done += 1

    def say(self, text: str) -> None:
        """Print a line that stays, if what the bar is for takes long: a result, or an error, as soon as it is known."""
        self._show(f"{text[:200]:<80}\n")

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        self._show(f"{'':<80}\r")

    def _show(self, text: str) -> None:
        if not self.quiet and time.monotonic() - self.start > DELAY_S:
            print(f"\r{text}", end="", file=sys.stderr, flush=True)

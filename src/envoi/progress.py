"""Progress on stderr, shown only on a terminal, and only if the work takes longer than two seconds."""

import sys
import time

DELAY_S = 2.0


class Progress:
    """Counter of steps in one line: `with Progress(12) as bar: bar.step("gemm 256x512x512")`."""

    def __init__(self, total: int, quiet: bool = False):
        self.total, self.done, self.quiet = total, 0, quiet
        self.on_terminal = sys.stderr is not None and sys.stderr.isatty()  # None if the caller has closed it
        self.start = time.monotonic()

    def step(self, label: str) -> None:
        """Show the label of the next step; everything before it is done."""
        self._show(f"[{self.done}/{self.total}] {label[:60]:<60}")
        self.done += 1

    def say(self, text: str) -> None:
        """Print a line that stays, if what the bar is for takes long: a result, or an error, as soon as it is known.

        Where stderr is a file, the line is in it, without the counter.
        """
        if self.on_terminal:
            self._show(f"{text[:200]:<80}\n")
        elif self._is_due():
            print(text[:200], file=sys.stderr, flush=True)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        self._show(f"{'':<80}\r")

    def _show(self, text: str) -> None:
        if self.on_terminal and self._is_due():
            print(f"\r{text}", end="", file=sys.stderr, flush=True)

    def _is_due(self) -> bool:
        return not self.quiet and time.monotonic() - self.start > DELAY_S

"""Lines and exit status of programs that check Envoi in an engine's own classes."""

import os
import sys


class Checks:
    """Checks of a program run, a line printed for each. wanted: their names on the command line; none: all.

    -v on the command line: an error that ends a check also ends the program.
    """

    def __init__(self) -> None:
        self.wanted = [name for name in sys.argv[1:] if not name.startswith("-")]
        self.raises = "-v" in sys.argv
        self.failed = 0

    def wants(self, name: str) -> bool:
        """Tell whether a check was asked for."""
        return not self.wanted or name in self.wanted

    def judge(self, name: str, good: bool, text: str) -> None:
        """Print a check's outcome, and count it if it failed."""
        self.failed += not good
        print(f"{'ok' if good else 'FAILED':7}{name}: {text}", flush=True)

    def end(self, at_once: bool = False) -> None:
        """End the program with status 1 if a check failed, else with 0.

        at_once: without freeing anything. Python would free vLLM's pools of GPU memory and their allocators in any
        order, of which a process dies.
        """
        if at_once:
            sys.stdout.flush()
            os._exit(self.failed > 0)
        sys.exit(self.failed > 0)


def said(errors: dict[int, float]) -> str:
    """Return errors by numbers of tokens as text."""
    return ", ".join(f"{count} tokens {error:.1e}" for count, error in errors.items())

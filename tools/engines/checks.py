"""Lines and exit status of programs that check Envoi in an engine's own classes."""

import os
import socket
import subprocess
import sys
import time


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


def run_ranks(module: str, num_ranks: int, rank: str, port: str, **more: str) -> int:
    """Run a module with this program's arguments, once for each rank; return 1 if one has failed, and end the others.

    rank, port, more: names of environment variables of the rank and a free port, and other variables.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        shared = os.environ | more | {port: str(free.getsockname()[1])}
    command = [sys.executable, "-m", module, *sys.argv[1:]]
    ranks = [subprocess.Popen(command, env=shared | {rank: str(number)}) for number in range(num_ranks)]
    try:
        while None in (codes := [process.poll() for process in ranks]) and not any(codes):
            time.sleep(0.1)
        return int(any(codes))
    finally:
        for process in ranks:  # which may wait for one that has failed
            process.kill()

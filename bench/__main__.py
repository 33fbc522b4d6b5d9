"""Benchmarks of Envoi compared with torch and its peers: python -m bench SUITE, from a checkout."""

import sys

from bench import command
from envoi.cli import Parser, run_program


def main(argv: list[str] | None = None) -> int:
    """Run a command line; return the exit status."""
    parser = Parser("python -m bench", description=command.DESCRIPTION, allow_abbrev=False)
    parser.set_defaults(command="bench", run=command.run)
    command.add_arguments(parser)
    return run_program(parser, argv)


if __name__ == "__main__":
    sys.exit(main())

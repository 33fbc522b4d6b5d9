"""`python -m tools.machine_code`: dump, count, compare machine code."""

import sys

from envoi.cli import Parser
from tools.machine_code import command


def main(argv: list[str] | None = None) -> int:
    """Run a command line; return the exit status: 2 for a user's mistake."""
    parser = Parser(prog="python -m tools.machine_code", description=command.DESCRIPTION, allow_abbrev=False)
    command.add_arguments(parser)
    try:
        return command.run(parser.parse_args(argv))
    except (ValueError, FileNotFoundError) as error:
        print(f"machine_code: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

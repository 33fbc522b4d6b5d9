"""Entry point of `python -m envoi`, the command `envoi`."""

import sys

from envoi.cli import main

if __name__ == "__main__":
    sys.exit(main())

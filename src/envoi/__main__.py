"""Entry point of `python -m envoi`, the command `envoi`."""

import sys

from envoi.cli import main

sys.exit(main())

"""`python tools/sass.py ...` is `envoi sass ...`: dump, count, compare machine code."""

import sys

from envoi.cli import main

if __name__ == "__main__":
    sys.exit(main(["sass", *sys.argv[1:]]))

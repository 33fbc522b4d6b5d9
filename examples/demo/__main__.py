"""Demo: a trained MoE model answers through Envoi, on any hardware: a table and a picture. python -m examples.demo"""

import argparse
import sys

from envoi.cli import FORMATS, Parser, run_program


def main(argv: list[str] | None = None) -> int:
    """Run a command line; return the exit status."""
    parser = Parser("python -m examples.demo", description=__doc__, allow_abbrev=False)
    parser.set_defaults(command="demo", run=_run)
    add = parser.add_argument
    add("--model", metavar="DIR", help="a checkpoint; default: examples/tiny_moe/model")
    add("--text", metavar="FILE", help="text to evaluate on; default: standard library modules that training never saw")
    add("--bytes", metavar="N", type=int, default=8192, help="how much of the text; default: %(default)s")
    add("--prompt", metavar="STR", default="def ", help="a beginning to continue; default: %(default)r")
    add("--new-bytes", metavar="N", type=int, default=160, help="how far; default: %(default)s")
    add("--ranks", metavar="N", type=int, default=4, help="processes that share one layer; default: %(default)s")
    add("--formats", metavar="A,B", default=FORMATS, help="number formats; default: %(default)s")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU if there is one")
    add("--out", metavar="FILE", default="demo.png", help="the picture, .png, .pdf or .svg; default: %(default)s")
    return run_program(parser, argv)


def _run(args: argparse.Namespace) -> int:
    from examples.demo.command import run  # imports torch: --help answers at once

    return run(args)


if __name__ == "__main__":
    sys.exit(main())

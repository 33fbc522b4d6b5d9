"""Command `python -m tools.time_models`: fit the models of GPU time of the Hopper GEMM and the Hopper router.

    python -m tools.time_models gemm measure bench/gemm_times.jsonl --seed 0 --count 40   on an H200; a line a shape
    python -m tools.time_models gemm fit bench/gemm_times.jsonl                           anywhere
    python -m tools.time_models router fit bench/router_times.jsonl

`measure` takes shapes as `python -m bench gemm_drawn`, `grouped_drawn` or `router_drawn` draw them, and of each shape's
configs the most promising ones and some at random: a model that is wrong mustn't choose all that could show it. Lines
are appended as soon as they are measured.

`fit` prints the regret, the time of the config that the model chooses over that of the best one measured, before and
after, and on shapes that a fit hasn't seen; then the constants.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from envoi.runtime import devices
from tools.time_models import gemm, router
from tools.time_models.fit import fit, held_out_regret, report

MODELS = {"gemm": gemm, "router": router}


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m tools.time_models", description=__doc__, formatter_class=lines)
    models = parser.add_subparsers(dest="model", required=True)
    for name in MODELS:
        actions = models.add_parser(name, help=f"of the Hopper {name}").add_subparsers(dest="action", required=True)
        measuring = actions.add_parser("measure", help="append times to FILE; needs an H200")
        measuring.add_argument("file", type=Path)
        for option, default, about in (
            ("seed", 0, "of the shapes"),
            ("count", 40, "shapes"),
            ("configs", 10, "of a shape"),
            ("repeat", 20, "rounds of each median"),
        ):
            about = f"{about}; default: {default}"
            measuring.add_argument(f"--{option}", metavar="N", type=int, default=default, help=about)
        measuring.add_argument("--jobs", metavar="N", type=int, help="processes that compile; default: by the CPUs")
        if name == "gemm":
            about = "only plain GEMMs with A to B tokens; default: all shapes"
            measuring.add_argument("--tokens", metavar="A-B", default="-".join(map(str, gemm.ANY)), help=about)
        fitting = actions.add_parser("fit", help="fit to FILEs; needs no GPU")
        fitting.add_argument("files", type=Path, nargs="+", metavar="file")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    args = arguments(given)
    try:
        _measure(args) if args.action == "measure" else _fit(args)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"time_models: {error}", file=sys.stderr)
        return 2
    return 0


def _measure(args: argparse.Namespace) -> None:
    more = (_tokens(args.tokens),) if args.model == "gemm" else ()
    if not torch.cuda.is_available() or devices.implementation(torch.device("cuda", 0)) != "hopper":
        raise ValueError("measure: expected a Hopper GPU (sm_90), this machine has none that torch can use")
    measure = MODELS[args.model].measure
    done = measure(args.file, args.seed, args.count, args.configs, args.repeat, args.jobs, *more)
    print(f"{done} shapes appended to {args.file}")


def _tokens(text: str) -> tuple[int, int]:
    least, _, most = text.partition("-")
    if not (least.isdigit() and most.isdigit() and int(least) <= int(most)):
        raise ValueError(f"--tokens: expected a range like 9-64, got {text!r}")
    return int(least), int(most)


def _fit(args: argparse.Namespace) -> None:
    data, model = MODELS[args.model].read(args.files), MODELS[args.model].MODEL
    if not data:
        raise ValueError(f"expected at least one measured shape, got none in {', '.join(map(str, args.files))}")
    print(report(data, model, fit(data, model), held_out_regret(data, model)))


if __name__ == "__main__":
    sys.exit(main())

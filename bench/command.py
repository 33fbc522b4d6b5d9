"""Implementation of `python -m bench` and its arguments. torch is imported only when something is measured."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bench import evidence, machine, pages

if TYPE_CHECKING:
    from bench.shapes import Case

QUICK_COMPILE_S = 150
MAX_COUNT = 1000
NEEDS_AN_ENGINE = "engine"  # a suite that runs where it is named: it needs a server, and minutes for each model

DESCRIPTION = """Measure Envoi beside torch and print tables. Without SUITE every suite but engine is run, at the
sizes that fit the device. With --out a case is appended to the results as soon as it is measured. Over several GPUs:
torchrun --nproc-per-node 4 -m bench moe"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m bench`."""
    parser.add_argument("suites", metavar="SUITE", nargs="*", help=f"of {', '.join(evidence.SUITES)}")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    parser.add_argument(
        "--case", metavar="SUBSTRING", action="append", help="only cases whose name contains this; may be repeated"
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU if there is one"
    )
    parser.add_argument(
        "--repeat", metavar="N", type=int, help="calls behind each median; default: fixed for each suite"
    )
    parser.add_argument("--quick", action="store_true", help=f"the same as --compile-limit {QUICK_COMPILE_S}")
    parser.add_argument(
        "--compile-limit", metavar="S", type=float, help="seconds for torch.compile's tuning in all; default: no limit"
    )
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile as a baseline")
    parser.add_argument(
        "--jobs", metavar="N", type=int, help="processes that compile Envoi's GEMMs beforehand; default: by the CPUs"
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of suites *_drawn; default: %(default)s")
    parser.add_argument(
        "--count", metavar="N", type=int, default=48, help="GPU cases of each suite *_drawn; default: %(default)s"
    )
    parser.add_argument("--layers", metavar="N", type=int, help="of suites model and engine; default: as many as fit")
    parser.add_argument(
        "--untuned", action="store_true", help="choose configs of Hopper GEMMs by their model, not by measured ones"
    )
    parser.add_argument(
        "--out", metavar="DIR", help="append the results to DIR/<gpu>.jsonl; default: they are printed and not kept"
    )
    parser.add_argument(
        "--peer-version", metavar="NAME=VERSION", action="append", default=[],
        help="of another library that doesn't say its own, e.g. vllm=0.33.0; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--theirs",
        metavar="FILE",
        help="take baselines that another process measured on these GPUs, see bench/README.md",
    )
    parser.add_argument("--commit", metavar="TEXT", help="what to record where the package isn't in a git repository")
    parser.add_argument(
        "--docs",
        metavar="DIR",
        help="write the pages of docs/benchmarks, the README's picture and the numbers in README and docs/*.md "
        "from the results of --out, in the repository bench/results, and stop",
    )


def run(args: argparse.Namespace) -> int:
    """Run `python -m bench`; return the exit status. Raises ValueError for a user's mistake."""
    if args.docs is not None:
        return _write_docs(Path(args.docs), args.out)
    chosen = _choose(args)
    if args.list:
        _print_list(chosen)
        return 0
    if args.repeat is not None and args.repeat < 1:
        raise ValueError(f"--repeat: expected at least 1, got {args.repeat}")
    if args.out is not None and Path(args.out).exists() and not Path(args.out).is_dir():
        raise ValueError(f"--out: expected a folder, got the file {args.out}")
    if args.out is not None:
        _make_folder(Path(args.out))
    from envoi.ops.gemm.hopper import tune

    tune.use_measured(not args.untuned)
    try:
        return _measure(args, chosen)
    finally:
        tune.use_measured(True)


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out: expected a folder that can be made, got {out}: {error.strerror}") from None


def _write_docs(docs: Path, out: str | None) -> int:
    """docs: docs/benchmarks of a repository, whose README and docs/assets are written too."""
    folder = machine.RESULTS if out is None else Path(out)
    if not folder.is_dir():
        raise ValueError(f"--out: expected the folder of the results that --docs takes, got {folder}, which isn't one")
    docs = docs.resolve()
    readme = docs.parent.parent / "README.md"
    if not docs.parent.is_dir() or not readme.is_file():
        raise ValueError(f"--docs: expected docs/benchmarks of a repository with a README.md, got {docs}")
    from bench import charts

    results = evidence.load(folder)
    texts = {docs / name: text for name, text in pages.pages(folder).items()}
    texts |= {path: pages.render(path.read_text(encoding="utf-8"), folder) for path in (readme, *guides(docs.parent))}
    cases = pages.picture_cases(results)
    picture = docs.parent / "assets" / pages.PICTURE
    for folder_made in (docs, picture.parent):
        folder_made.mkdir(exist_ok=True)
    if cases:
        charts.draw_picture(picture, cases)
    else:
        picture.unlink(missing_ok=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    print(f"{docs}, {picture}, {readme} and {docs.parent} agree with {folder}")
    return 0


def guides(docs: Path) -> list[Path]:
    """Return the pages of a docs folder that have numbers of the results."""
    return [path for path in sorted(docs.glob("*.md")) if "<!-- bench:" in path.read_text(encoding="utf-8")]


def _choose(args: argparse.Namespace) -> "list[Case]":
    from bench.shapes import Options
    from bench.suites import cases

    if not 1 <= args.count <= MAX_COUNT:
        raise ValueError(f"--count: expected 1 to {MAX_COUNT}, got {args.count}")
    if args.layers is not None and args.layers < 1:
        raise ValueError(f"--layers: expected at least 1, got {args.layers}")
    options = Options(args.seed, args.count, args.layers)
    names = list(dict.fromkeys(args.suites)) or [suite for suite in evidence.SUITES if suite != NEEDS_AN_ENGINE]
    chosen = [case for name in names for case in cases(name, options)]
    if args.case:
        chosen = [case for case in chosen if any(part in case.name for part in args.case)]
    if not chosen:
        wanted = " nor ".join(map(repr, args.case))
        raise ValueError(f"--case: expected a part of a case's name, {wanted} is in none of {', '.join(names)}")
    return [_untuned(case) for case in chosen] if args.untuned else chosen


def _untuned(case: "Case") -> "Case":
    return replace(case, name=f"untuned {case.name}", details=(*case.details, *evidence.UNTUNED.items()))


def _print_list(chosen: "list[Case]") -> None:
    width = max(len(case.suite) for case in chosen)
    for case in chosen:
        where = "cuda cpu" if case.on_cuda and case.on_cpu else "cuda" if case.on_cuda else "cpu"
        print(f"{case.suite:<{width}}  {case.name}  [{where}{'' if case.alone else ', over ranks'}]")


def _peer_versions(given: list[str]) -> dict[str, str]:
    from bench.libraries import LIBRARIES

    found = {}
    for text in given:
        name, _, version = text.partition("=")
        if name not in LIBRARIES or not version.strip():
            raise ValueError(f"--peer-version: expected NAME=VERSION of {', '.join(LIBRARIES)}, got {text!r}")
        found[name] = version
    return found


def _measure(args: argparse.Namespace, chosen: "list[Case]") -> int:
    from bench import ahead, libraries, runner
    from bench.suites import model, rehearsal
    from bench.theirs import read as read_theirs
    from bench.trial import Compiler

    peer_versions = _peer_versions(args.peer_version)
    device = runner.pick_device(args.device)
    fitting = [case for case in chosen if (case.on_cuda if device.type == "cuda" else case.on_cpu)]
    ranks = runner.join_ranks(device)
    fitting = [case for case in fitting if (case.over_ranks if ranks.num_ranks > 1 else case.alone)]
    theirs = () if args.theirs is None else read_theirs(Path(args.theirs), runner.all_gpus(ranks))
    if theirs:
        fitting = [case for case in fitting if case.name in {one.case for one in theirs}]
    if not fitting:
        where = f"{device.type} with {ranks.num_ranks} ranks" if ranks.num_ranks > 1 else device.type
        raise ValueError(f"--case: expected a case that runs on {where}, got none; see --list")
    commit = args.commit or machine.commit()
    if ranks.rank == 0 and args.out is None:
        print("envoi: results are printed and not kept; --out DIR appends them to DIR/<gpu>.jsonl", file=sys.stderr)
    elif ranks.rank == 0 and commit.endswith("-dirty"):
        print(f"envoi: warning: the package differs from its commit, recorded as {commit}", file=sys.stderr)
    paths: dict[Path, None] = {}

    def keep(measurement: evidence.Measurement) -> None:
        if args.out is not None:
            paths.update(dict.fromkeys(evidence.append(Path(args.out), [measurement])))

    if device.type == "cuda" and ranks.num_ranks == 1:
        rehearsed = [case for case in fitting if rehearsal.is_rehearsed(case)]
        rehearsal.rehearse_all(rehearsed, args.jobs, not args.untuned, not args.no_compile)
        ahead.compile_cases([case for case in fitting if case not in rehearsed], args.jobs)
        model.compile_ahead(fitting, device, args.jobs)
    limit_s = 0.0 if args.no_compile else args.compile_limit
    compiler = Compiler(QUICK_COMPILE_S if args.quick and limit_s is None else limit_s)
    plan = runner.Options(args.repeat, commit, compiler, keep, peer_versions, theirs)
    measured, num_failed = runner.run_cases(fitting, ranks, plan)
    runner.leave_ranks()
    for sentence in libraries.outdated(measured).values() if ranks.rank == 0 else ():
        print(f"envoi: warning: {sentence}; the pages count the newest alone", file=sys.stderr)
    for path in paths:
        print(f"appended to {path}")
    if num_failed:
        print(
            f"envoi: {num_failed} of {len(fitting)} cases failed; the lines below their suite's table say how",
            file=sys.stderr,
        )
    return 1 if num_failed else 0

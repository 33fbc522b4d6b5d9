"""Implementation of `python -m tools.machine_code` and its arguments. Triton is imported only when a kernel is inspected."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tools.machine_code.registry import KERNELS, Entry, find

if TYPE_CHECKING:
    from tools.machine_code.record import Record, Refusal

DESCRIPTION = """Machine code of kernels, with no GPU: registers, shared memory, and instructions by family. A KERNEL is
a name of --list, compiled for each --arch, or the path of a .cubin. The exit status is 1 if one of them has no counts;
the reason stands below the table."""
SWEEPS = ("tmem-load",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m tools.machine_code`."""
    parser.add_argument("kernels", metavar="KERNEL", nargs="*", help="a name of --list, or the path of a .cubin")
    parser.add_argument("--list", action="store_true", help="print the names of the kernels and stop")
    parser.add_argument("--arch", metavar="A,B", help="of sm_90, sm_100, sm_103; default: all that a kernel is for")
    parser.add_argument("--diff", metavar=("A", "B"), nargs=2, help="compare two builds: .cubin files, or --json files")
    parser.add_argument(
        "--sweep", choices=SWEEPS, help="compile one kernel in many ways: widths of tensor memory loads"
    )
    parser.add_argument("--json", metavar="FILE", help="write the counts to this file too")
    parser.add_argument("--dump", metavar="FILE", help="write the disassembly to this file")


def run(args: argparse.Namespace) -> int:
    """Run `python -m tools.machine_code`; return the exit status. Raises ValueError for a user's mistake."""
    modes = {"KERNEL": args.kernels, "--list": args.list, "--diff": args.diff, "--sweep": args.sweep}
    given = [name for name, value in modes.items() if value]
    if len(given) != 1:
        raise ValueError(f"sass: expected one of {', '.join(modes)}, got {' and '.join(given) or 'none'}")
    if args.dump and not args.kernels:
        raise ValueError(f"--dump: expected KERNEL beside it, got {given[0]}")
    if args.list:
        return _print_list()
    if args.diff:
        return _diff(*map(Path, args.diff))
    return _sweep(args) if args.sweep else _count(args)


def _print_list() -> int:
    width = max(map(len, KERNELS))
    for entry in KERNELS.values():
        print(f"{entry.name:<{width}}  {entry.about} [{', '.join(entry.arches)}]")
    return 0


def _diff(before: Path, after: Path) -> int:
    from tools.machine_code import diff, record

    print(diff.compare(record.read(before), record.read(after)))
    return 0


def _sweep(args: argparse.Namespace) -> int:
    from tools.machine_code import sweep, tmem_sweep

    tables, found = [], {}
    for arch in _arches(args.arch) or ("sm_100",):
        cases = list(tmem_sweep.cases())
        rows = sweep.run(arch, cases, progress=_progress(len(cases), arch))
        tables.append(f"{arch}\n{sweep.table(rows)}")
        found[arch] = [dataclasses.asdict(row) for row in rows]
    if args.json:
        Path(args.json).write_text(json.dumps({"sweep": args.sweep, "versions": _versions(), "rows": found}, indent=1))
    print("\n\n".join(tables))
    return 0


def _progress(total: int, arch: str) -> Callable[[object], None]:
    done = 0

    def show(case: object) -> None:
        nonlocal done
        done += 1
        print(f"\r{arch}: {done} of {total}", end="\n" if done == total else "", file=sys.stderr, flush=True)

    return show if sys.stderr.isatty() else lambda case: None


def _count(args: argparse.Namespace) -> int:
    from tools.machine_code import record, report

    records: list[Record] = []
    refusals: list[Refusal] = []
    texts: list[str] = []
    arches = _arches(args.arch)
    for source in [_open(name) for name in dict.fromkeys(args.kernels)]:
        if isinstance(source, Path):
            _keep(record.read_cubin(source), records, texts)
        else:
            _compile(source, arches or source.arches, records, refusals, texts)
    if records:
        print(report.table(records))
    print("".join(f"{line}\n" for line in report.notes(records, refusals)), end="")
    if args.json:
        Path(args.json).write_text(record.to_json(records, refusals, _versions()))
    if args.dump:
        Path(args.dump).write_text("\n".join(texts))
    return 1 if refusals or any(found.not_counted for found in records) else 0


def _open(name: str) -> "Path | Entry":
    """Return a path for a name that looks like one, so that a missing file isn't reported as an unknown kernel."""
    path = Path(name)
    if path.suffix == ".cubin" or len(path.parts) > 1 or path.is_file():
        if not path.is_file():
            raise FileNotFoundError(f"KERNEL: {name}: there is no such file")
        return path
    return find(name)


def _compile(
    entry: Entry, arches: tuple[str, ...], records: "list[Record]", refusals: "list[Refusal]", texts: list[str]
) -> None:
    from tools.machine_code import record
    from tools.machine_code.compile import CompilerRefusesError, compile_recipe

    for arch in arches:
        if arch not in entry.arches:
            refusals.append(record.Refusal(entry.name, arch, f"it is written for {', '.join(entry.arches)}"))
            continue
        try:
            binary = compile_recipe(entry.recipe(arch), arch)
        except CompilerRefusesError as error:
            refusals.append(record.Refusal(entry.name, arch, f"the compiler refuses it: {error.reason}"))
        else:
            _keep(record.of_binary(binary, entry.name), records, texts)


def _keep(found: "tuple[list[Record], str]", records: "list[Record]", texts: list[str]) -> None:
    records += found[0]
    texts.append(f"// {', '.join(record.title for record in found[0])}\n{found[1]}")


def _arches(text: str | None) -> tuple[str, ...]:
    from tools.machine_code.compile import check_arch

    return tuple(check_arch(arch) for arch in dict.fromkeys(text.split(","))) if text else ()


def _versions() -> dict[str, str]:
    import envoi
    from envoi.runtime import triton_compat

    return {"envoi": envoi.__version__, "triton": triton_compat.VERSION}

"""Command line of the machine-code tools; no GPU needed."""

import argparse
import sys
from pathlib import Path

from envoi.cli import Parser
from envoi.runtime import triton_compat
from tools.kernel_cases import EVERY_ARCH
from tools.machine_code import gate
from tools.machine_code.compile import CompilerRefusesError
from tools.machine_code.count import Record

ACCEPTED = Path(__file__).resolve().parents[2] / "tests" / "machine_code" / "gate.json"


def main(argv: list[str] | None = None) -> int:
    """Run a command line; return the exit status: 1 if a kernel is refused or breaks a rule, 2 for a user's mistake."""
    parser = Parser(prog="python -m tools.machine_code", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, about, run in (
        ("list", "the kernels and their architectures", _list),
        ("count", "registers, shared memory and instructions of kernels", _count),
        ("check", "hold all kernels to the rules, whatever the Triton", _check),
        ("accept", f"write all counts and hashes to {ACCEPTED.name}, which the tests compare with", _accept),
    ):
        command = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
        command.set_defaults(run=run)
        if name == "count":
            command.add_argument("kernels", metavar="KERNEL", nargs="+", help="a name of `list`")
            command.add_argument("--arch", choices=EVERY_ARCH, help="default: all that a kernel is written for")
            command.add_argument("--dump", metavar="FILE", help="write the disassembly to this file")
        if name == "check":
            command.add_argument("triton", nargs="?", help="the release that should be installed")
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, FileNotFoundError) as error:
        print(f"machine_code: {error}", file=sys.stderr)
        return 2


def _list(args: argparse.Namespace) -> int:
    for case in gate.cases().values():
        print(f"{case.name:<40} {case.about} [{', '.join(case.arches)}]")
    return 0


def _count(args: argparse.Namespace) -> int:
    unknown = [name for name in args.kernels if name not in gate.cases()]
    if unknown:
        raise ValueError(f"KERNEL: expected a name of `list`, got {', '.join(unknown)}")
    chosen = [target for target in gate.targets() if target[0] in args.kernels and args.arch in (None, target[1])]
    if not chosen:
        raise ValueError(f"--arch: expected one that a kernel is written for, got {args.arch}")
    texts, num_refused = [], 0
    for target in chosen:
        try:
            record, text = gate.count(*target)
        except CompilerRefusesError as error:
            num_refused += 1
            print(error)
        else:
            print(*_lines(record), sep="\n")
            texts.append(f"// {record.title}\n{text}")
    if args.dump:
        Path(args.dump).write_text("\n".join(texts))
    return 1 if num_refused else 0


def _lines(record: Record) -> list[str]:
    resources = f"{record.num_warps} warps, {record.registers} registers, {record.stack_bytes} stack bytes a thread"
    found = [f"{record.title}: {resources}, {record.shared_bytes} shared bytes", f"  PTX {record.ptx_sha256}"]
    found.append(f"  {record.instructions} instructions")
    for family, opcodes in record.families.items():
        found.append(f"  {family}: {', '.join(f'{number} {opcode}' for opcode, number in opcodes.items())}")
    return found


def _check(args: argparse.Namespace) -> int:
    if args.triton not in (None, triton_compat.VERSION):
        raise ValueError(f"expected Triton {args.triton}, got {triton_compat.VERSION}")
    _, wrong = gate.judge_all(gate.targets())
    print(f"Triton {triton_compat.VERSION}: {len(gate.targets())} kernels compiled", *wrong, sep="\n")
    return 1 if wrong else 0


def _accept(args: argparse.Namespace) -> int:
    words, right = gate.accept(ACCEPTED)
    print(words)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())

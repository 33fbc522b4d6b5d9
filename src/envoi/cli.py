"""Command `envoi`. Imports only argparse, so that `--help` answers at once."""

import argparse
import errno
import os
import select
import sys
from collections.abc import Container
from functools import partial
from importlib import import_module
from typing import NoReturn

import envoi

FORMATS = "bf16,fp8_row,fp8_block128,mxfp8,mxfp4,mxfp4_fp8,mxfp4_mxfp8,nvfp4,int4"
# Options by the arguments that they become, where those have other names.
OPTIONS = {
    "num_ranks": "gpus", "num_hosts": "hosts", "num_topk": "topk", "num_tokens": "tokens", "num_experts": "experts",
    "intermediate": "inter", "gb_per_s": "network", "collective_us": "collective",
}  # fmt: skip
LAYER = "ops.moe.parallel.command"  # implements the commands that run or compile a layer
TUNE = """Measure the configs of a Hopper GEMM in rounds, with a cold L2 cache, and keep the fastest. A later
`envoi.gemm` on this machine uses it."""
READER_GONE = 141  # a shell's exit status for a program ended by SIGPIPE


class Parser(argparse.ArgumentParser):
    """ArgumentParser whose errors are one line, like all others of this command."""

    def error(self, message: str) -> NoReturn:
        """Print the line and exit with status 2."""
        self.exit(2, f"envoi: {message}; see {self.prog} --help\n")


def main(argv: list[str] | None = None) -> int:
    """Run a command line; return the exit status."""
    return run_program(_parser(), argv)


def run_program(parser: Parser, argv: list[str] | None = None) -> int:
    """Run a command line; return the exit status: 2 for a mistake or a full disk, 141 if the reader has gone.

    parser: sets `run`, a function of the arguments that returns the status, and `command`, its name.
    """
    try:
        try:
            return _run(parser, argv)
        finally:
            if sys.stdout is not None:  # None if the caller has closed it
                sys.stdout.flush()  # here: at interpreter exit an error would print a traceback
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        return READER_GONE
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _discard_output()
        return _refuse(str(error))


def _reader_is_gone() -> bool:
    """Return whether standard output has lost its reader; if so, discard the rest of the output."""
    output = select.poll()
    output.register(sys.stdout, 0)  # poll reports errors and hang-ups without being asked
    if not output.poll(0):
        return False
    _discard_output()
    return True


def _discard_output() -> None:
    """Discard the rest of the output, which can't be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(parser: Parser, argv: list[str] | None) -> int:
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, FileNotFoundError, PermissionError) as error:
        return _refuse(_of_options(str(error), vars(args)))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "envoi":
            raise
        return _refuse(f"{args.command} needs {error.name}, which isn't installed; pip install 'envoi[demo]' brings it")


def _of_options(message: str, options: Container[str]) -> str:
    """Return an error that names an argument of Python as one that names the option: "num_topk: .." as "--topk: ..".

    options: the command's, as argparse names them.
    """
    name, colon, rest = message.partition(":")
    option = name if name in options else OPTIONS.get(name, "")
    return f"--{option.replace('_', '-')}{colon}{rest}" if colon and option in options else message


def _refuse(message: str) -> int:
    print(f"envoi: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _parser() -> Parser:
    parser = Parser(prog="envoi", description=envoi.__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"envoi {envoi.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, help, add_arguments, runs in (
        ("info", "versions, devices, and which implementation each operator uses here", _info_arguments, "info"),
        ("tune", "measure the configs of a GEMM on this GPU, keep the fastest", _tune_arguments, "tune.command"),
        ("warm-up", "compile all kernels that a MoE layer can need, in parallel", _warm_up_arguments, LAYER),
        ("estimate", "predict an expert-parallel MoE: times, bounds, sizes", _estimate_arguments, "estimates.report"),
        ("trace", "record one expert-parallel MoE call on its GPUs, as a timeline", _trace_arguments, f"{LAYER}:trace"),
        ("indexer", "certify the indexer's exact mode on this GPU", _indexer_arguments, "ops.indexer.certify"),
    ):
        earlier = ["plan"] if name == "estimate" else []  # its name until 0.2
        command = commands.add_parser(name, aliases=earlier, help=help, description=help, allow_abbrev=False)
        command.set_defaults(run=partial(_run_implementation, runs))
        add_arguments(command)
    return parser


def _run_implementation(named: str, args: argparse.Namespace) -> int:
    """Run a command. named: a module below envoi, and its function after a colon; default "run"."""
    module, _, function = named.partition(":")
    return getattr(import_module(f"envoi.{module}"), function or "run")(args)


def _info_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the same as one JSON object")


def _tune_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = TUNE
    add = parser.add_argument
    add("--shape", metavar="MxNxK", required=True, help="sizes; with --groups M is the rows of all experts")
    add("--format", metavar="F", default="bf16", help="bf16, fp8_row or fp8_block128; default: %(default)s")
    add("--epilogue", metavar="NAME", default="store", help="of envoi.tune.problems.EPILOGUES; default: %(default)s")
    add("--groups", metavar="E", type=int, help="experts; default: a plain GEMM")
    add("--drawn", action="store_true", help="with --groups: as many rows an expert as routing at random leaves it")
    add_tune_options(parser)


def add_tune_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say how shapes are measured, whichever they are."""
    add = parser.add_argument
    add("--candidates", metavar="N", type=int, default=24, help="configs that are measured, the most promising")
    add("--repeat", metavar="N", type=int, default=20, help="rounds behind each median; default: %(default)s")
    add("--jobs", metavar="N", type=int, help="processes that compile; default: by the CPUs")
    add("--out", metavar="FILE", help="keep the winners here; default: gemm.json in the cache directory")
    add("--list", action="store_true", help="print the shapes with their default configs and stop; needs no GPU")


def _estimate_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _layer_arguments(parser)
    add("--gpus", metavar="N", type=int, default=1, help="1, 2, 4 or 8, which share the experts; default: %(default)s")
    add(
        "--hosts", metavar="N", type=int, default=1, help="with --gpus each, which all share them; default: %(default)s"
    )
    add("--network", metavar="GB/s", type=float, help="sent between hosts by one GPU; default: 45, of 400 Gb/s")
    add("--collective", metavar="US", type=float, help="time of a collective between hosts without bytes; default: 30")
    add("--presum", action="store_true", help="each host sends one sum of a token's rows; default: all rows")
    add("--format", metavar="NAME", default="bf16", help=f"of {FORMATS}; default: %(default)s")
    add("--arch", metavar="NAME", default="sm_90", help="sm_90 (H200) or sm_100 (B200); default: %(default)s")
    add("--max-tokens", metavar="N", type=int, help="of one GPU, for the size of buffers; default: --tokens")
    add("--json", action="store_true", help="the same as one JSON object")


def _layer_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sizes of an expert-parallel layer."""
    for name, about in (
        ("hidden", "width of a token"),
        ("inter", "width inside an expert"),
        ("experts", "of all GPUs"),
        ("topk", "experts of a token"),
        ("tokens", "of one GPU"),
    ):
        also = ["--intermediate"] if name == "inter" else []  # as `warm-up` has it
        parser.add_argument(f"--{name}", *also, metavar="N", type=int, required=True, help=about)


def _trace_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = """Record one call of a MoE layer over the GPUs of a host, on random tokens, in a CUDA graph:
    what each role of each multiprocessor did, and when. Over several GPUs: torchrun --nproc-per-node 4 -m envoi.cli
    trace .."""
    _layer_arguments(parser)
    add = parser.add_argument
    add("--format", metavar="NAME", default="fp8_block128", help=f"of {FORMATS}; default: %(default)s")
    add("--out", metavar="FILE", default="trace.json.gz", help="for ui.perfetto.dev; default: %(default)s")


def _warm_up_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = """Compile all kernels that a layer can need for any number of tokens, in parallel, into
    Triton's cache on disk, from which a later process on a GPU of the same kind reads them."""
    add = parser.add_argument
    for name, about in (
        ("hidden", "width of a token"),
        ("intermediate", "width inside an expert"),
        ("experts", "of all ranks"),
        ("topk", "slots of a token"),
        ("max-tokens", "the most tokens that a call has on a GPU"),
    ):
        also = [f"--{OPTIONS[name]}"] if name in OPTIONS else []  # as `estimate` and `trace` have it
        add(f"--{name}", *also, metavar="N", type=int, required=True, help=about)
    add("--format", metavar="NAME", default="bf16", help=f"of {FORMATS}; default: %(default)s")
    add("--activation", metavar="NAME", default="swiglu", help="as for envoi.experts.pack; default: %(default)s")
    add("--bias", action="store_true", help="experts have biases")
    about = "also compile envoi.route by this model's rule, such as deepseek-v3, in bf16; default: no router"
    add("--router", metavar="MODEL", help=about)
    add("--ranks", metavar="N", type=int, default=1, help="GPUs that share the experts over NVLink; default: 1")
    about = "as for ExpertParallel, with --ranks; default: where faster"
    add("--presum", action=argparse.BooleanOptionalAction, help=about)
    add("--results", metavar="NAME", default="bf16", help="as for ExpertParallel, with --ranks; default: %(default)s")
    add("--arch", metavar="NAME", help="sm_90, sm_100 or sm_103, which needn't be present; default: the GPU here")
    add("--sms", metavar="N", type=int, help="multiprocessors of --arch; default: 132, as an H100 SXM or H200 has")
    add("--jobs", metavar="N", type=int, help="processes; default: one for each CPU")


def _indexer_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "certify: find out in which order this GPU's torch adds up, for the indexer's exact mode"
    parser.add_argument("action", choices=("certify",))
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True, help="keep it; default: yes")


if __name__ == "__main__":
    sys.exit(main())

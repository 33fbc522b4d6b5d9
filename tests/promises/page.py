"""Page docs/promises.md: what Envoi promises, the test that proves each, and the last run, from bench/promises."""

import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from envoi.quant import FORMATS
from tests.fuzz.parallel import RANKS as RANKS_OPERATOR
from tests.fuzz.run import kept, read, spans
from tests.promises import evidence
from tests.promises.evidence import FOLDER, Run
from tests.promises.same_bits import CHECKS, REFUSED
from tests.promises.sanitize import PLANTED, counted_apart, registered, totals
from tests.promises.sanitized import programs
from tests.promises.subjects import MAKERS, OPERATORS, needs

PAGE = Path(__file__).resolve().parents[2] / "docs" / "promises.md"
COMMAND = "python -m tests.promises page"
NOT_RUN = "not run"
SAME_BITS = "tests/promises/test_same_bits_gpu.py"
RANKS = "number of ranks"
# Products whose rows follow the others without batch_invariant: by operator, the formats of which that is true.
WITH_OPTION = {
    "gemm": "bf16, fp16, fp8_row and fp8_block128, whose sum over K is split where tiles are few, and nvfp4",
    "grouped_gemm": "epilogues that add up rows, except beside MX weights, and nvfp4",
    "moe": "mxfp4 and mxfp4_fp8 on Hopper, whose kernels for few tokens add up in another order (those of bf16 and FP8 "
    "weights don't), and nvfp4 where 64 doesn't divide H and I or a scale factor is negative or NaN, which Triton's "
    "kernels compute",
}
EPILOGUE = "epilogue"  # cases of gemm and grouped_gemm
FUZZED = {
    EPILOGUE: "gemm and grouped_gemm, epilogues as a user writes them",
    "moe": "moe, every format",
    "expert_parallel": "ExpertParallel",
    RANKS_OPERATOR: "ExpertParallel, a process a rank",
}
SOAK = (
    ("soak/bits", "Outputs have the bits of one rank after every 500 of the calls"),
    ("soak/memory", "Memory doesn't grow after the first fifth of the calls"),
    (
        "soak/pauses",
        "No eager call after the first with its tokens, before graphs are captured or after, takes over 3 times the "
        "median of those like it and 10 ms more",
    ),
    (
        "soak/times from graphs",
        "No call from a graph, on idle devices, takes over 3 times the median of those like it, less what hosts were "
        "later than usual",
    ),
    ("soak/times", "No call without a graph does"),
    (
        "soak/host",
        "The host's time of a call without a graph is over 3 times its median no more often than chance explains, "
        "beside as long rows of small operators of torch, and never over 100 times",
    ),
)
OVER_NVLINK, OVER_NCCL = "over NVLink", "over NCCL"
FAULTS = (
    (
        "killed",
        "A rank is killed: within `timeout_s` + 1 s every other gets a `PeerTimeout` that names it, or the right "
        "answer if it needs no more of that rank",
    ),
    ("stopped", "A rank is stopped for longer than the timeout: the same"),
    ("late", "A rank is late by half of `timeout_s` (6 s): the right answer"),
    ("wrong arguments", "A rank passes wrong arguments: a `ValueError` on every rank, then the right answer"),
    ("out of memory", "A rank is out of memory while an object is opened: the right answer, or an error that says so"),
)
SANITIZERS = ("memcheck", "synccheck", "racecheck")
HEAD = f"""# What Envoi promises

Each promise has a test that can fail, and a program that makes many more calls of it and records them. The tables are
written from these records by `{COMMAND}`. Counts are of calls, cases or ranks that were checked,
then of those that were wrong. Only runs on GPUs count: "not run" is what hasn't had one yet. Blackwell hasn't been run.
"""


def wrong_of(run: Run | None) -> str:
    """Return the counts of a run on a GPU, or that there was none."""
    if run is None or not run.num_gpus:
        return NOT_RUN
    return "refused" if run.text == REFUSED else f"{run.count}, {run.wrong} wrong"


def where(run: Run | None) -> str:
    """Return machine, commit and date of a run on a GPU, or "-"."""
    if run is None or not run.num_gpus:
        return "-"
    ranks = f"{run.num_ranks} ranks on " if run.num_ranks else ""
    return f"{ranks}{run.num_gpus} x {run.machine}, `{run.commit}`, {run.date}"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def together(runs: Iterable[Run | None]) -> Run | None:
    """Return the sum of runs, None if one of them is missing or wasn't made on a GPU; of the oldest commit's date."""
    found = list(runs)
    if not found or any(run is None or not run.num_gpus for run in found):
        return None
    known = [run for run in found if run is not None]
    last = min(known, key=lambda run: run.date)
    count, wrong = sum(run.count for run in known), sum(run.wrong for run in known)
    return replace(last, count=count, wrong=wrong, seconds=0.0, text="")


def same_bits(runs: dict[str, Run]) -> str:
    """Return the section on bits."""
    kinds = list(dict.fromkeys(" ".join(name.split()[:2]) for name in MAKERS))
    kinds.sort(key=lambda kind: (OPERATORS.index(kind.split()[0]), kind))
    rows = []
    for kind in kinds:
        operator, form = kind.split()
        found = {check: runs.get(f"same bits/{check}/{kind}") for check in CHECKS}
        last = together(found.values())
        rows.append([operator, form, needs(kind) or "-", *map(wrong_of, found.values()), where(last)])
    rank_rows = []
    for form in FORMATS:
        run = runs.get(f"same bits/{RANKS}/ExpertParallel {form}")
        rank_rows.append(["ExpertParallel", form, wrong_of(run), where(run)])
    options = "\n".join(f"- `{name}`: {text}." for name, text in WITH_OPTION.items())
    return f"""## The same bits

A row of the output (a token, a query) has the same bits

- from run to run, whatever is in the memory that a call is given;
- whatever other rows there are, how many (M) and in which order, if the call says `batch_invariant=True` where that is
  needed, and always elsewhere (see below);
- whether a call is prepared or launched as always, and from a CUDA graph or eagerly;
- whether L1 and L2 are one launch or two (`tests/moe/test_one_launch_gpu.py`);
- for `ExpertParallel` without `presum`: for any number of ranks and any shares of tokens and experts. The bits are
  those of `envoi.moe` with `batch_invariant=True` on one rank.

Needs `batch_invariant=True` for the second:

{options}

`route`, `indexer_topk`, quantising, and all else of the operators above need nothing. fp32 products on a GPU are
torch's, in tiles of one size; by expert they need offsets on the host, so that a capture is refused. Values that are
reduced over rows (`col_sum`, `total_sum`) depend on all rows, of course.
The bits aren't promised to be equal on another GPU, with another Triton or another release of Envoi, with `presum` for
another number of ranks, or after `envoi tune` for calls without `batch_invariant`.

Test: `{SAME_BITS}`. Program: `python -m tests.promises same-bits`.

{table(["operator", "format", "needs the option", *CHECKS, "last run"], rows)}

{table(["operator", "format", RANKS, "last run"], rank_rows)}

What the option costs is measured beside each case of the suite `gemm_drawn`, and beside MXFP4 layers of `moe`, as
`batch_invariant`: [benchmarks](benchmarks/index.md).
"""


def fuzz(folder: Path) -> str:
    """Return the section on random cases."""
    runs = kept(r for r in read(folder / "fuzz.jsonl") if r.device == "cuda")
    rows = []
    for name in (*OPERATORS[:2], EPILOGUE, *OPERATORS[2:], "expert_parallel", RANKS_OPERATOR):
        mine = [r for r in runs if r.operator == name]
        if not mine:
            rows.append([FUZZED.get(name, name), NOT_RUN, "-", "-"])
            continue
        seeds = sorted(set().union(*(r.seeds for r in mine)))
        found = f"{len(seeds)}, {sum(r.wrong for r in mine)} wrong"
        whole = ", ".join(f"{first} to {first + count - 1}" for first, count, _ in spans((x, 1, 0) for x in seeds))
        of = f"{whole}, {mine[-1].sizes}, by {mine[-1].family}"
        at = "; ".join(dict.fromkeys(r.where for r in mine))
        rows.append([FUZZED.get(name, name), found, of, at])
    return f"""## Right results

Random cases of every operator, hostile inputs included, are judged in float64 by code that shares nothing with the
kernels or their references. Seeds come in families that share kernels and differ in rows, values and routing. The
command that a finding prints repeats its seed. An epilogue "as a user writes one" is a program drawn from most of the
language, with operands, reductions, casts and quantised outputs, given to `gemm` or `grouped_gemm` in any format.

Tests: `tests/fuzz/test_fuzz.py`, also on CPUs. Program: `python -m tests.fuzz all --jobs 14 --limit-s 570`.

{table(["operator", "cases", "seeds, sizes, family", "runs"], rows)}
"""


def faults(runs: dict[str, Run]) -> list[list[str]]:
    """Return a row for each kind of fault and way of the tokens: the sum over its stages."""
    found = []
    for kind, text in FAULTS:
        ways: dict[str, list[Run]] = {OVER_NVLINK: []}
        for name, run in runs.items():
            if name.startswith(f"faults/{kind}/") and run.num_gpus:
                way = OVER_NVLINK if name.split("/")[2] == "memory" else OVER_NCCL
                ways.setdefault(way, []).append(run)
        for way, stages in ways.items():
            run = together(stages)
            stages_text = "" if run is None else f" in {len(stages)} stages"
            found.append([text, way, wrong_of(run) + stages_text, where(run)])
    return found


def several_gpus(runs: dict[str, Run]) -> str:
    """Return the sections on ranks."""
    soak = [[text, wrong_of(runs.get(name)), where(runs.get(name))] for name, text in SOAK]
    kept = runs.get("soak/bits")
    remark = f"\n{kept.text}.\n" if kept is not None and kept.num_gpus else ""
    hosts = runs.get("soak/host")
    remark += f"{hosts.text[:1].upper()}{hosts.text[1:]}.\n" if hosts is not None and hosts.num_gpus else ""
    return f"""## Many calls

`ExpertParallel` with changing numbers of tokens (0 to the most), routing and skew, eagerly and from graphs, by two
objects, on one stream and on two. Pauses are looked for first, with Python's garbage collection on: each scene is
called 4 times before graphs are captured and 30 times after, and each call but the first timed until its device is
done. Less than 10 ms isn't counted: the second call of a shape is recorded, and the first one after a capture asks the
driver for the memory that torch has given back, each in 2 to 8 ms.

Test: `tests/promises/test_soak.py`, over gloo. Program: `python -m tests.promises soak --ranks 4 --calls 100000`. Ranks
on one GPU, which they would otherwise have in turn, had it at once, by CUDA's MPS.

{table(["promise", "checked", "last run"], soak)}
{remark}
## Lost ranks

At every stage: while an object is opened (before NCCL connects the ranks, for which it has 30 s at least), before a
call, before a graph's replay, and at the beginning of each step within a call. Afterwards, in the same processes, a new
object on a new group of the ranks that are left is right. The wait for a late rank is `timeout_s` less the roll call,
which is 2 s, or half of `timeout_s` if that is less.

Test: `tests/promises/test_faults.py`, over gloo. Program: `python -m tests.promises faults --ranks 4`. A rank without
memory has filled its GPU.

{table(["promise", "tokens travel", "ranks checked", "last run"], faults(runs))}
"""


def watched(runs: dict[str, Run], promise: str) -> tuple[str, str, str]:
    """Return the counts, kernels and places of a tool's last run of each program, or of all of them in one.

    Of both if not all programs have a run of their own: which kernels those of the one run launched isn't recorded.
    """
    whole, every = runs.get(promise), programs()
    of = {name: run for name in (PLANTED, *every) if (run := runs.get(f"{promise}/{name}")) is not None}
    if PLANTED not in of:
        return wrong_of(whole), whole.text if whole is not None else "-", where(whole)
    all_of = totals(run.text for run in of.values())
    programs_run = f"{len(of) - 1} of {len(every)} programs"
    text = [f"{all_of.kernels} kernels, by program, of {len(all_of.names)} names in {programs_run}"]
    text += counted_apart(all_of)
    runs_of = list(of.values())
    if whole is not None and whole.num_gpus and len(of) <= len(every):
        text = [whole.text, f"since then, {text[0]}", *text[1:]]
        runs_of.append(whole)
    elif missing := sorted(registered() - all_of.names):
        text.append(f"not watched: {', '.join(missing)}")
    text += [run.text for run in of.values() if run.wrong]
    count, wrong = sum(run.count for run in runs_of), sum(run.wrong for run in runs_of)
    return f"{count}, {wrong} wrong", "; ".join(text), "; ".join(sorted(set(map(where, runs_of))))


def sanitizers(runs: dict[str, Run]) -> str:
    """Return the section on compute-sanitizer."""
    rows = [[tool, *watched(runs, f"sanitizers/{tool}")] for tool in SANITIZERS]
    return f"""## No error of memory or barriers

What compute-sanitizer's tools found in Envoi's kernels. Each first has to find an error that is planted for it. Kernels
of processes on several GPUs, replayed graphs and prepared calls aren't watched; the same kernels are, launched singly.
Kernels of torch aren't watched either. racecheck names the stores by which Triton's `warp_specialize` tells warps their
roles in every kernel with roles, since it doesn't follow the barrier behind them: reports of that table's accesses
alone, in one kernel's machine code, are counted apart. So are its warnings, and reports of the words that roles of one
launch of L1 and L2 hand over by mbarriers, which it doesn't follow either: `tests/moe/test_one_launch_roles.py`
simulates the protocol, and `tools/machine_code/arrivals.py` finds a barrier before each arrival.

Test: `tests/promises/test_sanitize.py`. Program: `python -m tests.promises sanitize`.

{table(["tool", "programs", "watched", "last run"], rows)}
"""


LOAD = """## The load is known

`ExpertParallel.load()` says how many tokens each expert and rank had in the last 128 calls, eager, prepared, compiled
or replayed from a graph, on the device, without a wait; printed, it names the rank and the expert that bound the layer,
as do `envoi.integrations.transformers.report` and `make demo`.

Tests: `tests/moe/parallel/test_load.py`, `tests/moe/parallel/interpreted/test_load.py`,
`tests/moe/parallel/test_load_gpu.py`.
"""


def text(folder: Path = FOLDER) -> str:
    """Return the page."""
    runs = {name: run for name, run in evidence.read(folder).items() if run.num_gpus}
    parts = HEAD, same_bits(runs), fuzz(folder), several_gpus(runs), sanitizers(runs), LOAD
    return "\n".join(parts)


def write(check: bool) -> int:
    """Write the page, or with check only compare it; return the exit status."""
    new = text()
    if check:
        same = PAGE.exists() and PAGE.read_text() == new
        print(f"{PAGE.name}: {'as recorded' if same else f'not as recorded; {COMMAND} writes it'}", file=sys.stderr)
        return int(not same)
    PAGE.write_text(new)
    return 0

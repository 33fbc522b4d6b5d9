"""Page of what was measured under two pairs of torch and Triton, one after the other on one GPU.

The rows are `bench/results/pairs/<gpu>.jsonl`, made by `python -m bench SUITE --out bench/results/pairs` under each.
"""

from collections.abc import Sequence
from pathlib import Path

from bench.evidence import Measurement, read
from bench.summary import mean_and_least, provenance, ratio, table
from envoi.table import number

FOLDER, PAGE = "pairs", "pairs.md"
TORCHS = ("cublas", "eager", "torch_grouped")  # baselines that are torch's own operators
SLOWER = 0.95  # ratios below are listed
ABOUT = """# Pairs of torch and Triton

The same cases under two pairs, one after the other on one GPU. A ratio is the time under the older pair over that
under the newer one: above 1 the newer pair is faster. Geometric means, the least in brackets, of Envoi's kernels and of
torch's own operators (matrix products, eager routers, grouped matmuls)."""


def page(folder: Path) -> str:
    """Return the page of the rows in a folder of results; "" if there are none."""
    found = {path.stem: read(path) for path in sorted((folder / FOLDER).glob("*.jsonl"))}
    return "\n\n".join([ABOUT, *(_of_gpu(gpu, rows) for gpu, rows in found.items())]) + "\n" if found else ""


def _of_gpu(gpu: str, rows: Sequence[Measurement]) -> str:
    older, newer = _by_pair(rows)
    both = [(older[key], newer[key]) for key in older if key in newer]
    lines = [["suite", "cases", "Envoi", "torch"]]
    for suite in dict.fromkeys(old.suite for old, _ in both):
        here = [(old, new) for old, new in both if old.suite == suite]
        torchs = [old.baselines[name] / new.baselines[name] for old, new in here for name in _torchs(old, new)]
        ratios = [old.ours_us / new.ours_us for old, new in here]
        lines.append([suite, str(len(here)), mean_and_least(ratios), mean_and_least(torchs) if torchs else "-"])
    slower = [["slower cases", "older: us", "newer: us", "ratio"]] + [
        [f"{old.suite} {old.case}", number(old.ours_us), number(new.ours_us), ratio(old.ours_us, new.ours_us)]
        for old, new in both
        if old.ours_us / new.ours_us < SLOWER
    ]
    sources = "\n".join(f"- {provenance(list(side.values()))}" for side in (older, newer))
    return "\n\n".join([f"## {gpu.upper()}", sources, table(lines), *[table(slower)] * (len(slower) > 1)])


def _by_pair(rows: Sequence[Measurement]) -> list[dict[tuple, Measurement]]:
    """Return the measurements of each of two pairs by key, the older torch's first. ValueError unless there are two."""
    found: dict[str, dict[tuple, Measurement]] = {}
    for row in rows:
        found.setdefault(row.torch, {})[row.key] = row
    if len(found) != 2:
        raise ValueError(f"{FOLDER}: expected rows of two torches for a GPU, got {', '.join(sorted(found))}")
    return [found[torch] for torch in sorted(found, key=_numbers)]


def _numbers(torch: str) -> list[int]:
    return [int(part) for part in torch.partition("+")[0].split(".")]


def _torchs(old: Measurement, new: Measurement) -> list[str]:
    return [name for name in TORCHS if name in old.baselines and name in new.baselines]

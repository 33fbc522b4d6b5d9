"""Pages made from the results: one for each suite, their index, and the numbers of the README and the guides.

A page `<suite>.md` has, for each GPU, where the numbers come from, a table and geometric means. In the README and in
docs/*.md it is what stands between `<!-- bench:.. -->` and `<!-- /bench -->`:

    <!-- bench:picture -->                              its picture, and what that shows, in a line
    <!-- bench:h200:gemm_swiglu:1 -->                   the mean ratio to the best baseline, of cases on 1 GPU
    <!-- bench:h200:moe:2:sgl_deep_gemm -->             the mean ratio to this baseline
    <!-- bench:h200:moe:1:libraries -->                 the mean ratio to the fastest of other libraries' baselines
    <!-- bench:h200,h100:moe:1::mxfp4_mxfp8 -->         of the first GPU that has any, cases whose name contains this
    <!-- bench:engine:h200:table -->                    tokens a second of models in vLLM, of any version (`served`)
    <!-- bench:engine:h200:line:sglang -->              in SGLang; their ratios in a line

Baselines count in the newest version that `libraries` knows; what was measured with older ones stands in a section of
its own. Where nothing was measured a marker says so.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench import pairs, served
from bench.evidence import BASELINES, SUITES, Measurement, load, slug
from bench.libraries import OF_BASELINE, is_old, label, newest_only, outdated, version
from bench.predicted import PREDICTED
from bench.summary import (
    baseline_names,
    best_baseline,
    compared,
    distinct,
    mean_and_least,
    means,
    of_roof,
    peers,
    provenance,
    ratio,
    table,
)  # fmt: skip
from envoi.table import number

MARKER = re.compile(r"(<!-- bench:(\S+) -->)(.*?)<!-- /bench -->", re.DOTALL)
INDEX = "index.md"
PICTURE = "moe_ranks.svg"
PICTURE_LAYER, PICTURE_TOKENS, PICTURE_GPUS = "4096/2048/256/6 fp8_block128", (64, 512, 2048, 8192), (8, 4, 2)
PICTURE_BASELINES = {
    "sgl_deep_gemm": "sgl-deep-gemm's one launch",
    "torch_ep": "torch in bf16 (NCCL + grouped matmul)",
}
NOT_MEASURED = "not measured"
LIBRARIES = "libraries"  # in the place of a baseline
ABOUT = """Medians in microseconds, each case measured beside its baselines in the same run, with a cold L2 cache unless
the suite says otherwise. A ratio is the other's time over Envoi's: above 1 Envoi is faster. The best baseline is the
fastest of those that do the same work. The error is relative, against float64, with torch's for the same work beside
it. `python -m bench --docs docs/benchmarks` writes these pages from `bench/results`; `python -m bench SUITE` measures a
suite on your GPU and prints it, and keeps it only with `--out bench/results`."""
ABOUT_PREDICTED = """What `envoi estimate` said of a layer when it was measured, without the router, and its time."""
WITHOUT = "The same without configs that were tuned for these sizes, by the model of time alone (`--untuned`):"


def pages(folder: Path) -> dict[str, str]:
    """Return the text of every page by file name, from the results of a folder. Raises ValueError if there are none."""
    results = load(folder)
    if not results:
        raise ValueError(f"--out: expected a folder with results, got none in {folder}")
    texts = {INDEX: index(results), **{f"{suite}.md": page(suite, results) for suite in SUITES}}
    if of_pairs := pairs.page(folder):
        texts[INDEX] += f"- [{pairs.PAGE.removesuffix('.md')}]({pairs.PAGE}): some of these suites under two torches\n"
        texts[pairs.PAGE] = of_pairs
    return texts


def of_suite(
    results: dict[str, list[Measurement]], suite: str, untuned: bool = False
) -> dict[str, list[Measurement]]:  # fmt: skip
    """Return the measurements of a suite, those made with `--untuned` or the others, by file, that with most first.

    Baselines of old versions aren't among them.
    """
    chosen = {
        gpu: newest_only(m for m in measurements if m.suite == suite and m.is_untuned == untuned)
        for gpu, measurements in results.items()
    }
    return {gpu: chosen[gpu] for gpu in sorted(chosen, key=lambda gpu: -len(chosen[gpu])) if chosen[gpu]}


def index(results: dict[str, list[Measurement]]) -> str:
    """Return the list of suites, with the mean ratio to the best baseline where there is one."""
    lines = ["# Benchmarks", "", ABOUT, ""]
    for suite, about in SUITES.items():
        found = [f"{gpu}: {by_gpus(ms)}" for gpu, ms in of_suite(results, suite).items() if overall(ms)]
        lines.append(f"- [{suite}]({suite}.md): {about}. {'; '.join(found)}".rstrip())
    return "\n".join(lines) + "\n"


def page(suite: str, results: dict[str, list[Measurement]]) -> str:
    """Return the page of a suite. Measurements with `--untuned` have a table of their own, and so have old versions."""
    by_gpu, untuned = of_suite(results, suite), of_suite(results, suite, True)
    parts = [f"# {suite}", f"{SUITES[suite][0].upper()}{SUITES[suite][1:]}."]
    every = {gpu: [m for m in found if m.suite == suite] for gpu, found in results.items()}
    for gpu in [*by_gpu, *(gpu for gpu, found in every.items() if found and gpu not in by_gpu)]:
        measurements = by_gpu.get(gpu, [])
        parts.append(f"## {gpu.upper()}")
        if measurements:
            parts.append(provenance(measurements))
            parts += [table(rows(measurements)), *summaries(measurements), *predictions(measurements)]
        if others := untuned.get(gpu):
            mean = by_gpus(others)
            parts += [WITHOUT, provenance(others), table(rows(others)), *[f"- best baseline: {mean}"] * bool(mean)]
        parts += old_versions(every[gpu])
    if not any(every.values()):
        parts.append("Not measured yet.")
    return "\n\n".join(parts) + "\n"


def rows(measurements: Sequence[Measurement]) -> list[list[str]]:
    """Return a header and six cells for each measurement."""
    others = {m.key: (name, us) for m, name, us in compared(measurements)}
    found = [["case", "Envoi us", f"{_other(measurements)}: us", "ratio", "of roof", "error (torch's)"]]
    for m in measurements:
        name, us = others.get(m.key, ("", 0.0))
        theirs = (f"{label(m.details, name)}: {number(us)}", ratio(us, m.ours_us)) if name else ("-", "-")
        error = f"{m.error['ours']:.1e} ({m.error['torch']:.1e})"
        found.append([case_name(m), number(m.ours_us), *theirs, of_roof(m.floor_us, m.ours_us), error])
    return found


def predictions(measurements: Sequence[Measurement]) -> list[str]:
    """Return a table of what `envoi estimate` said before a case was measured, and the time; [] without any."""
    lines = [
        [case_name(m), number(us), number(m.ours_us), ratio(m.ours_us, us)]
        for m in measurements
        if isinstance(us := m.details.get(PREDICTED), float)
    ]
    header = ["case", "predicted us", "Envoi us", "of predicted"]
    return ["### Predicted", ABOUT_PREDICTED, table([header, *lines])] if lines else []


def old_versions(measurements: Sequence[Measurement]) -> list[str]:
    """Return what was measured with versions of other libraries that aren't the newest known, and which those are."""
    lines = [
        [case_name(m), number(m.ours_us), f"{label(m.details, name)}: {number(us)}", ratio(us, m.ours_us), m.date]
        for m in measurements
        for name, us in peers(m).items()
        if is_old(m, name)
    ]
    if not lines:
        return []
    known = _list(f"{sentence}." for sentence in outdated(measurements).values())
    header = ["case", "Envoi us", "old version: us", "ratio", "date"]
    return ["### Measured with older versions", f"Not counted above.\n\n{known}", table([header, *lines])]


def _other(measurements: Sequence[Measurement]) -> str:
    return "best baseline" if any(map(best_baseline, measurements)) else "another form"


def case_name(m: Measurement) -> str:
    """Return the case, with the number of GPUs if they are several."""
    return m.case if m.num_gpus == 1 else f"{m.case}, {m.num_gpus} GPUs"


def summaries(measurements: Sequence[Measurement]) -> list[str]:
    """Geometric means of the ratios to all baselines, and what each baseline is."""
    mean = means(list(measurements))
    same = {name for m in measurements for name in peers(m)}
    others = [name for name in baseline_names(measurements) if name not in same]
    found = []
    if mean:
        best = [f"best baseline: {by_gpus(measurements)}"] if same else []
        found.append("Geometric means of the ratios, the least in brackets:\n\n" + _list([*best, *mean.split("; ")]))
    if same:
        found.append(
            "Baselines:\n\n" + _list(_meaning(n, measurements) for n in baseline_names(measurements) if n in same)
        )
    if others:
        found.append("Measured too, but not the same work:\n\n" + _list(_meaning(n, measurements) for n in others))
    return found


def overall(measurements: Iterable[Measurement], baseline: str | None = None) -> str:
    """Return the mean ratio to the best baseline or to a named one, "1.13x [1.04x] over 9 cases"; "" where none is."""
    found = [us / m.ours_us for m, _, us in _compared(measurements, baseline)]
    return f"{mean_and_least(found)} over {len(found)} case{'s'[: len(found) > 1]}" if found else ""


def _compared(measurements: Iterable[Measurement], baseline: str | None) -> list[tuple[Measurement, str, float]]:
    """Return measurements with what they are compared to: the fastest of all that do the same work, of libraries', or
    a named one."""
    found = []
    for m in measurements:
        names = [
            name for name in peers(m)
            if baseline is None or name == baseline or (baseline == LIBRARIES and name in OF_BASELINE)
        ]  # fmt: skip
        if names:
            fastest = min(names, key=lambda name: m.baselines[name])
            found.append((m, fastest, m.baselines[fastest]))
    return found


def by_gpus(measurements: Sequence[Measurement]) -> str:
    """`overall`, separately for each number of GPUs where there are several."""
    counts = sorted({m.num_gpus for m in measurements})
    if counts == [1]:
        return overall(measurements)
    parts = ((count, overall(m for m in measurements if m.num_gpus == count)) for count in counts)
    return ", ".join(f"{mean} on {count} GPU{'s'[: count > 1]}" for count, mean in parts if mean)


def picture_cases(results: dict[str, list[Measurement]]) -> list[Measurement]:
    """Return the series of the README's picture, by tokens, of most GPUs of those that have it whole, or []."""
    by_gpu = of_suite(results, "moe").values()
    for num_gpus in PICTURE_GPUS:
        for measurements in by_gpu:
            found = {m.case: m for m in measurements if m.num_gpus == num_gpus}
            series = [found.get(f"{PICTURE_LAYER} tokens={tokens}") for tokens in PICTURE_TOKENS]
            whole = [m for m in series if m is not None and m.baselines.keys() >= PICTURE_BASELINES.keys()]
            if len(whole) == len(series):
                return whole
    return []


def where(cases: Sequence[Measurement]) -> str:
    """Return the GPUs of the picture, "2 H200s"."""
    return f"{cases[0].num_gpus} {slug(cases[0].gpu).upper()}s"


def caption(cases: Sequence[Measurement]) -> str:
    """Return a line that says what the picture shows."""
    spans = []
    for name, meaning in PICTURE_BASELINES.items():
        ratios = [m.baselines[name] / m.ours_us for m in cases]
        library = f" ({_of_libraries((m, name) for m in cases)})" if name in OF_BASELINE else ""
        spans.append(f"{number(min(ratios))}x to {number(max(ratios))}x {meaning}{library}")
    dates = sorted({m.date for m in cases})
    return (
        f"One MoE layer on {where(cases)} (hidden 4096, intermediate 2048, 256 experts, top-6, FP8), "
        f"{PICTURE_TOKENS[0]} to {PICTURE_TOKENS[-1]} tokens a GPU, the other's time over Envoi's (below 1 Envoi is "
        f"slower): {' and '.join(spans)}; {distinct(dates)}, commit {distinct(m.commit for m in cases)}."
    )


def picture(results: dict[str, list[Measurement]]) -> str:
    """Return the picture and its caption as Markdown; "" without measurements for it."""
    cases = picture_cases(results)
    if not cases:
        return "\n"
    about = f"Time of one MoE layer on {where(cases)}: Envoi, sgl-deep-gemm, torch"
    return f"\n![{about}](docs/assets/{PICTURE})\n{caption(cases)}\n"


def render(text: str, folder: Path) -> str:
    """Return a text with new text between its markers. Raises ValueError for an unknown marker."""
    results = load(folder)
    if text.count("<!-- bench:") != len(MARKER.findall(text)):
        raise ValueError("bench: expected <!-- /bench --> after each <!-- bench:.. -->, got one without")
    return MARKER.sub(lambda found: f"{found[1]}{_served(found[2], results)}<!-- /bench -->", text)


def _served(marker: str, results: dict[str, list[Measurement]]) -> str:
    if marker == "picture":
        return picture(results)
    if marker.startswith("engine:"):
        return _of_engines(marker, results)
    gpu, suite, num_gpus, baseline, part = (*marker.split(":"), "", "", "", "")[:5]
    if suite not in SUITES or not num_gpus.isdigit() or baseline not in ("", LIBRARIES, *BASELINES):
        raise ValueError(f"bench:{marker}: expected GPU:SUITE:NUM_GPUS[:BASELINE[:PART OF A CASE'S NAME]]")
    measured = of_suite(results, suite)
    for place, name in enumerate(gpu.split(",")):
        chosen = [m for m in measured.get(name, []) if str(m.num_gpus) == num_gpus and part in m.case]
        if found := overall(chosen, baseline or None):
            library = _of_libraries((m, one) for m, one, _ in _compared(chosen, baseline or None))
            return found + f", on {name.upper()}" * bool(place) + f" ({library})" * bool(library)
    return NOT_MEASURED


def _of_engines(marker: str, results: dict[str, list[Measurement]]) -> str:
    _, gpu, form, engine = (*marker.split(":"), "", "", "")[:4]
    engine = engine or "vllm"
    if form not in ("table", "line") or engine not in served.ENGINES:
        raise ValueError(f"bench:{marker}: expected engine:GPU:table or engine:GPU:line, then :sglang or nothing")
    measured = (m for m in results.get(gpu, []) if m.suite == "engine" and not m.is_untuned)
    found = [m for m in measured if m.case.startswith(f"{engine}, ")]
    if not found:
        return NOT_MEASURED
    return f"\n\n{served.table(found)}\n\n" if form == "table" else served.line(found)


def _of_libraries(compared_with: Iterable[tuple[Measurement, str]]) -> str:
    """Return the libraries with the versions of which these baselines were measured, "vllm 0.33.0, humming 0.1.19"."""
    found = (f"{OF_BASELINE[name]} {version(m.details, name)}" for m, name in compared_with if name in OF_BASELINE)
    return distinct(sorted(found))


def _meaning(name: str, measurements: Sequence[Measurement]) -> str:
    library = _of_libraries((m, name) for m in measurements if name in m.baselines)
    return f"{name}: {BASELINES[name]}{f' ({library})' * bool(library)}"


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)

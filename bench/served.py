"""What the guides and the README say of the suite `engine`: tokens a second of a served model, by its rows."""

import re
from collections.abc import Sequence

from bench.evidence import Measurement
from bench.libraries import version
from bench.summary import ratio
from envoi.table import number

CASE = re.compile(r"(?P<engine>\w+), (?P<model>\S+) (?P<format>\S+) x(?P<layers>\d+), (?P<step>.+)")
ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}  # as cases and as pages call them
ROUTED = "routed"  # Envoi's gate too
SECOND = 1e6  # us


def table(measurements: Sequence[Measurement]) -> str:
    """Return tokens a second of each model by step, "64,713 to 90,487 (1.40x)", and below where they come from."""
    steps = list(dict.fromkeys(_parts(m)["step"] for m in measurements))
    lines = [["sizes of", *steps], ["---", *["---:"] * len(steps)]]
    for name, found in _by_model(measurements).items():
        lines.append([name, *(_cell(found.get(step)) for step in steps)])
        if any(ROUTED in m.baselines for m in found.values()):
            cells = (_cell(found.get(step), ROUTED) for step in steps)
            lines.append([f"{name}, `ENVOI_VLLM_ROUTE=1`", *cells])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + f"\n\n{_caption(measurements)}"


def line(measurements: Sequence[Measurement]) -> str:
    """Return the ratios in a line: the least and the largest of prefill and of decode, in how many models."""
    parts = []
    for phase in ("prefill", "decode"):
        found = [m.baselines[baseline_of(m)] / m.ours_us for m in measurements if _parts(m)["step"].startswith(phase)]
        least, most = number(min(found)), number(max(found))
        span = most if least == most else f"{least} to {most}"
        parts.append(f"{span} times the tokens/s in {phase}")
    names = list(_by_model(measurements))  # with the engine and its version
    count = len({(parts["model"], parts["format"]) for parts in map(_parts, measurements)})
    which = f"{count} models, {_engine(measurements[0])} {_versions(measurements)}" if len(names) > 1 else names[0]
    return f"{' and '.join(parts)} (sizes of {which}, {measurements[0].gpu})"


def baseline_named(engine: str, backend: str = "") -> str:
    """Return the baseline that is an engine with its own kernels; backend: one that it doesn't choose itself."""
    return f"{engine}_engine_{backend}" if backend else f"{engine}_engine"


def baseline_of(m: Measurement) -> str:
    """Return the baseline of a measurement of an engine: with the fastest of its own kernels."""
    own = baseline_named(_parts(m)["engine"])
    return min((name for name in m.baselines if name.startswith(own)), key=lambda name: m.baselines[name])


def _backend(m: Measurement) -> str:
    """Return the name for `--moe-backend` behind `baseline_of`; "" for the engine's own choice."""
    return baseline_of(m).removeprefix(baseline_named(_parts(m)["engine"])).removeprefix("_")


def _engine(m: Measurement) -> str:
    return ENGINES[_parts(m)["engine"]]


def _parts(m: Measurement) -> dict[str, str]:
    found = CASE.fullmatch(m.case)
    assert found is not None, m.case
    return found.groupdict()


def _by_model(measurements: Sequence[Measurement]) -> dict[str, dict[str, Measurement]]:
    """Return the measurements by model and the engine's version, then by step."""
    found: dict[str, dict[str, Measurement]] = {}
    for m in measurements:
        parts = _parts(m)
        engine = f"{_engine(m)} {version(m.details, baseline_of(m))}"
        name = f"{parts['model']}, {parts['format']}, {parts['layers']} layers, {engine}"
        found.setdefault(name, {})[parts["step"]] = m
    return found


def _cell(m: Measurement | None, ours: str = "") -> str:
    if m is None or (ours and ours not in m.baselines):
        return "-"
    us = m.baselines[ours] if ours else m.ours_us
    tokens, theirs = _tokens(m), m.baselines[baseline_of(m)]
    by = f", {_backend(m)}" if _backend(m) else ""
    return f"{tokens / theirs * SECOND:,.0f} to {tokens / us * SECOND:,.0f} ({ratio(theirs, us)}{by})"


def _tokens(m: Measurement) -> int:
    phase, _, sizes = _parts(m)["step"].partition(" ")
    count, _, length = sizes.partition("x")
    return int(count) * int(length or 1) if phase == "prefill" else int(count)


def _versions(measurements: Sequence[Measurement]) -> str:
    return ", ".join(dict.fromkeys(str(version(m.details, baseline_of(m))) for m in measurements))


def _caption(measurements: Sequence[Measurement]) -> str:
    dates = sorted({m.date for m in measurements})
    commits = ", ".join(dict.fromkeys(m.commit for m in measurements))
    torches = ", ".join(dict.fromkeys(f"torch {m.torch} with Triton {m.triton}" for m in measurements))
    ready = "; ".join(
        f"{name}: {next(iter(found.values())).details['ready s']}" for name, found in _by_model(measurements).items()
    )
    rounds = ", ".join(dict.fromkeys(str(m.n) for m in measurements))
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    named = any(map(_backend, measurements))
    which = "; a name: of `--moe-backend`, where that is faster than the choice by default" if named else ""
    return (
        f"Tokens/s, {_engine(measurements[0])}'s own kernels to Envoi's{which}. "
        f"One {measurements[0].gpu}, {torches}, {when}, commit {commits}; medians of {rounds} rounds, in turns. "
        f"Seconds of a first start with empty caches, all engines of a model at once: {ready}."
    )

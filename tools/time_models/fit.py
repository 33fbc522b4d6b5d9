"""Measured times of a shape's configs, their data files, and the fit of a model's constants to them.

Regret, the time of the config that a model chooses over that of the best one measured, changes in jumps. So what is
minimised is the error of predicted ratios of times, between configs of a shape, near the best one most.
"""

import json
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import exp, log
from pathlib import Path
from typing import Any, TypeVar

FOLDS = 5
SHARPNESS = 5.0  # a config that takes 20 % longer than the best counts e times less
STEPS = (1.6, 1.25, 1.1, 1.04)  # factors by which constants are tried
KEPT_CLOSE = 1e-5  # squared error that a constant e times larger or smaller has to be worth


@dataclass(frozen=True)
class Measured(ABC):
    """Times of a shape's configs on a GPU with num_sms multiprocessors. label: the shape's name.

    times_us: (config, time).
    """

    label: str
    num_sms: int
    times_us: tuple[tuple[Any, float], ...]

    @abstractmethod
    def predicted_us(self, config: Any, costs: Any) -> float:
        """Return the time that the model predicts with these constants."""

    @property
    def best_us(self) -> float:
        """Time of the fastest config."""
        return min(us for _, us in self.times_us)


M = TypeVar("M", bound=Measured)


@dataclass(frozen=True)
class Model:
    """Model of time. costs: a dataclass, its constants as they are. fixed: names of those that aren't fitted.

    limits: least and greatest value by name. absolute: share in the error of a shape's times as such, beside their
    ratios: above 0 where times of different shapes are added.
    """

    costs: Any
    fixed: tuple[str, ...] = ()
    limits: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    absolute: float = 0.0


# The data files


def line_of(measured: Measured, gpu: str, **entries: Any) -> str:
    """Return one line of JSON, without the newline; configs without fields that have their default.

    entries: what else `parse` needs to make `measured` again.
    """
    times = [{**changed(config), "us": us} for config, us in measured.times_us]
    first = {"label": measured.label, "gpu": gpu, "num_sms": measured.num_sms}
    return json.dumps({**first, **entries, "times_us": times})


def parse(line: str, kind: type[M], config: type, more: Callable[[dict[str, Any]], dict[str, Any]]) -> M:
    """Parse a line of `line_of`. Raises ValueError for anything else.

    kind, config: classes of what was measured and of its configs. more: function of the line's entries that returns the
    other fields of `kind`.
    """
    try:
        entries = json.loads(line)
        times = [(config(**{k: v for k, v in x.items() if k != "us"}), float(x["us"])) for x in entries["times_us"]]
        measured = kind(entries["label"], int(entries["num_sms"]), tuple(times), **more(entries))
    except (TypeError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"expected a line that `measure` wrote, got {line[:60]!r} ({error})") from error
    if len(times) < 2 or measured.best_us <= 0:
        raise ValueError(f"{measured.label}: expected at least two configs with times above 0, got {len(times)}")
    return measured


def keep(path: Path, line: str, measured: Measured, costs: Any) -> None:
    """Append a line to a data file, and print how well the model chooses."""
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    print(f"{measured.label}: regret {regret(measured, costs):.2f} over {len(measured.times_us)} configs", flush=True)


def changed(x: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that don't have their default."""
    return {each.name: getattr(x, each.name) for each in fields(x) if getattr(x, each.name) != each.default}


def lines_of(paths: Sequence[Path]) -> list[str]:
    """Return all lines of these files but empty ones."""
    return [line for path in paths for line in path.read_text().splitlines() if line.strip()]


# Regret


def regret(measured: Measured, costs: Any) -> float:
    """Return the time of the config that the model chooses over that of the best, from 1."""
    chosen = min(measured.times_us, key=lambda entry: measured.predicted_us(entry[0], costs))
    return chosen[1] / measured.best_us


def mean_regret(data: Sequence[Measured], costs: Any) -> float:
    """Return the geometric mean of the regret."""
    return exp(sum(log(regret(measured, costs)) for measured in data) / len(data))


def squared_error(data: Sequence[Measured], costs: Any, absolute: float = 0.0) -> float:
    """Return the mean square of the error of log(time) within a shape, its mean removed, near the best time most.

    absolute: how much of the square of that mean is added.
    """
    total = 0.0
    for measured in data:
        errors = [log(measured.predicted_us(config, costs) / us) for config, us in measured.times_us]
        weights = [(measured.best_us / us) ** SHARPNESS for _, us in measured.times_us]
        middle = sum(w * e for w, e in zip(weights, errors, strict=True)) / sum(weights)
        total += sum(w * (e - middle) ** 2 for w, e in zip(weights, errors, strict=True)) / sum(weights)
        total += absolute * middle**2
    return total / len(data)


# The fit


def fit(data: Sequence[Measured], model: Model) -> Any:
    """Return constants with less error: one is changed at a time, by smaller and smaller factors, while that helps.

    A constant that no measurement shows stays as it is, since a change has to be worth KEPT_CLOSE.
    """
    names = [each.name for each in fields(model.costs) if each.name not in model.fixed]

    def loss(costs: Any) -> float:
        moved = sum(log(getattr(costs, name) / getattr(model.costs, name)) ** 2 for name in names)
        return squared_error(data, costs, model.absolute) + KEPT_CLOSE * moved

    best, least = model.costs, loss(model.costs)
    for step in STEPS:
        improved = True
        while improved:
            improved = False
            for name in names:
                tried = [value * getattr(best, name) for value in (step, 1 / step)]
                for value in _within(tried, model.limits.get(name)):
                    best, least, better = _better(best, least, name, value, loss)
                    improved = improved or better
    return best


def _within(values: Sequence[float], limits: tuple[float, float] | None) -> list[float]:
    low, high = limits or (1e-6, 1e9)
    return [value for value in values if low <= value <= high]


def _better(
    best: Any, least: float, name: str, value: float, loss: Callable[[Any], float]
) -> tuple[Any, float, bool]:  # fmt: skip
    """Return the better of `best` and the same with another value, its loss, and whether it is the latter."""
    other = replace(best, **{name: value})
    found = loss(other)
    return (other, found, True) if found < least - 1e-9 else (best, least, False)


def held_out_regret(data: Sequence[Measured], model: Model) -> float:
    """Return the mean regret on each fifth of the shapes by a fit to the other four, NaN if there are none."""
    order = list(data)
    random.Random(0).shuffle(order)
    logs = []
    for fold in range(FOLDS):
        seen = [measured for place, measured in enumerate(order) if place % FOLDS != fold]
        unseen = order[fold::FOLDS]
        if seen and unseen:
            costs = fit(seen, model)
            logs += [log(regret(measured, costs)) for measured in unseen]
    return exp(sum(logs) / len(logs)) if logs else float("nan")


def report(data: Sequence[Measured], model: Model, costs: Any, held_out: float) -> str:
    """Return regrets before and after, the shapes that are chosen worst, and the constants."""
    pairs = sum(len(measured.times_us) for measured in data)
    lines = [f"{len(data)} shapes, {pairs} times; regret: chosen config's time / best one's, mean [most]"]
    for name, each in (("before", model.costs), ("after", costs)):
        most = max(regret(measured, each) for measured in data)
        lines.append(f"  {name:<9} {mean_regret(data, each):.3f} [{most:.2f}]")
    lines.append(f"  held out  {held_out:.3f}")
    worst = sorted(data, key=lambda measured: -regret(measured, costs))[:5]
    lines += [f"  {regret(measured, costs):.2f} {measured.label}" for measured in worst]
    return "\n".join([*lines, *(f"    {name}: float = {value:.4g}" for name, value in asdict(costs).items())])

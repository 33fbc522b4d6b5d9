"""Measured configs of the Hopper GEMM on disk, which take precedence over the model of `time_model.py`.

Entries are read from the shipped `tuned.json` beside this file and from `gemm.json` in the cache directory, which
`envoi tune` writes. A key names the multiprocessors, the problem and the kind of epilogue. An entry for a power of two
of tokens stands for fewer of them too, down to the next, since serving sees every number. What was fastest for 1024
tokens needn't be for 600, which fill other rounds of tiles: `choose` asks the model about that.
"""

import dataclasses
import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from envoi import cache_file, env
from envoi.epilogues.lower import Lowered
from envoi.ops.gemm.hopper.candidates import default_config
from envoi.ops.gemm.hopper.config import Config, Problem, fitted, why_not
from envoi.ops.gemm.hopper.time_model import predicted_cycles
from envoi.runtime import prepared
from envoi.runtime.math import cdiv, next_power_of_2

SHIPPED = Path(__file__).with_name("tuned.json")
P = ParamSpec("P")
T = TypeVar("T")
MAX_REGRET = 1.03  # predicted time by the best prediction, over what that ratio is for the tokens measured
STEPS = 64  # numbers of an expert's tokens in an octave that the model tells apart
_EXPECTED = {int: "an int of at least 1", bool: "true or false"}


_use_measured = True
_choices: list[Callable[[], None]] = []  # functions that forget choices made from measured configs


def remember(choice: Callable[P, T]) -> Callable[P, T]:
    """Decorate a choice that depends on the measured configs: cache its results until those change."""
    cached = lru_cache(maxsize=4096)(choice)
    _choices.append(cached.cache_clear)
    return cast(Callable[P, T], cached)


def forget_choices() -> None:
    """Choose anew from now on, since the measured configs have changed."""
    for forget in _choices:
        forget()


def use_measured(wanted: bool) -> None:
    """Use measured configs, as always, or the model of `time_model.py` alone, to measure how good the model is."""
    global _use_measured
    _use_measured = wanted
    forget_choices()
    prepared.clear()


def state() -> str | None:
    """Return the measured configs that are used, as text; None if none are, or if the cache has others by now."""
    if not _use_measured or _entries.__wrapped__(False) != _entries(False):
        return None
    return repr(sorted(_entries(False).items()))


def key_of(problem: Problem, code: Lowered, num_sms: int) -> str:
    """Return the key of a problem's own entry, such as "132sm 4096x4096x7168 2B tma"."""
    M = problem.M if next_power_of_2(problem.M) == problem.M else rounded(problem).M
    kind = ["whole"] * code.whole_rows + ["tma"] * bool(code.tma_outputs) + ["side"] * bool(code.tma_operands)
    kind += ["rows"] * bool(code.partials) + [f"piece{code.chunk_columns}"] * (code.chunk_columns > 64)
    kind += ["sent"] * code.scattered + ["pairs"] * code.paired
    kind += ["scaled"] * problem.scaled + [f"groups{problem.num_groups}"] * bool(problem.num_groups)
    return " ".join([f"{num_sms}sm", f"{M}x{problem.N}x{problem.K}", f"{problem.element_bytes}B", *kind])


def best(problem: Problem, code: Lowered, num_sms: int, shipped_only: bool = False) -> Config | None:
    """Return the measured config, or None. shipped_only: ignore measurements from this machine."""
    entries = _entries(shipped_only) if _use_measured else {}
    for entry in (entries.get(key_of(p, code, num_sms)) for p in (problem, _above(problem))):
        config = None if entry is None else fitted(problem, entry, code)
        if config is not None and not why_not(problem, config, code):  # another epilogue's may not suit this one
            return config
    return None


@remember
def choose(problem: Problem, code: Lowered, num_sms: int, shipped_only: bool = False) -> Config | None:
    """Return the measured config, else the one that the model prefers; None if none fits.

    A config that was measured with more tokens is taken only if the model thinks as well of it for these.
    """
    measured = best(problem, code, num_sms, shipped_only)
    if measured is not None:
        own = _entries(shipped_only).get(key_of(problem, code, num_sms))
        if own is not None and measured == fitted(problem, own, code):
            return measured
    modelled = _modelled(rounded(problem), code, num_sms)
    if measured is None or modelled is None:
        return measured or modelled
    most = MAX_REGRET * _regret(_above(problem), measured, code, num_sms)
    return measured if _regret(problem, measured, code, num_sms) <= most else modelled


def _above(problem: Problem) -> Problem:
    """Return the problem with the next power of two of tokens."""
    return dataclasses.replace(problem, M=next_power_of_2(problem.M))


def _regret(problem: Problem, config: Config, code: Lowered, num_sms: int) -> float:
    """Return a config's predicted time over that of the one that the model prefers, or 1 if there is none."""
    problem = rounded(problem)
    config = fitted(problem, config, code)
    modelled = _modelled(problem, code, num_sms) or config
    return predicted_cycles(problem, config, num_sms) / predicted_cycles(problem, modelled, num_sms)


def rounded(problem: Problem) -> Problem:
    """Return a problem with the most tokens for which the model prefers the same config: the model takes milliseconds.

    It sees only whole tokens of an expert, in tiles of eights in a plain GEMM, and how many experts have tokens: of
    fewer tokens the next power of two is enough. Of an expert with more than STEPS tokens it sees one in STEPS: another
    config is preferred in 2 % of the cases then, by 2 % of its time in the mean; by up to 30 % where few experts' tiles
    just fill a round, as far as the model can know how many tiles a routing makes.
    """
    groups, step = max(1, problem.num_groups), 1 if problem.num_groups else 8
    if problem.num_groups and groups * step > problem.M:
        return dataclasses.replace(problem, M=min(next_power_of_2(problem.M), groups * step))
    if problem.num_groups:
        step = max(1, next_power_of_2(cdiv(problem.M, groups)) // 2 // STEPS)
    return dataclasses.replace(problem, M=groups * step * cdiv(problem.M, groups * step))


_modelled = lru_cache(maxsize=4096)(default_config)


@lru_cache(maxsize=2)
def _entries(shipped_only: bool) -> dict[str, Config]:
    shipped = {key: _config(value) for key, value in json.loads(SHIPPED.read_text()).items()}
    return shipped if shipped_only else shipped | cache_file.entries(_cache(), _config)


def _config(value: Any) -> Config:
    """Parse an entry. Raises ValueError for unknown fields, missing fields and invalid values."""
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, got {type(value).__name__}")
    try:
        config = Config(**value)
    except TypeError as error:
        raise ValueError(str(error).removeprefix("Config.__init__() ")) from error
    for field in dataclasses.fields(Config):
        got = getattr(config, field.name)
        if field.type in _EXPECTED and (type(got) is not field.type or (field.type is int and got < 1)):
            raise ValueError(f"{field.name}: expected {_EXPECTED[field.type]}, got {got!r}")
    return config


def _cache() -> Path | None:
    return env.cache_file("gemm.json")


def keep(entries: dict[str, Config], path: Path | None = None) -> None:
    """Add entries to the cache (or to another file) and use them from now on. Raises OSError if nothing is kept."""
    cache_file.add(path or _cache(), {key: dataclasses.asdict(config) for key, config in entries.items()})
    _entries.cache_clear()
    forget_choices()
    prepared.clear()

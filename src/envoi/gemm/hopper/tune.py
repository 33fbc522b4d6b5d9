"""Measured configs: kept on disk, looked up before the model of `config.py` is asked.

Entries come from `tuned.json` beside this file, which is shipped, and from `gemm.json` in the cache directory, which
`envoi tune` writes. A key names the multiprocessors, the problem and the kind of epilogue; tokens are rounded up to a
power of two, since serving sees every number of them.
"""

import dataclasses
import json
import os
import tempfile
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

from envoi import env
from envoi.epilogue.lower import Lowered
from envoi.gemm.hopper.config import Config, Problem, default_config, fitted, supports
from envoi.runtime.math import next_power_of_2

SHIPPED = Path(__file__).with_name("tuned.json")


def key_of(problem: Problem, code: Lowered, num_sms: int) -> str:
    """Return the key of a problem's entry, such as "132sm 4096x4096x7168 2B tma"."""
    M = next_power_of_2(problem.M)
    kind = ["whole"] * code.whole + ["tma"] * bool(code.leaving) + ["side"] * bool(code.side)
    kind += ["rows"] * bool(code.partials) + [f"piece{code.piece_columns}"] * (code.piece_columns > 64)
    kind += ["sent"] * code.sent
    kind += ["scaled"] * problem.scaled + [f"groups{problem.num_groups}"] * bool(problem.num_groups)
    return " ".join([f"{num_sms}sm", f"{M}x{problem.N}x{problem.K}", f"{problem.element_bytes}B", *kind])


def best(problem: Problem, code: Lowered, num_sms: int, shipped_only: bool = False) -> Config | None:
    """Return the measured config, or None. shipped_only: ignore what was measured on this machine."""
    found = _entries(shipped_only).get(key_of(problem, code, num_sms))
    if found is None:
        return None
    config = fitted(problem, found, code)
    return None if supports(problem, config, code) else config


@lru_cache(maxsize=4096)
def choose(problem: Problem, code: Lowered, num_sms: int, shipped_only: bool = False) -> Config | None:
    """Return the measured config, else the one that the model prefers; None if none fits."""
    return best(problem, code, num_sms, shipped_only) or default_config(problem, code, num_sms)


@lru_cache(maxsize=2)
def _entries(shipped_only: bool) -> dict[str, Config]:
    entries: dict[str, Config] = {}
    for path in (SHIPPED,) if shipped_only else (SHIPPED, _cache()):
        entries |= {key: Config(**value) for key, value in _read(path).items()}
    return entries


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """Return a file's entries; those whose fields no Config of this version has are left out, with a warning."""
    found = json.loads(path.read_text()) if path.exists() else {}
    known = {field.name for field in dataclasses.fields(Config)}
    entries = {key: value for key, value in found.items() if value.keys() <= known}
    if len(entries) < len(found):
        warnings.warn(
            f"{path}: {len(found) - len(entries)} of {len(found)} configs were measured by another version of Envoi "
            "and are ignored; `envoi tune` measures them again",
            stacklevel=2,
        )
    return entries


def _cache() -> Path:
    return env.cache_dir() / "gemm.json"


def keep(entries: dict[str, Config], path: Path | None = None) -> None:
    """Add entries to the cache (or to another file) and use them from now on."""
    path = path or _cache()
    kept = _read(path) | {key: dataclasses.asdict(config) for key, config in entries.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(kept, file, indent=1, sort_keys=True)
    os.replace(file.name, path)
    _entries.cache_clear()
    choose.cache_clear()

"""Sites that a warm-up has found, kept in Triton's disk cache beside its marks, so that a later process needn't look.

What is found depends on the calls, the target, the numbers of tokens, Envoi's sources, measured configs, switches and
the versions of Triton and torch: a file is named by all of these. And each of its sites is looked at once more, so that
a kernel that has become another isn't missed.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from triton import knobs

from envoi import cache_file, env
from envoi.gemm.hopper import tune
from envoi.gemm.hopper.forced import any_forced
from envoi.runtime import triton_compat
from envoi.runtime.devices import Target
from envoi.runtime.rehearsal import Call, Site, digests_at

PLAIN = (str, int, float, bool, type(None), torch.dtype, torch.device)


class UnknownError(Exception):
    """Sign that a call holds something whose text doesn't say all that it is."""


def place_of(calls: Sequence[Call], target: Target, numbers: range) -> Path | None:
    """Return the file of what `rehearsal.find` finds for these arguments, None if it isn't to be kept.

    Nothing is kept if a call can't be told from others, if a choice between kernels is forced, or if Envoi's sources or
    measured configs are others than those that this process uses.
    """
    try:
        arguments = described((list(calls), target, [numbers.start, numbers.stop]))
        sources, configs = _sources(), tune.state()
    except (OSError, UnknownError):
        return None
    if sources is None or configs is None or any_forced():
        return None
    key = arguments, sources, configs, env.switches(), torch.__version__
    name = hashlib.sha256(repr(key).encode()).hexdigest()[:32]
    return Path(knobs.cache.dir) / f"envoi-{triton_compat.VERSION}-{target.arch}-found" / f"{name}.json"


def recall(path: Path, calls: Sequence[Call], target: Target) -> dict[str, Site] | None:
    """Return what the file `place_of` these calls has, None if there is none, or if a kernel has become another."""
    with suppress(OSError, ValueError, TypeError, LookupError):
        sites = {digest: Site(*site) for digest, site in dict(json.loads(path.read_text())).items()}
        if sites and digests_at(calls, target, sites.values()) == list(sites):
            return sites
    return None


def keep(path: Path, sites: Mapping[str, Site]) -> None:
    """Write a file for `recall`; where that can't be, nothing."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        cache_file.replace(path, json.dumps(sites))


def described(value: Any) -> Any:
    """Return what tells a call's part from others: of tensors no values. Raises UnknownError."""
    if isinstance(value, torch.Tensor):
        return "tensor", tuple(value.shape), value.stride(), value.dtype
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [(x.name, described(getattr(value, x.name))) for x in dataclasses.fields(value)]
        return type(value).__module__, type(value).__qualname__, parts
    if isinstance(value, dict):
        return [(described(key), described(x)) for key, x in value.items()]
    if isinstance(value, tuple | list):
        return [described(x) for x in value]
    if not isinstance(value, PLAIN):
        raise UnknownError(type(value).__name__)
    return value


def _sources() -> str | None:
    """Return a hash of Envoi's sources, None if one is younger than what this process has imported."""
    folder = Path(__file__).resolve().parents[1]
    paths = [path for path in sorted(folder.rglob("*")) if path.suffix in (".py", ".json")]
    if max(path.stat().st_ctime_ns for path in paths) > env.IMPORTED_NS:
        return None
    return _hash_of(tuple(paths))


@lru_cache(maxsize=1)
def _hash_of(paths: tuple[Path, ...]) -> str:
    found = hashlib.sha256()
    for path in paths:
        content = path.read_bytes()
        found.update(f"{path.name} {len(content)} ".encode() + content)
    return found.hexdigest()

"""Sites that a warm-up has found, kept in Triton's disk cache beside its marks, so that a later process needn't look.

What is found depends on the calls, the target, the numbers of tokens, Envoi's sources, measured configs, switches and
the versions of Triton and torch: a file is named by all of these. And each of its sites is looked at once more, so that
a kernel that has become another isn't missed.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from triton import knobs

from envoi import env
from envoi.runtime import triton_compat
from envoi.runtime.devices import Target
from envoi.runtime.rehearsal import Call, Site, digests_at

PLAIN = (str, int, float, bool, type(None), torch.dtype, torch.device)


class UnknownError(Exception):
    """Sign that a call holds something whose text doesn't say all that it is."""


def recall(calls: Sequence[Call], target: Target, numbers: range) -> dict[str, Site] | None:
    """Return what `rehearsal.find` has found for these arguments, None if that isn't known."""
    with suppress(OSError, ValueError, TypeError, LookupError, UnknownError):
        kept = json.loads(_path(calls, target, numbers).read_text())
        sites = {digest: Site(*site) for digest, site in dict(kept).items()}
        if sites and digests_at(calls, target, sites.values()) == list(sites):
            return sites
    return None


def keep(calls: Sequence[Call], target: Target, numbers: range, sites: Mapping[str, Site]) -> None:
    """Keep what was found; where it can't be written, or a call can't be told from others, nothing."""
    with suppress(OSError, UnknownError):
        path = _path(calls, target, numbers)
        path.parent.mkdir(parents=True, exist_ok=True)
        own = path.with_suffix(f".{os.getpid()}")
        own.write_text(json.dumps(sites))
        own.replace(path)  # at once: other ranks read it


def _path(calls: Sequence[Call], target: Target, numbers: range) -> Path:
    arguments = described((list(calls), target, [numbers.start, numbers.stop]))
    key = arguments, _sources(), _measured(), env.switches()
    name = hashlib.sha256(repr((*key, torch.__version__)).encode()).hexdigest()[:32]
    return Path(knobs.cache.dir) / f"envoi-{triton_compat.VERSION}-{target.arch}-found" / f"{name}.json"


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


@lru_cache(maxsize=1)
def _sources() -> str:
    folder = Path(__file__).resolve().parents[1]
    return _hash(path for path in sorted(folder.rglob("*")) if path.suffix in (".py", ".json"))


def _measured() -> str:
    return _hash(sorted(env.cache_dir().glob("*.json")))


def _hash(paths: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for path in paths:
        content = path.read_bytes()
        found.update(f"{path.name} {len(content)} ".encode() + content)
    return found.hexdigest()


__all__ = ["UnknownError", "described", "keep", "recall"]

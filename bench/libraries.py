"""Other libraries that Envoi is compared with: their baselines, and the newest version of each that is known.

Pages and README compare with the newest version alone; rows with older ones stand in a section of their own.
"""

import importlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from bench.evidence import Measurement
from bench.summary import peers
from envoi.info import version_of


@dataclass(frozen=True)
class Library:
    """Library by its distribution's name. known: the date on which `newest` was looked up, YYYY-MM-DD."""

    module: str
    newest: str
    known: str
    baselines: tuple[str, ...]


LIBRARIES = {
    "vllm": Library(
        "vllm", "0.33.0", "2026-11-27",
        ("vllm_triton", "vllm_marlin", "vllm_deepgemm", "vllm_router", "vllm_torch_topk", "vllm_cooperative_topk_set",
         "vllm_persistent_topk_set", "vllm_per_row_topk_set", "vllm_engine", "vllm_engine_deep_gemm",
         "vllm_engine_marlin"),
    ),
    "sglang": Library("sglang", "0.5.23", "2026-11-28", ("sglang_engine",)),
    "humming-kernels": Library("humming", "0.1.19", "2026-11-27", ("humming_w8a8", "humming_w4a16", "humming_w4a8")),
    "flashinfer-python": Library("flashinfer", "0.7.2.post1", "2026-11-27", ("flashinfer", "flashinfer_router")),
    "sgl-deep-gemm": Library("deep_gemm", "0.2.5", "2026-11-27", ("sgl_deep_gemm", "sgl_deep_gemm_topk")),
    # The last that Triton 3.6 compiles. It has no version of its own: the name of the release that has it within.
    "triton_kernels": Library("triton_kernels", "vllm 0.20.2", "2026-11-27", ("triton_kernels",)),
}  # fmt: skip
OF_BASELINE = {baseline: name for name, library in LIBRARIES.items() for baseline in library.baselines}
UNKNOWN = "unknown"


def versions(baselines: Iterable[str], given: Mapping[str, str]) -> dict[str, str | float]:
    """Return the versions of the libraries of these baselines, for the details of a measurement.

    given: versions by distribution, of libraries that don't say their own.
    """
    names = dict.fromkeys(OF_BASELINE[name] for name in baselines if name in OF_BASELINE)
    return {name: _installed(name) or given.get(name, UNKNOWN) for name in names}


def _installed(name: str) -> str | None:
    """Return the version that the distribution says, or the module that was measured."""
    found = version_of(name)
    return found or getattr(importlib.import_module(LIBRARIES[name].module), "__version__", None)


def version(details: Mapping[str, object], baseline: str) -> str | None:
    """Return the version that a baseline was measured with, by details; None for torch's and Envoi's own."""
    return str(details.get(OF_BASELINE[baseline], UNKNOWN)) if baseline in OF_BASELINE else None


def label(details: Mapping[str, object], baseline: str) -> str:
    """Return a baseline's name with its version, "vllm_triton 0.33.0"."""
    found = version(details, baseline)
    return baseline if found is None else f"{baseline} {found}"


def is_old(m: Measurement, baseline: str) -> bool:
    """Tell whether a newer version is known than the one that the baseline was measured with."""
    found = version(m.details, baseline)
    return found is not None and _order(found) < _order(LIBRARIES[OF_BASELINE[baseline]].newest)


def _order(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def newest_only(measurements: Iterable[Measurement]) -> list[Measurement]:
    """Return the measurements without baselines of old versions.

    One that such a baseline did the work of is left out: what remains, torch or a slower library, is easier to beat.
    """
    found = []
    for m in measurements:
        old = {name for name in m.baselines if is_old(m, name)}
        if not old:
            found.append(m)
        elif not old & peers(m).keys():
            found.append(replace(m, baselines={name: us for name, us in m.baselines.items() if name not in old}))
    return found


def outdated(measurements: Iterable[Measurement]) -> dict[str, str]:
    """Return a sentence for each library of which a newer version is known than the one measured, by its name."""
    found: dict[str, str] = {}
    for m in measurements:
        for baseline in m.baselines:
            if is_old(m, baseline):
                name = OF_BASELINE[baseline]
                newest = LIBRARIES[name]
                mine = version(m.details, baseline)
                found[name] = f"measured with {name} {mine}; {newest.newest} is known (looked up {newest.known})"
    return found

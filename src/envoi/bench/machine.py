"""Provenance of a measurement: hardware, versions, commit."""

import platform
import subprocess
from importlib import metadata
from pathlib import Path

import envoi

PACKAGE = Path(envoi.__file__).resolve().parent


def cpu_name() -> str:
    """Return the CPU's model as Linux reports it, followed by " (CPU)"."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()} (CPU)"


def device_name(device_type: str) -> str:
    """Return the `gpu` of a measurement on this machine's "cuda" or "cpu"."""
    if device_type == "cpu":
        return cpu_name()
    import torch

    return torch.cuda.get_device_name()


def version_of(distribution: str) -> str | None:
    """Return the installed version of a package, None if it isn't installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """Return the commit of the package's files, with "-dirty" if they differ; "v<version>" outside a repository."""
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return f"v{envoi.__version__}"
    head = _git("rev-parse", "--short=12", "HEAD")
    return f"{head}-dirty" if _git("status", "--porcelain", "--", ".") else f"{head}"


def results_folder() -> Path | None:
    """Return bench/results of the repository around this package; None if the package is installed elsewhere."""
    repository = PACKAGE.parents[1]
    return repository / "bench" / "results" if (repository / "pyproject.toml").is_file() else None


def _git(*arguments: str) -> str | None:
    """Return git's output in the package's folder; None if git fails or is missing."""
    try:
        done = subprocess.run(("git", *arguments), cwd=PACKAGE, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None

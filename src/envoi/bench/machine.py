"""Where and of what a measurement was taken: hardware, versions, commit."""

import platform
import subprocess
from importlib import metadata
from pathlib import Path

import envoi

PACKAGE = Path(envoi.__file__).resolve().parent


def cpu_name() -> str:
    """The CPU's model as Linux gives it, " (CPU)" behind it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()} (CPU)"


def device_name(device_type: str) -> str:
    """The `gpu` of a measurement on this machine's "cuda" or "cpu"."""
    if device_type == "cpu":
        return cpu_name()
    import torch

    return torch.cuda.get_device_name()


def version_of(distribution: str) -> str | None:
    """The installed version of a package, None if there is none."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """The commit of the package's files, "-dirty" behind it if they differ; "v<version>" outside a repository."""
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return f"v{envoi.__version__}"
    head = _git("rev-parse", "--short=12", "HEAD")
    return f"{head}-dirty" if _git("status", "--porcelain", "--", ".") else f"{head}"


def results_folder() -> Path | None:
    """bench/results of the repository around this package; None where the package is installed elsewhere."""
    repository = PACKAGE.parents[1]
    return repository / "bench" / "results" if (repository / "pyproject.toml").is_file() else None


def _git(*arguments: str) -> str | None:
    """What git says in the package's folder; None where it refuses or isn't there."""
    try:
        done = subprocess.run(("git", *arguments), cwd=PACKAGE, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None

"""Provenance of a measurement: hardware, versions, commit."""

import subprocess
from pathlib import Path

import envoi
from envoi.info import cpu_name

PACKAGE = Path(envoi.__file__).resolve().parent


def device_name(device_type: str) -> str:
    """Return the `gpu` of a measurement on this machine's "cuda" or "cpu"."""
    if device_type == "cpu":
        return cpu_name()
    import torch

    return torch.cuda.get_device_name()


def commit() -> str:
    """Return the commit of the package's files, with "-dirty" if they differ; "v<version>" outside a repository."""
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return f"v{envoi.__version__}"
    head = _git("rev-parse", "--short=12", "HEAD")
    return f"{head}-dirty" if _git("status", "--porcelain", "--", ".") else f"{head}"


RESULTS = Path(__file__).with_name("results")


def _git(*arguments: str) -> str | None:
    """Return git's output in the package's folder; None if git fails or is missing."""
    try:
        done = subprocess.run(("git", *arguments), cwd=PACKAGE, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None

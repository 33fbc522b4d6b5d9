"""`python tools/resolve.py`: ask the default package index whether every pair in `constraints/` can be installed.

Runs pip as for a user without any configuration: without its configuration files, environment variables and local
wheels, in an empty virtual environment. Nothing but metadata is downloaded. For the running Python pip resolves the
requirements of `envoi[dev]` with all dependencies; for the other Pythons it checks that every pin has a wheel there.
Exit status 1 names the failures. Runs in the environment that `make` sets up, whose metadata say what envoi requires.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pairs
from packaging.requirements import Requirement

PIP = "pip>=26"  # earlier releases download wheels for --dry-run
# From an index that has no metadata beside its wheels pip reads the end of a wheel, not gigabytes of them.
ASK = ("install", "--dry-run", "--quiet", "--use-feature=fast-deps")
ISOLATED = ("--isolated", "--disable-pip-version-check", "--no-input")
RUNNING = ".".join(map(str, sys.version_info[:2]))
JOBS = 4  # threads that wait for the network


def pip(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pip without any configuration."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment["PIP_CONFIG_FILE"] = os.devnull
    command = [str(python), "-m", "pip", *ISOLATED, *arguments]
    return subprocess.run(command, cwd=pairs.ROOT, env=environment, capture_output=True, text=True, check=False)


def resolve(python: Path, pair: pairs.Pair) -> str:
    """Resolve `envoi[dev]` under the pair's constraints without installing; return "" or pip's error."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        done = pip(
            python, *ASK, "--report", str(report), "-c", str(pair.path), *required()
        )  # fmt: skip
        if done.returncode:
            return last_error(done.stderr)
        found = {
            item["metadata"]["name"]: item["metadata"]["version"] for item in json.loads(report.read_text())["install"]
        }
    wanted = {"torch": pair.torch, "triton": pair.triton, "transformers": pair.transformers}
    wrong = [
        f"{name} {found.get(name)} instead of {version}"
        for name, version in wanted.items()
        if found.get(name) != version
    ]
    return ", ".join(wrong)


def required() -> list[str]:
    """Return the requirements of `envoi[dev]` as pip arguments, including those of the extras that it names."""
    lines = [line.partition(";") for line in importlib.metadata.requires("envoi") or ()]
    return [name.strip() for name, _, _ in lines if not name.startswith("envoi")]


def without_wheel(python: Path, version: str, pins: list[str]) -> str:
    """Return pip's error for pins under another Python; "" if each has a wheel there."""
    with tempfile.TemporaryDirectory() as folder:
        done = pip(
            python, *ASK, "--no-deps", "--only-binary=:all:", "--python-version", version, "--target", folder, *pins
        )  # fmt: skip
    return last_error(done.stderr) if done.returncode else ""


def pins_of(path: Path, version: str) -> list[str]:
    """Return the pins of a file for that Python: pip would evaluate their markers for the running one."""
    pins = [Requirement(line) for line in path.read_text().splitlines() if line and line[0] not in "#-"]
    chosen = [pin for pin in pins if pin.marker is None or pin.marker.evaluate({"python_version": version})]
    return [f"{pin.name}{pin.specifier}" for pin in chosen]


def last_error(stderr: str) -> str:
    """Return the last error line of pip's output."""
    lines = [line for line in stderr.splitlines() if line.startswith("ERROR")]
    return (lines or stderr.splitlines() or ["pip gave no reason"])[-1]


def checks(python: Path) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the checks: a title, and a function that returns the error or ""."""
    known = pairs.pairs()
    for pair in known:
        for version in pair.pythons:
            title = f"torch {pair.torch}, Triton {pair.triton}, Python {version}"
            if version == RUNNING:
                yield f"{title}, all dependencies", partial(resolve, python, pair)
            else:
                yield title, partial(without_wheel, python, version, pins_of(pair.path, version))
    common = pairs.FOLDER / "common.txt"
    for version in dict.fromkeys(version for pair in known for version in pair.pythons if version != RUNNING):
        yield (
            f"what all pairs share, Python {version}",
            partial(without_wheel, python, version, pins_of(common, version)),
        )


def main() -> int:
    """Check all pairs under all of their Pythons; return the exit status."""
    if not any(RUNNING in pair.pythons for pair in pairs.pairs()):
        print(f"resolve: no pair takes the running Python, {RUNNING}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        upgraded = pip(python, "install", "--quiet", "--upgrade", PIP)
        if upgraded.returncode:
            print(f"resolve: {last_error(upgraded.stderr)}", file=sys.stderr)
            return 1
        with ThreadPoolExecutor(JOBS) as pool:
            jobs = [(title, pool.submit(job)) for title, job in checks(python)]
            problems = [(title, job.result()) for title, job in jobs]
    print(*(f"{title}: {problem or 'can be installed'}" for title, problem in problems), sep="\n")
    return 1 if any(problem for _, problem in problems) else 0


if __name__ == "__main__":
    sys.exit(main())

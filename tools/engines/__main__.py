"""Names of serving engines that the integrations rely on, in the releases that are supported.

    python -m tools.engines            download each supported release (300 MB), compare with what is recorded, and run
                                       layers in its classes, without a GPU
    python -m tools.engines --record   and record what they have: tests/integrations/engines.json
    python -m tools.engines --newest   the newest releases: is anything that the integrations rely on gone?

Exits with 1 if an integration wouldn't run in one of them, or if a record isn't what a wheel has.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tools.engines.facts import RELEASES, downloaded, facts_of, problems, record, recorded, unnamed

ROOT = Path(__file__).resolve().parents[2]
NEEDED = {"sglang": ("dill", "msgspec"), "vllm": ()}  # packages without which an engine's modules can't be imported


def main() -> int:
    """Check the releases; print a line for each."""
    parser = argparse.ArgumentParser(prog="python -m tools.engines", description=str(__doc__).splitlines()[0])
    parser.add_argument("--record", action="store_true", help="write tests/integrations/engines.json")
    parser.add_argument("--newest", action="store_true", help="the newest releases instead of those supported")
    args = parser.parse_args()
    wanted = [(x, None) for x in RELEASES] if args.newest else [(x, y) for x, all_ in RELEASES.items() for y in all_]
    known, found, failed = recorded() if not (args.record or args.newest) else {}, {}, False
    for engine, release in wanted:
        with tempfile.TemporaryDirectory() as folder:
            wheel = downloaded(engine, release, folder)
            version, facts = facts_of(engine, wheel)
            why = problems(engine, facts) + unnamed(engine, wheel)
            if not (why or args.record or runs_layers(engine, wheel, Path(folder) / "files")):
                why.append("its layers don't run as they should")
        if known and known.get(f"{engine} {version}") != facts:
            why.append("what is recorded differs: run python -m tools.engines --record")
        print(f"{engine} {version}: {'; '.join(why) or f'all {len(facts)} names are as they were'}", flush=True)
        found[f"{engine} {version}"] = facts
        failed = failed or bool(why)
    if args.record:
        record(found)
    return int(failed)


def runs_layers(engine: str, wheel: Path, folder: Path) -> bool:
    """Run an engine's `tools.engines.*_layers` on a wheel's Python files, without a GPU; return whether all is well."""
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder, [name for name in file.namelist() if not name.endswith(".so")])
    if NEEDED[engine]:
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
        subprocess.run([*install, *NEEDED[engine]], check=True)
    path = os.pathsep.join((str(folder), str(ROOT / "src"), str(ROOT)))
    command = [sys.executable, "-W", "ignore", "-m", f"tools.engines.{engine}_layers"]
    here = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}  # on a GPU they need all of the engine
    return subprocess.run(command, env=here).returncode == 0


if __name__ == "__main__":
    sys.exit(main())

"""What README.md and the tutorials show runs as it stands, on a CPU: a namespace for each file, one process for all."""

import re
import runpy
import socket
import textwrap
from pathlib import Path

import pytest
import torch

from envoi.epilogues.lower import lower
from tests.helpers import fresh
from tests.helpers.slow import mostly_slow

ROOT = Path(__file__).resolve().parents[1]
# README.md last: it opens a process group, which forks of the process would have.
PAGES = [*sorted((ROOT / "docs" / "tutorials").glob("*.md")), ROOT / "docs" / "replay.md", ROOT / "README.md"]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Ranks are started as `torch.multiprocessing.spawn` does it, or as forks, which import nothing anew.
RUN = """
import functools, runpy, sys, warnings, torch.multiprocessing as mp
warnings.simplefilter('ignore')
mp.spawn = functools.partial(mp.start_processes, start_method=sys.argv[1])
for path in sys.argv[2:]:
    runpy.run_path(path, run_name='__main__')
"""


def blocks(path: Path) -> list[str]:
    return BLOCK.findall(path.read_text(encoding="utf-8"))


def environment() -> dict[str, str]:
    """A machine without a GPU, as torchrun sets it up for one process."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = str(sock.getsockname()[1])
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    offline = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT / "src")}
    return {**ranks, **offline}


@pytest.mark.parametrize("start", mostly_slow(["fork", "spawn"], ["fork"]))
def test_every_block_runs(start, tmp_path, monkeypatch):
    programs = [tmp_path / f"page_{path.stem}.py" for path in PAGES]  # files, because tracing reads their lines
    for path, program in zip(PAGES, programs, strict=True):
        found = blocks(path)
        assert found, path
        program.write_text("\n".join(found))
    monkeypatch.chdir(ROOT)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    done = fresh.run(RUN, start, *map(str, programs))
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def test_the_listings_of_an_epilogue_are_what_is_made_of_it(tmp_path):
    page = ROOT / "docs" / "tutorials" / "epilogue.md"
    program = tmp_path / "page.py"
    program.write_text(blocks(page)[0])
    made = runpy.run_path(str(program))["gated_fp8"].ir
    listings = re.findall(r"(?:^ {4}.*\n)+", BLOCK.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    assert textwrap.dedent(listings[0]) == f"{made}\n"
    assert listings[1] in lower(made, torch.bfloat16, "gluon", False, True, frozenset()).source


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_links_to_files_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target


def test_every_variable_that_the_package_reads_is_listed():
    read = set(re.findall(r'"(ENVOI_\w+)"', (ROOT / "src" / "envoi" / "env.py").read_text()))
    for page in (ROOT / "README.md", ROOT / "docs" / "environment.md"):
        assert read == set(re.findall(r"`(ENVOI_\w+)`", page.read_text(encoding="utf-8"))), page

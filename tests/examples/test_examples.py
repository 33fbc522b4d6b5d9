"""Programs of examples/: each runs unchanged on this machine and returns its stated result."""

import re
import runpy
from pathlib import Path

import torch

from tests.helpers import fresh
from tests.test_readme import environment

ROOT = Path(__file__).parents[2]


def run_main(name: str):
    return runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"]()


def test_gemm_epilogue():
    assert run_main("gemm_epilogue") < 1e-3


def test_moe_layer():
    differences = run_main("moe_layer")
    assert differences["bf16"] == 0
    assert all(0 < differences[name] < 0.1 for name in ("fp8_row", "fp8_block128"))


def test_indexer():
    slots = run_main("indexer")
    assert (slots >= 0).sum(1).tolist() == [512, 100]
    assert all(len(row[row >= 0].unique()) == int((row >= 0).sum()) for row in slots)


def test_serve_transformers(capfd):
    out = run_main("serve_transformers")
    assert out.shape[1] > len("import ")
    assert capfd.readouterr().out.startswith("import ")


# As torchrun starts them, but as forks of one process that has imported all.
RANKS = """
import os, runpy, sys, envoi
ranks = []
for rank in range(int(os.environ["WORLD_SIZE"])):
    if (pid := os.fork()) == 0:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        runpy.run_path(sys.argv[1], run_name="__main__")
        sys.exit()
    ranks.append(pid)
sys.exit(any(os.waitpid(pid, 0)[1] for pid in ranks))
"""


def test_moe_torchrun(monkeypatch):
    count = str(min(2, torch.cuda.device_count()) or 2)
    by_torchrun = environment() | {"WORLD_SIZE": count, "TORCHELASTIC_RUN_ID": "none"}
    del by_torchrun["CUDA_VISIBLE_DEVICES"]
    for name, value in by_torchrun.items():
        monkeypatch.setenv(name, value)
    done = fresh.run(RANKS, str(ROOT / "examples" / "moe_torchrun.py"))
    assert done.returncode == 0, done.stderr[-4000:]
    # Ranks share one pipe, and what they print at the same time can end up in one line.
    assert sorted(re.findall(r"rank (\d+): \(\d+, 256\)", done.stdout)) == [str(r) for r in range(int(count))]

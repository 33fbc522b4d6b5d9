"""Programs of examples/: each runs unchanged on this machine and returns its stated result."""

import re
import runpy
from pathlib import Path

import torch

from tests.helpers import fresh

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


def test_moe_torchrun(monkeypatch):
    count = str(min(2, torch.cuda.device_count()) or 2)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    program = str(ROOT / "examples" / "moe_torchrun.py")
    done = fresh.run_module("torch.distributed.run", "--standalone", "--nproc-per-node", count, program)
    assert done.returncode == 0, done.stderr[-4000:]
    # Ranks share one pipe, and what they print at the same time can end up in one line.
    assert sorted(re.findall(r"rank (\d+): \(\d+, 256\)", done.stdout)) == [str(r) for r in range(int(count))]

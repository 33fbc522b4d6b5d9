"""Programs of examples/: each runs unchanged on this machine and returns its stated result.

moe_torchrun.py is run by torchrun: tests/moe/parallel/test_two_hosts.py.
"""

import runpy
from pathlib import Path

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

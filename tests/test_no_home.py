"""A user without a home, or with one that isn't its own: everything works, without entries of this machine."""

import json
import os
import pwd
from pathlib import Path

import pytest
import torch

import envoi
from envoi import cli
from envoi.ops.gemm.hopper import tune
from envoi.ops.indexer import certificate, certify
from envoi.ops.moe import warm_up
from envoi.runtime.devices import Target
from envoi.runtime.planned_kernels import compile_here, find
from envoi.tune import command as tuning
from tests.helpers import fresh, stranger
from tests.helpers.slow import mostly_slow
from tests.moe.layers import make
from tools.oracles.indexer_workloads import one

HOPPER = Target("sm_90", 132)
EXPERTS = 4
# One line of JSON: what the function returned.
CHILD = """
import json, os, sys, warnings
from tests.helpers import stranger
home, *folders = sys.argv[1:]
stranger.become(*folders)
sys.path.insert(0, os.getcwd())  # what is imported later is there too
os.chdir(folders[0])
if home:
    os.environ["HOME"] = home
from tests import test_no_home
print(json.dumps(test_no_home.exercise()))
"""


def operators() -> None:
    """Run every operator on this CPU."""
    layer = make(tokens=8, experts=EXPERTS, k=2)
    gate = torch.randn(EXPERTS, 256).bfloat16()
    routing = envoi.route(layer.tokens, gate, 2)
    experts = layer.pack("fp8_block128")
    envoi.gemm(layer.tokens, gate)
    envoi.grouped_gemm(layer.tokens, layer.gate_up, torch.tensor([0, 2, 4, 6, 8], dtype=torch.int32))
    alone = envoi.moe(layer.tokens, routing, experts)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel = envoi.ExpertParallel(experts, max_tokens=8, num_topk=2)
    assert torch.equal(parallel.moe(layer.tokens, routing), alone)
    parallel.close()
    torch.distributed.destroy_process_group()
    envoi.indexer_topk(*one((100,)).tensors(), k=512)


def hopper_kernels() -> dict[str, int]:
    """Warm up for a GPU that isn't here: find a layer's kernels, as tuned; compile one; return the numbers."""
    calls = [warm_up.LayerCall(warm_up.without_tensors(make(tokens=1, experts=EXPERTS, k=2).pack()), 2)]
    sites = find(calls, HOPPER, range(1, 5))
    compile_here(calls, HOPPER, min(sites.values()))
    return {"found": len(sites), "compiled": len(list(Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin")))}


def entries() -> dict[str, int]:
    """Count the tuned configs, and look for certificates."""
    tune._entries.cache_clear()
    certificate.orders.cache_clear()
    assert certificate.orders(torch.device("cpu"), 64) is None
    return {"all": len(tune._entries(False)), "shipped": len(tune._entries(True))}


def exercise() -> dict[str, object]:
    """Do everything that may read or write local entries, as the process's user."""
    assert os.geteuid() != 0
    with pytest.raises(KeyError):
        pwd.getpwuid(os.getuid())
    certificate.name_of = lambda device: "a GPU"
    operators()
    said: dict[str, object] = {"before": entries(), "kernels": hopper_kernels()}
    for write in (lambda: tune.keep({}), lambda: certificate.write("a GPU", {})):
        with pytest.raises(OSError):
            write()
    stranger.lose_sight()
    os.environ["ENVOI_CACHE_DIR"] = f"{os.getcwd()}/closed/envoi"
    os.environ["TRITON_CACHE_DIR"] = f"{os.getcwd()}/closed/triton"
    with pytest.warns(UserWarning, match="envoi/.*: Permission denied; going on without it"):
        said["closed"] = entries()
    return said


@pytest.mark.parametrize("home", mostly_slow(["", "read-only"], quick=[""]))
def test_a_user_of_no_passwd_entry_needs_no_home(tmp_path, monkeypatch, home):
    monkeypatch.delenv("ENVOI_CACHE_DIR", raising=False)
    own, triton_cache, closed = (tmp_path / name for name in ("own", "triton", "own/closed"))
    for folder in (own, triton_cache, closed, tmp_path / "read-only"):
        folder.mkdir()
    (tmp_path / "read-only").chmod(0o555)
    closed.chmod(0)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(triton_cache))
    done = fresh.run(CHILD, home and str(tmp_path / home), str(own), str(triton_cache))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    count = said["before"]["shipped"]
    assert count > 0
    assert said["before"] == said["closed"] == {"all": count, "shipped": count}
    assert said["kernels"]["found"] >= 3 and said["kernels"]["compiled"] == 1


@pytest.fixture(params=["no home", "a file in its place"])
def nowhere(request, tmp_path, monkeypatch):
    """Leave no place for entries."""
    if request.param == "no home":
        monkeypatch.delenv("ENVOI_CACHE_DIR")
        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.setattr(pwd, "getpwuid", stranger._no_entry)
    else:
        (tmp_path / "file").touch()
        monkeypatch.setenv("ENVOI_CACHE_DIR", str(tmp_path / "file"))


def one_line(capsys) -> str:
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1, said
    return said


def test_the_tuner_says_before_it_measures_that_nothing_is_kept(nowhere, monkeypatch, capsys):
    monkeypatch.setattr(tuning, "_expect_hopper", lambda: None)
    monkeypatch.setattr(tuning, "_measure", lambda *given: pytest.fail("measured"))
    assert cli.main(["tune", "--shape", "64x256x256"]) == 2
    assert one_line(capsys).startswith("envoi: tune: nothing was kept: ")


def test_certifying_says_that_nothing_was_kept(nowhere, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(certificate, "name_of", lambda device: "a GPU")
    monkeypatch.setattr(certify, "search", lambda *given: ({"parts": [[1, 4]], "shared_from": None}, []))
    assert cli.main(["indexer", "certify"]) == 2
    assert one_line(capsys).startswith("envoi: indexer certify: nothing was kept: ")
    assert cli.main(["indexer", "certify", "--no-write"]) == 0

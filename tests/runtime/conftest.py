"""Fixture of prepared calls: CPU tensors take the Hopper path, whose kernels are compiled and never run."""

from importlib import import_module

import pytest

from envoi.ops.gemm import backend
from envoi.ops.indexer import fast, select
from envoi.ops.moe import api as moe_api
from envoi.ops.moe import choose, permute
from envoi.ops.moe.parallel import nvlink
from envoi.ops.moe.router import host as router_host
from envoi.runtime import devices, workspace
from tests.helpers import fake_driver
from tests.helpers.compiling_driver import CompilingDriver


@pytest.fixture
def hopper(monkeypatch) -> CompilingDriver:
    """Return the driver, which notes what it is handed. The switch is on, and there are no calls yet."""
    made = CompilingDriver()
    fake_driver.install(monkeypatch, made)
    packing = import_module("envoi.ops.moe.packing")  # the package has a function of this name
    for module in (backend, choose, fast, packing, permute, router_host, select):
        monkeypatch.setattr(module, "implementation", lambda device: "hopper")
    monkeypatch.setattr(devices, "_num_sms", lambda device: 132)
    monkeypatch.setattr(moe_api, "check_ids", lambda *_: None)
    for name in ("_counters", "_blanks"):
        monkeypatch.setattr(workspace, name, workspace.Kept(getattr(workspace, name).fill))
    monkeypatch.setattr(workspace.Kept, "new", lambda kept, count, device: kept.take(count, device))
    for module in (devices, nvlink):
        monkeypatch.setattr(module, "on_gpu", lambda device: True)
    monkeypatch.setattr(permute, "casts_e4m3", lambda device: True)
    monkeypatch.setattr(workspace, "under_way", lambda device: (made.stream_now, int(made.capturing)))
    monkeypatch.setattr(workspace, "FOR_GRAPHS", 1 << 16)
    return made

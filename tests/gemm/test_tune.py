"""Measured configs on disk, entries of another version among them; what the compiler's cache files a config under."""

import dataclasses
import json

import pytest
import torch

from envoi.epilogue import library
from envoi.epilogue.lower import lower
from envoi.gemm.blackwell.config import BlackwellConfig
from envoi.gemm.hopper import tune
from envoi.gemm.hopper.config import Config, Problem
from envoi.gemm.hopper.tile_config import TileConfig
from envoi.gemm.hopper_mx.config import MxConfig

STORE = lower(library.store.ir, torch.bfloat16, "gluon", False, True, frozenset())
PROBLEM = Problem(256, 512, 384, 2)
CONFIG = Config(64, 2, 128, 64, 5)
CONFIGS = [CONFIG, MxConfig(2, 16, 12), BlackwellConfig(256, 64, 3)]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ENVOI_CACHE_DIR", str(tmp_path))
    tune._entries.cache_clear()
    tune.choose.cache_clear()
    yield tmp_path / "gemm.json"
    monkeypatch.undo()
    tune._entries.cache_clear()
    tune.choose.cache_clear()


def test_entries_of_another_version_are_ignored_with_a_warning(cache):
    key = tune.key_of(PROBLEM, STORE, 132)
    older = {"role_m": 64, "num_roles": 2, "block_y": 128, "block_k": 64, "num_stages": 5}
    cache.write_text(json.dumps({key: older, "another": dataclasses.asdict(CONFIG)}))
    with pytest.warns(UserWarning, match="1 of 2 configs were measured by another version of Envoi"):
        assert tune.best(PROBLEM, STORE, 132) is None


def test_keeping_drops_them(cache):
    cache.write_text(json.dumps({"older": {"role_m": 64}}))
    key = tune.key_of(PROBLEM, STORE, 132)
    with pytest.warns(UserWarning, match="1 of 1 configs"):
        tune.keep({key: CONFIG})
    assert json.loads(cache.read_text()) == {key: dataclasses.asdict(CONFIG)}
    assert tune.best(PROBLEM, STORE, 132) == CONFIG


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_every_field_tells_configs_apart_in_the_compilers_cache(config):
    """Triton files a constant under its str: a field that isn't in it would bring another config's binary."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        other = dataclasses.replace(config, **{field.name: not value if isinstance(value, bool) else value + 1})
        assert str(other) != str(config), field.name


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_every_config_has_what_shared_code_asks_for(config):
    assert isinstance(config, TileConfig)

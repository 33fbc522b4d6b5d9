"""Measured configs on disk: stored, found again, and ignored if they are spoilt or of another version."""

import dataclasses
import json
import random

import pytest
import torch

from envoi.epilogues.library import store
from envoi.epilogues.lower import lower
from envoi.ops.gemm.hopper import tune
from envoi.ops.gemm.hopper.candidates import default_config
from envoi.ops.gemm.hopper.config import Config, Problem
from envoi.ops.gemm.hopper.time_model import predicted_cycles

PROBLEM = Problem(4096, 4096, 4096, 2)
NUM_SMS = 99  # no config is shipped for it
CODE = lower(store.ir, torch.bfloat16, "gluon", False, False, frozenset())
CONFIG = Config(64, 1, 64, 64, 3, tiles_overlap=True)  # as `fitted` leaves it
KEY = tune.key_of(PROBLEM, CODE, NUM_SMS)


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setenv("ENVOI_CACHE_DIR", str(tmp_path))
    forget()
    yield tmp_path / "gemm.json"
    monkeypatch.undo()
    forget()


def forget():
    tune._entries.cache_clear()
    tune.forget_choices()


def chosen():
    return tune.choose(PROBLEM, CODE, NUM_SMS)


def test_what_is_kept_is_chosen(path):
    assert chosen() == default_config(PROBLEM, CODE, NUM_SMS) != CONFIG
    tune.keep({KEY: CONFIG})
    assert chosen() == CONFIG
    assert json.loads(path.read_text()) == {KEY: dataclasses.asdict(CONFIG)}
    assert tune.choose(PROBLEM, CODE, NUM_SMS, shipped_only=True) == default_config(PROBLEM, CODE, NUM_SMS)


# Times in us on an H200 of what was measured for 1024x5120x2880 and of the model's choice: 36.3 and 32.3 at 700 tokens.
@pytest.mark.parametrize(("M", "measured"), [(1024, True), (1020, True), (700, False), (588, False)])
def test_a_config_measured_with_more_tokens_is_chosen_where_the_model_thinks_as_well_of_it(M, measured):
    code, problem = lower(store.ir, torch.bfloat16, "gluon", False, True, frozenset()), Problem(M, 5120, 2880, 2)
    found = tune.best(problem, code, 132, shipped_only=True)
    assert found is not None and found != default_config(tune.rounded(problem), code, 132)
    assert (tune.choose(problem, code, 132, shipped_only=True) == found) == measured


def test_what_was_measured_for_these_tokens_is_chosen_and_for_no_others(path):
    own, others = (dataclasses.replace(PROBLEM, M=M) for M in (300, 400))
    modelled = default_config(tune.rounded(others), CODE, NUM_SMS)
    tune.keep({tune.key_of(own, CODE, NUM_SMS): CONFIG})
    assert tune.choose(own, CODE, NUM_SMS) == tune.choose(dataclasses.replace(own, M=298), CODE, NUM_SMS) == CONFIG
    assert tune.choose(others, CODE, NUM_SMS) == modelled != CONFIG


def test_every_number_of_tokens_of_a_server_asks_the_model_for_few_problems():
    problems = [Problem(8 * tokens, 1536, 2048, 2, 128) for tokens in range(1, 8193)]
    rounded = [tune.rounded(problem) for problem in problems]
    assert len(set(rounded)) < 300
    for problem, found in zip(problems, rounded, strict=True):
        most = max(128, problem.M // tune.STEPS) + 128 if problem.M > 128 else 2 * problem.M
        assert problem.M <= found.M < problem.M + most


def test_fewer_problems_cost_next_to_nothing_by_the_model():
    source, code = random.Random(3), lower(store.ir, torch.bfloat16, "gluon", False, True, frozenset())
    lost = []
    for N, K in [(1536, 2048), (2048, 768), (4096, 7168), (7168, 2048), (2880, 2880), (4096, 14336)] * 8:
        groups, element_bytes = source.choice((8, 32, 48, 128)), source.choice((1, 2))
        exact = Problem(groups * source.randrange(129, 3000), N, K, element_bytes, groups)
        configs = [default_config(problem, code, 132) for problem in (exact, tune.rounded(exact))]
        best, found = (predicted_cycles(exact, config, 132) for config in configs if config is not None)
        lost.append(found / best)
    assert 1 <= sum(lost) / len(lost) < 1.002
    assert max(lost) < 1.05


def entry(**changes) -> dict:
    return {key: value for key, value in (dataclasses.asdict(CONFIG) | changes).items() if value is not ...}


BAD = {
    "a field that Config hasn't": (entry(fast=True), "unexpected keyword argument 'fast'"),
    "a field that Config needs": (
        entry(rows_per_consumer=...),
        "missing 1 required positional argument: 'rows_per_consumer'",
    ),
    "text for a number": (entry(block_y="64"), "block_y: expected an int of at least 1, got '64'"),
    "zero": (entry(epilogue_columns=0), "epilogue_columns: expected an int of at least 1, got 0"),
    "a number for a truth": (entry(pingpong=1), "pingpong: expected true or false, got 1"),
    "no object": ([64, 1], "expected an object, got list"),
}


@pytest.mark.parametrize(("value", "problem"), BAD.values(), ids=BAD)
def test_an_entry_that_is_no_config_is_left_out_with_a_warning(path, value, problem):
    path.write_text(json.dumps({KEY: value, "another": entry()}))
    with pytest.warns(UserWarning, match=r"gemm\.json: .*going on without 1 of 2 entries") as caught:
        assert chosen() == default_config(PROBLEM, CODE, NUM_SMS)
    assert len(caught) == 1
    assert problem in str(caught[0].message)
    assert tune._entries(False)["another"] == CONFIG


@pytest.mark.parametrize("text", ["", '{"a', "[]", "null"])
def test_a_spoilt_file_stops_no_gemm_and_no_tuning(path, text):
    path.write_text(text)
    with pytest.warns(UserWarning, match=r"gemm\.json: .*going on without it"):
        assert chosen() == default_config(PROBLEM, CODE, NUM_SMS)
    tune.keep({KEY: CONFIG})
    assert chosen() == CONFIG

"""Sites kept on disk: found again without a look at each number of tokens, unless what they depend on is another."""

import dataclasses
import json
import shutil
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from triton import knobs

from envoi import cache_file, env
from envoi.gemm.hopper import pairs, tune, two_kernels
from envoi.moe import known_sites, warm_up
from envoi.runtime import rehearsal
from envoi.runtime.compilers import Compilers
from envoi.runtime.devices import Target
from tests.moe.layers import make

HOPPER = Target("sm_90", 132)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("ENVOI_CACHE_DIR", str(tmp_path / "envoi"))
    return tmp_path


def calls_of(**changes) -> list[warm_up.LayerCall]:
    layer = make(**({"tokens": 1, "hidden": 256, "intermediate": 128, "experts": 4, "k": 2} | changes))
    return [warm_up.LayerCall(warm_up.without_tensors(layer.pack("fp8_block128")), 2)]


def look(calls, max_tokens: int = 40, target: Target = HOPPER) -> dict[str, rehearsal.Site]:
    with Compilers(target, 1) as compilers:
        return warm_up.begin_looking(compilers, calls, target, range(1, max_tokens + 1), warm_up.HERE)()


def kept() -> list[Path]:
    """Return the files that were kept, and what is left of others."""
    return list(Path(knobs.cache.dir).glob("*-found/*"))


def looks(monkeypatch) -> list:
    """Note each look at all numbers of tokens."""
    seen: list = []
    find_all = warm_up.begin_finding
    monkeypatch.setattr(warm_up, "begin_finding", lambda *given: seen.append(given) or find_all(*given))
    return seen


def test_what_was_found_is_found_again_without_a_look(cache, monkeypatch):
    seen = looks(monkeypatch)
    found = look(calls_of())
    assert len(found) > 3 and len(seen) == 1
    assert look(calls_of()) == found, "another object of the same layer"
    assert len(seen) == 1
    shutil.rmtree(cache / "triton")
    assert look(calls_of()) == found
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("layer", "more"),
    [
        ({"hidden": 384}, {}),
        ({"experts": 8}, {}),
        ({"bias": True}, {}),
        ({"activation": "swiglu_oai"}, {}),
        ({}, {"max_tokens": 41}),
        ({}, {"target": Target("sm_90", 114)}),
    ],
)
def test_another_call_is_looked_at(cache, monkeypatch, layer, more):
    look(calls_of())
    seen = looks(monkeypatch)
    look(calls_of(**layer), **more)
    assert len(seen) == 1


def test_so_is_one_with_other_sources_or_switches(cache, monkeypatch):
    look(calls_of())
    seen = looks(monkeypatch)
    monkeypatch.setenv("ENVOI_NVTX", "0")
    look(calls_of())
    monkeypatch.setattr(known_sites, "_sources", lambda: "another release")
    look(calls_of())
    assert len(seen) == 2
    look(calls_of())
    assert len(seen) == 2


def test_sources_that_came_after_the_import_are_not_those_that_run(cache, monkeypatch):
    monkeypatch.setattr(env, "IMPORTED_NS", 0)
    seen = looks(monkeypatch)
    look(calls_of())
    look(calls_of())
    assert len(seen) == 2 and not kept()


def test_configs_that_others_have_measured_meanwhile_are_not_those_that_run(cache, monkeypatch):
    """This process has read its own; what it finds isn't what one that starts now would find."""
    tune._entries(False)
    seen = looks(monkeypatch)
    look(calls_of())
    path = cache / "envoi" / "gemm.json"
    entry = {"132sm 64x256x256 2B": dataclasses.asdict(next(iter(tune._entries(True).values())))}
    cache_file.add(path, entry)
    look(calls_of())
    look(calls_of())
    assert len(seen) == 3 and len(kept()) == 1
    tune._entries.cache_clear()
    tune.forget_choices()
    try:
        look(calls_of())
        look(calls_of())
        assert len(seen) == 4 and len(kept()) == 2
    finally:
        path.unlink()
        tune._entries.cache_clear()
        tune.forget_choices()


def test_what_changes_during_a_look_keeps_it_from_being_kept(cache, monkeypatch):
    find_all, path = warm_up.begin_finding, cache / "envoi" / "gemm.json"
    entry = {"132sm 64x256x256 2B": dataclasses.asdict(next(iter(tune._entries(True).values())))}

    def find_meanwhile(*given, **named):
        found = find_all(*given, **named)
        cache_file.add(path, entry)
        return found

    monkeypatch.setattr(warm_up, "begin_finding", find_meanwhile)
    tune._entries.cache_clear()
    look(calls_of())
    assert not kept()


@pytest.mark.parametrize(
    ("force", "usual"), [(pairs.use_pairs, None), (two_kernels.use, None), (tune.use_measured, True)]
)
def test_nothing_is_kept_while_a_choice_is_forced(cache, monkeypatch, force, usual):
    seen = looks(monkeypatch)
    force(False)
    try:
        look(calls_of())
        look(calls_of())
        assert len(seen) == 2 and not kept()
    finally:
        force(usual)
    look(calls_of())
    look(calls_of())
    assert len(seen) == 3


def test_a_kernel_that_has_become_another_is_looked_for(cache, monkeypatch):
    found = look(calls_of())
    (path,) = kept()
    seen = looks(monkeypatch)
    first, *others = json.loads(path.read_text()).items()
    for broken in (
        json.dumps(dict([("0" * 16, first[1]), *others])), json.dumps(dict([(first[0], [0, 1, 99, "x"]), *others])),
        "{}", "[1]", "no json",
    ):  # fmt: skip
        path.write_text(broken)
        assert look(calls_of()) == found
    assert len(seen) == 5
    assert look(calls_of()) == found and len(seen) == 5


@dataclass(frozen=True)
class Odd:
    """Call that holds what no text tells from others."""

    part: Any

    def __call__(self, num_tokens: int) -> None:
        """Launch nothing."""


def test_what_cant_be_told_from_others_is_not_kept(cache):
    for part in (len, object(), {1}, partial(len)):
        assert look([Odd(part)]) == {}
    assert not kept()
    with pytest.raises(known_sites.UnknownError, match="builtin_function_or_method"):
        known_sites.described(Odd(len))
    assert known_sites.described(Odd(1)) != known_sites.described(Odd("1")) != known_sites.described(Odd(2))


def test_tensors_are_told_apart_by_shape_strides_and_dtype():
    x = torch.zeros(4, 6)
    others = (x.T, x[:, :3], x[:, ::2], x.bfloat16(), x.view(6, 4), replace(Odd(x), part=x.view(24)))
    texts = [repr(known_sites.described(Odd(other))) for other in (x, *others)]
    assert len(set(texts)) == len(texts)
    assert repr(known_sites.described(Odd(x + 1))) == texts[0]


def test_a_cache_that_cant_be_written_is_no_error(cache, monkeypatch):
    (cache / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache / "file"))
    seen = looks(monkeypatch)
    assert look(calls_of()) == look(calls_of())
    assert len(seen) == 2

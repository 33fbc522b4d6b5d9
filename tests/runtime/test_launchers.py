"""Launchers that are built while their kernels are compiled: they are those that would be built afterwards."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton import knobs
from triton.runtime import driver

from envoi.moe import warm_up
from envoi.moe.parallel.command import experts_without_memory
from envoi.runtime import launchers, shortcuts, triton_compat
from envoi.runtime.devices import Target, standing_for
from envoi.runtime.rehearsal import Site, compile_at, find, load_at, rehearse

HOPPER = Target("sm_90")


@pytest.fixture
def layer(monkeypatch, tmp_path) -> warm_up.LayerCall:
    """Return a layer whose kernels this process hasn't compiled, as far as it knows."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with standing_for(HOPPER):
        made = warm_up.LayerCall(experts_without_memory(256, 384, 8, "fp8_block128", "swiglu", bias=False), 2)
    for num_tokens in (3, 300):
        for kernel, *_ in rehearse(made, num_tokens, HOPPER):
            kernel.device_caches.clear()
    return made


@pytest.mark.default_triton
def test_the_launcher_built_beside_a_kernel_is_its_own(monkeypatch, layer):
    """One text for both, so that the second is in the cache: with descriptors and without, in Triton and in Gluon."""
    from triton.backends.nvidia import driver as nvidia

    built: list[tuple[str, Any]] = []

    def build(src: str, **_) -> SimpleNamespace:
        built.append((src, threading.current_thread()))
        return SimpleNamespace(launch=None)

    monkeypatch.setattr(nvidia, "PyCUtensorMap", object)
    monkeypatch.setattr(nvidia, "library_dirs", list)
    monkeypatch.setattr(nvidia, "compile_module_from_src", build)
    launches = rehearse(layer, 300, HOPPER)
    kernels = {kernel.fn.__name__: (kernel, arguments, options) for kernel, _, arguments, options in launches}
    assert len(kernels) >= 4
    texts = set()
    for kernel, arguments, options in kernels.values():
        built.clear()
        launchers.compile_to_launch(kernel, arguments, "sm_90", options)
        (beside, other), (after, this) = built
        assert beside == after and this is threading.current_thread() and other is not this
        assert not other.is_alive()
        texts.add(after)
    assert len(texts) == len(kernels) and any("CUtensorMap" in text for text in texts)


@pytest.mark.parametrize("error", [OSError, ValueError])
def test_a_launcher_that_cannot_be_built_is_left_to_the_first_launch(monkeypatch, layer, error):
    asked = []

    def refuse(kernel: Any) -> None:
        asked.append(kernel)
        raise error("no compiler")

    monkeypatch.setattr(triton_compat, "build_launcher", refuse)
    (site,) = [site for site in find([layer], HOPPER, [300]).values() if site.name == "combine_kernel"]
    assert compile_at([layer], HOPPER, True, site) == ""
    assert len(asked) == 1 + triton_compat.LAUNCHERS_IN_C
    assert compile_at([layer], HOPPER, True, site) == ""
    assert len(asked) == 2 + triton_compat.LAUNCHERS_IN_C, "what is in the cache has no launcher beside it"


@pytest.mark.parametrize("num_tokens", [3, 300])
def test_kernels_are_compiled_while_the_driver_is_loaded(monkeypatch, layer, num_tokens):
    """Without a look at it, which would make it twice; and what is loaded afterwards is in the cache."""
    done, loading, happened = threading.Event(), [], []
    monkeypatch.setattr(driver, "_active", None)
    monkeypatch.setattr(driver, "_default", Unasked())
    monkeypatch.setattr(triton_compat, "build_launcher", lambda kernel: None)
    monkeypatch.setattr(
        knobs.compilation, "listener", lambda **event: happened.append((event["src"].fn.__name__, event["cache_hit"]))
    )

    def compile_then_end(*given: Any) -> None:
        compile_alone(*given)
        happened.append("compiled")
        done.set()

    def loaded_kernel(kernel: Any, grid: Any, arguments: Any, options: Any) -> None:
        assert not loading[0].is_alive()
        happened.append("loaded")
        triton_compat.compile_like_a_launch(kernel, arguments, "sm_90", options)

    compile_alone = triton_compat.compile_without_driver
    monkeypatch.setattr(triton_compat, "compile_without_driver", compile_then_end)
    monkeypatch.setattr(triton_compat, "loaded_kernel", loaded_kernel)
    monkeypatch.setattr(shortcuts, "ENABLED", False)  # no GPU whose kernel it could be
    launches = rehearse(layer, num_tokens, HOPPER)
    assert len(launches) >= 3
    for number, (kernel, *_) in enumerate(launches):
        name = kernel.fn.__name__
        done.clear()
        happened.clear()
        loading[:] = [threading.Thread(target=done.wait)]
        loading[0].start()
        site = Site(0, num_tokens, number, name, 0)
        load_at([layer], HOPPER, site, loading[0])
        assert happened == [(name, False), "compiled", "loaded", (name, True)]
        happened.clear()
        load_at([layer], HOPPER, site, loading[0])
        assert happened == ["loaded"], "where the driver is there, nothing is compiled before"


class Unasked:
    """Driver that mustn't be asked for anything."""

    def __getattr__(self, name: str) -> Any:
        """Fail."""
        pytest.fail(f"asked for {name}")


def test_nothing_is_begun_by_another_compilation(monkeypatch, layer):
    asked = []
    monkeypatch.setattr(triton_compat, "build_launcher", asked.append)
    kernel, _, arguments, options = rehearse(layer, 3, HOPPER)[0]
    with pytest.raises(TypeError):
        launchers.compile_to_launch(kernel, (*arguments, torch.zeros(1)), "sm_90", options)
    triton_compat.compile_like_a_launch(kernel, arguments, "sm_90", options)
    assert not asked

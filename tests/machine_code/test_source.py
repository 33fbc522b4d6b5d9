"""Hash of what a kernel is compiled from: what changes it, and what doesn't."""

import functools
from pathlib import Path

import pytest
from triton.runtime.jit import DependenciesFinder

from envoi.epilogues.lower import FUNCTIONS, Lowered
from tests.helpers.slow import mostly_slow
from tools.machine_code import gate, source

# A module's text is parsed once: edits forget what depends on any.
PARSED = functools.cache(source.Module)
KERNELS = ("gemm-sm90-narrowed-fp8-row", "gemm-sm90-swiglu-fp8", "router-sm90-decode")


@pytest.fixture(autouse=True)
def edited(monkeypatch):
    """Return a function that edits a module's text as the hash reads it."""
    texts: dict[str, str] = {}
    read = Path.read_text

    def forget():
        source.module_of.cache_clear()
        source.text_of.cache_clear()
        source.needs.cache_clear()

    def edit(module: str, old: str, new: str) -> None:
        path = str(source.file_of(module))
        text = texts.get(path, read(Path(path)))
        assert old in text
        texts[path] = text.replace(old, new, 1)
        forget()

    monkeypatch.setattr(source, "Module", PARSED)
    monkeypatch.setattr(Path, "read_text", lambda path, **options: texts.get(str(path)) or read(path, **options))
    yield edit
    forget()


EDITS = {
    "the kernel": (0, "ops.gemm.hopper.kernel", "num_consumers == 3", "num_consumers == 4"),
    "a device function": (0, "ops.gemm.hopper.mainloop", "warpgroup_mma(", "warpgroup_mma_twice("),
    "a constexpr function": (0, "ops.gemm.hopper.consumer", "cfg.consumers_per_tile > 1", "cfg.consumers_per_tile > 2"),
    "an aggregate's method": (0, "runtime.ring", "self.num_stages - 1", "self.num_stages - 2"),
    "a property of a constant": (0, "ops.gemm.hopper.config", "self.num_stages", "self.num_consumers"),
    "what a generated epilogue calls": (1, "epilogues.tile_gluon", "return [turns, ", "return [turns + 1, "),
    "what that calls": (1, "epilogues.device", "power_of_two(x * -LOG2_E)", "power_of_two(x * LOG2_E)"),
    "a constant of a device function": (1, "epilogues.device", "1.4426950408889634", "1.4426950408889635"),
    "a change to the PTX": (0, "runtime.narrow_wgmma", "[: used // 2]", "[: used // 4]"),
    "an option of all launches": (0, "runtime.triton_compat", 'fp_fusion": True', 'fp_fusion": False'),
    "another kernel": (2, "ops.moe.router.choose_experts", "tl.max(slots, 1)", "tl.min(slots, 1)"),
}


@pytest.mark.parametrize(
    "what", mostly_slow(EDITS, quick=["the kernel", "what that calls", "an option of all launches"])
)
def test_an_edit_changes_it(what, edited):
    kernel, module, old, new = EDITS[what]
    before, elsewhere = gate.source_of(KERNELS[kernel], "sm_90"), gate.source_of("ep-mark", "sm_90")
    edited(f"envoi.{module}", old, new)
    assert gate.source_of(KERNELS[kernel], "sm_90") != before
    if module != "runtime.triton_compat":
        assert gate.source_of("ep-mark", "sm_90") == elsewhere


def test_text_of_an_epilogue_arguments_options_and_architecture_are_in_it():
    launch = gate.cases()[KERNELS[0]].launch()
    lowered = next(value for value in launch.arguments if isinstance(value, Lowered))
    other = object.__new__(Lowered)
    other.__dict__.update({**vars(lowered), "source": lowered.source + "\n"})
    changed = [
        launch._replace(arguments=tuple(other if value is lowered else value for value in launch.arguments)),
        launch._replace(options={**launch.options, "maxnreg": 64}),
        gate.cases()["gemm-sm90-narrowed-residual"].launch(),
    ]
    found = [source.digest(one, "sm_90") for one in [launch, *changed]]
    assert len({*found, source.digest(launch, "sm_100")}) == len(found) + 1


def test_it_reads_all_that_triton_reads(monkeypatch):
    """Test it against the functions that Triton's own key has, for a launch of every kernel function."""
    update_hash = DependenciesFinder._update_hash
    seen: dict[int, source.Definition] = {}
    total = 0

    def forget(function):
        monkeypatch.setattr(function, "used_global_vals", function.used_global_vals)
        monkeypatch.setattr(function, "hash", None)  # so that it looks into the function; other tests want it as it was

    def noting(self, function):
        if id(function) not in seen:
            seen[id(function)] = source.definition_of(function.fn)
            forget(function)
        update_hash(self, function)

    monkeypatch.setattr(DependenciesFinder, "_update_hash", noting)
    launches = {case.launch().kernel: case for case in gate.cases().values()}
    assert len(launches) > 30
    for case in launches.values():
        launch, arch = case.launch(), case.arches[0]
        seen.clear()
        generated = [
            getattr(value, name) for value in launch.arguments if isinstance(value, Lowered) for name in FUNCTIONS
        ]
        for function in [launch.kernel, *generated]:
            forget(function)
            function.cache_key  # noqa: B018
        read = {definition for definition in seen.values() if source.file_of(definition[0]) is not None}
        total += len(read)
        made = {definition for definition in read if definition[1] == "__init__"}  # of an aggregate, from its fields
        assert read - made <= source.compiled_from(launch, arch)[1], case.name
    assert total > 500

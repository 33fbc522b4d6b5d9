"""Facts about an engine's names: the same from its source, as the command reads them, and from the imported module."""

import sys
import zipfile

import pytest

from envoi.integrations import names
from envoi.integrations.names import Used
from envoi.integrations.vllm.used import ATTRIBUTES
from tools.engines.facts import fact, unnamed

SOURCE = {
    "an_engine/__init__.py": "from an_engine.inner import choose\nfrom .inner import Kind\n",
    "an_engine/inner.py": """
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum

class Kind(Enum):
    FAST = "fast"
    SLOW = "slow"

@dataclass
class Config:
    size: int
    name: str = ""

    @property
    def is_big(self): return self.size > 8

class Base(ABC):
    def __init__(self, config, *, device=None): ...
    @staticmethod
    @abstractmethod
    def supports(kind): ...
    @abstractmethod
    def run(self, x, out): ...
    @property
    def scale(self): return 1

class Kernel(Base):
    @staticmethod
    def supports(kind): return True
    @abstractmethod
    def shapes(self, M, N): ...

def choose(config, kind=Kind.FAST, **rest): ...

KEY = ("a", 1)
""",
}
INNER = "an_engine.inner"
ALL = (
    Used("an_engine", "choose", takes=("config", "kind")),
    Used("an_engine", "Kind", members=("SLOW",)),
    Used(INNER, "Kind", members=("FAST", "SLOW")),
    Used(INNER, "Config", members=("size", "name", "is_big")),
    Used(
        INNER, "Kernel",
        methods={"__init__": ("config", "device"), "run": ("x", "out"), "supports": ("kind",), "shapes": ("M", "N")},
        members=("scale",), abstract=("run", "shapes"),
    ),
    Used(INNER, "KEY"),
)  # fmt: skip


@pytest.fixture
def engine(tmp_path, monkeypatch):
    for name, text in SOURCE.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("an_engine", INNER):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("used", ALL, ids=str)
def test_source_and_module_give_one_fact(engine, used):
    read = fact(used, SOURCE.get)
    assert read is not None and read == names.fact_of(used, names.found_names([used])[used.name])
    assert not names.missing(used, read)


@pytest.mark.parametrize(
    "used, why",
    [
        (Used(INNER, "Missing"), "there is no an_engine.inner.Missing"),
        (Used("an_engine.gone", "choose"), "there is no an_engine.gone.choose"),
        (Used("an_engine", "choose", takes=("config", "layer")), "an_engine.choose doesn't take layer"),
        (Used(INNER, "Kind", members=("FAST", "FASTER")), "an_engine.inner.Kind has no FASTER"),
        (Used(INNER, "Kernel", methods={"run": ("x",)}), "an_engine.inner.Kernel.run takes (x, out), and (x) is"),
        (Used(INNER, "Kernel", methods={"stop": ()}), "an_engine.inner.Kernel.stop takes (no such method)"),
        (Used(INNER, "Kernel", abstract=("run",)), "an_engine.inner.Kernel wants shapes implemented"),
    ],
)
def test_what_has_moved_is_named(engine, used, why):
    assert names.missing(used, fact(used, SOURCE.get)).startswith(why)
    with pytest.raises(names.MovedError) as caught:
        names.found_names([*ALL, used])
    assert str(caught.value).startswith(why)


def test_what_keeps_a_module_from_being_imported_is_named(engine):
    (engine / "an_engine" / "broken.py").write_text("import a_package_that_is_missing\nKEY = 1\n")
    with pytest.raises(names.MovedError, match="no an_engine.broken.KEY: No module named 'a_package_that_is_missing'"):
        names.found_names([Used("an_engine.broken", "KEY")])


def test_attributes_that_a_wheel_no_longer_names(tmp_path):
    texts = {module: f"layer.{given[0]} = {list(given[1:])!r}" for module, given in ATTRIBUTES.items()}
    (kept, *_, moved) = ATTRIBUTES
    for lost, line in ({}, []), ({moved: "layer.done = None"}, [f"{moved} names no {ATTRIBUTES[moved][0]}"]):
        wheel = tmp_path / "vllm-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as file:
            for module, text in (texts | lost).items():
                file.writestr(f"{module.replace('.', '/')}.py", text)
        assert unnamed("vllm", wheel) == line and unnamed("sglang", wheel) == []
    with zipfile.ZipFile(wheel, "w"):
        pass
    assert f"{kept} names no moe_kernel" in unnamed("vllm", wheel)

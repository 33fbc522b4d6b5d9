"""Experts classes of the installed transformers, each built small from its own configuration's defaults, and the table
of docs/checkpoints.md: `python -m tests.integrations.classes` writes it."""

import copy
import importlib
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from envoi.integrations.transformers import is_experts, recognise_activation, register, unserved

PAGE = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"
BEGIN, END = "<!-- table: python -m tests.integrations.classes -->", "<!-- end of classes -->"
HIDDEN, INTERMEDIATE, EXPERTS, TOPK, TOKENS = 128, 64, 4, 2, 9
SIZES = {
    "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "moe_intermediate_size": INTERMEDIATE,
    "num_experts": EXPERTS, "num_local_experts": EXPERTS, "n_routed_experts": EXPERTS, "moe_latent_size": None,
}  # fmt: skip


class Small:
    """Configuration with other sizes and an experts_implementation of its own."""

    def __init__(self, config: Any):
        self.config, self._experts_implementation = config, "eager"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "config":  # while a copy is made there is none yet
            raise AttributeError(name)
        value = getattr(self.config, name)  # a missing attribute stays missing
        return SIZES.get(name, value)


@dataclass(frozen=True)
class Kind:
    """Experts class and a small random module of it, in bf16."""

    family: str
    name: str
    module: Any


def names() -> list[tuple[str, str]]:
    """Return transformers' classes whose experts are looked up by experts_implementation: (module, name).

    Found in the text, so nothing is left out, and none of the modules is imported: each process collects these.
    """
    models, found = Path(transformers.__file__).parent / "models", []
    for file in sorted(models.glob("*/modeling_*.py")):
        lines = file.read_text().splitlines()
        for number, line in enumerate(lines):
            if line.startswith("@use_experts_implementation"):
                name = next(text for text in lines[number + 1 :] if text.startswith("class "))
                module = f"transformers.models.{file.parent.name}.{file.stem}"
                found.append((module, name.removeprefix("class ").partition("(")[0]))
    return found


def class_of(module: str, name: str) -> Any:
    """Import a class."""
    return getattr(importlib.import_module(module), name)


def build(code: str, name: str) -> Kind:
    """Build a class from the first configuration of its family that has what it reads."""
    settings = importlib.import_module(code.replace("modeling_", "configuration_"))
    own = [kind for _, kind in inspect.getmembers(settings, inspect.isclass) if kind.__module__ == settings.__name__]
    tried = []
    for kind in own:
        try:
            module = class_of(code, name)(Small(kind()))
        except (AttributeError, TypeError, KeyError) as error:
            tried.append(f"{kind.__name__}: {error}")
            continue
        source = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for x in module.parameters():
                x.copy_(torch.randn(x.shape, generator=source) * (0.1 if x.dim() > 2 else 0.5))
        return Kind(code.split(".")[2], name, module.bfloat16())
    raise AssertionError(f"{name}: no configuration fits: {tried}")


def outputs(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what Envoi computes in bf16, and the module's own code in float64."""
    source = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, HIDDEN, generator=source).bfloat16()
    weights = torch.rand(TOKENS, TOPK, generator=source)
    ids = torch.rand(TOKENS, EXPERTS, generator=source).topk(TOPK).indices
    wide = copy.deepcopy(module).double()
    with torch.no_grad():
        want = wide(x.double(), ids, weights.double())
        module.config._experts_implementation = "envoi"
        return module(x, ids, weights), want


def described(module: Any) -> str:
    """Return a module's activation and the layout of its weights, in words."""
    assert is_experts(module)
    reason = unserved(module)
    if reason is not None:
        return f"refused: {reason}"
    activation, limit = recognise_activation(module)
    activation = activation.partition("(")[0]  # of a formula that is text, its name
    text = activation if limit is None else f"{activation}, clamped at {limit:g}"
    if not module.has_gate:
        return f"{text}, without a gate"
    rows = "gate, then up" if module.is_concatenated else "gate and up in turn"
    return f"{text}; {rows}" + ("; transposed" if module.is_transposed else "") + ("; biases" * module.has_bias)


def found() -> dict[str, str]:
    """Return what each class computes, by "family Class"."""
    kinds = [build(code, name) for code, name in names()]
    return {f"{kind.family} {kind.name}": described(kind.module) for kind in kinds}


def table() -> str:
    """Return the table's text, a row for classes that are alike."""
    alike: dict[str, list[str]] = {}
    for name, what in found().items():
        alike.setdefault(what, []).append(name.split()[1].removesuffix("Experts"))
    rows = [f"| {what} | {len(all_)} | {', '.join(all_)} |" for what, all_ in sorted(alike.items())]
    head = '| activation and weights | classes | names, without "Experts" |\n|---|---|---|'
    total = sum(map(len, alike.values()))
    return "\n".join([f"transformers {transformers.__version__}, {total} classes:\n", head, *rows])


def documented() -> tuple[str, dict[str, str]]:
    """Return the page's version of transformers, and what the page says of each class, by its name."""
    text = PAGE.read_text().split(BEGIN)[1].split(END)[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    said = {f"{name}Experts": what for what, _, all_ in rows for name in all_.split(", ")}
    return text.split()[1].rstrip(","), said


if __name__ == "__main__":
    register()
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}")

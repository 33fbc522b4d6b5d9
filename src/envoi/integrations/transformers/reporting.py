"""Report of a transformers model's experts modules: how each is stored, whether Envoi runs it, and why not."""

from dataclasses import dataclass
from typing import Any

import torch

from envoi.check import dtype_name
from envoi.integrations import packings
from envoi.integrations.transformers.modules import (
    FORMAT_OF,
    is_experts,
    local_part,
    own_weights,
    released,
    stored_format,
    unserved,
)
from envoi.ops.moe.op import tensors_of
from envoi.ops.moe.parallel import ExpertParallel
from envoi.table import align, fold

OUTSIDE = "transformers doesn't look its experts up by experts_implementation, and always runs the model's own code"
FEW = 3  # layers alike that are listed by name


@dataclass(frozen=True)
class Row:
    """Experts module: its path and class, what its weights are stored as ("bfloat16", "fp8_block128", ..), the chosen
    experts_implementation, why Envoi doesn't run it, "" if it does, and the bytes of memory of its weights: its own and
    those that Envoi keeps packed, none counted twice. load: for a module that holds an `envoi.ExpertParallel`, which
    rank and expert bound its last calls, else ""."""

    path: str
    kind: str
    stored: str
    chosen: str
    why: str
    num_bytes: int
    load: str = ""

    @property
    def runs(self) -> bool:
        """Return True if Envoi runs this module."""
        return not self.why


@dataclass(frozen=True)
class Report:
    """Rows for all experts modules of a model, in its order; printed with modules that are alike in one line."""

    rows: tuple[Row, ...]

    def __str__(self) -> str:
        if not self.rows:
            return "no experts modules found"
        alike: dict[tuple[str, ...], list[Row]] = {}
        for row in self.rows:
            alike.setdefault((row.kind, row.stored, row.chosen, row.why), []).append(row)
        lines = [
            (str(len(rows)), kind, stored, chosen, "no" if why else "yes", f"{_megabytes(rows):.2f}")
            for (kind, stored, chosen, why), rows in alike.items()
        ]
        text = [align(("modules", "class", "stored as", "implementation", "by Envoi", "MB"), lines, left=(1, 2, 3, 4))]
        for (kind, *_, why), rows in alike.items():
            if why:
                named = ", ".join(row.path for row in rows[:FEW]) + (", .." if len(rows) > FEW else "")
                text.append(fold(f"{kind} ({named}): {why}"))
        text += [fold(f"{row.path}: {row.load}") for row in self.rows if row.load]
        return "\n".join(text)


def _megabytes(rows: list[Row]) -> float:
    return sum(row.num_bytes for row in rows) / 1e6


def report(model: torch.nn.Module) -> Report:
    """Look at every experts module of a model, and every module that holds an `ExpertParallel`; reads no weights."""
    rows, seen = [], []
    for path, module in model.named_modules():
        if any(path.startswith(f"{above}.") for above in seen):
            continue
        parallel = next((x for x in vars(module).values() if isinstance(x, ExpertParallel)), None)
        if parallel is not None:
            seen.append(path)
            rows.append(_parallel_row(path, module, parallel))
        elif is_experts(module) or _looks_like_experts(path, module):
            seen.append(path)
            rows.append(_row(path, module))
    return Report(tuple(rows))


def _parallel_row(path: str, module: Any, parallel: ExpertParallel) -> Row:
    held = [x for x in tensors_of(parallel.experts) if x is not None]
    chosen = f"ExpertParallel over {parallel.transport}"
    num_bytes = sum(x.nbytes for x in held)
    return Row(path, type(module).__name__, parallel.experts.format, chosen, "", num_bytes, str(parallel.load()))


def _looks_like_experts(path: str, module: torch.nn.Module) -> bool:
    named = path.rsplit(".", 1)[-1] == "experts" or type(module).__name__.endswith("Experts")
    return named and next(module.parameters(), None) is not None


def _row(path: str, module: Any) -> Row:
    kind = type(module).__name__
    if not is_experts(module):
        mxfp4 = kind == "Mxfp4GptOssExperts"
        why = "its MXFP4 weights are in the order of transformers' own kernels; choose Envoi in from_pretrained"
        stored = "mxfp4" if mxfp4 else _dtype(module)
        return Row(path, kind, stored, "-", why if mxfp4 else OUTSIDE, _num_bytes(module))
    chosen = str(module.config._experts_implementation)
    why = unserved(module, FORMAT_OF.get(chosen, "bf16")) or ""
    if chosen not in FORMAT_OF:
        reason = f"experts_implementation is {chosen!r}"
        why = f"{reason}, and Envoi can't run it: {why}" if why else reason
    return Row(path, kind, _stored(module), chosen, why, _num_bytes(module))


def _num_bytes(module: Any) -> int:
    held: list[torch.Tensor | None] = [local_part(x) for x in module.parameters()]
    if is_experts(module):
        freed = released(module)
        packed = [freed.experts] if freed is not None else packings.kept(own_weights(module))
        held += [x for experts in packed for x in tensors_of(experts)]
    # Packed weights may be the module's own memory, and tensors without memory are at 0.
    return sum({x.data_ptr(): x.nbytes for x in held if not (x is None or x.is_meta)}.values())


def _stored(module: Any) -> str:
    try:
        return stored_format(module) or _dtype(module)
    except ValueError:
        return _dtype(module)


def _dtype(module: torch.nn.Module) -> str:
    matrices = [x for x in module.parameters() if x.dim() >= 2]
    return dtype_name((matrices or list(module.parameters()))[0].dtype)

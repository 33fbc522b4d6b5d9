"""Experts of which each matrix is a tensor of its own: read one after the other into tensors of all experts."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from envoi.checkpoints.config import Config
from envoi.checkpoints.integers import read_integers
from envoi.checkpoints.names import Separate, check_beside
from envoi.checkpoints.quantisation import Quantisation
from envoi.checkpoints.schemes import ALL, FLOATS, Integers, Stored
from envoi.checkpoints.shards import Shards
from envoi.quant.bits import as_bytes
from envoi.quant.regroup import stored_factors
from envoi.runtime.math import cdiv
from envoi.types import Matrix


class Tensors(NamedTuple):
    """A layer's experts as `envoi.experts.pack` takes them, by the names of its arguments."""

    gate_up: Matrix
    down: Matrix
    gate_up_sf: torch.Tensor | None = None
    down_sf: torch.Tensor | None = None
    gate_up_scale: torch.Tensor | None = None
    down_scale: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    weight_block_size: tuple[int, int] | None = None


class SeparateExperts:
    """Names, dtypes and shapes of a layer's tensors, all compared with the files' headers when it is made.

    stored: how quantised weights are stored, None where quantization_config says that these aren't.
    group: rows and columns that share a factor, `ALL` for all of a side; None for weights in float.
    """

    def __init__(
        self, shards: Shards, quantisation: Quantisation | None, named: Separate, ids: Sequence[int], count: int
    ):
        self.shards, self.named, self.ids = shards, named, ids
        self.why = why_all(count)
        stored = stored_of(quantisation, named, ids)
        if isinstance(stored, Integers):
            name = named.name(ids[0] if ids else 0, named.inputs[0], stored.weight)
            raise ValueError(
                f"{shards.file_of.get(name, shards.path)}: {name}: expected experts that transformers keeps as they "
                "are stored, got INT4; envoi.experts.from_checkpoint loads them"
            )
        self.stored = stored
        self.part = self._part()
        first = ids[0] if ids else 0
        name = named.name(first, named.inputs[0], self.part)
        self.dtype, shape = expect_weights(shards, name, self.stored, quantisation, self.why)
        if len(shape) != 2:
            raise ValueError(f"{shards.file_of[name]}: {name}: expected a matrix [intermediate, hidden], got {shape}")
        self.per_byte = 1 if self.dtype in FLOATS or self.dtype == torch.float8_e4m3fn else 2
        self.intermediate, self.hidden = shape[0], shape[1] * self.per_byte
        self.group = self.stored.groups[self.dtype] if self.stored and self.dtype not in FLOATS else None
        self._check()

    def _part(self) -> str:
        """Return the last part of the weights' names: quantised ones may have another, if this layer is quantised."""
        parts = (self.stored.weight if self.stored else "weight", "weight", "weight_packed")
        names = {part: self.named.name(self.ids[0] if self.ids else 0, self.named.inputs[0], part) for part in parts}
        return next((part for part, name in names.items() if name in self.shards.file_of), parts[0])

    def shape(self, projection: str) -> tuple[int, int]:
        """Return rows and columns of a projection, in elements."""
        down = projection == self.named.down
        return (self.hidden, self.intermediate) if down else (self.intermediate, self.hidden)

    def grouped(self, projection: str) -> tuple[int, int]:
        """Return how many factors a projection has along its rows and columns."""
        sides = zip(self.shape(projection), self.group or (1, 1), strict=True)
        rows, columns = (1 if side == ALL else cdiv(size, side) for size, side in sides)
        return rows, columns

    def factor(self, expert: int, projection: str) -> str:
        """Return the name of a projection's factors: the first that is there, of those that it may have."""
        parts = self.stored.factors if self.stored else ()
        names = [self.named.name(expert, projection, part) for part in parts]
        return next((name for name in names if name in self.shards.file_of), names[0] if names else "")

    def scale(self, expert: int, projection: str) -> str:
        """Return the name of the scale that a projection has on top of its factors; "" if it has none."""
        part = self.stored.scale if self.stored and self.group is not None else ""
        return part and self.named.name(expert, projection, part)

    def _check(self) -> None:
        for expert in self.ids:
            for projection in self.named.projections:
                rows, columns = self.shape(projection)
                name = self.named.name(expert, projection, self.part)
                self.shards.expect(name, (self.dtype,), ((rows, columns // self.per_byte),), self.why)
                bias = self.named.name(expert, projection, "bias")
                if bias in self.shards.file_of:
                    raise ValueError(f"{self.shards.file_of[bias]}: {bias}: expected experts without biases, got one")
                if self.stored is not None and self.group is not None:
                    sides = self.grouped(projection)
                    flat = [(sides[0],)] if sides[1] == 1 else []
                    flat += [(sides[0], 1, sides[1], 1)] if self.stored.spread else []
                    shapes = (sides, *flat, *([()] if sides == (1, 1) else []))
                    why = f"the factors of {name}"
                    self.shards.expect(self.factor(expert, projection), self.stored.kinds, shapes, why)
                if self.scale(expert, projection):
                    name, why = self.scale(expert, projection), f"the scale of {name}"
                    self.shards.expect(name, (torch.float32,), ((), (1,)), why)
        check_beside(self.shards.file_of, self.named, self._parts())

    def _parts(self) -> set[str]:
        """Return the last parts of the names of all tensors that are read."""
        if self.stored is None or self.group is None:
            return {self.part}
        each = [(expert, projection) for expert in self.ids or (0,) for projection in self.named.projections]
        factors = {self.factor(*one).removeprefix(self.named.name(*one, "")) for one in each}
        return {self.part, self.stored.scale, *factors}


def why_all(count: int) -> str:
    """Return why an expert's tensor is expected."""
    return f"the layer has experts 0 to {count - 1}"


def stored_of(quantisation: Quantisation | None, named: Separate, ids: Sequence[int]) -> Stored | Integers | None:
    """Return how the experts `ids` are stored, None if they aren't quantised."""
    return stored_as(quantisation, [named.name(e, p, "") for e in ids or (0,) for p in named.projections])


def stored_as(
    quantisation: Quantisation | None, names: Sequence[str], stacked: bool = False
) -> Stored | Integers | None:
    """Return how the modules are stored to which tensors of these names belong, None if none is quantised."""
    modules = [name.removesuffix(".weight").removesuffix(".") for name in names]
    return quantisation.stored(modules, stacked) if quantisation else None


def expect_weights(
    shards: Shards, name: str, stored: Stored | None, quantisation: Quantisation | None, why: str = ""
) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return dtype and shape of weights, which are in float or in a dtype of how they are stored. Reads headers."""
    dtype = shards.header(name, why)[0]
    if stored is None and quantisation is not None and dtype not in FLOATS:
        raise ValueError(
            f"{shards.file_of[name]}: {name}: expected bfloat16, float16 or float32, as quantization_config leaves "
            f"this module as it is or doesn't name it, got {dtype}"
        )
    return shards.expect(name, (*FLOATS, *(stored.groups if stored else ())), (), why)


def block_of(group: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return rows and columns of a group as `pack` takes them; None where its shape of factors says all."""
    return None if group is None or ALL in group else group


def read_separate(
    shards: Shards, config: Config, named: Separate, ids: Sequence[int], count: int, device: torch.device,
    step: Callable[[int], None],
) -> Tensors:  # fmt: skip
    """Read the experts `ids` as stored: gate_up [E, 2I, H], all gate rows first, or up [E, I, H]; down [E, H, I]."""
    stored = stored_of(config.quantisation, named, ids)
    if isinstance(stored, Integers):
        return Tensors(*read_integers(shards, named, stored, ids, why_all(count), device, step))
    plan = SeparateExperts(shards, config.quantisation, named, ids, count)
    intermediate, hidden = plan.intermediate, plan.hidden
    values = [
        torch.empty(len(ids), rows, columns // plan.per_byte, dtype=plan.dtype, device=device)
        for rows, columns in ((len(named.inputs) * intermediate, hidden), (hidden, intermediate))
    ]
    factors = [_factors(plan, named.inputs, device), _factors(plan, (named.down,), device)]
    for position, expert in enumerate(ids):
        step(expert)
        parts = (*values[0][position].split(intermediate), values[1][position])
        for projection, rows in zip(named.projections, parts, strict=True):
            rows.copy_(shards.read(named.name(expert, projection, plan.part)))
    if plan.group is None:
        return Tensors(values[0], values[1])
    scales = [_scales(plan, named.inputs, device), _scales(plan, (named.down,), device)]
    return Tensors(
        values[0], values[1], factors[0], factors[1], scales[0], scales[1], weight_block_size=block_of(plan.group)
    )


def _factors(plan: SeparateExperts, projections: tuple[str, ...], device: torch.device) -> torch.Tensor:
    """Read the factors of these projections, one below the other: [E, rows, columns] of groups."""
    if plan.group is None or not plan.ids:
        rows, columns = plan.grouped(projections[0])
        kind = torch.float8_e4m3fn if plan.stored is not None and plan.stored.scale else torch.float32
        return torch.empty(0, len(projections) * rows, columns, dtype=kind, device=device)
    parts = [
        stored_factors(plan.shards.read(plan.factor(expert, projection))).reshape(plan.grouped(projection))
        for expert in plan.ids
        for projection in projections
    ]
    rows, columns = parts[0].shape
    whole = torch.stack([as_bytes(part) for part in parts]).view(len(plan.ids), len(projections) * rows, columns)
    return whole.view(parts[0].dtype).to(device)


def _scales(plan: SeparateExperts, projections: tuple[str, ...], device: torch.device) -> torch.Tensor | None:
    """Read the scales of these projections' matrices, float32 [E, projections], to be multiplied; None without."""
    if plan.stored is None or not plan.stored.scale:
        return None
    found = torch.ones(len(plan.ids), len(projections), dtype=torch.float32)
    for position, expert in enumerate(plan.ids):
        for column, projection in enumerate(projections):
            found[position, column] = plan.shards.read(plan.scale(expert, projection)).reshape(())
    return (found.reciprocal() if plan.stored.inverse else found).to(device)

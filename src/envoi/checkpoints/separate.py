"""Experts of which each matrix is a tensor of its own: read one after the other into tensors of all experts."""

from collections.abc import Callable, Sequence

import torch

from envoi.checkpoints.config import ALL, FLOATS, Config, Quantisation
from envoi.checkpoints.names import Separate, check_beside
from envoi.checkpoints.shards import Shards
from envoi.quant.bits import as_bytes
from envoi.quant.regroup import FACTORS, stored_factors
from envoi.types import Matrix, QuantTensor

BIASES = (None, None)


class Plan:
    """Names, dtypes and shapes of a layer's tensors, all compared with the files' headers when it is made."""

    def __init__(
        self, shards: Shards, quantisation: Quantisation | None, named: Separate, ids: Sequence[int], count: int
    ):
        self.shards, self.named, self.ids = shards, named, ids
        self.why = f"the layer has experts 0 to {count - 1}"
        self.quantisation = quantisation
        self.part = self._part()
        first = ids[0] if ids else 0
        name = named.name(first, named.gate, self.part)
        dtypes = (*FLOATS, *(self.quantisation.groups if self.quantisation else ()))
        self.dtype, shape = shards.expect(name, dtypes, (), self.why)
        if len(shape) != 2:
            raise ValueError(f"{shards.file_of[name]}: {name}: expected a matrix [intermediate, hidden], got {shape}")
        self.per_byte = 1 if self.dtype in FLOATS or self.dtype == torch.float8_e4m3fn else 2
        self.intermediate, self.hidden = shape[0], shape[1] * self.per_byte
        self.group = None if self.dtype in FLOATS else self._group(name)
        self._check()

    def _part(self) -> str:
        """Return the last part of the weights' names: quantised ones may have another, if this layer is quantised."""
        other = self.quantisation.weight if self.quantisation else "weight"
        named = self.named.name(self.ids[0] if self.ids else 0, self.named.gate, other)
        return other if named in self.shards.file_of else "weight"

    def _group(self, name: str) -> tuple[int, int]:
        quantisation: Quantisation = self.quantisation  # pyright: ignore[reportAssignmentType]
        group = quantisation.groups[self.dtype]
        for what, size, side in (("intermediate", self.intermediate, group[0]), ("hidden", self.hidden, group[1])):
            if side > 1 and size % side:
                raise ValueError(
                    f"{self.shards.file_of[name]}: {name}: expected a multiple of {side} as {what} size, as "
                    f"{group[0]} x {group[1]} elements share a factor, got {size}"
                )
        return group

    def shape(self, projection: str) -> tuple[int, int]:
        """Return rows and columns of a projection, in elements."""
        down = projection == self.named.down
        return (self.hidden, self.intermediate) if down else (self.intermediate, self.hidden)

    def grouped(self, projection: str) -> tuple[int, int]:
        """Return how many factors a projection has along its rows and columns."""
        sides = zip(self.shape(projection), self.group or (1, 1), strict=True)
        rows, columns = (1 if side == ALL else size // side for size, side in sides)
        return rows, columns

    def factor(self, expert: int, projection: str) -> str:
        """Return the name of a projection's factors: the first that is there, of those that it may have."""
        parts = self.quantisation.factors if self.quantisation else ()
        names = [self.named.name(expert, projection, part) for part in parts]
        return next((name for name in names if name in self.shards.file_of), names[0] if names else "")

    def scale(self, expert: int, projection: str) -> str:
        """Return the name of the scale that a projection has on top of its factors; "" if it has none."""
        part = self.quantisation.scale if self.quantisation and self.group is not None else ""
        return part and self.named.name(expert, projection, part)

    def _check(self) -> None:
        for expert in self.ids:
            for projection in (self.named.gate, self.named.up, self.named.down):
                rows, columns = self.shape(projection)
                name = self.named.name(expert, projection, self.part)
                self.shards.expect(name, (self.dtype,), ((rows, columns // self.per_byte),), self.why)
                bias = self.named.name(expert, projection, "bias")
                if bias in self.shards.file_of:
                    raise ValueError(f"{self.shards.file_of[bias]}: {bias}: expected experts without biases, got one")
                if self.group is not None:
                    sides = self.grouped(projection)
                    flat = [(sides[0],)] if sides[1] == 1 else []
                    shapes = (sides, *flat, *([()] if sides == (1, 1) else []))
                    why = f"the factors of {name}"
                    self.shards.expect(self.factor(expert, projection), FACTORS, shapes, why)
                if self.scale(expert, projection):
                    name, why = self.scale(expert, projection), f"the scale of {name}"
                    self.shards.expect(name, (torch.float32,), ((), (1,)), why)
        check_beside(self.shards.file_of, self.named, self._parts())

    def _parts(self) -> set[str]:
        """Return the last parts of the names of all tensors that are read."""
        parts = {self.part, *([self.quantisation.scale] if self.quantisation and self.group is not None else [])}
        if self.group is not None:
            each = [(e, name) for e in self.ids or (0,) for name in (self.named.gate, self.named.up, self.named.down)]
            parts |= {self.factor(*one).removeprefix(self.named.name(*one, "")) for one in each}
        return parts


def read_separate(
    shards: Shards, config: Config, named: Separate, ids: Sequence[int], count: int, device: torch.device,
    step: Callable[[int], None],
) -> tuple[Matrix, Matrix, tuple[None, None]]:  # fmt: skip
    """Read the experts `ids`: gate_up [E, 2I, H], all gate rows first, and down [E, H, I], as the file stores them."""
    plan = Plan(shards, config.quantisation, named, ids, count)
    intermediate, hidden = plan.intermediate, plan.hidden
    values = [
        torch.empty(len(ids), rows, columns // plan.per_byte, dtype=plan.dtype, device=device)
        for rows, columns in ((2 * intermediate, hidden), (hidden, intermediate))
    ]
    factors = [_factors(plan, (named.gate, named.up), device), _factors(plan, (named.down,), device)]
    for position, expert in enumerate(ids):
        step(expert)
        gate_up, down = values[0][position], values[1][position]
        for projection, rows in ((named.gate, gate_up[:intermediate]), (named.up, gate_up[intermediate:]),
                                 (named.down, down)):  # fmt: skip
            rows.copy_(shards.read(named.name(expert, projection, plan.part)))
    if plan.group is None:
        return values[0], values[1], BIASES
    scales = [_scales(plan, (named.gate, named.up), device), _scales(plan, (named.down,), device)]
    sides = []
    for x, sf, scale, rows, columns in zip(
        values, factors, scales, (intermediate, hidden), (hidden, intermediate), strict=True
    ):
        group = (plan.group[0] or rows, plan.group[1] or columns)
        sides.append(QuantTensor(x.view(torch.uint8) if plan.per_byte == 2 else x, sf, group, scale))
    return sides[0], sides[1], BIASES


def _factors(plan: Plan, projections: tuple[str, ...], device: torch.device) -> torch.Tensor:
    """Read the factors of these projections, one below the other: [E, rows, columns] of groups."""
    if plan.group is None or not plan.ids:
        rows, columns = plan.grouped(projections[0])
        nvfp4 = plan.quantisation is not None and plan.quantisation.scale
        kind = torch.float8_e4m3fn if nvfp4 else torch.float32
        return torch.empty(0, len(projections) * rows, columns, dtype=kind, device=device)
    parts = [
        stored_factors(plan.shards.read(plan.factor(expert, projection))).reshape(plan.grouped(projection))
        for expert in plan.ids
        for projection in projections
    ]
    rows, columns = parts[0].shape
    whole = torch.stack([as_bytes(part) for part in parts]).view(len(plan.ids), len(projections) * rows, columns)
    return whole.view(parts[0].dtype).to(device)


def _scales(plan: Plan, projections: tuple[str, ...], device: torch.device) -> torch.Tensor | None:
    """Read the scales of these projections' matrices, float32 [E, projections], to be multiplied; None without."""
    if plan.quantisation is None or not plan.quantisation.scale:
        return None
    found = torch.ones(len(plan.ids), len(projections), dtype=torch.float32)
    for position, expert in enumerate(plan.ids):
        for column, projection in enumerate(projections):
            found[position, column] = plan.shards.read(plan.scale(expert, projection)).reshape(())
    return (found.reciprocal() if plan.quantisation.inverse else found).to(device)

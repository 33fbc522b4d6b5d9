"""Experts that are stored together, [num_experts, ..] in a tensor: only the rows of the experts asked for are read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from envoi.checkpoints.config import FLOATS, MX, Config, Quantisation
from envoi.checkpoints.names import Stacked, check_beside
from envoi.checkpoints.shards import Shards
from envoi.quant.regroup import FACTORS, stored_factors
from envoi.types import Matrix, QuantTensor

PER_BLOCK, BYTES = 32, 16  # elements of a block of E2M1, and its bytes
Biases = tuple[torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True)
class Part:
    """Names of one projection's tensors, factors "" and bias "" if there are none; group: as in a QuantTensor."""

    values: str
    factors: str
    bias: str
    group: tuple[int, int]
    transposed: bool = False

    @property
    def names(self) -> list[str]:
        """Names of its tensors."""
        return [name for name in (self.values, self.factors, self.bias) if name]

    def matrix(self, read: dict[str, torch.Tensor]) -> Matrix:
        """Return the projection as [E, rows, columns] from its tensors [E, ..]."""
        values = read[self.values]
        if not self.factors:
            return values.transpose(1, 2) if self.transposed else values
        if values.dtype != torch.float8_e4m3fn:
            values = values.view(torch.uint8)
        values = values.flatten(-2) if values.dim() == 4 else values
        return QuantTensor(values, stored_factors(read[self.factors]), self.group)


def read_stacked(
    shards: Shards, config: Config, named: Stacked, ids: Sequence[int], count: int, device: torch.device,
    step: Callable[[int], None],
) -> tuple[Matrix, Matrix, Biases]:  # fmt: skip
    """Read the experts `ids`: gate_up [E, 2I, H] with the file's order of rows, down [E, H, I], and both biases."""
    parts = plan_stacked(shards, config.quantisation, named, count)
    read: dict[str, torch.Tensor] = {}
    for name in (name for part in parts for name in part.names):
        dtype, shape = shards.header(name)
        read[name] = torch.empty(len(ids), *shape[1:], dtype=dtype, device=device)
    for position, expert in enumerate(ids):
        step(expert)
        for name, x in read.items():
            x[position].copy_(shards.read_rows(name, expert, expert + 1)[0])
    biases = [read[part.bias] if part.bias else None for part in parts]
    return parts[0].matrix(read), parts[1].matrix(read), (biases[0], biases[1])


def plan_stacked(shards: Shards, quantisation: Quantisation | None, named: Stacked, count: int) -> list[Part]:
    """Return the parts of gate_up and down, all compared with the files' headers."""
    parts = _plan_blocks(shards, named, count) if named.blocks else _plan_matrices(shards, quantisation, named, count)
    if bool(parts[0].bias) != bool(parts[1].bias):
        lacking = f"{named.down if parts[0].bias else named.gate_up}_bias"
        raise ValueError(f"{shards.path}: {lacking}: expected a bias, as the other projection has one, got none")
    check_beside(shards.file_of, named, [name for part in parts for name in part.names])
    return parts


def _plan_blocks(shards: Shards, named: Stacked, count: int) -> list[Part]:
    """Compare gpt-oss's _blocks [E, rows, columns / 32, 16] and _scales [E, rows, columns / 32] with the headers."""
    _, shape = shards.expect(f"{named.gate_up}_blocks", (torch.uint8,), ())
    rows, blocks = (shape[1], shape[2]) if len(shape) == 4 else (2 * PER_BLOCK, 1)
    parts = []
    for name, side in ((named.gate_up, (rows, blocks)), (named.down, (blocks * PER_BLOCK, rows // 2 // PER_BLOCK))):
        shards.expect(f"{name}_blocks", (torch.uint8,), ((count, *side, BYTES),))
        shards.expect(f"{name}_scales", (torch.uint8, torch.float8_e8m0fnu), ((count, *side),))
        parts.append(Part(f"{name}_blocks", f"{name}_scales", _bias(shards, name, (count, side[0])), MX))
    return parts


def _plan_matrices(shards: Shards, quantisation: Quantisation | None, named: Stacked, count: int) -> list[Part]:
    """Compare [E, 2I, H] and [E, H, I], or both transposed, with the headers; and the factors of quantised ones."""
    groups = quantisation.groups if quantisation else {}
    dtype, one = shards.expect(named.gate_up, (*FLOATS, *groups), ())
    _, two = shards.expect(named.down, (dtype,), ())
    transposed = len(one) == len(two) == 3 and (one[1], one[2]) == (two[2], 2 * two[1])
    per_byte = 1 if dtype in FLOATS or dtype == torch.float8_e4m3fn else 2
    rows, hidden = (one[2], one[1]) if transposed else (one[-2], one[-1] * per_byte)
    parts = []
    for name, size, columns in ((named.gate_up, rows, hidden), (named.down, hidden, rows // 2)):
        side = (columns, size) if transposed else (size, columns // per_byte)
        shards.expect(name, (dtype,), ((count, *side),))
        factors, group = "", MX
        if dtype in groups:
            group = groups[dtype][0] or size, groups[dtype][1] or columns
            factors = f"{name}_scale_inv"
            wanted = (count, *(-(-n // g) for n, g in zip((size, columns), group, strict=True)))
            shards.expect(factors, FACTORS, (wanted,), f"the factors of {name}")
        parts.append(Part(name, factors, _bias(shards, name, (count, size)), group, transposed))
    return parts


def _bias(shards: Shards, name: str, shape: tuple[int, ...]) -> str:
    """Return the name of a projection's bias, which must have this shape; "" if there is none."""
    name = f"{name}_bias"
    if name not in shards.file_of:
        return ""
    shards.expect(name, FLOATS, (shape,))
    return name

"""Experts that are stored together, [num_experts, ..] in a tensor: only the rows of the experts asked for are read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from envoi.checkpoints.config import Config
from envoi.checkpoints.names import Stacked, check_beside
from envoi.checkpoints.quantisation import Quantisation
from envoi.checkpoints.schemes import ALL, FLOATS, MX, Integers, Stored
from envoi.checkpoints.separate import Tensors, block_of, expect_weights, stored_as
from envoi.checkpoints.shards import Shards
from envoi.runtime.math import cdiv

PER_BLOCK, BYTES = 32, 16  # elements of a block of E2M1, and its bytes


@dataclass(frozen=True)
class Part:
    """Names of one projection's tensors, factors "" and bias "" if there are none. group: of `SeparateExperts`."""

    values: str
    factors: str
    bias: str
    group: tuple[int, int] | None
    transposed: bool = False

    @property
    def names(self) -> list[str]:
        """Names of its tensors."""
        return [name for name in (self.values, self.factors, self.bias) if name]

    def matrix(self, read: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the weights as [E, rows, columns] from its tensors [E, ..]."""
        values = read[self.values]
        return values.transpose(1, 2) if self.transposed else values


def read_stacked(
    shards: Shards, config: Config, named: Stacked, ids: Sequence[int], count: int, device: torch.device,
    step: Callable[[int], None],
) -> Tensors:  # fmt: skip
    """Read the experts `ids`: gate_up [E, 2I, H] with the file's order of rows, down [E, H, I], and both biases."""
    ranges = 2 if config.gate_up_layout(named.gate_up) == "concat" else 1
    parts = plan_stacked(shards, config.quantisation, named, count, ranges)
    read: dict[str, torch.Tensor] = {}
    for name in (name for part in parts for name in part.names):
        dtype, shape = shards.header(name)
        read[name] = torch.empty(len(ids), *shape[1:], dtype=dtype, device=device)
    for position, expert in enumerate(ids):
        step(expert)
        for name, x in read.items():
            x[position].copy_(shards.read_rows(name, expert, expert + 1)[0])
    factors, biases = [read.get(part.factors) for part in parts], [read.get(part.bias) for part in parts]
    return Tensors(
        parts[0].matrix(read), parts[1].matrix(read), factors[0], factors[1], gate_up_bias=biases[0],
        down_bias=biases[1], weight_block_size=block_of(parts[0].group),
    )  # fmt: skip


def plan_stacked(
    shards: Shards, quantisation: Quantisation | None, named: Stacked, count: int, ranges: int = 2
) -> list[Part]:
    """Return the parts of gate_up and down, all compared with the files' headers.

    ranges: of the rows of gate_up, in each of which blocks begin anew: 2 for gate above up, 1 for rows in turn.
    """
    if named.blocks:
        parts = _plan_blocks(shards, named, count)
    else:
        parts = _plan_matrices(shards, quantisation, named, count, ranges)
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


def _plan_matrices(
    shards: Shards, quantisation: Quantisation | None, named: Stacked, count: int, ranges: int
) -> list[Part]:  # fmt: skip
    """Compare [E, 2I, H] and [E, H, I], or in float both transposed, with the headers; and quantised ones' factors."""
    stored = stored_as(quantisation, (named.gate_up, named.down), stacked=True)
    if isinstance(stored, Integers):
        raise ValueError(
            f"{shards.file_of[named.gate_up]}: {named.gate_up}: expected INT4 experts with tensors for each matrix, "
            "got all in one tensor"
        )
    dtype, one = expect_weights(shards, named.gate_up, stored, quantisation)
    _, two = shards.expect(named.down, (dtype,), ())
    transposed = dtype in FLOATS and len(one) == len(two) == 3 and (one[1], one[2]) == (two[2], 2 * two[1])
    per_byte = 1 if dtype in FLOATS or dtype == torch.float8_e4m3fn else 2
    rows, hidden = (one[2], one[1]) if transposed else (one[-2], one[-1] * per_byte)
    parts = []
    for name, size, columns in ((named.gate_up, rows, hidden), (named.down, hidden, rows // 2)):
        side = (columns, size) if transposed else (size, columns // per_byte)
        shards.expect(name, (dtype,), ((count, *side),))
        factors, group = "", None
        if stored is not None and dtype not in FLOATS:
            if stored.scale:
                raise ValueError(
                    f"{shards.file_of[name]}: {name}: expected experts with a tensor for each matrix, as their factors "
                    f"have scales on top ({stored.scale}), got all in one tensor"
                )
            group = stored.groups[dtype]
            factors = _factors_of(shards, stored, name)
            shapes = _shapes(count, (size, columns), group, ranges if name == named.gate_up else 1)
            shards.expect(factors, stored.kinds, shapes, f"the factors of {name}")
        parts.append(Part(name, factors, _bias(shards, name, (count, size)), group, transposed))
    return parts


def _factors_of(shards: Shards, stored: Stored, name: str) -> str:
    """Return the name of the factors of weights: the first that is there, of those that it may have."""
    base = name.removesuffix(".weight")
    # Of a module's weight the factors are its other parameters; else both are parameters of the module of all experts.
    names = [f"{base}.{part}" if base != name else f"{name}_{part.removeprefix('weight_')}" for part in stored.factors]
    return next((known for known in names if known in shards.file_of), names[0])


def _shapes(
    count: int, sizes: tuple[int, int], group: tuple[int, int], ranges: int
) -> tuple[tuple[int, ...], ...]:  # fmt: skip
    """Return the shapes that the factors of matrices of all experts may have."""
    if group == (ALL, ALL):
        both = ((count, ranges), (count, ranges, 1)) if ranges > 1 else ()  # one for gate, one for up
        return (count, 1, 1), (count, 1), (count,), *both
    rows = 1 if group[0] == ALL else ranges * cdiv(sizes[0] // ranges, group[0])
    columns = 1 if group[1] == ALL else cdiv(sizes[1], group[1])
    return (count, rows, columns), *(((count, rows),) if columns == 1 and group[1] == ALL else ())


def _bias(shards: Shards, name: str, shape: tuple[int, ...]) -> str:
    """Return the name of a projection's bias, which must have this shape; "" if there is none."""
    name = f"{name}_bias"
    if name not in shards.file_of:
        return ""
    shards.expect(name, FLOATS, (shape,))
    return name

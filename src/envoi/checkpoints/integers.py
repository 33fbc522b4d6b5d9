"""Experts in INT4, each matrix with tensors of its own: read one after the other, as `envoi.experts.pack` takes them.

    writer              integers                     zero points                     factors
    compressed-tensors  weight_packed [N, K / 8]     weight_zero_point [N / 8, G]    weight_scale [N, G]
    AWQ                 qweight [K, N / 8]           qzeros [G, N / 8]               scales [G, N]
    GPTQ                qweight [K / 8, N]           qzeros [G, N / 8]               scales [G, N], g_idx [K]

of a matrix [N, K] in G groups along K. Eight integers share an int32, the first in the lowest bits: neighbours along
the side that is divided by 8, of AWQ in the order 0, 2, 4, 6, 1, 3, 5, 7. A weight is (integer - zero point) * factor.
compressed-tensors means signed integers and adds 8 to both when it packs them; GPTQ's first version stores zero points
less 1. (compressed-tensors 0.12, compressors/pack_quantized; AutoAWQ 0.2, modules/linear/gemm.py; GPTQModel 2,
nn_modules/qlinear.)
"""

from collections.abc import Callable, Sequence

import torch

from envoi.checkpoints.names import Separate, check_beside
from envoi.checkpoints.schemes import ALL, Integers
from envoi.checkpoints.shards import Shards
from envoi.quant.bits import pack_nibbles
from envoi.quant.int4 import FACTORS
from envoi.types import QuantTensor

PER_WORD = 8  # integers of an int32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # place of each nibble's column
INT32 = (torch.int32,)


class IntegerExperts:
    """Names and shapes of a layer's INT4 tensors, all compared with the files' headers when it is made."""

    def __init__(self, shards: Shards, named: Separate, stored: Integers, ids: Sequence[int], why: str):
        self.shards, self.named, self.stored, self.ids = shards, named, stored, ids
        self.hidden, self.intermediate = self._sizes(why)
        for expert in ids:
            for projection in named.projections:
                self._check(expert, projection, why)
        parts = {stored.weight, stored.factors, stored.zeros, "g_idx" if stored.writer == "gptq" else ""}
        check_beside(shards.file_of, named, parts - {""})

    def shape(self, projection: str) -> tuple[int, int]:
        """Return rows and columns of a projection."""
        down = projection == self.named.down
        return (self.hidden, self.intermediate) if down else (self.intermediate, self.hidden)

    def groups(self, projection: str) -> int:
        """Return how many groups of columns a projection has."""
        columns = self.shape(projection)[1]
        return 1 if self.stored.columns == ALL else columns // self.stored.columns

    def empty(self, projections: tuple[str, ...], device: torch.device) -> QuantTensor:
        """Return weights of these projections, one below the other, to be filled."""
        (rows, columns), groups = self.shape(projections[0]), self.groups(projections[0])
        shape = len(self.ids), len(projections) * rows
        dtype = torch.bfloat16
        if self.ids:
            dtype = self.shards.header(self.named.name(self.ids[0], projections[0], self.stored.factors))[0]
        values = torch.empty(*shape, columns // 2, dtype=torch.uint8, device=device)
        sf = torch.empty(*shape, groups, dtype=dtype, device=device)
        zeros = torch.empty(*shape, groups, dtype=torch.uint8, device=device) if self.stored.zeros else None
        return QuantTensor(values, sf, (1, columns // groups), zeros=zeros)

    def read(self, expert: int, projection: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return one matrix: pairs uint8 [N, K / 2], factors [N, G] and zero points uint8 [N, G], None if all are 8."""

        def tensor(part: str) -> torch.Tensor:
            return self.shards.read(self.named.name(expert, projection, part))

        sf = tensor(self.stored.factors)
        if self.stored.writer == "compressed-tensors":
            values = tensor("weight_packed").contiguous().view(torch.uint8)  # little-endian: pairs as they have to be
            zeros = nibbles(tensor(self.stored.zeros).T).T if self.stored.zeros else None
            return values, sf.reshape(self.shape(projection)[0], self.groups(projection)), zeros
        self._check_order(expert, projection)
        if self.stored.writer == "awq":
            codes, points = awq_columns(tensor("qweight")).T, awq_columns(tensor("qzeros"))
        else:
            codes, points = nibbles(tensor("qweight").T), nibbles(tensor("qzeros"))
            points = self._gptq_points(points, self.named.name(expert, projection, "qzeros"))
        return pack_nibbles(codes), sf.T.contiguous(), points.T.contiguous()

    def _sizes(self, why: str) -> tuple[int, int]:
        """Return the hidden and the intermediate size, from the first expert's first matrix."""
        name = self.named.name(self.ids[0] if self.ids else 0, self.named.inputs[0], self.stored.weight)
        shape = self.shards.expect(name, INT32, (), why)[1]
        if len(shape) != 2:
            raise ValueError(f"{self.shards.file_of[name]}: {name}: expected a matrix of int32, got {list(shape)}")
        if self.stored.writer == "compressed-tensors":
            return shape[1] * PER_WORD, shape[0]
        return (shape[0], shape[1] * PER_WORD) if self.stored.writer == "awq" else (shape[0] * PER_WORD, shape[1])

    def _check(self, expert: int, projection: str, why: str) -> None:
        (N, K), G, stored = self.shape(projection), self.groups(projection), self.stored
        name = self.named.name(expert, projection, stored.weight)
        if stored.columns != ALL and G * stored.columns != K:
            raise ValueError(
                f"{self.shards.file_of[name]}: {name}: expected columns in whole groups of {stored.columns}, got {K}"
            )
        words = {"compressed-tensors": (N, K // PER_WORD), "awq": (K, N // PER_WORD), "gptq": (K // PER_WORD, N)}
        self.shards.expect(name, INT32, (words[stored.writer],), why)
        is_compressed = stored.writer == "compressed-tensors"
        factors, points = ((N, G), (-(-N // PER_WORD), G)) if is_compressed else ((G, N), (G, N // PER_WORD))
        more = [(N,)] if is_compressed and G == 1 else []
        factor = self.named.name(expert, projection, stored.factors)
        first = self.named.name(self.ids[0], self.named.inputs[0], stored.factors)
        kind = self.shards.expect(first, FACTORS, ())[0]
        self.shards.expect(factor, (kind,), (factors, *more), f"the factors of {name}")
        if stored.zeros:
            zeros = self.named.name(expert, projection, stored.zeros)
            self.shards.expect(zeros, INT32, (points,), f"the zero points of {name}")
        self._check_shape(expert, projection, (N, K))

    def _check_shape(self, expert: int, projection: str, shape: tuple[int, int]) -> None:
        """Raise ValueError if compressed-tensors says that the matrix has another shape than its packed form."""
        name = self.named.name(expert, projection, "weight_shape")
        if self.stored.writer != "compressed-tensors" or name not in self.shards.file_of:
            return
        given = self.shards.read(name).tolist()
        if given != list(shape):
            raise ValueError(f"{self.shards.file_of[name]}: {name}: expected {list(shape)}, got {given}")

    def _check_order(self, expert: int, projection: str) -> None:
        """Raise ValueError if a GPTQ matrix has its columns' groups in another order than that of the columns."""
        name = self.named.name(expert, projection, "g_idx")
        if self.stored.writer != "gptq" or name not in self.shards.file_of:
            return
        K = self.shape(projection)[1]
        self.shards.expect(name, INT32, ((K,),))
        in_order = torch.arange(K) // (K if self.stored.columns == ALL else self.stored.columns)
        if not torch.equal(self.shards.read(name).long(), in_order):
            raise ValueError(
                f"{self.shards.file_of[name]}: {name}: expected groups of neighbouring columns, got columns that were "
                "ordered by their activations (desc_act), whose groups no kernel of Envoi reads"
            )

    def _gptq_points(self, points: torch.Tensor, name: str) -> torch.Tensor:
        """Return the zero points of what GPTQ has stored, of which the first version has subtracted 1."""
        if self.stored.added == 0:
            return points
        if bool((points == 15).any()):
            raise ValueError(
                f"{self.shards.file_of[name]}: {name}: expected zero points less 1 of at most 14, got 15, which "
                "readers of GPTQ's first version take for 16 or for 0"
            )
        return points + self.stored.added


def nibbles(words: torch.Tensor) -> torch.Tensor:
    """Return the eight integers of each word: int32 [R, C] -> uint8 [R, 8 C]."""
    by = words.contiguous().view(torch.uint8)
    return torch.stack((by & 15, by >> 4), -1).flatten(-2)


def awq_columns(words: torch.Tensor) -> torch.Tensor:
    """Return AWQ's integers in the order of their columns: int32 [R, C] -> uint8 [R, 8 C]."""
    found = nibbles(words).unflatten(-1, (-1, PER_WORD))
    ordered = torch.empty_like(found)
    ordered[..., AWQ_ORDER] = found
    return ordered.flatten(-2)


def read_integers(
    shards: Shards, named: Separate, stored: Integers, ids: Sequence[int], why: str, device: torch.device,
    step: Callable[[int], None],
) -> tuple[QuantTensor, QuantTensor]:  # fmt: skip
    """Read the experts `ids`: gate_up [E, 2I, H], all gate rows first, or up [E, I, H]; down [E, H, I]."""
    plan = IntegerExperts(shards, named, stored, ids, why)
    both = plan.empty(named.inputs, device), plan.empty((named.down,), device)
    for position, expert in enumerate(ids):
        step(expert)
        for x, projections in zip(both, (named.inputs, (named.down,)), strict=True):
            for i, projection in enumerate(projections):
                rows = slice(i * plan.shape(projection)[0], (i + 1) * plan.shape(projection)[0])
                for part, found in zip((x.values, x.sf, x.zeros), plan.read(expert, projection), strict=True):
                    if part is not None and found is not None:
                        part[position, rows].copy_(found)
    return both

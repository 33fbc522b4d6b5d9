"""Layouts in which a checkpoint may store a module's weights: dtypes, groups that share a factor, names of tensors."""

from dataclasses import dataclass

import torch

from envoi.quant.regroup import FACTORS

ALL = 0  # in a group: all rows, or all columns
MX, NV, BLOCK128 = (1, 32), (1, 16), (128, 128)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
E4M3 = torch.float8_e4m3fn
NUMBERS = tuple(dtype for dtype in FACTORS if dtype != E4M3)  # factors as floats, or as powers of two
POWERS = (torch.float8_e8m0fnu, torch.uint8)


@dataclass(frozen=True)
class Stored:
    """Layout of quantised weights: rows and columns that share a factor, by the weights' dtype; and names.

    factors: the last parts that a factor's name may have. kinds: the factors' dtypes.
    weight: the last part of the weights' names.
    scale: the last part of the name of a matrix's scale, float32, on top of its factors; "" if there is none.
    inverse: the scale divides, instead of being multiplied. spread: factors may be [rows, 1, columns, 1].
    """

    groups: dict[torch.dtype, tuple[int, int]]
    factors: tuple[str, ...] = ("weight_scale",)
    kinds: tuple[torch.dtype, ...] = NUMBERS
    weight: str = "weight"
    scale: str = ""
    inverse: bool = False
    spread: bool = False


@dataclass(frozen=True)
class Integers:
    """Layout of INT4 weights: `envoi.checkpoints.integers` says what each writer's tensors are.

    writer: "compressed-tensors", "awq" or "gptq". columns: that share a factor, `ALL` for a row. zeros: the last part
    of the zero points' names, "" if there are none. added: to stored zero points.
    """

    writer: str
    columns: int
    zeros: str
    added: int = 0

    @property
    def weight(self) -> str:
        """Last part of the integers' names."""
        return "weight_packed" if self.writer == "compressed-tensors" else "qweight"

    @property
    def factors(self) -> str:
        """Last part of the factors' names."""
        return "weight_scale" if self.writer == "compressed-tensors" else "scales"


def fp8(group: tuple[int, int], factors: tuple[str, ...] = ("weight_scale",)) -> Stored:
    """Return the layout of FP8 weights, [rows, columns] of a group."""
    return Stored({E4M3: group}, factors)


MXFP8 = Stored({E4M3: MX}, ("weight_scale", "weight_scale_inv", "scale"), POWERS)
MXFP4 = Stored({torch.uint8: MX, torch.int8: MX}, ("weight_scale", "weight_scale_inv", "scale"), POWERS)
MXFP4_PACKED = Stored({torch.uint8: MX}, kinds=POWERS, weight="weight_packed")
NVFP4 = Stored({torch.uint8: NV}, kinds=(E4M3,), scale="weight_scale_2")
NVFP4_PACKED = Stored(
    {torch.uint8: NV}, kinds=(E4M3,), weight="weight_packed", scale="weight_global_scale", inverse=True
)

"""Quantisation schemes (how numbers are grouped under a scale factor) and formats (the schemes of a GEMM), by name."""

from dataclasses import dataclass

import torch

from envoi.check import expect_choice

E4M3_MAX = 448.0
E2M1_MAX = 6.0


@dataclass(frozen=True)
class Scheme:
    """Quantisation of one tensor: element type, rows x columns per scale factor (0 = all), the scale factor's type."""

    name: str
    values: torch.dtype  # float8_e4m3fn, or uint8 for two E2M1 numbers a byte
    group: tuple[int, int]
    sf: torch.dtype

    @property
    def max_value(self) -> float:
        """Largest finite element."""
        return E2M1_MAX if self.values == torch.uint8 else E4M3_MAX

    def group_for(self, shape: tuple[int, ...] | torch.Size) -> tuple[int, int]:
        """Return the group for a shape, with 0 replaced by the size of the dimension (at least 1)."""
        rows, columns = (side or max(size, 1) for side, size in zip(self.group, shape[-2:], strict=True))
        return rows, columns


_E4M3, _E8M0, _F32, _PAIR = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float32, torch.uint8

SCHEMES = {
    s.name: s
    for s in (
        Scheme("fp8_tensor", _E4M3, (0, 0), _F32),
        Scheme("fp8_row", _E4M3, (1, 0), _F32),
        Scheme("fp8_1x128", _E4M3, (1, 128), _F32),
        Scheme("fp8_128x128", _E4M3, (128, 128), _F32),
        Scheme("mxfp8", _E4M3, (1, 32), _E8M0),
        Scheme("mxfp4", _PAIR, (1, 32), _E8M0),
        Scheme("nvfp4", _PAIR, (1, 16), _E4M3),
    )
}


# Weights alone have it, and say themselves how many columns share a factor, in which dtype: see `QuantTensor`. These
# are what floats are packed to.
INT4 = Scheme("int4", _PAIR, (1, 32), torch.bfloat16)


@dataclass(frozen=True)
class Format:
    """Format of an expert GEMM: a scheme for activations and one for weights; None = bf16."""

    name: str
    activations: Scheme | None
    weights: Scheme | None

    @property
    def group_k(self) -> int:
        """Number that K must be a multiple of."""
        return max(1, *(s.group[1] for s in (self.activations, self.weights) if s is not None), 1)


FORMATS = {
    f.name: f
    for f in (
        Format("bf16", None, None),
        Format("fp8_row", SCHEMES["fp8_row"], SCHEMES["fp8_row"]),
        Format("fp8_block128", SCHEMES["fp8_1x128"], SCHEMES["fp8_128x128"]),
        Format("mxfp8", SCHEMES["mxfp8"], SCHEMES["mxfp8"]),
        Format("mxfp4", None, SCHEMES["mxfp4"]),
        Format("mxfp4_fp8", SCHEMES["fp8_row"], SCHEMES["mxfp4"]),
        Format("mxfp4_mxfp8", SCHEMES["mxfp8"], SCHEMES["mxfp4"]),
        Format("nvfp4", None, SCHEMES["nvfp4"]),
        Format("int4", None, INT4),
    )
}


def format_named(name: str, argument: str = "format") -> Format:
    """Return the Format with a name. Raises ValueError that lists the names."""
    return FORMATS[expect_choice(argument, name, FORMATS)]


def scheme_named(name: str) -> Scheme:
    """Return the Scheme with a name. Raises ValueError that lists the names."""
    return SCHEMES[expect_choice("scheme", name, SCHEMES)]

"""Weights as checkpoints store them quantised, made without the product's quantisers, and what they mean in float64."""

import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _meaning_of_e4m3(code: int) -> float:
    sign, exponent, mantissa = 1 - (code >> 7) * 2, (code >> 3) & 15, (code & 7) / 8
    return sign * (mantissa * 2.0**-6 if exponent == 0 else (1 + mantissa) * 2.0 ** (exponent - 7))


# By their bits; tables, since most of the time of a test would go into arithmetic.
TABLE_E4M3 = torch.tensor([_meaning_of_e4m3(code) for code in range(256)], dtype=torch.float64)
TABLE_E2M1 = torch.tensor([*E2M1, *(-x for x in E2M1)], dtype=torch.float64)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def e4m3(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return random bytes as float8_e4m3fn: every number of the type but NaN."""
    codes = torch.randint(0, 256, shape, generator=seeded(seed))
    return codes.where((codes & 0x7F) != 0x7F, 0x7E).to(torch.uint8).view(torch.float8_e4m3fn)


def pairs(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return random bytes of two E2M1 numbers each; shape counts the bytes."""
    return torch.randint(0, 256, shape, generator=seeded(seed)).to(torch.uint8)


def float_factors(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.rand(shape, generator=seeded(seed)) * 1e-4 + 1e-5


def power_bytes(*shape: int, low: int = 118, high: int = 122, seed: int = 1) -> torch.Tensor:
    """Return random UE8M0 bytes: 2^(byte - 127)."""
    return torch.randint(low, high, shape, generator=seeded(seed)).to(torch.uint8)


def numbers(values: torch.Tensor) -> torch.Tensor:
    """Return the elements in float64: E4M3 by its bits, pairs by a table, the low nibble first."""
    code = values.view(torch.uint8).int()
    if values.dtype == torch.float8_e4m3fn:
        return TABLE_E4M3[code]
    return TABLE_E2M1[torch.stack((code & 15, code >> 4), dim=-1).flatten(-2)]


def meaning(values: torch.Tensor, factors: torch.Tensor, group: tuple[int, int]) -> torch.Tensor:
    """Return element r, c times the factor of its group, in float64 [E, R, C]; uint8 factors are UE8M0 bytes."""
    x = numbers(values)
    if factors.dtype in (torch.uint8, torch.float8_e8m0fnu):
        wide = 2.0 ** (factors.view(torch.uint8).double() - 127)
    else:
        wide = factors.double()
    rows = torch.arange(x.shape[-2]) // group[0]
    columns = torch.arange(x.shape[-1]) // group[1]
    return x * wide[..., rows, :][..., columns]

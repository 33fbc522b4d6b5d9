"""Number formats by their definitions, in float64: rounding, tables of small floats, the block-scaled schemes.

Written from the definitions alone; nothing here is imported from Envoi.
"""

from dataclasses import dataclass

import torch

# Bits of precision with the hidden one, exponent of the smallest normal number, largest finite number.
FLOATS = {
    torch.bfloat16: (8, -126, (2 - 2.0**-7) * 2.0**127),
    torch.float16: (11, -14, 65504.0),
    torch.float32: (24, -126, (2 - 2.0**-23) * 2.0**127),
}
AMAX_FLOOR = 1e-30  # a group's largest magnitude counts as at least this


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Return 2^exponent in float64 for integers from -1022 to 1023, exactly."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def ulp(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the distance of neighbouring numbers of a dtype around float64 x."""
    precision, smallest, _ = FLOATS[dtype]
    exponent = torch.frexp(x.nan_to_num(0.0, 0.0, 0.0)).exponent - 1
    exponent = torch.where(x == 0, smallest, exponent).clamp(smallest, 200)
    return power_of_two(exponent - precision + 1)


def round_to(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round float64 to the nearest number of a dtype, ties to even; too large ones to infinity. Result in float64."""
    quantum = ulp(x, dtype)
    rounded = torch.where(x.isfinite(), torch.round(x / quantum) * quantum, x)
    return torch.where(rounded.abs() > FLOATS[dtype][2], torch.sign(x) * torch.inf, rounded)


def _small_float(exponent_bits: int, mantissa_bits: int, has_nan: bool) -> torch.Tensor:
    """Return all magnitudes by code: an IEEE-like float without infinities."""
    bias, values = 2 ** (exponent_bits - 1) - 1, []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = code >> mantissa_bits, code & (2**mantissa_bits - 1)
        fraction = mantissa / 2**mantissa_bits + (exponent > 0)
        values.append(fraction * 2.0 ** (max(exponent, 1) - bias))
    if has_nan:
        values[-1] = float("nan")
    return torch.tensor(values, dtype=torch.float64)


E4M3 = _small_float(4, 3, True)
E2M1 = _small_float(2, 1, False)


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """Return the float64 values of bytes (uint8, or float8 tensors by their bytes)."""
    return torch.cat((E4M3, -E4M3))[codes.view(torch.uint8).long()]


def decode_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Return the float64 values [.., C] of nibbles [.., C / 2], the even column in the low one."""
    table = torch.cat((E2M1, -E2M1))
    low, high = table[(packed % 16).long()], table[(packed // 16).long()]
    return torch.stack((low, high), -1).flatten(-2)


def decode_e8m0(codes: torch.Tensor) -> torch.Tensor:
    """Return 2^(byte - 127) in float64; NaN for 255."""
    codes = codes.view(torch.uint8).long()
    return power_of_two(codes - 127).masked_fill(codes == 255, torch.nan)


def nearest_code(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return the codes of the table's numbers next to float64 x, ties to even codes, saturating, with sign.

    Codes are int64; NaN gives the table's own NaN if it has one, else 0.
    """
    has_nan = bool(table[-1].isnan())
    values = table[:-1] if has_nan else table
    middles = (values[1:] + values[:-1]) / 2
    size = x.abs().nan_to_num(0.0)
    code = torch.searchsorted(middles, size.contiguous())
    tie = size == middles[code.clamp(max=len(middles) - 1)]
    code = code + (tie & (code % 2 == 1)).long()
    code = torch.where(x.isnan(), len(table) - 1 if has_nan else 0, code)
    negative = torch.signbit(x) & (~x.isnan() | has_nan)
    return code + negative.long() * len(table)


def nearest(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Round float64 x to the table's numbers."""
    return torch.cat((table, -table))[nearest_code(x, table)]


@dataclass(frozen=True)
class Scheme:
    """Block-scaled scheme: table of elements, rows and columns of a group (0 = all), kind of scale factor.

    sf: "float32", "e8m0" or "e4m3".
    """

    name: str
    table: torch.Tensor
    rows: int
    columns: int
    sf: str

    @property
    def largest(self) -> float:
        """Largest finite element."""
        return float(self.table[~self.table.isnan()].max())

    def group(self, shape) -> tuple[int, int]:
        """Return rows and columns of a group of a matrix [.., R, C]."""
        return self.rows or max(shape[-2], 1), self.columns or max(shape[-1], 1)


SCHEMES = {
    s.name: s
    for s in (
        Scheme("fp8_tensor", E4M3, 0, 0, "float32"),
        Scheme("fp8_row", E4M3, 1, 0, "float32"),
        Scheme("fp8_1x128", E4M3, 1, 128, "float32"),
        Scheme("fp8_128x128", E4M3, 128, 128, "float32"),
        Scheme("mxfp8", E4M3, 1, 32, "e8m0"),
        Scheme("mxfp4", E2M1, 1, 32, "e8m0"),
        Scheme("nvfp4", E2M1, 1, 16, "e4m3"),
    )
}
# Activations and weights of an expert format; None = bf16.
FORMATS = {
    "bf16": (None, None),
    "fp8_row": ("fp8_row", "fp8_row"),
    "fp8_block128": ("fp8_1x128", "fp8_128x128"),
    "mxfp8": ("mxfp8", "mxfp8"),
    "mxfp4": (None, "mxfp4"),
    "mxfp4_fp8": ("fp8_row", "mxfp4"),
    "mxfp4_mxfp8": ("mxfp8", "mxfp4"),
    "nvfp4": (None, "nvfp4"),
}


def group_max(x: torch.Tensor, group: tuple[int, int]) -> torch.Tensor:
    """Return the largest value of each group, NaN if one is: [.., R, C] -> [.., row groups, column groups]."""
    *lead, rows, columns = x.shape
    r, c = -(-rows // group[0]), -(-columns // group[1])
    out = torch.zeros(*lead, r, c, dtype=x.dtype)
    for i in range(r):
        for j in range(c):
            part = x[..., i * group[0] : (i + 1) * group[0], j * group[1] : (j + 1) * group[1]]
            if part.shape[-1] and part.shape[-2]:
                out[..., i, j] = part.amax((-2, -1))
    return out


def spread(sf: torch.Tensor, group: tuple[int, int], shape) -> torch.Tensor:
    """Repeat each group's value for its elements: [.., row groups, column groups] -> [.., R, C]."""
    rows = torch.arange(shape[-2]) // group[0]
    columns = torch.arange(shape[-1]) // group[1]
    return sf[..., rows, :][..., columns]


def e8m0_code(x: torch.Tensor) -> torch.Tensor:
    """Return the code (int64) of the smallest power of two that isn't below x >= 0, from 2^-126 on; 255 for NaN."""
    mantissa, exponent = torch.frexp(x.nan_to_num(1.0, 1.0, 1.0))
    code = (exponent.long() - (mantissa == 0.5).long() + 127).clamp(1, 254)
    return torch.where(x.isfinite(), torch.where(x == 0, 1, code), 255)


@dataclass(frozen=True)
class Quantised:
    """Result of a quantisation: codes of the elements and of the scale factors (values for float32), and the numbers.

    sf: float64 scale factors [.., row groups, column groups]. x: values times scale factors, float64 [.., R, C].
    """

    codes: torch.Tensor
    sf: torch.Tensor
    x: torch.Tensor


def scale_factors(amax: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale factors of groups with float64 largest magnitudes amax, and the factors for their elements."""
    f32 = torch.float32
    amax = amax.masked_fill(~amax.isfinite(), torch.nan)
    amax = torch.where(amax < AMAX_FLOOR, round_to(torch.full_like(amax, AMAX_FLOOR), f32), amax)
    share = round_to(amax / scheme.largest, f32)
    if scheme.sf == "float32":
        return share, round_to(scheme.largest / amax, f32)
    if scheme.sf == "e8m0":
        sf = decode_e8m0(e8m0_code(share).to(torch.uint8))
        return sf, 1.0 / sf
    sf = nearest(share.clamp(2.0**-9, 448.0), E4M3)
    return sf, round_to(1.0 / sf, f32)


def quantise(x: torch.Tensor, scheme: Scheme) -> Quantised:
    """Quantise numbers that float32 holds, given in float64 [.., R, C]."""
    group = scheme.group(x.shape)
    sf, factor = scale_factors(group_max(x.abs(), group), scheme)
    scaled = round_to(x * spread(factor, group, x.shape), torch.float32)
    scaled = torch.where(scaled == 0, torch.copysign(scaled, x), scaled)
    codes = nearest_code(scaled, scheme.table)
    values = torch.cat((scheme.table, -scheme.table))[codes]
    return Quantised(codes, sf, values * spread(sf, group, x.shape))


def weights_mxfp4(x: torch.Tensor) -> tuple[Quantised, Quantised, torch.Tensor]:
    """Quantise weights [.., R, C] to MXFP4 with the scale that clips nothing, and with half of it.

    Returns both, and by how much the second's squared error is larger, relative to both, for each group.
    """
    scheme = SCHEMES["mxfp4"]
    group = scheme.group(x.shape)
    wide = quantise(x, scheme)
    sf = torch.where(wide.sf > 2.0**-126, wide.sf / 2, wide.sf)
    codes = nearest_code(round_to(x / spread(sf, group, x.shape), torch.float32), scheme.table)
    narrow = Quantised(codes, sf, torch.cat((E2M1, -E2M1))[codes] * spread(sf, group, x.shape))
    errors = [
        (q.x - x).square().unflatten(-1, (-1, group[1])).sum(-1).nan_to_num(0.0, 0.0, 0.0) for q in (wide, narrow)
    ]
    total = (errors[0] + errors[1]).clamp(min=1e-300)
    return wide, narrow, ((errors[1] - errors[0]) / total).masked_fill(wide.sf.isnan(), 1.0)


def weights_nvfp4(x: torch.Tensor) -> Quantised:
    """Quantise weights [E, R, C] to NVFP4 under a power of two for each matrix, which x has and sf doesn't."""
    finite = torch.where(x.isfinite(), x.abs(), 0.0).flatten(1)
    amax = torch.cat((finite, finite.new_zeros(len(finite), 1)), 1).amax(1)
    share = round_to(amax / (6.0 * 448.0), torch.float32)
    scale = torch.where(amax == 0, 1.0, decode_e8m0(e8m0_code(share).to(torch.uint8)))[:, None, None]
    q = quantise(round_to(x / scale, torch.float32), SCHEMES["nvfp4"])
    return Quantised(q.codes, q.sf, q.x * scale)


def decode(values: torch.Tensor, sf: torch.Tensor, group: tuple[int, int]) -> torch.Tensor:
    """Return the float64 numbers of a stored matrix, by the dtypes of its values and scale factors."""
    elements = decode_e2m1(values) if values.dtype == torch.uint8 else decode_e4m3(values)
    return elements * spread(decode_sf(sf), group, elements.shape)


def decode_sf(sf: torch.Tensor) -> torch.Tensor:
    """Return stored scale factors in float64."""
    if sf.dtype == torch.float32:
        return sf.double()
    return decode_e8m0(sf) if sf.dtype == torch.float8_e8m0fnu else decode_e4m3(sf)

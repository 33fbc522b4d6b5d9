"""Device functions of the language's operations, in Triton; Gluon kernels use them too.

float32 throughout. Every function is elementwise, or reduces one axis in a fixed order, so a value's bits don't depend
on its neighbours. NaN propagates as in torch.
"""

import triton
import triton.language as tl

from envoi import env
from envoi.runtime.triton_compat import CASTS_BACK

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
AMAX_FLOOR: tl.constexpr = tl.constexpr(1e-30)
INTERPRETED: tl.constexpr = tl.constexpr(env.interpreting())
INF: tl.constexpr = tl.constexpr(float("inf"))


@triton.jit
def minimum(x, y):
    """Return the smaller of x and y; NaN if either is."""
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def maximum(x, y):
    """Return the larger of x and y; NaN if either is."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def rounded_product(x, y):
    """Return x * y, rounded at every use: the compiler would fuse it into some sums and not into others."""
    if INTERPRETED:
        return x * y
    else:
        return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], tl.float32, is_pure=True, pack=1)


@triton.jit
def reciprocal(x):
    """Return 1 / x to one unit in the last place; 0 beyond 2^126."""
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def divide(x, y):
    """Return x / y rounded to nearest, for y >= AMAX_FLOOR and quotients far from the ends of float32.

    The compiler's own exact division calls a subroutine. Here the reciprocal takes one Newton step, and the quotient is
    corrected by its exact remainder.
    """
    if INTERPRETED:
        return x / y
    else:
        shrink = tl.where(y > 1e18, 8.673617379884035e-19, 1.0)  # 2^-60: the reciprocal of a huge y would be 0
        y = y * shrink
        r = reciprocal(y)
        r = tl.fma(tl.fma(-y, r, 1.0), r, r)
        q = x * r
        return tl.fma(tl.fma(-q, y, x), r, q) * shrink


@triton.jit
def power_of_two(x):
    """Return 2^x; 0 below 2^-126."""
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def exp(x):
    """Return e^x; 0 below 2^-126, where the language's own scales x and the result."""
    return power_of_two(x * LOG2_E)


@triton.jit
def exp2(x):
    """Return 2^x; 0 below 2^-126."""
    return power_of_two(x)


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + e^-x)."""
    return reciprocal(1.0 + power_of_two(x * -LOG2_E))


@triton.jit
def silu(x):
    """Return x * sigmoid(x)."""
    return x * sigmoid(x)


@triton.jit
def relu(x):
    """Return max(x, 0)."""
    return maximum(x, 0.0)


@triton.jit
def tanh(x):
    """Return tanh(x) = 1 - 2 / (1 + e^2x); near 0, where that cancels, from a polynomial. Within 2e-7."""
    far = 1.0 - 2.0 * reciprocal(1.0 + power_of_two(x * (2.0 * LOG2_E)))
    s = x * x
    near = x * (1.0 + s * (-0.33333333 + s * (0.13333333 + s * (-0.053968254 + s * 0.021869488))))
    return tl.where(tl.abs(x) < 0.25, near, far)


@triton.jit
def gelu(x):
    """Return x * P(normal < x) = max(x, 0) - |x| / 2 * erfc(|x| / sqrt 2).

    erfc(z) = t * 2^(p(t) - z^2 log2 e) with t = 1 / (1 + 0.4 z); p was fitted at Chebyshev nodes, its error is 1e-7.
    The absolute error is 2.4e-7 over all x, two thirds of that of 1 + erf, in half its instructions.
    """
    a = tl.abs(minimum(x, 20.0))  # so that infinity gives infinity, not NaN
    t = reciprocal(1.0 + 0.28284273 * a)
    p = 0.8722628 + t * -0.12420681
    p = -2.0087509 + t * p
    p = 1.7407299 + t * p
    p = -0.57809155 + t * p
    p = 0.83451864 + t * p
    p = 1.4091973 + t * p
    p = -2.1456583 + t * p
    return maximum(x, 0.0) - 0.5 * a * t * power_of_two(p - 0.72134752 * a * a)


@triton.jit
def gelu_tanh(x):
    """Return gelu(x) with P approximated by tanh: (1 + tanh u) / 2 = sigmoid(2 u)."""
    return x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def hardswish(x):
    """Return x * clip(x + 3, 0, 6) / 6."""
    return x * minimum(maximum(x + 3.0, 0.0), 6.0) / 6.0


@triton.jit
def leaky_relu(x, slope):
    """Return x where positive, slope * x elsewhere."""
    return tl.where(x > 0.0, x, x * slope)


@triton.jit
def softplus(x):
    """Return log(1 + e^x), x itself above 20; a polynomial where 1 + e^-|x| would round."""
    e = tl.exp(-tl.abs(x))
    small = e * (1.0 - e * (0.5 - e * (0.33333333 - e * 0.25)))
    y = maximum(x, 0.0) + tl.where(e < 0.01, small, tl.log(1.0 + e))
    return tl.where(x > 20.0, x, y)


@triton.jit
def e8m0_ceil(x):
    """Return the least power of two >= x > 0 as (uint8 exponent, float32 of its inverse); NaN gives (255, NaN)."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    exponent = (bits + 0x7FFFFF) >> 23
    exponent = tl.where(bits > 0x7F800000, 255, tl.minimum(tl.maximum(exponent, 1), 255))
    # 2^-(e - 127) has the exponent 254 - e; for e = 254 that is the subnormal 2^-127.
    inverse = tl.where(exponent == 254, 0x00400000, (254 - exponent) << 23)
    inverse = tl.where(exponent == 255, 0x7FC00000, inverse)
    return exponent.to(tl.uint8), inverse.to(tl.float32, bitcast=True)


@triton.jit
def group_amax(x):
    """Return the amax to scale a group by, given its largest magnitude: at least AMAX_FLOOR, NaN for infinity."""
    x = maximum(x, AMAX_FLOOR)
    return tl.where(x == INF, float("nan"), x)


@triton.jit
def bf16(x):
    """Round float32 to bf16, to nearest even."""
    if INTERPRETED:  # its cast truncates
        bits = x.to(tl.int32, bitcast=True)
        bits = tl.where(x == x, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)
        return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def round_bf16(x):
    """Round float32 to a number of bf16, in float32."""
    if INTERPRETED:  # its cast to float32 doesn't know bf16
        return (bf16(x).to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return bf16(x).to(tl.float32)


@triton.jit
def e4m3(x):
    """Round float32 to E4M3, saturating."""
    return minimum(maximum(x, -448.0), 448.0).to(tl.float8e4nv)


@triton.jit
def near_e4m3(x):
    """Round float32 of at most 448 to the nearest number of E4M3, ties to even, in float32."""
    # x + large is rounded to a multiple of the step between E4M3's numbers near x: an eighth of x's power of two, and
    # 2^-9 below 2^-6.
    large = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    large = tl.maximum(large, 0.015625) * 1572864.0
    return (x + large) - large


@triton.jit
def mxfp8_factors(largest):
    """Return the scale factors of MXFP8's groups, NaN where a number isn't finite, and the inverses of those that are.

    largest: int32, the bits of the largest magnitude of a group; as integers they compare as numbers do, NaN above all.
    A factor is the least power of two >= largest / 448, and 448 is 1.75 * 2^8: the next one where the fraction is more.
    """
    largest = tl.where(largest >= 0x7F800000, 0x7FFFFFFF, tl.maximum(largest, 0x0DA24260))  # AMAX_FLOOR
    factor = (largest - 0x03E00001) & 0x7F800000  # 2^8 less, and rounded up from fractions above 0.75
    inverse = 0x7F000000 - factor
    factor = tl.where(factor == 0x7C000000, 0x7FC00000, factor)  # 2^121, which no finite number has
    return factor.to(tl.float32, bitcast=True), inverse.to(tl.float32, bitcast=True)


@triton.jit
def cast_back(code, x):
    """Convert code back to float32. code: x cast to E4M3; x: float32 of at most 448."""
    if CASTS_BACK:
        return code.to(tl.float32)
    else:
        return near_e4m3(x)


@triton.jit
def e4m3_scale(x):
    """Return a scale factor rounded to E4M3, and the float32 inverse of the rounded factor."""
    x = minimum(maximum(x, 0.001953125), 448.0)
    sf = x.to(tl.float8e4nv)
    return sf, 1.0 / cast_back(sf, x)


@triton.jit
def e2m1(x):
    """Round float32 to E2M1 nibbles in uint8, ties to even, saturating; NaN gives 0."""
    a = tl.abs(x)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32) + (a >= 1.75).to(tl.int32)
    code += (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
    sign = (x.to(tl.int32, bitcast=True) >> 31) & 8
    return tl.where(x == x, code | sign, code).to(tl.uint8)


@triton.jit
def in_order(bits):
    """Map bits of float32 to int32 that compare as the floats do (-0 below 0); the map is its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def plus(a, b):
    """Return a + b; the combine function of scans."""
    return a + b


@triton.jit
def apart(x):
    """Return x, which the compiler fuses into no sum: for the product of a sum that isn't the one to be fused."""
    if INTERPRETED:
        return x
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def halves_in_turn(ids, n, N):
    """Return i, i + N / 2, i + 1, i + 1 + N / 2, .. for the ids 0, 1, 2, 3, ..: columns of both halves, in turn.

    i = n / 2. The first column n, an even number, is apart, so that the compiler knows the bits of the ids.
    """
    return (ids >> 1) + (ids & 1) * (N // 2) + n // 2


@triton.jit
def sort_key(x, columns):
    """Return int64 keys that order a row for top-k: larger values first, then lower columns; NaN counts as -inf."""
    x = tl.where(x == x, x + 0.0, -INF)  # + 0.0: -0 and 0 are equal
    return (in_order(x.to(tl.int32, bitcast=True)).to(tl.int64) << 32) | (0x7FFFFFFF - columns)[None, :].to(tl.int64)


@triton.jit
def best_key(keys):
    """Return the best key of each row."""
    return tl.max(keys, axis=1)


@triton.jit
def without(keys, best):
    """Return the keys with each row's best replaced by the worst possible key."""
    return tl.where(keys == best[:, None], -9187343244130779136, keys)  # the key of -inf, in the last column


@triton.jit
def key_value(key):
    """Return the float32 value of a key."""
    return in_order((key >> 32).to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def key_column(key):
    """Return the int32 column of a key, -1 for a value of -inf."""
    column = 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)
    return tl.where(key_value(key) == -INF, -1, column)

"""Epilogues of the GEMMs for few tokens: L1 stores activations as tokens of L2, L2 stores rows."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from envoi.epilogues.device import (
    bf16,
    cast_back,
    divide,
    group_amax,
    maximum,
    minimum,
    mxfp8_factors,
    near_e4m3,
    sigmoid,
    silu,
)
from envoi.runtime.aggregate import Scalar, aggregate

GROUP = gl.constexpr(32)  # features of a tile of weights: of places that the second GEMM's tokens have in common
E4M3_MAX = gl.constexpr(448.0)


@aggregate
class Outputs:
    """Pointers that the epilogues read and write.

    scale: float32 pointer [num_experts, 64 * num_row_tiles], of weights for FP8 tokens, else None.
    bias: float32 pointer [num_experts, 64 * num_row_tiles]. row_weights: float32 pointer, the routing weight of a row.
    out: of the first GEMM E4M3 bits, uint8 [rows, I / 32, 2, 32] as `tokens` has them, with a float32 for each tile's
    32 or 64 features in out_factors; of the second bf16 [rows, 64 * num_row_tiles].
    With FP8 tokens out is bf16 of both, and out_factors int32 [rows], the bits of a row's largest magnitude. With bf16
    tokens out is bf16 of both too, and there are no factors.
    token_factors: float32 pointer [rows], what the first GEMM's sums have yet to be multiplied by; of the second GEMM
    of FP8 tokens int32, the bits of the largest magnitude.
    """

    scale: Scalar
    bias: gl.tensor
    row_weights: gl.tensor
    out: gl.tensor
    out_factors: Scalar
    token_factors: Scalar
    num_row_tiles: Scalar
    cfg: gl.constexpr


@gluon.jit
def of_columns(pointer, tile, COUNT: gl.constexpr, layout: gl.constexpr):
    """Return a value of each row of tokens of a tile, 0 where there is none."""
    token = tile.token + gl.arange(0, COUNT, layout)
    return gl.load(pointer + token, mask=token < tile.token_end, other=0)


@gluon.jit
def of_rows(pointer, acc, tile, outputs):
    """Return the expert's value of each feature of acc [features, tokens], features in order, 0 where there is none."""
    width = outputs.num_row_tiles * 64
    feature = tile.row_tile * 64 + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
    return gl.load(pointer + tile.expert.to(gl.int64) * width + feature, mask=feature < width, other=0.0)


@gluon.jit
def with_bias(acc, tile, outputs, weights):
    """Return acc [features, tokens], features in order, plus the expert's bias times `weights` [tokens]."""
    return acc + of_rows(outputs.bias, acc, tile, outputs)[:, None] * weights[None, :]


@gluon.jit
def in_order(acc):
    """Return acc with rows in the order of features: of 16 rows of the instruction, g and g + 8 are 2 g and 2 g + 1."""
    rows: gl.constexpr = acc.shape[0]
    T: gl.constexpr = acc.shape[1]
    return acc.reshape([rows // 16, 2, 8, T]).permute([0, 2, 1, 3]).reshape([rows, T])


@gluon.jit
def gate_and_up(acc):
    """Return gate and up [features / 2, tokens] of acc [features, tokens], in which they alternate."""
    rows: gl.constexpr = acc.shape[0]
    T: gl.constexpr = acc.shape[1]
    return gl.split(acc.reshape([rows // 2, 2, T]).permute([0, 2, 1]))


@gluon.jit
def activate(gate, up, cfg: gl.constexpr):
    """Apply the experts' activation, as `envoi.epilogues.library.expert_l1` has it."""
    if cfg.limit is not None:
        gate = minimum(gate, cfg.limit)
        up = minimum(maximum(up, -cfg.limit), cfg.limit)
    if cfg.activation == "swiglu_oai":
        return (up + 1.0) * gate * sigmoid(1.702 * gate)
    return silu(gate) * up


@gluon.jit
def split_scaled(x, largest):
    """Split x into high and low in E4M3; return both, and the factor of their products.

    high + low = x * 2^(7 - floor(log2 largest)). The factor undoes that, the 2^-6 of widened weights, and the 2 that is
    too much in their factors (`row_factors`); it is NaN if a number of the group is, or infinite.
    """
    exponent = gl.maximum(largest >> 23, 8)
    up = ((261 - exponent) << 23).to(gl.float32, bitcast=True)
    bits = gl.where(exponent == 255, 0x7FC00000, (exponent - 2) << 23)
    x = x * up
    high = x.to(gl.float8e4nv)
    low = (x - cast_back(high, x)).to(gl.float8e4nv)
    return high, low, bits.to(gl.float32, bitcast=True)


@gluon.jit
def finish_l1(acc, tile, outputs):
    """Activate, multiply by the routing weight, round to bf16, and store for the second GEMM."""
    cfg: gl.constexpr = outputs.cfg
    T: gl.constexpr = cfg.tile_tokens
    acc = in_order(acc)
    columns: gl.constexpr = gl.SliceLayout(0, acc.type.layout)
    if outputs.token_factors is not None:
        acc = acc * of_columns(outputs.token_factors, tile, T, columns)[None, :]
    if cfg.fp8:
        acc = acc * of_rows(outputs.scale, acc, tile, outputs)[:, None]
    if cfg.has_bias:
        acc = with_bias(acc, tile, outputs, gl.full((T,), 1.0, gl.float32, columns))
    gate, up = gate_and_up(acc)
    if cfg.fp8 or cfg.bf16:
        store_hidden(activate(gate, up, cfg), tile, outputs)
    else:
        store_split(activate(gate, up, cfg), tile, outputs)


@gluon.jit
def store_hidden(h, tile, outputs):
    """Store activations [features, tokens] times the routing weight in bf16; of FP8 their rows' largest magnitudes."""
    cfg: gl.constexpr = outputs.cfg
    T: gl.constexpr = cfg.tile_tokens
    columns: gl.constexpr = gl.SliceLayout(0, h.type.layout)
    weights = of_columns(outputs.row_weights, tile, T, columns)
    h = bf16(h * weights[None, :])
    width = outputs.num_row_tiles * 32
    token = tile.token + gl.arange(0, T, columns)
    feature = tile.row_tile * 32 + gl.arange(0, h.shape[0], gl.SliceLayout(1, h.type.layout))
    inside = (token < tile.token_end)[None, :] & (feature < width)[:, None]
    gl.store(outputs.out + token.to(gl.int64)[None, :] * width + feature[:, None], h, mask=inside)
    if cfg.fp8:
        # As integers, magnitudes compare as they do as numbers, and NaN is above all.
        bits = h.to(gl.float32).to(gl.int32, bitcast=True) & 0x7FFFFFFF
        largest = gl.max(gl.where((feature < width)[:, None], bits, 0), axis=0)
        gl.atomic_max(outputs.out_factors + token, largest, mask=token < tile.token_end, sem="relaxed", scope="gpu")


@gluon.jit
def store_split(h, tile, outputs):
    """Store activations [features, tokens] times the routing weight, rounded, as two E4M3 and their factors.

    They are rounded to bf16, or to MXFP8: then the low one would be 0, and isn't stored.
    """
    cfg: gl.constexpr = outputs.cfg
    T: gl.constexpr = cfg.tile_tokens
    shared: gl.constexpr = 64 // cfg.groups_per_step  # features that share a power of two
    num_groups: gl.constexpr = GROUP * cfg.num_row_tiles // shared
    if cfg.mxfp8:
        weights = of_columns(outputs.row_weights, tile, T, gl.SliceLayout(0, h.type.layout))
        h = in_mxfp8(h * weights[None, :])
    h = h.reshape([num_groups, shared, T])
    layout: gl.constexpr = h.type.layout
    columns3: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, layout))
    if not cfg.mxfp8:
        weights = of_columns(outputs.row_weights, tile, T, columns3)
        h = bf16(h * weights[None, None, :]).to(gl.float32)
    # As integers, magnitudes compare as they do as numbers, and NaN is above all.
    largest = gl.max(h.to(gl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    high, low, factors = split_scaled(h, largest[:, None, :])
    token = tile.token + gl.arange(0, T, columns3)[None, None, :]
    i = gl.arange(0, num_groups, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    j = gl.arange(0, shared, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    group = tile.row_tile + i * (shared // GROUP) + j // GROUP
    inside = (token < tile.token_end) & (group < outputs.num_row_tiles)
    at = token.to(gl.int64) * outputs.num_row_tiles + group
    # In a group, place (k16, t, b, k8) is feature (k16, k8, t, b): see `envoi.quant.fragments`.
    place = at * 64 + ((j & 16) | ((j & 6) << 1) | ((j & 1) << 1) | ((j & 8) >> 3))
    gl.store(outputs.out + place, high.to(gl.uint8, bitcast=True), mask=inside)
    if not cfg.mxfp8:
        gl.store(outputs.out + place + GROUP, low.to(gl.uint8, bitcast=True), mask=inside)
    group = tile.row_tile // (shared // GROUP) + i
    count = outputs.num_row_tiles // (shared // GROUP)
    inside = (token < tile.token_end) & (group < count)
    gl.store(outputs.out_factors + token.to(gl.int64) * count + group, factors, mask=inside)


@gluon.jit
def in_mxfp8(h):
    """Round h [features, tokens] to numbers of MXFP8, in groups of 32 features."""
    rows: gl.constexpr = h.shape[0]
    T: gl.constexpr = h.shape[1]
    groups = h.reshape([rows // GROUP, GROUP, T])
    factor, inverse = mxfp8_factors(gl.max(groups.to(gl.int32, bitcast=True) & 0x7FFFFFFF, axis=1))
    return (near_e4m3(groups * inverse[:, None, :]) * factor[:, None, :]).reshape([rows, T])


@gluon.jit
def finish_l2(acc, tile, outputs):
    """Add the bias times the routing weight and store bf16 rows."""
    cfg: gl.constexpr = outputs.cfg
    T: gl.constexpr = cfg.tile_tokens
    acc = in_order(acc)
    layout: gl.constexpr = acc.type.layout
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    if cfg.fp8:
        amax = group_amax(of_columns(outputs.token_factors, tile, T, columns).to(gl.float32, bitcast=True))
        acc = acc * divide(amax, E4M3_MAX)[None, :] * of_rows(outputs.scale, acc, tile, outputs)[:, None]
    if cfg.has_bias:
        acc = with_bias(acc, tile, outputs, of_columns(outputs.row_weights, tile, T, columns))
    width = outputs.num_row_tiles * 64
    token = (tile.token + gl.arange(0, T, columns))[None, :]
    feature = (tile.row_tile * 64 + gl.arange(0, acc.shape[0], gl.SliceLayout(1, layout)))[:, None]
    inside = (token < tile.token_end) & (feature < width)
    gl.store(outputs.out + token.to(gl.int64) * width + feature, bf16(acc), mask=inside)

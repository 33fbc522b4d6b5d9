"""Which kernels run a layer: the one place that decides, for calls, warm-ups, plans and estimates alike.

    choose_layer      experts, number of tokens and of their slots -> Choice    `envoi.moe`
    choose_experts    experts, number of rows and their grouping -> Choice      rows by expert, also of other ranks

The first of these that can run a call, and pays, is taken:

    DECODE_MX     permute -> L1 -> L2 -> combine          Hopper, few tokens, MXFP4 or INT4 in fragments
    DECODE        L1 -> L2 -> combine                     Hopper, few tokens, bf16 and fp8_block128
    ONE_LAUNCH    sort -> gather -> L1 with L2 -> combine Hopper, fp8_block128
    GEMMS         sort -> gather -> L1 -> L2 -> combine   every GPU; each GEMM by the kernels that `kernels_for` names

`why_not_*` returns why kernels can't run a call, "" if they can; `*_pays` whether they should be faster where they can.
Both depend on formats, shapes, strides, addresses and the device, never on values. On "meta" the device is the GPU of
`runtime.devices.standing_for`.
"""

from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import Any, cast

import torch

from envoi.epilogues.api import Epilogue
from envoi.epilogues.ir import IR
from envoi.epilogues.lower import Lowered, lower
from envoi.epilogues.outputs import chunk_columns
from envoi.ops.gemm.backend import kernels_for
from envoi.ops.gemm.grouping import EXPERTS_ROWS, Grouping
from envoi.ops.gemm.hopper import host as hopper
from envoi.ops.gemm.hopper import tune
from envoi.ops.gemm.hopper.config import Config, Problem, are_few
from envoi.ops.gemm.hopper.time_model import COSTS, predicted_cycles
from envoi.ops.gemm.hopper_w4a16 import few, few_config
from envoi.ops.moe.decode.bf16_fp8 import config as decode
from envoi.ops.moe.epilogues import l1_epilogues, l2_epilogue
from envoi.ops.moe.one_launch import config as one_launch
from envoi.ops.moe.one_launch.host import cycles_of, tiling_of
from envoi.ops.moe.op import rows_in_bf16, rows_scheme
from envoi.ops.moe.permute import empty_rows
from envoi.quant.formats import Scheme, format_named
from envoi.quant.fp8_fragments import ORDER as FP8_ORDER
from envoi.runtime.devices import SHARED_BYTES, implementation, num_sms
from envoi.runtime.math import cdiv, mean_chosen
from envoi.runtime.program import unwatched
from envoi.runtime.tma import is_tma_ready
from envoi.types import ExpertWeights, Matrix, QuantTensor

# Rows of an expert on average, up to which the kernels for few tokens are faster than those for many.
DECODE_ROWS, DECODE_ROWS_OF_NARROW_CHUNKS = 4, 1
# Bytes of weights up to which the kernel for few tokens pays in bf16 where its stages have one step of K: it reads them
# 2 to 4 % slower than the kernels for many, and saves some 9 us of launches.
DECODE_BYTES_OF_SINGLE_STEPS = 1.5e9
DECODE_MX_ROWS = {"fragments": 16, FP8_ORDER: 6}  # above, half have two tiles of 16 tokens; measured at 7168 columns
DECODE_MX_ACTIVATIONS = ("swiglu", "swiglu_oai")  # these kernels take no other epilogue
# Rows of an expert, up to which one launch is taken and from which on again, and how long it may take by the model
# compared with two. It saves a launch's end and start and a search for each tile's expert, and mixes experts, which the
# model doesn't know: 2 to 19 % of the time up to 128 rows, measured on an H200, -2 to 4 % up to 256. Up to 768 it takes
# 1.00 to 1.02 of that of two; with more 0.99 to 1.01, 0.95 to 1.00 where experts are busy unequally.
ONE_LAUNCH_ROWS, ONE_LAUNCH_ROWS_AGAIN, MAX_ONE_LAUNCH_TIME = 256, 768, 1.05

BF16 = torch.bfloat16


class LayerPath(Enum):
    """Sequence of launches that runs a layer; see the module."""

    DECODE_MX = "few tokens on 4-bit weights"
    DECODE = "few tokens"
    ONE_LAUNCH = "L1 and L2 in one launch"
    GEMMS = "L1, then L2"


@dataclass(frozen=True)
class Choice:
    """Kernels of a layer. Of `LayerPath.GEMMS` only:

    l1, l2: each GEMM's kernels, as `kernels_for` names them. in_pairs: pairs of L1's tiles quantise its rows in groups
    of 128; else L1 itself if its epilogue can within a tile, or one more kernel.
    """

    path: LayerPath
    l1: str = ""
    l2: str = ""
    in_pairs: bool = False


def has_kernels(device: torch.device) -> bool:
    """Tell whether kernels run on this device; else torch computes the layer (`envoi.ops.moe.reference`)."""
    return implementation(device) != "torch"


def choose_layer(experts: ExpertWeights, num_tokens: int, num_topk: int, batch_invariant: bool = False) -> Choice:
    """Return the kernels of a layer all of whose experts are on this device, which has kernels.

    batch_invariant: none whose bits differ from those for another number of tokens.
    """
    slots = num_tokens, num_topk
    if not batch_invariant and not why_not_decode_mx(experts, num_topk) and decode_mx_pays(experts, *slots):
        return Choice(LayerPath.DECODE_MX)
    if not why_not_decode(experts, *slots) and decode_pays(experts, *slots):
        return Choice(LayerPath.DECODE)
    return choose_experts(experts, num_tokens * num_topk, replace(EXPERTS_ROWS, batch_invariant=batch_invariant))


def choose_experts(experts: ExpertWeights, num_rows: int, grouping: Grouping = EXPERTS_ROWS) -> Choice:
    """Return the kernels of L1 and L2 on `num_rows` rows sorted by expert, on a device that has kernels."""
    if not why_not_one_launch(experts, num_rows, grouping) and one_launch_pays(experts, num_rows, grouping):
        return Choice(LayerPath.ONE_LAUNCH)
    kind, scheme, most = implementation(experts.device), rows_scheme(experts), min(1, num_rows)
    rows, hidden = (_rows(most, width, scheme) for width in (experts.hidden, experts.intermediate))
    in_tile, in_pairs = l1_epilogues(experts)
    takes_pairs = (
        in_pairs is not None
        and kind == "hopper"
        and not why_not_pairs(rows, experts.gate_up, in_pairs.ir)
        and pairs_pay(experts.gate_up, in_pairs.ir, in_tile.ir, grouping.likely_rows(num_rows))
    )
    l1 = cast(Epilogue, in_pairs).ir if takes_pairs else in_tile.ir
    return Choice(
        LayerPath.GEMMS,
        kernels_for(kind, rows, experts.gate_up, l1, grouping),
        kernels_for(kind, hidden, experts.down, l2_epilogue(experts, grouping.results).ir, grouping),
        takes_pairs,
    )


def l2_quantises(experts: ExpertWeights, results: str) -> bool:
    """Return True if the kernels that L2 runs on can quantise its rows to this scheme too."""
    scheme, kind = format_named(experts.format).activations, implementation(experts.device)
    if not experts.num_local_experts or experts.order != "rows":  # kernels of an order take no groups of 128
        return False
    hidden = _rows(1, experts.intermediate, scheme)
    kernels = (kernels_for(kind, hidden, experts.down, l2_epilogue(experts, wanted).ir) for wanted in (None, results))
    return len({*kernels}) == 1


@lru_cache(maxsize=64)  # tensors without memory take longer to make than all else that a choice asks
def _rows(num_rows: int, width: int, scheme: Scheme | None) -> Matrix:
    with unwatched():
        return empty_rows(num_rows, width, scheme, torch.device("meta"))


# Few tokens


def why_not_decode_mx(experts: ExpertWeights, num_topk: int) -> str:
    """Return why the kernels for few tokens on MXFP4 or INT4 weights can't run these experts; "" if they can."""
    gate_up, down = experts.gate_up, experts.down
    if not isinstance(gate_up, QuantTensor) or not isinstance(down, QuantTensor):
        return "the weights' format"
    if gate_up.order not in DECODE_MX_ROWS or down.order != gate_up.order:
        return "the weights' order"
    if gate_up.sf.dtype == torch.float8_e4m3fn:
        return "the weights' format"
    if (gate_up.zeros is None) != (down.zeros is None):
        return "zero points of one of the weights alone"
    if experts.activation not in DECODE_MX_ACTIVATIONS:
        return "the activation"
    if num_topk > few.MAX_TOPK or experts.num_local_experts > few_config.MAX_EXPERTS:
        return "too many experts"
    config = few.configs_of(decode_mx_layer(experts), 1)[0]
    return "" if config.shared_bytes <= SHARED_BYTES else "tokens too wide for shared memory"


def decode_mx_layer(experts: ExpertWeights) -> few.Layer:
    """Return experts that `why_not_decode_mx` doesn't refuse as their kernels take them."""
    return few.Layer(
        cast(QuantTensor, experts.gate_up), cast(QuantTensor, experts.down), experts.gate_up_bias, experts.down_bias,
        experts.activation, experts.swiglu_limit, rows_in_bf16(experts),
    )  # fmt: skip


def decode_mx_pays(experts: ExpertWeights, num_tokens: int, num_topk: int) -> bool:
    """Return True if the kernels for few tokens on MXFP4 or INT4 weights should be faster than those for many."""
    slots, num_experts = num_tokens * num_topk, experts.num_local_experts
    rows = DECODE_MX_ROWS[experts.order]
    if few.configs_of(decode_mx_layer(experts), slots)[0].tile_tokens < 16 and experts.order != FP8_ORDER:
        rows = few_config.WIDE_FROM  # tiles have 8 tokens, for each of which all weights are read
    return slots <= rows * num_experts


def why_not_decode(experts: ExpertWeights, num_tokens: int, num_topk: int) -> str:
    """Return why the kernel for few tokens can't run this; "" if it can."""
    if implementation(experts.device) != "hopper":
        return "no Hopper GPU"
    num_slots, num_experts = num_tokens * num_topk, experts.num_local_experts
    if num_slots > decode.MAX_SLOTS or num_topk > decode.MAX_TOPK or num_experts > decode.MAX_EXPERTS:
        return "too many slots or experts"
    in_halves = experts.gate_up_layout == "concat"
    reason = _unreadable(experts.gate_up, in_halves) or _unreadable(experts.down, False)
    if reason:
        return reason
    return "" if _decode_config(experts, num_tokens, num_topk).num_stages else "tokens too wide for shared memory"


def decode_pays(experts: ExpertWeights, num_tokens: int, num_topk: int) -> bool:
    """Return True if the kernel for few tokens should be faster than those for many."""
    config, num_slots = _decode_config(experts, num_tokens, num_topk), num_tokens * num_topk
    num_experts = experts.num_local_experts
    if not config.block_scaled and config.stage_steps == 1 and num_experts:
        used = mean_chosen(num_experts, num_slots)
        if used * 3 * 2 * experts.hidden * experts.intermediate > DECODE_BYTES_OF_SINGLE_STEPS:
            return False
    narrow = config.block_scaled and config.chunk_slabs < decode.WHOLE_CHUNK
    most = DECODE_ROWS_OF_NARROW_CHUNKS if narrow else DECODE_ROWS
    return num_slots <= most * num_experts


def _decode_config(experts: ExpertWeights, num_tokens: int, num_topk: int) -> decode.DecodeConfig:
    return decode.configs_of(experts, num_tokens, num_topk)[0]


def _unreadable(weights: Matrix, in_halves: bool) -> str:
    """Return why the kernel can't read these weights; "" if it can. in_halves: gate's rows, then up's."""
    if isinstance(weights, torch.Tensor):
        if weights.dtype != BF16:
            return "the weights' format"
        values, step = weights, decode.STEP_BYTES // 2
    else:
        block = decode.SCALE_BLOCK
        if weights.group != (block, block) or weights.sf.dtype not in hopper.BLOCK_FACTORS:
            return "the weights' format"
        if weights.shape[-2] % (2 * block if in_halves else block):
            return "blocks that aren't whole"
        values, step = weights.values, decode.STEP_BYTES
    if values.shape[-1] % step:
        return "a last step along K that isn't whole"
    return "" if is_tma_ready(values) else "weights that TMA can't read"


# L1 and L2 in one launch


def why_not_one_launch(experts: ExpertWeights, num_rows: int, grouping: Grouping = EXPERTS_ROWS) -> str:
    """Return why one launch can't run L1 and L2 on so many rows, "" if it can."""
    if experts.format != one_launch.FORMAT:
        return f"experts in {experts.format}, not {one_launch.FORMAT}"
    if implementation(experts.device) != "hopper":
        return f"experts on {experts.device}, which is no Hopper GPU"
    if grouping.write_tail:
        return "rows of no expert are written"
    if not experts.num_local_experts:
        return "no experts"
    scheme, in_pairs = format_named(experts.format).activations, l1_epilogues(experts)[1]
    row, hidden = (_rows(1, width, scheme) for width in (experts.hidden, experts.intermediate))
    if in_pairs is None or why_not_pairs(row, experts.gate_up, in_pairs.ir):
        return f"experts whose L1 has no groups of 128 gated columns: {experts.activation}, {experts.intermediate} wide"
    refusal = hopper.why_not_hopper(hidden, experts.down, l2_epilogue(experts, grouping.results).ir)
    if refusal:
        return refusal
    return "" if fits_search(num_rows, experts.num_local_experts) else "more rows than a search can tell apart"


def fits_search(num_rows: int, num_experts: int) -> bool:
    """Return True if an expert's last tile and its number fit an int32 of `MixedTiles.ends`, in tiles of few rows."""
    tiles = cdiv(num_rows, one_launch.FEW[0].block_m) + num_experts
    return tiles * hopper.max_experts(num_experts, False) < 2**31


def one_launch_pays(experts: ExpertWeights, num_rows: int, grouping: Grouping) -> bool:
    """Return True if one launch that can run L1 and L2 saves time, in tiles that suit both."""
    rows, num_local = grouping.likely_rows(num_rows), experts.num_local_experts
    if ONE_LAUNCH_ROWS * num_local < rows < ONE_LAUNCH_ROWS_AGAIN * num_local:
        return False
    hidden, intermediate = experts.hidden, experts.intermediate
    in_tile, in_pairs = l1_epilogues(experts)
    problems = (
        tune.rounded(Problem(rows, 2 * intermediate, hidden, 1, num_local, scaled=True)),
        tune.rounded(Problem(rows, hidden, intermediate, 1, num_local, scaled=True)),
    )
    irs = in_tile.ir, cast(Epilogue, in_pairs).ir, l2_epilogue(experts, grouping.results).ir
    return _one_launch_pays(problems, irs, grouping.to is not None, num_sms(experts.device))


@tune.remember
def _one_launch_pays(
    problems: tuple[Problem, Problem], irs: tuple[Any, ...], scattered: bool, num_sms: int
) -> bool:  # fmt: skip
    """Compare the best tiling of one launch with two launches, each in its best."""
    first, second = problems
    in_tile, in_pairs, l2 = irs
    by_tma = not (scattered or are_few(second.M // second.num_groups, chunk_columns(l2)))
    last = lower(l2, BF16, "gluon", False, by_tma, frozenset(), (), scattered)
    tiling = tiling_of(problems, (_lowered_pairs(in_pairs), last), num_sms)
    own = [*_l1_configs(first, in_pairs, in_tile, num_sms), tune.choose(second, last, num_sms)]
    if tiling is None or None in own:
        return False
    of_pairs, of_alone, of_l2 = (
        predicted_cycles(problem, cast(Config, config), num_sms)
        for problem, config in zip((first, first, second), own, strict=True)
    )
    two = min(of_pairs, of_alone + _quantize_cycles(first)) + of_l2
    return cycles_of(problems, tiling, num_sms) <= MAX_ONE_LAUNCH_TIME * two


# Pairs of L1's tiles, which quantise in groups of 128. They save a kernel, which reads bf16 and stores E4M3; they cost
# time where the last, partly filled round of the persistent loop is one of pairs.


def why_not_pairs(rows: Matrix, gate_up: Matrix, in_pairs: IR) -> str:
    """Return why pairs of L1's tiles can't quantise its rows; "" if they can. rows: any number of them, not 0."""
    refusal = hopper.why_not_hopper(rows, gate_up, in_pairs)
    if refusal or hopper.scaling(rows, gate_up) != "blocks":
        return refusal or "no scale factors along K"
    return "" if hopper.takes_pairs(in_pairs, gate_up.shape[-2], gate_up.shape[0]) else "no groups of 128 gated columns"


def pairs_pay(gate_up: Matrix, in_pairs: IR, in_tile: IR, num_rows: int) -> bool:
    """Return True if an L1 that quantises should take less time than one in bf16 and the kernel that quantises."""
    N, K = gate_up.shape[-2:]
    problem = Problem(num_rows, N, K, 1, gate_up.shape[0], scaled=True)
    return _pairs_pay(tune.rounded(problem), in_pairs, in_tile, num_sms(gate_up.device))


@tune.remember
def _pairs_pay(problem: Problem, in_pairs: IR, in_tile: IR, num_sms: int) -> bool:
    """Compare by the model of time.

    Where tokens are so few that weights take the M side, reading weights bounds the time: pairs have tokens there.
    """
    pairs, alone = _l1_configs(problem, in_pairs, in_tile, num_sms)
    if pairs is None or alone is None or alone.swap_ab:
        return False
    cycles = predicted_cycles(problem, alone, num_sms) + _quantize_cycles(problem)
    return predicted_cycles(problem, pairs, num_sms) < cycles


def _l1_configs(problem: Problem, in_pairs: IR, in_tile: IR, num_sms: int) -> tuple[Config | None, Config | None]:
    """Return the configs of an L1 that quantises and of one in bf16, each None if none fits."""
    by_tma = not are_few(problem.M // problem.num_groups, chunk_columns(in_tile))
    alone = lower(in_tile, BF16, "gluon", False, by_tma, frozenset())
    return tune.choose(problem, _lowered_pairs(in_pairs), num_sms), tune.choose(problem, alone, num_sms)


def _lowered_pairs(in_pairs: IR) -> Lowered:
    return lower(in_pairs, BF16, "gluon", False, False, frozenset(), paired=True)


def _quantize_cycles(problem: Problem) -> float:
    """Return the cycles that a kernel takes to read rows of N / 2 columns in bf16 and store them in E4M3."""
    return COSTS.launch + problem.M * problem.N / 2 * 3 / COSTS.dram_bytes

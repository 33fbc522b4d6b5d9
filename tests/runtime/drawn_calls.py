"""Drawn calls of every operator, of the sizes of models too, whose launches are to be compared and never made.

Only shapes, dtypes, strides, addresses and options decide a call's launches, so most tensors are left unwritten.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

import envoi
from envoi.epilogues.activation import ACTIVATIONS
from envoi.ops.indexer import certificate, fast
from envoi.ops.indexer import exact as exact_mode
from envoi.ops.moe.op import tensors_of, widened
from envoi.ops.moe.parallel.exchange import OnDevice
from envoi.ops.moe.parallel.nvlink import SharedLayout, allocate, set_peers
from envoi.ops.moe.parallel.rail import Grid, HostsLayout, open_rail
from envoi.ops.moe.permute import quantize_rows
from envoi.ops.moe.router.presets import PRESETS
from envoi.quant import scheme_named
from envoi.runtime.devices import Target
from envoi.runtime.program import without_memory
from envoi.types import ExpertWeights, Matrix, QuantTensor, Routing, has_gate
from tests.fuzz import formats, indexer, products, routing
from tests.fuzz.draw import Draw
from tests.fuzz.experts import FORMATS

CPU = torch.device("cpu")
TARGETS = (
    *[Target("sm_90")] * 4, Target("sm_90", 114), Target("sm_90", 78), Target("sm_100", 148), Target("sm_80", 108)
)  # fmt: skip
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
SIZES = (64, 128, 192, 256, 384, 512, 640, 768, 1024, 1536, 2048, 2880, 3072, 4096, 5120, 7168)


class Direct(NamedTuple):
    """Call that no public function makes as it is: as `program.plan` takes it."""

    function: Callable
    arguments: tuple
    tensors: tuple
    owner: Any = None


Call = Callable[[], Any] | Direct


def unwritten(value: Any) -> Any:
    """Return an object with memory for all tensors on meta in it, of the same strides, unwritten."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype) if value.is_meta else value
    if isinstance(value, tuple):
        return tuple(map(unwritten, value))
    if not is_dataclass(value) or isinstance(value, type):
        return value
    made = object.__new__(type(value))
    for part in fields(value):
        object.__setattr__(made, part.name, unwritten(getattr(value, part.name)))
    return made


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Make an unwritten tensor."""
    return torch.empty(shape, dtype=dtype)


def num_tokens(draw: Draw, most: int = 8192) -> int:
    """Draw a number of tokens, often few."""
    return draw.one(
        (draw.one((0, 1, 2, 3)), 1, 2, draw.size(1, 16), draw.size(1, 64), draw.size(1, 300), draw.size(1, 2048), most)
    )


def num_sms(draw: Draw) -> int | None:
    """Draw a limit of the multiprocessors, mostly none."""
    return draw.one((None, None, None, None, 1, 20, 64, 132, 200))


def drawn_experts(draw: Draw, most: int = 64) -> ExpertWeights:
    """Draw experts of some format."""
    format = draw.one(tuple(FORMATS))
    step = {"bf16": 8, "fp8_row": 8, "fp8_block128": 128, "nvfp4": 16}.get(format, 32)
    hidden, inside = ((draw.one(SIZES) if draw.chance(0.7) else draw.size(step, 1024, step)) for _ in range(2))
    hidden, inside = (-(-size // step) * step for size in (hidden, inside))
    E = draw.one((1, 2, 3, 8, 16, 32, most))
    while E > 1 and E * hidden * inside > 1 << 27:
        E //= 2
    dtype, bias = draw.one(FLOATS), draw.chance(0.4)
    activation = draw.one(("swiglu", "swiglu", "swiglu_oai", "swiglu_oai", *ACTIVATIONS))
    gated = has_gate(activation)
    rows = 2 * inside if gated else inside
    gate_up, down = (_weights(format, shape, dtype) for shape in ((E, rows, hidden), (E, hidden, inside)))
    packed = envoi.experts.pack(
        gate_up, down, format, activation=activation,
        gate_up_bias=without_memory((E, rows), torch.float32) if bias else None,
        down_bias=without_memory((E, hidden), torch.float32) if bias else None,
        gate_up_layout=draw.one(("concat", "interleaved")),
        swiglu_limit=draw.one((None, None, 7.0)) if "swiglu" in activation else None,
    )  # fmt: skip
    if draw.chance(0.5):
        packed = ExpertWeights.arrange(replace(packed, gate_up=promised(packed.gate_up), down=promised(packed.down)))
    return unwritten(packed)


def promised(x: Matrix) -> Matrix:
    """Return weights whose powers of two are known to be at most 2, where they have such factors."""
    is_mx = isinstance(x, QuantTensor) and x.sf.dtype == torch.float8_e8m0fnu
    return replace(x, scales_at_most_2=True) if is_mx else x


def _weights(format: str, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Make weights without memory, in the format's scheme: to quantise takes torch long, on meta too."""
    scheme = FORMATS[format][1]
    if scheme is None:
        return without_memory(shape, dtype)
    values, sf, group = _quantised(scheme, shape)
    scale = without_memory(shape[:1], torch.float32) if scheme == "nvfp4" else None
    return QuantTensor(values, sf, group, scale)


def moe(draw: Draw) -> Call:
    """Draw a call of `envoi.moe`."""
    experts = drawn_experts(draw)
    E, M = experts.num_local_experts, num_tokens(draw)
    k = draw.one((1, min(E, 8), draw.random.randint(1, min(E, 16))))
    plain = draw.chance(0.8)
    weights = empty(M, k, dtype=torch.float32 if plain else draw.one(FLOATS))
    ids = empty(M, k, dtype=torch.int32 if plain else torch.int64)
    tokens = empty(M, experts.hidden, dtype=torch.bfloat16 if plain else torch.float16)
    if draw.chance(0.1):
        tokens, ids, weights = (draw.placed(x) for x in (tokens, ids, weights))
    elif draw.chance(0.2) and M % 2 == 0 and M:
        tokens, ids, weights = (x.view(2, M // 2, -1) for x in (tokens, ids, weights))
    invariant = draw.chance(0.2)
    routing, most = Routing(weights, ids, E), num_sms(draw)
    return lambda: envoi.moe(tokens, routing, experts, batch_invariant=invariant, num_sms=most)


def route(draw: Draw) -> Call:
    """Draw a call of `envoi.route`: a rule or a preset, sizes of models."""
    if draw.chance(0.5):
        return routing.route(draw).call
    name = draw.one((*PRESETS, None))
    N, k, rule = routing.drawn_rule(draw)
    if name is not None:
        N, rule = 256, name
    M, hidden, dtype = num_tokens(draw), draw.one(SIZES), draw.one(FLOATS)
    bias = empty(N, dtype=draw.one(FLOATS)) if draw.chance(0.4) else None
    wants = {f"return_{part}": draw.chance(0.5) for part in ("logits", "dense", "counts")}
    given = empty(M, hidden, dtype=dtype), empty(N, hidden, dtype=dtype), min(k, 8)
    return partial(envoi.route, *given, rule=rule, expert_bias=bias, num_sms=num_sms(draw), **wants)


def product(draw: Draw, grouped: bool = False, choose: Any = products.of_library) -> Call:
    """Draw a call of `envoi.gemm` or `envoi.grouped_gemm`, half of the time of the sizes of models."""
    if draw.chance(0.5):
        return (products.grouped_gemm if grouped else products.gemm)(draw, choose).call
    of_a, of_b, dtype = products.drawn_formats(draw)
    of_a = "fp8_row" if grouped and of_a == "fp8_tensor" else of_a
    ending = choose(draw, grouped)
    M, N, K = num_tokens(draw), draw.one(SIZES), draw.one(SIZES)
    N = -(-N // ending.columns) * ending.columns
    experts = (draw.one((1, 2, 8, 16, 32)),) if grouped else ()
    a, b = _side(of_a, (M, K), dtype), _side(of_b, (*experts, N, K), dtype)
    offsets = (empty(experts[0] + 1, dtype=torch.int32),) if grouped else ()
    options = {
        "out_dtype": draw.one((None, *FLOATS)), "batch_invariant": draw.chance(0.2), "num_sms": num_sms(draw)
    }  # fmt: skip
    function = envoi.grouped_gemm if grouped else envoi.gemm
    return partial(function, a, b, *offsets, ending.epilogue, **options, **_operands(draw, ending, M, N, experts))


def _side(scheme: str | None, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    if scheme is None:
        return empty(*shape, dtype=dtype)
    return unwritten(QuantTensor(*_quantised(scheme, shape)))


def _quantised(name: str, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int]]:
    """Make values and scale factors without memory; return them and the group."""
    scheme = formats.SCHEMES[name]
    group, packed = scheme.group(shape), scheme.table is formats.E2M1
    values = without_memory(
        (*shape[:-1], shape[-1] // (1 + packed)), torch.uint8 if packed else torch.float8_e4m3fn
    )  # fmt: skip
    dtype = {"e8m0": torch.float8_e8m0fnu, "e4m3": torch.float8_e4m3fn}.get(scheme.sf, torch.float32)
    sf = without_memory((*shape[:-2], -(-shape[-2] // group[0]), -(-shape[-1] // group[1])), dtype)
    return values, sf, group


def _operands(draw: Draw, ending: Any, M: int, N: int, experts: tuple[int, ...]) -> dict[str, Any]:
    shapes = {"tile": (M, N), "half": (M, N // 2), "row": (M,), "col": (*experts, N), "halfcol": (*experts, N // 2)}
    return {
        name: draw.one((0.0, 1.0, -0.5)) if kind == "scalar" else empty(*shapes[kind], dtype=draw.one(FLOATS))
        for name, kind in ending.operands.items()
    }


def exact(draw: Draw) -> Call:
    """Draw a call of the kernels of the indexer's exact mode."""
    B, next_n, heads, columns = draw.random.randint(0, 300), draw.one((1, 2)), draw.one((32, 64)), draw.size(1, 2048)
    q = empty(B * next_n, heads, 128, dtype=torch.float8_e4m3fn)
    cache, weights = empty(columns * 2, 64, 1, 132, dtype=torch.uint8), empty(B * next_n, heads, dtype=torch.float32)
    lengths, table = empty(B, dtype=torch.int32), empty(B, columns, dtype=torch.int32)
    orders = empty(certificate.NUM_ORDERS + 4, dtype=torch.int32)
    tensors = q, cache, weights, lengths, table, orders
    by_score = draw.chance(0.5)
    order = fast.Order(draw.chance(0.5), by_score, not by_score and draw.chance(0.5))
    options = draw.one((512, 1024, 2048)), next_n, order
    return Direct(exact_topk, (*tensors, *options), tensors)


def exact_topk(q, cache, weights, lengths, table, orders, k: int, next_n: int, order: fast.Order) -> Any:
    """Launch the exact mode, as `envoi.indexer_topk` does where there is a certificate."""
    return exact_mode.topk(fast.Problem(q, cache, weights, lengths, table, k, next_n), orders, order)


def quantise(draw: Draw) -> Call:
    """Draw a call of the kernel that quantises rows."""
    scheme = scheme_named(draw.one(("fp8_row", "fp8_1x128", "mxfp8")))
    rows = empty(num_tokens(draw), 128 * draw.random.randint(1, 56))
    offsets = empty(draw.random.randint(1, 65), dtype=torch.int32)
    return Direct(quantize_rows, (rows, offsets, scheme), (rows, offsets))


def parallel(draw: Draw) -> Call:
    """Draw a rank's call of `ExpertParallel.moe` over NVLink's memory, in one group, or by hosts."""
    experts = drawn_experts(draw, 16)
    while experts.hidden % 16:
        experts = drawn_experts(draw, 16)
    way, ranks = draw.one(("memory", "memory", "memory", "gathered", "hosts")), draw.one((1, 2, 3, 4, 8))
    local = experts.num_local_experts
    most, E = draw.one((1, 8, 64, 256, 1024)), local * ranks
    k = draw.random.randint(1, min(E, 8))
    rank, ends = draw.random.randrange(ranks), [local * i for i in range(ranks + 1)]
    presum = way != "hosts" and draw.chance(0.5)
    layout = SharedLayout(ranks, E, most, k, experts.hidden, experts.format, presum)
    sizes = rank, ends, 1.0, CPU
    if way == "memory":
        owner: Any = allocate(layout, *sizes, shared=False)
        set_peers(owner, [owner.memory.data_ptr()] * ranks)
    else:
        hosts = ranks if way == "gathered" else draw.one([size for size in (1, 2, 4) if ranks % size == 0])
        names = [str(number // (ranks // hosts)) for number in range(ranks)]
        owner = open_rail(HostsLayout(layout, hosts), Grid.of(names), *sizes, shared=False)
    M = draw.random.randint(0, most)
    tokens, history = empty(M, experts.hidden), (owner if way == "memory" else owner.domain).history
    plain = draw.chance(0.8)
    slots = k if plain else max(1, k - 1)
    weights = empty(M, slots, dtype=torch.float32 if plain else draw.one(FLOATS))
    ids = empty(M, slots, dtype=torch.int32 if plain else torch.int64)
    arguments = tokens, weights, ids, experts, k
    return Direct(layer_of_rank, arguments, (tokens, weights, ids, *tensors_of(experts), history), owner)


def layer_of_rank(
    owner: Any, tokens: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: ExpertWeights, k: int
) -> torch.Tensor:  # fmt: skip
    """Launch a rank's layer, as `ExpertParallel.moe` does."""
    return OnDevice(owner).run_layer(tokens, *widened(weights, ids), experts)


OPERATORS: dict[str, Callable[[Draw], Call]] = {
    "gemm": product, "grouped_gemm": partial(product, grouped=True),
    "epilogue": partial(product, choose=products.written),
    "epilogue of experts": partial(product, grouped=True, choose=products.written),
    "route": route, "moe": moe, "indexer_topk": lambda draw: indexer.indexer_topk(draw).call, "exact": exact,
    "quantise": quantise, "expert_parallel": parallel,
}  # fmt: skip

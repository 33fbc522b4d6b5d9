"""Cases of the suites that draw their sizes from published models, so that no config can be chosen for a list of them.

M is log-uniform from 1 to 16384. The other sizes are those of `models.MODELS`; formats, epilogues, a rank's share of
the experts, routers and skew are drawn too, from the seed alone. A case's name says all of what is measured, and its
inputs depend on nothing else, so a case that two seeds draw is one case. Its details have the seed, the model and the
layer.
"""

import random
from collections.abc import Callable
from dataclasses import replace

from bench.shapes import (
    Case,
    GemmShape,
    GroupedShape,
    MoeShape,
    Options,
    RouterShape,
    drawn_rows,
    moe_name,
)
from bench.suites.models import MODELS, linears
from envoi.ops.moe.router.presets import PRESETS
from envoi.quant.formats import format_named

Draw = Callable[[random.Random], Case | None]

MAX_M = 16384
CPU_COUNT = 3
CPU_MAX_M = 64
MAX_ROWS = 65536  # of a grouped GEMM
MAX_LAYER_ELEMENTS = 3 << 29  # of a rank's experts: 3 GB in bf16
RANKS = (1, 2, 4, 8, 16)
SKEW = 4.0
GEMM_FORMATS = ("bf16", "bf16", "fp8_row", "fp8_block128")
GROUPED_FORMATS = ("bf16", "fp8_row", "fp8_block128", "mxfp8", "mxfp4", "mxfp4_mxfp8")
GATED = ("store", "swiglu", "swiglu_fp8")
PLAIN = ("store", "store", "scale_bias_relu", "gelu_residual", "absmax")
WITH_EXPERTS = [model for model in MODELS if model.num_experts]
WITH_ROUTER = [model for model in MODELS if model.preset]


def cases(suite: str, options: Options) -> list[Case]:
    """Return options.count cases for a GPU and a few small ones for a CPU, equal for equal options."""
    draw, small = SUITES[suite]
    source = random.Random(f"{suite} {options.seed}")
    of_cpu = random.Random(f"{suite} {options.seed} cpu")
    found = _distinct(lambda: draw(source), options.count) + _distinct(lambda: small(of_cpu), CPU_COUNT)
    return [replace(case, details=(("seed", options.seed), *case.details)) for case in found]


def log_uniform(source: random.Random, most: int) -> int:
    """Draw a whole number from 1 to `most` whose logarithm is uniform."""
    return round(most ** source.random())


def _distinct(draw: Callable[[], Case | None], count: int) -> list[Case]:
    """Draw until there are `count` cases of different names; None is a draw that doesn't fit its format."""
    found: dict[str, Case] = {}
    while len(found) < count:
        case = draw()
        if case is not None:
            found.setdefault(case.name, case)
    return list(found.values())


def _fits(n: int, k: int, format: str, epilogue: str = "store") -> bool:
    """Tell whether Envoi and torch both take these sizes in this format."""
    columns = n // 2 if epilogue.startswith("swiglu") else n
    whole_groups = columns % 128 == 0 if epilogue == "swiglu_fp8" else columns % 8 == 0
    blocks = n % 128 == 0 if format == "fp8_block128" else n % 16 == 0
    return whole_groups and blocks and k % max(16, format_named(format).group_k) == 0


def _case(suite: str, name: str, shape, details: tuple, on_cuda: bool = True) -> Case:
    return Case(suite, name, shape, on_cuda, not on_cuda, details=details)


# gemm_drawn


def _gemm(source: random.Random) -> Case | None:
    model = source.choice([model for model in MODELS if linears(model)])
    linear = source.choice(linears(model))
    return _gemm_case(
        source, log_uniform(source, MAX_M), linear.n, linear.k, linear.role.startswith("gate_up"),
        (("model", model.name), ("layer", linear.role)),
    )  # fmt: skip


def _small_gemm(source: random.Random) -> Case | None:
    n, k = (128 * source.randint(1, 3) for _ in range(2))
    return _gemm_case(source, log_uniform(source, CPU_MAX_M), n, k, source.random() < 0.5, (), on_cuda=False)


def _gemm_case(
    source: random.Random, m: int, n: int, k: int, gated: bool, details: tuple, on_cuda: bool = True
) -> Case | None:
    epilogue, format = source.choice(GATED if gated else PLAIN), source.choice(GEMM_FORMATS)
    if not _fits(n, k, format, epilogue):
        return None
    name = f"{m}x{n}x{k} {epilogue} {format}"
    return _case("gemm_drawn", name, GemmShape(m, n, k, format, epilogue), details, on_cuda)


# grouped_drawn


def _grouped(source: random.Random) -> Case | None:
    model = source.choice(WITH_EXPERTS)
    ranks = source.choice(_ranks(model.num_experts, 2 * model.expert_intermediate * model.hidden))
    tokens = log_uniform(source, MAX_M)
    num_rows = max(1, tokens * model.num_topk // ranks)
    layers = {
        "L1": (2 * model.expert_intermediate, model.hidden),
        "L2": (model.hidden, model.expert_intermediate),
    }
    layer = source.choice(sorted(layers))
    details = ("model", model.name), ("layer", layer)
    return _grouped_case(source, model.num_experts // ranks, num_rows, *layers[layer], details)


def _small_grouped(source: random.Random) -> Case | None:
    n, k = (128 * source.randint(1, 2) for _ in range(2))
    return _grouped_case(source, 2 ** source.randint(1, 3), log_uniform(source, CPU_MAX_M), n, k, (), on_cuda=False)


def _grouped_case(
    source: random.Random, num_experts: int, num_rows: int, n: int, k: int, details: tuple, on_cuda: bool = True
) -> Case | None:
    format = source.choice(GROUPED_FORMATS)
    if not _fits(n, k, format) or num_rows > MAX_ROWS:
        return None
    name = f"{num_experts} experts drawn {num_rows}, {k} -> {n} {format}"
    shape = GroupedShape(drawn_rows(num_rows, num_experts), n, k, format)
    return _case("grouped_drawn", name, shape, details, on_cuda)


def _ranks(num_experts: int, elements: int) -> list[int]:
    """Return the numbers of ranks over which experts of so many elements can be spread, a rank's share fitting."""
    return [n for n in RANKS if num_experts % n == 0 and num_experts // n * elements <= MAX_LAYER_ELEMENTS]


# moe_drawn


def _moe(source: random.Random) -> Case | None:
    model = source.choice(WITH_EXPERTS)
    ranks = source.choice(_ranks(model.num_experts, 3 * model.expert_intermediate * model.hidden))
    num_experts = model.num_experts // ranks
    # Of a token's slots few are on one rank; top-8 of 8 experts would be every expert for every token.
    num_topk = model.num_topk if ranks == 1 else max(1, min(model.num_topk, num_experts // 4))
    shape = MoeShape(
        model.hidden, model.expert_intermediate, num_experts, num_topk,
        log_uniform(source, MAX_M), source.choice(GROUPED_FORMATS), _skew(source, num_experts, num_topk),
    )  # fmt: skip
    return _moe_case(shape, (("model", model.name),))


def _small_moe(source: random.Random) -> Case | None:
    shape = MoeShape(256, 128, 8, 2, log_uniform(source, CPU_MAX_M), source.choice(GROUPED_FORMATS))
    return _moe_case(shape, (), on_cuda=False)


def _moe_case(shape: MoeShape, details: tuple, on_cuda: bool = True) -> Case | None:
    fits = _fits(2 * shape.intermediate, shape.hidden, shape.format)
    if not fits or not _fits(shape.hidden, shape.intermediate, shape.format):
        return None
    return _case("moe_drawn", moe_name(shape), shape, details, on_cuda)


def _skew(source: random.Random, num_experts: int, num_topk: int) -> float:
    """Draw how many times its share expert 0 gets: once in four cases more than one, where that is possible."""
    return SKEW if source.random() < 0.25 and num_experts >= 2 * SKEW * num_topk else 1.0


# router_drawn


def _router(source: random.Random) -> Case | None:
    model = source.choice(WITH_ROUTER)
    return _router_case(source, log_uniform(source, MAX_M), model.hidden, model.preset, (("model", model.name),))


def _small_router(source: random.Random) -> Case | None:
    model = source.choice(WITH_ROUTER)
    return _router_case(source, log_uniform(source, CPU_MAX_M), 128, model.preset, (), on_cuda=False)


def _router_case(source: random.Random, m: int, k: int, rule: str, details: tuple, on_cuda: bool = True) -> Case | None:
    preset, dtype = PRESETS[rule], source.choice(("bf16", "bf16", "fp16"))
    shape = RouterShape(m, preset.num_experts, k, preset.num_topk, rule, dtype)
    return _case("router_drawn", f"{m}x{shape.n}x{k} {rule} {dtype}", shape, details, on_cuda)


SUITES: dict[str, tuple[Draw, Draw]] = {
    "gemm_drawn": (_gemm, _small_gemm),
    "grouped_drawn": (_grouped, _small_grouped),
    "moe_drawn": (_moe, _small_moe),
    "router_drawn": (_router, _small_router),
}

"""Cases: their sizes, those of the suites that have a list of them, and which run on a CPU too."""

import random
from dataclasses import dataclass
from math import log2

from envoi.tune.problems import GemmShape, GroupedShape, drawn_rows
from tools.oracles.indexer_workloads import Workload, one, workloads

GEMM_MNK = (
    (8192, 8192, 8192),
    (4096, 4096, 7168),
    (8192, 4096, 7168),
    (16384, 14336, 4096),
    (2048, 7168, 2048),
    (1024, 5120, 2880),
    (256, 4096, 7168),
    (64, 4096, 7168),
    (16, 7168, 2048),
)
GEMM_CPU_MNK = (256, 512, 512)
ROW_VALUE_MNK = (2000, 4096, 4096)  # beside GEMM_MNK, for epilogues of which each row has a value
ROW_VALUES = ("capped_residual_max", "logsumexp", "logsumexp_of_max")
FP8_MIN_M = 1024  # below, a GEMM is bound by reading weights
FP8_FORMATS = ("fp8_row", "fp8_block128")
EPILOGUES = {
    "gemm": ("store",),
    "gemm_swiglu": ("swiglu",),
    "gemm_quant": ("swiglu_fp8",),
    "gemm_epilogues": ("scale_bias_relu", "gelu_residual", "absmax", *ROW_VALUES),
    "gemm_fp8": ("store",),
}
WEIGHTS_FORMATS = ("bf16", "mxfp4", "mxfp4_mxfp8", "mxfp8")

ROUTER_TOP4_MNK = (
    (512, 8, 128),
    (512, 16, 128),
    (1024, 64, 512),
    (2048, 128, 1024),
    (4096, 64, 2048),
    (4096, 128, 2048),
)
ROUTER_CPU_MAX_M = 1024
ROUTER_DECODE_M = (4, 16, 64)
ROUTER_DENSE_MK = (4096, 1024)
ROUTER_DENSE_N = (8, 16, 32, 64, 128, 256, 512, 1024)

MOE_V4, MOE_SMALL, MOE_V3 = (4096, 2048, 256, 6), (2048, 768, 128, 8), (7168, 2048, 256, 8)
MOE_OVER_RANKS = (
    *((MOE_V4, m, name) for name in ("fp8_block128", "fp8_row", "mxfp4_fp8") for m in (64, 512, 2048, 8192)),
    (MOE_V4, 2048, "bf16"),
    (MOE_V4, 64, "mxfp4_mxfp8"),
    (MOE_V4, 64, "mxfp4"),
    *((MOE_SMALL, m, name) for name in ("fp8_block128", "fp8_row") for m in (64, 2048, 8192)),
    (MOE_SMALL, 512, "fp8_block128"),
    *((MOE_V3, m, "fp8_block128") for m in (64, 2048)),
)
MOE_SKEW, MOE_ZIPF = 8.0, 1.2
MOE_160 = (5120, 1536, 160, 8)  # DeepSeek-V2's sizes, with more experts a token
# Where ranks share no memory: what NCCL's torch pipeline is compared with, and every format at 512 tokens.
MOE_OVER_NCCL = (
    *((MOE_V4, m, "fp8_block128") for m in (64, 512, 2048)),
    *((MOE_V4, 512, name) for name in ("bf16", "fp8_row", "mxfp4", "mxfp4_mxfp8", "mxfp8")),
    (MOE_SMALL, 64, "bf16"),
    (MOE_SMALL, 8192, "fp8_block128"),
)
MOE_BY_HOST = (
    *((MOE_V4, m, "fp8_block128") for m in (64, 2048)),
    (MOE_SMALL, 64, "bf16"),
    (MOE_V3, 64, "fp8_block128"),
)
# The layers of half as many experts have on two GPUs as many on each as the whole ones have on four.
MOE_BLOCK_SCALED = (  # in fp8_block128, beside those of `MOE_OVER_RANKS`
    *((sizes, m) for sizes in (MOE_V4, MOE_SMALL, MOE_V3) for m in (64, 512, 2048, 8192)),
    *(((h, i, experts // 2, k), m) for h, i, experts, k in (MOE_V4, MOE_SMALL) for m in (2048, 8192)),
    *((MOE_160, m) for m in (64, 2048, 8192)),
    # Narrow experts, for which dispatch is a larger part of a call.
    *((sizes, 8192) for sizes in ((7168, 512, 256, 8), (4096, 1024, 256, 6), (2048, 512, 512, 10))),
)
TRANSPORTS = ("over nccl", "by host")
MOE_ONE_GPU = (4096, 2048, 32, 6, 2048)  # one rank's part of the first, of eight
MOE_READ_AS_STORED = ("bf16", "fp8_row", "fp8_block128")  # of these also with few tokens
MOE_FORMATS = ("bf16", "fp8_row", "fp8_block128", "mxfp4", "mxfp4_fp8", "mxfp4_mxfp8")
# Mostly few tokens, bound by reading the chosen experts' weights: gpt-oss-20b, four times its experts, sizes that are
# no powers of two, and many small experts.
GPT_OSS_20B, GPT_OSS_120B = (2880, 2880, 32, 4), (2880, 2880, 128, 4)
KIMI_K2_PART = (7168, 2048, 48, 8)  # one rank's experts of eight
MOE_DECODE = (
    *((GPT_OSS_20B, m, name) for name in ("mxfp4", "mxfp4_fp8") for m in (1, 16, 64, 512, 2048, 4096)),
    *((GPT_OSS_20B, m, "bf16") for m in (64, 256, 2048)),
    *((GPT_OSS_20B, m, "int4") for m in (1, 16, 64, 512, 4096)),
    *((KIMI_K2_PART, m, "int4") for m in (1, 16, 64, 512)),
    *((GPT_OSS_120B, m, "mxfp4") for m in (16, 256)),
    *(((2048, i, 32, 4), 16, "mxfp4") for i in (768, 1024, 1408, 1536, 2048)),
    # Qwen3-30B-A3B; its 64 tokens in fp8_block128 are above.
    *((MOE_SMALL, m, "bf16") for m in (1, 16, 64, 128, 256, 8192)),
    *((MOE_SMALL, m, "fp8_block128") for m in (1, 16, 128, 256)),
)
# Where others are nearest: FP8 tokens on MXFP4 weights, DeepSeek-V3's shard of eight ranks, Mixtral's large experts.
MOE_OF_PEERS = (
    *(((7168, 2048, 32, 8), m, "mxfp4_fp8") for m in (16, 64, 512, 2048)),
    *((GPT_OSS_20B, m, "mxfp4_mxfp8") for m in (1, 16, 64, 512, 4096)),
    *(((7168, 2048, 32, 8), m, "fp8_block128") for m in (16, 64, 512, 2048)),
    *(((4096, 14336, 8, 2), m, "bf16") for m in (16, 256)),
)
# With a shared expert: DeepSeek-V3's shard of eight ranks, and one of Qwen3-Next's.
MOE_SHARED = (
    *(((7168, 2048, 32, 8), m, "fp8_block128", "shared") for m in (1, 16, 128, 2048)),
    *(((2048, 512, 64, 10), m, "bf16", "shared gated") for m in (1, 16, 128, 2048)),
)


@dataclass(frozen=True)
class RouterShape:
    """Sizes of a router: tokens [m, k], gate [n, k]; rule: a model, or "softmax" for softmax, top-k, renormalised."""

    m: int
    n: int
    k: int
    num_topk: int
    rule: str
    dtype: str


@dataclass(frozen=True)
class MoeShape:
    """Sizes of an MoE. num_tokens: per rank. num_experts: of all ranks. skew: expert 0 gets so many times its share.
    zipf: experts' shares fall with their place, in an order drawn once, to this power; 0 = all are equal.

    transport: "" for the best that the ranks have; "over nccl" leaves shared memory unused, "by host" takes both halves
    of the ranks for hosts, between which nothing but NCCL is used; on CPUs both are over gloo. presum: of
    ExpertParallel. shared: "" for none, "shared" for one shared expert of weight 1, of the others' size, or "shared
    gated" for one whose weight is a sigmoid.
    """

    hidden: int
    intermediate: int
    num_experts: int
    num_topk: int
    num_tokens: int
    format: str
    skew: float = 1.0
    transport: str = ""
    presum: bool = False
    zipf: float = 0.0
    shared: str = ""

    @property
    def is_even(self) -> bool:
        """Tell whether all experts get the same share of tokens."""
        return self.skew == 1.0 and not self.zipf


@dataclass(frozen=True)
class IndexerShape:
    """Workloads of an indexer case, at least one; times are means over them.

    k: tokens that are chosen, in this order; block: tokens of a block, of which then k are chosen; 0 for none.
    """

    workloads: tuple[Workload, ...]
    order: str = "score"
    k: int = 2048
    block: int = 0


@dataclass(frozen=True)
class HostShape:
    """Call of a public operator, whose host time counts: its name in envoi, and its sizes.

    mode: of the indexer; of others "", or `suites.host.FIRST`.
    """

    operator: str
    sizes: GemmShape | GroupedShape | RouterShape | MoeShape | IndexerShape
    mode: str = ""


@dataclass(frozen=True)
class ModelShape:
    """Step of a model: num_tokens of each sequence, 1 for decode. model: its name; format: of its experts.

    how: "eager", "graph" (replays of a CUDA graph of it) or "compiled" (by torch.compile, and replays).
    """

    model: str
    num_layers: int
    format: str
    num_sequences: int
    num_tokens: int
    how: str = "eager"


@dataclass(frozen=True)
class EngineShape:
    """Step of a model in a server's engine: num_tokens of each sequence, 1 for decode."""

    engine: str
    model: str
    num_layers: int
    format: str
    num_sequences: int
    num_tokens: int


Shape = EngineShape | GemmShape | GroupedShape | RouterShape | MoeShape | IndexerShape | HostShape | ModelShape


@dataclass(frozen=True)
class Case:
    """Line of `python -m bench --list`. on_cuda, on_cpu: devices that run it.

    alone, over_ranks: one process can run it, several that share it can.
    details: (name, value) pairs for the details of its measurement.
    """

    suite: str
    name: str
    shape: Shape
    on_cuda: bool = True
    on_cpu: bool = False
    over_ranks: bool = False
    alone: bool = True
    details: tuple[tuple[str, str | float], ...] = ()


@dataclass(frozen=True)
class Options:
    """Choices of the command that decide which cases a suite has.

    seed, count: of the suites that draw them. layers: of suites model and engine, None for as many as
    fit.
    """

    seed: int = 0
    count: int = 48
    layers: int | None = None


DEFAULTS = Options()


def fixed_cases(suite: str) -> list[Case]:
    """Return the cases of a suite whose sizes are in this file; `suites.cases` has those of all."""
    makers = {
        "gemm_grouped": _grouped_cases, "gemm_weights": _weights_cases, "moe": _moe_cases,
    }  # fmt: skip
    if suite in makers:
        return makers[suite]()
    if suite.startswith("router"):
        return _router_cases(suite)
    return _indexer_cases(suite) if suite.startswith("indexer") else _gemm_cases(suite)


def _gemm_cases(suite: str) -> list[Case]:
    formats = FP8_FORMATS if suite == "gemm_fp8" else ("bf16",)
    found = []
    for format in formats:
        for epilogue in EPILOGUES[suite]:
            what = epilogue if suite == "gemm_epilogues" else format
            more = (ROW_VALUE_MNK,) if epilogue in ROW_VALUES else ()
            for mnk in (*GEMM_MNK, *more, GEMM_CPU_MNK):
                on_cpu = mnk == GEMM_CPU_MNK
                if on_cpu or format == "bf16" or _takes_fp8(mnk, format):
                    shape = GemmShape(*mnk, format, epilogue)
                    found.append(Case(suite, f"{'x'.join(map(str, mnk))} {what}", shape, not on_cpu, on_cpu))
    return found


def _takes_fp8(mnk: tuple[int, int, int], format: str) -> bool:
    return mnk[0] >= FP8_MIN_M and (format == "fp8_row" or mnk[2] % 128 == 0)


def _grouped_cases() -> list[Case]:
    formats = ("bf16", *FP8_FORMATS)
    found = []
    for label, num_rows, n, k, on_cpu in (
        ("32 experts x 256", (256,) * 32, 4096, 7168, False),
        ("32 experts drawn 8192", drawn_rows(8192, 32), 4096, 7168, False),
        ("32 experts zipf 8192", zipf_rows(8192, 32, 4), 4096, 7168, False),
        ("8 experts x 32", (32,) * 8, 256, 512, True),
        ("8 experts zipf 256", zipf_rows(256, 8, 2), 256, 512, True),
    ):
        for format in formats:
            shape = GroupedShape(num_rows, n, k, format)
            found.append(Case("gemm_grouped", f"{label}, {k} -> {n} {format}", shape, not on_cpu, on_cpu))
    return found


def _weights_cases() -> list[Case]:
    found = []
    for format in WEIGHTS_FORMATS:
        for num_experts, tokens, n, k, on_cpu in (
            (32, 16, 4096, 4096, False), (32, 64, 4096, 4096, False), (8, 4, 256, 256, True),
        ):  # fmt: skip
            shape = GroupedShape((tokens,) * num_experts, n, k, format)
            name = f"{num_experts} experts x {tokens}, {k} -> {n} {format}"
            found.append(Case("gemm_weights", name, shape, not on_cpu, on_cpu))
    return found


def zipf_rows(total: int, num_experts: int, num_empty: int) -> tuple[int, ...]:
    """Split `total` rows over experts in proportion to 1, 1/2, 1/3, .., in a fixed mixed order; num_empty get none.

    >>> zipf_rows(100, 4, 1)
    (18, 55, 0, 27)
    """
    busy = num_experts - num_empty
    weights = [1 / (rank + 1) for rank in range(busy)]
    rows = [int(total * weight / sum(weights)) for weight in weights] + [0] * num_empty
    rows[0] += total - sum(rows)
    random.Random(num_experts).shuffle(rows)
    return tuple(rows)


def _router_cases(suite: str) -> list[Case]:
    if suite == "router_dense":
        m, k = ROUTER_DENSE_MK
        small = Case(suite, *_router_shape(256, 16, 128, 4, "softmax", "fp16"), on_cuda=False, on_cpu=True)
        return [*(Case(suite, *_router_shape(m, n, k, 4, "softmax", "fp16")) for n in ROUTER_DENSE_N), small]
    shapes = [_router_shape(*mnk, 4, "softmax", "fp16") for mnk in ROUTER_TOP4_MNK]
    decode = ROUTER_DECODE_M if suite == "router_call" else ()
    shapes += [_router_shape(m, 256, 7168, 8, "deepseek-v3", "bf16") for m in (1, *decode, 128, 4096, 16384)]
    shapes.append(_router_shape(16, 384, 7168, 8, "kimi-k2", "bf16"))
    shapes.append(_router_shape(64, 160, 2048, 8, "softmax", "bf16"))
    shapes.append(_router_shape(2048, 512, 4096, 10, "softmax", "bf16"))
    at_most = ROUTER_CPU_MAX_M if suite == "router" else 16
    return [Case(suite, name, s, on_cpu=s.m <= at_most) for name, s in shapes]


def _router_shape(m: int, n: int, k: int, num_topk: int, rule: str, dtype: str) -> tuple[str, RouterShape]:
    """Return the shape with its name."""
    what = f"top{num_topk} softmax" if rule == "softmax" else rule
    return f"{m}x{n}x{k} {what} {dtype}", RouterShape(m, n, k, num_topk, rule, dtype)


def _moe_cases() -> list[Case]:
    shapes = [MoeShape(*sizes, m, name) for sizes, m, name in MOE_OVER_RANKS]
    more = (MoeShape(*sizes, m, "fp8_block128") for sizes, m in MOE_BLOCK_SCALED)
    shapes += [shape for shape in more if shape not in shapes]
    shapes += [
        MoeShape(*MOE_V4, 2048, "fp8_block128", skew, zipf=zipf) for skew, zipf in ((MOE_SKEW, 0.0), (1.0, MOE_ZIPF))
    ]
    shapes.append(MoeShape(*MOE_V4, 2048, "mxfp4_fp8", zipf=MOE_ZIPF))
    shapes.append(MoeShape(*MOE_160, 2048, "fp8_block128", zipf=MOE_ZIPF))
    alone = [MoeShape(*MOE_ONE_GPU, name) for name in MOE_FORMATS]
    alone += [MoeShape(*MOE_ONE_GPU[:4], 64, name) for name in MOE_READ_AS_STORED]
    alone += [MoeShape(*sizes, m, name) for sizes, m, name in (*MOE_DECODE, *MOE_OF_PEERS)]
    alone += [MoeShape(*sizes, m, name, shared=shared) for sizes, m, name, shared in MOE_SHARED]
    small = [MoeShape(256, 128, 8, 2, 64, name) for name in MOE_FORMATS]
    shapes += [MoeShape(*sizes, m, name, transport="over nccl") for sizes, m, name in MOE_OVER_NCCL]
    for presum in (False, True):
        shapes += [MoeShape(*sizes, m, name, 1.0, "by host", presum) for sizes, m, name in MOE_BY_HOST]
    small += [MoeShape(256, 128, 8, 2, 64, "bf16", 1.0, transport) for transport in TRANSPORTS]
    small.append(MoeShape(256, 128, 8, 2, 64, "bf16", zipf=MOE_ZIPF))
    found = [Case("moe", moe_name(s), s, over_ranks=True, alone=not s.transport) for s in shapes]
    found += [Case("moe", moe_name(s), s) for s in alone]
    with_shared = [MoeShape(256, 128, 8, 2, 64, name, shared=shared) for _, _, name, shared in MOE_SHARED[::4]]
    found += [Case("moe", moe_name(s), s, False, True) for s in with_shared]
    return found + [Case("moe", moe_name(s), s, False, True, over_ranks=True, alone=not s.transport) for s in small]


def moe_name(s: MoeShape) -> str:
    """Return a case's name, "4096/2048/256/6 fp8_row tokens=64": hidden, intermediate, experts, top-k."""
    how = f" skew={s.skew:g}" if s.skew != 1.0 else ""
    how += f" zipf={s.zipf:g}" if s.zipf else ""
    how += f" {s.transport}" if s.transport else ""
    how += " sums" if s.presum else ""
    how += f" {s.shared}" if s.shared else ""
    return f"{s.hidden}/{s.intermediate}/{s.num_experts}/{s.num_topk} {s.format} tokens={s.num_tokens}{how}"


MIXED = (65536, 1024, 300, 20000) * 4  # lengths of requests
DRAWN_SEED, DRAWN_BATCHES = 7, 8
# Requests, keys of each, keys that a row of the table has room for: servers' tables hold the longest that may come.
WIDE = (64, 4096, 131072), (64, 4096, 163840), (200, 3000, 65536), (16, 32768, 131072)


def _indexer_cases(suite: str) -> list[Case]:
    found = [
        Case(suite, f"{len(workloads())} workloads (mean)", IndexerShape(workloads())),
        Case(suite, "batch 1x131072", IndexerShape((one((131072,)),))),
        Case(suite, "batch 32x32768", IndexerShape((one((32768,) * 32),))),
        Case(suite, "batch 64x8192", IndexerShape((one((8192,) * 64),))),
        Case(suite, "batch 16x4096", IndexerShape((one((4096,) * 16),))),
        Case(suite, "batch 2x4096", IndexerShape((one((4096,) * 2),)), False, True),
    ]
    return found if suite == "indexer_exact" else [*found, *_set_cases(suite), *_prefill_cases(suite)]


def _drawn_lengths() -> dict[str, tuple[int, ...]]:
    """Return batches of requests whose lengths nobody chose, by their number and the longest."""
    draw, found = random.Random(DRAWN_SEED), {}
    for nth in range(DRAWN_BATCHES):
        rows = round(128 ** ((nth + draw.random()) / DRAWN_BATCHES))
        most = min(131072, 2**22 // rows)
        lengths = tuple(round(2 ** draw.uniform(9, log2(most))) for _ in range(rows))
        found[f"drawn {rows}x{max(lengths)}"] = lengths
    return found


def _set_cases(suite: str) -> list[Case]:
    """Return sets in any order: of several sizes, drawn too, heads, keys in FP4, of blocks, and in wide tables."""
    long = (32768,) * 32
    sizes = {"1x131072": (131072,), "32x32768": long, "64x8192": (8192,) * 64, "16x4096": (4096,) * 16,
             "16xmixed": MIXED, **_drawn_lengths()}  # fmt: skip
    return [
        *(Case(suite, f"set {name}", IndexerShape((one(lengths),), "any")) for name, lengths in sizes.items()),
        *(
            Case(suite, f"set 32x32768 heads={heads}", IndexerShape((one(long, num_heads=heads),), "any"))
            for heads in (4, 16, 32)
        ),
        Case(
            suite, "set 32x32768 heads=32 fp4 k=512", IndexerShape((one(long, num_heads=32, fp4=True),), "any", 512)
        ),
        Case(
            suite, "blocks of 8 32x32768 heads=32 fp4",
            IndexerShape((one(long, num_heads=32, fp4=True),), "any", 2048, 8),
        ),
        *(
            Case(suite, f"set {rows}x{keys} of {room}", IndexerShape((one((keys,) * rows, room=room),), "any"))
            for rows, keys, room in WIDE
        ),
        Case(suite, "set 3x700 heads=4 k=128", IndexerShape((one((700,) * 3, num_heads=4),), "any", 128), False, True),
        Case(
            suite, "blocks of 8 2x700 heads=4 fp4",
            IndexerShape((one((700,) * 2, num_heads=4, fp4=True),), "any", 20, 8), False, True,
        ),
    ]  # fmt: skip


def _prefill_cases(suite: str) -> list[Case]:
    """Return sets of many query rows of a request: each row sees one key more than the one before."""
    sizes = (64, 4096, 4096), (64, 4096, 16384), (64, 4096, 65536), (32, 4096, 16384)
    return [
        *(
            Case(suite, f"prefill {rows}x{keys} heads={heads}",
                 IndexerShape((one((keys,), num_heads=heads, next_n=rows),), "any"))
            for heads, rows, keys in sizes
        ),
        Case(suite, "prefill 5x300 heads=8 k=128",
             IndexerShape((one((300,), num_heads=8, next_n=5),), "any", 128), False, True),
    ]  # fmt: skip

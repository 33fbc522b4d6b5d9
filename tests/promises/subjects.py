"""Calls whose bits are promised: each operator in each format, on a choice of rows out of a fixed set.

A subject's inputs for some rows are made from the same full set, so that what a row gives can be compared between
calls with other rows around it, more or fewer of them, and in another order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import envoi
from envoi.epilogues import Row, epilogue, row_sum, rsqrt
from envoi.epilogues.library import store, swiglu
from envoi.ops.indexer.select import orders_for
from envoi.ops.moe.router import PRESETS
from envoi.quant import FORMATS, quantize
from envoi.quant.formats import SCHEMES
from envoi.types import QuantTensor, Routing
from tests.moe.layers import make
from tools.oracles.indexer_workloads import one

Tensors = tuple[torch.Tensor, ...]
GEMM_SCHEMES: dict[str, tuple[str | torch.dtype | None, str | None]] = {
    "bf16": (None, None), "fp16": (torch.float16, None), "fp32": (torch.float32, None),
    "fp8_row": ("fp8_row", "fp8_row"), "fp8_block128": ("fp8_1x128", "fp8_128x128"), "mxfp8": ("mxfp8", "mxfp8"),
    "mxfp4": (None, "mxfp4"), "mxfp4_mxfp8": ("mxfp8", "mxfp4"), "nvfp4": ("nvfp4", "nvfp4"),
}  # fmt: skip
ROUTERS = ("qwen3-moe", "deepseek-v3", "gpt-oss-120b")


@epilogue
def square_sums(acc, weight: Row):
    """Return each row times its weight, and the sum of its squares, which tiles add up among them."""
    return acc * weight, row_sum(acc * acc)


@epilogue
def unit_rows(acc, weight: Row):
    """Return each row times its weight over its length, which has to be known first."""
    return acc * rsqrt(row_sum(acc * acc) + 1e-6) * weight


@dataclass(frozen=True)
class Subject:
    """Call of an operator on some of `rows` rows.

    operator: its public name. name: with the format and the epilogue. given: takes row numbers [m] int64, returns the
    call's tensors. run: takes them, returns outputs whose first dimension is m, in that order of rows.
    invariant: batch_invariant=True is what makes a row's bits independent of the others; False: they always are.
    captured: a CUDA graph can hold the call; False: it is refused there, since torch reads values on the host.
    """

    operator: str
    name: str
    rows: int
    given: Callable[[torch.Tensor], Tensors]
    run: Callable[..., Sequence[torch.Tensor]]
    invariant: bool = False
    captured: bool = True


@dataclass(frozen=True)
class Sizes:
    """Sizes of the subjects: on a GPU such that tiles are few for few rows and many for many."""

    rows: int
    N: int
    K: int
    experts: int
    k: int

    @property
    def long_k(self) -> int:
        """K of a product without experts, whose sum is split where rows are few, if its format's ever is."""
        return 2 * self.K

    @staticmethod
    def of(device: torch.device) -> "Sizes":
        """Return the sizes for a device."""
        return Sizes(1500, 512, 4096, 16, 4) if device.type == "cuda" else Sizes(70, 256, 256, 6, 2)


# Formats of layers that have kernels for few tokens, which add up in another order.
WITH_FEW = ("mxfp4", "mxfp4_fp8", "mxfp4_mxfp8", "int4")

# Epilogues by name, and whether they take a weight for each row.
_ENDINGS = {
    "store": (store, False), "swiglu": (swiglu, False), "row sums": (square_sums, True), "unit rows": (unit_rows, True),
}  # fmt: skip


def _normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _matrix(x: torch.Tensor, scheme: str | torch.dtype | None, device: torch.device) -> Any:
    if isinstance(scheme, str):
        return quantize(x.to(device), scheme)
    return x.to(device, scheme or torch.bfloat16)


def _picked(x: Any, rows: torch.Tensor) -> list[torch.Tensor]:
    if not isinstance(x, QuantTensor):
        return [x[rows]]
    # Indexing isn't written for narrow types on every device.
    return [x.values.view(torch.uint8)[rows], x.sf.view(torch.uint8)[rows] if x.sf.itemsize == 1 else x.sf[rows]]


def _joined(like: Any, parts: Sequence[torch.Tensor]) -> Any:
    if not isinstance(like, QuantTensor):
        return parts[0]
    values, sf = parts
    return QuantTensor(values.view(like.values.dtype), sf.view(like.sf.dtype), like.group)


def _flat(x: Any) -> list[torch.Tensor]:
    if isinstance(x, tuple):
        return [part for item in x for part in _flat(item)]
    return [x.values, x.sf] if isinstance(x, QuantTensor) else [x]


def _needs(form: str, ending: str, grouped: bool) -> bool:
    """Tell whether a product's row needs batch_invariant=True: K is split, or tiles decide in which order rows add up.

    MX weights' kernel never splits K, and adds up rows by 64 columns, and MX that becomes bf16 is multiplied as with
    the option; torch multiplies fp32 in tiles of one size.
    """
    if form in ("mxfp8", "mxfp4", "mxfp4_mxfp8", "fp32"):
        return False
    return not grouped or ending.endswith(("rows", "sums")) or form == "nvfp4"


def _gemm(device: torch.device, sizes: Sizes, batch_invariant: bool | None, name: str, ending: str) -> Subject:
    of_a, of_b = GEMM_SCHEMES[name]
    of_b = of_b or (of_a if isinstance(of_a, torch.dtype) else None)
    a = _matrix(_normal(0, sizes.rows, sizes.long_k), of_a, device)
    b = _matrix(_normal(1, sizes.N, sizes.long_k) / sizes.long_k**0.5, of_b, device)
    weights = _normal(2, sizes.rows).to(device)
    ep, has_weight = _ENDINGS[ending]
    needed = _needs(name, ending, False)
    wanted = needed if batch_invariant is None else batch_invariant

    def given(rows: torch.Tensor) -> Tensors:
        return (weights[rows], *_picked(a, rows))

    def run(weight: torch.Tensor, *parts: torch.Tensor) -> list[torch.Tensor]:
        operands: dict[str, Any] = {"weight": weight} if has_weight else {}
        return _flat(envoi.gemm(_joined(a, parts), b, ep, batch_invariant=wanted, **operands))

    return Subject("gemm", "", sizes.rows, given, run, needed)


def _grouped(device: torch.device, sizes: Sizes, batch_invariant: bool | None, name: str, ending: str) -> Subject:
    of_a, of_b = GEMM_SCHEMES[name]
    of_b = of_b or (of_a if isinstance(of_a, torch.dtype) else None)
    E = sizes.experts
    a = _matrix(_normal(0, sizes.rows, sizes.K), of_a, device)
    b = _matrix(_normal(1, E, sizes.N, sizes.K) / sizes.K**0.5, of_b, device)
    weights = _normal(2, sizes.rows).to(device)
    # Experts of very different sizes, one of them without a row.
    expert = (_normal(3, sizes.rows).abs() * 0.4 * (E - 1)).long().clamp(max=E - 2).to(device)
    ep, has_weight = _ENDINGS[ending]
    needed = _needs(name, ending, True)
    wanted = needed if batch_invariant is None else batch_invariant

    def given(rows: torch.Tensor) -> Tensors:
        order = expert[rows].sort(stable=True).indices
        counts = torch.bincount(expert[rows], minlength=E)
        offsets = torch.cat((counts.new_zeros(1), counts.cumsum(0))).int()
        return (order.argsort(), offsets, weights[rows[order]], *_picked(a, rows[order]))

    def run(back: torch.Tensor, offsets: torch.Tensor, weight: torch.Tensor, *parts: torch.Tensor) -> list:
        operands: dict[str, Any] = {"weight": weight} if has_weight else {}
        out = envoi.grouped_gemm(_joined(a, parts), b, offsets, ep, batch_invariant=wanted, **operands)
        return [x[back] for x in _flat(out)]

    return Subject("grouped_gemm", "", sizes.rows, given, run, needed, captured=name != "fp32")


def _route(device: torch.device, sizes: Sizes, batch_invariant: bool | None, model: str, dtype: torch.dtype) -> Subject:
    preset = PRESETS[model]
    tokens = _normal(0, sizes.rows, sizes.K).to(device, dtype)
    gate = (_normal(1, preset.num_experts, sizes.K) / sizes.K**0.5).to(device, dtype)
    biases: dict[str, Any] = {
        "expert_bias": _normal(2, preset.num_experts).to(device) * 0.1 if preset.has_expert_bias else None,
        "logit_bias": _normal(3, preset.num_experts).to(device) if preset.has_logit_bias else None,
    }

    def run(x: torch.Tensor) -> list[Any]:
        found = envoi.route(x, gate, preset.num_topk, rule=preset.rule, return_logits=True, return_dense=True, **biases)
        return [found.topk_weights, found.topk_ids, found.logits, found.dense]

    return Subject("route", "", sizes.rows, lambda rows: (tokens[rows],), run)


def _moe(device: torch.device, sizes: Sizes, batch_invariant: bool | None, format: str) -> Subject:
    layer = make(sizes.rows, sizes.experts, sizes.k, min(sizes.K, 2048), sizes.N, masked=0.1)
    layer.gate_up, layer.down = layer.gate_up.to(device), layer.down.to(device)
    experts = layer.pack(format)
    weights, ids = layer.routing.topk_weights.to(device), layer.routing.topk_ids.to(device)
    tokens, needed = layer.tokens.to(device), format in WITH_FEW
    wanted = needed if batch_invariant is None else batch_invariant

    def run(x: torch.Tensor, w: torch.Tensor, i: torch.Tensor) -> list[torch.Tensor]:
        return [envoi.moe(x, Routing(w, i, sizes.experts), experts, batch_invariant=wanted)]

    def given(rows: torch.Tensor) -> Tensors:
        return tokens[rows], weights[rows], ids[rows]

    return Subject("moe", "", sizes.rows, given, run, needed)


def _indexer(device: torch.device, sizes: Sizes, batch_invariant: bool | None, mode: str) -> Subject:
    requests, most = (40, 5000) if device.type == "cuda" else (7, 300)
    lengths = torch.randint(0, most, (requests,), generator=torch.Generator().manual_seed(0)).tolist()
    q, cache, weights, seq_lens, table = (x.to(device) for x in one(tuple(lengths)).tensors())
    raw = q.view(torch.uint8)

    def given(rows: torch.Tensor) -> Tensors:
        return raw[rows], weights[rows], seq_lens[rows], table[rows]

    def run(x: torch.Tensor, w: torch.Tensor, lens: torch.Tensor, pages: torch.Tensor) -> list[torch.Tensor]:
        found = envoi.indexer_topk(x.view(q.dtype), cache, w, lens, pages, k=512, mode=mode)
        assert isinstance(found, torch.Tensor)
        return [found]

    captured = mode == "fast" or orders_for(device, q.shape[1]) is not None
    return Subject("indexer_topk", "", requests, given, run, captured=captured)


def _quantise(device: torch.device, sizes: Sizes, batch_invariant: bool | None, scheme: str) -> Subject:
    x = _normal(0, sizes.rows, sizes.K).to(device, torch.bfloat16)
    run = partial(_quantised, scheme)
    return Subject("quantise", "", sizes.rows, lambda rows: (x[rows],), run)


def _makers() -> dict[str, Callable[..., Subject]]:
    found: dict[str, Callable[..., Subject]] = {}
    for ending in _ENDINGS:
        for name in GEMM_SCHEMES:
            found[f"gemm {name} {ending}"] = partial(_gemm, name=name, ending=ending)
            found[f"grouped_gemm {name} {ending}"] = partial(_grouped, name=name, ending=ending)
    for model in ROUTERS:
        for kind, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
            found[f"route {model} {kind}"] = partial(_route, model=model, dtype=dtype)
    found |= {f"moe {format}": partial(_moe, format=format) for format in FORMATS}
    found |= {f"indexer_topk {mode}": partial(_indexer, mode=mode) for mode in ("fast", "exact")}
    by_row = [name for name in SCHEMES if SCHEMES[name].group[0] == 1]
    return dict(sorted((found | {f"quantise {name}": partial(_quantise, scheme=name) for name in by_row}).items()))


MAKERS = _makers()


def subject(name: str, device: torch.device, batch_invariant: bool | None = None) -> Subject:
    """Make a subject. batch_invariant: of a call that takes it; None = where it is needed."""
    made = MAKERS[name](device, Sizes.of(device), batch_invariant)
    return replace(made, name=name)


def _quantised(scheme: str, x: torch.Tensor) -> list[torch.Tensor]:
    return _flat(quantize(x, scheme))

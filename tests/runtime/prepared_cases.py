"""Calls of every operator for the tests of prepared calls, on a CPU in the interpreter and on a GPU.

A case makes the arguments of call number i: other values at other addresses, all of the same shapes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

import envoi
from envoi.epilogues import Col, Row, Scalar, Tile, cast, col_sum, epilogue, row_absmax
from envoi.epilogues.activation import written
from envoi.epilogues.library import linear, store, swiglu, swiglu_fp8
from envoi.ops.gemm import grouped_gemm
from envoi.quant import FORMATS, quantize
from envoi.router import Rule
from envoi.types import QuantTensor
from tests.moe.layers import Layer, make
from tests.moe.own import reglu
from tools.oracles.indexer_workloads import one, random_fp4_cache


@epilogue
def several(acc, row: Row, col: Col, tile: Tile, by: Scalar):
    """Outputs of several kinds, in a dict."""
    return {"out": (acc * by + tile) * row + col, "plain": cast(acc, "bf16")}


@epilogue
def reduced(acc):
    """Reductions over rows and over columns, which a second kernel completes."""
    return acc, row_absmax(acc), col_sum(acc)


@dataclass(frozen=True)
class Case:
    """Call of an operator. arguments: takes the number of the call, returns positional and named arguments."""

    function: Callable
    arguments: Callable[[int], tuple[tuple, dict]]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return normal numbers; the same on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gemm_cases(M: int, N: int, K: int) -> dict[str, Case]:
    """Return dense and grouped GEMMs in every format, with epilogues of every kind."""
    found = {}
    sides = {
        "bf16": (None, None), "fp16": (None, None), "fp8_row": ("fp8_row",) * 2, "fp8_tensor": ("fp8_tensor",) * 2,
        "fp8_block128": ("fp8_1x128", "fp8_128x128"), "mxfp8": ("mxfp8",) * 2, "mxfp4": (None, "mxfp4"),
        "mxfp4_mxfp8": ("mxfp8", "mxfp4"),
    }  # fmt: skip
    for name, (x, y) in sides.items():
        dtype = torch.float16 if name == "fp16" else torch.bfloat16

        def sides_of(i: int, lead: tuple[int, ...] = (), x=x, y=y, dtype=dtype):
            a, b = normal(M, K, seed=i, dtype=dtype), normal(*lead, N, K, seed=i + 50, dtype=dtype)
            return a if x is None else quantize(a, x), b if y is None else quantize(b, y)

        found[f"gemm-{name}"] = Case(envoi.gemm, lambda i, of=sides_of: (of(i), {}))
        if name != "fp8_tensor":
            found[f"grouped-{name}"] = Case(grouped_gemm, lambda i, of=sides_of: ((*of(i, (3,)), offsets(i, M)), {}))
    for ep in (linear, swiglu, swiglu_fp8, several, reduced):
        found[f"gemm-{ep.ir.name}"] = Case(envoi.gemm, lambda i, ep=ep: _with_epilogue(i, ep, M, N, K))
    found["gemm-float32-out"] = Case(
        envoi.gemm, lambda i: ((normal(M, K, seed=i), normal(N, K, seed=i + 50), store), {"out_dtype": torch.float32})
    )
    return found


def offsets(i: int, M: int) -> torch.Tensor:
    """Return rows of 3 experts, others for each call, one of them none."""
    first = M // 3 - i % 2
    return torch.tensor([0, first, first, M - i], dtype=torch.int32)


def _with_epilogue(i: int, ep: Any, M: int, N: int, K: int) -> tuple[tuple, dict]:
    operands: dict[str, Any] = {}
    for number, operand in enumerate(ep.ir.operands):
        shape = {"Row": (M,), "Col": (N,), "Tile": (M, N)}.get(operand.kind)
        operands[operand.name] = 0.5 if shape is None else normal(*shape, seed=i * 10 + number)
    return (normal(M, K, seed=i), normal(N, K, seed=i + 50), ep), operands


def route_cases(M: int, N: int, hidden: int, k: int) -> dict[str, Case]:
    """Return routers: rules, biases, hashed, all outputs."""

    def arguments(i: int, **named: Any) -> tuple[tuple, dict]:
        return (normal(M, hidden, seed=i), normal(N, hidden, seed=i + 50), k), named

    ids = torch.Generator().manual_seed(0)
    table = torch.stack([torch.randperm(N, generator=ids)[:k] for _ in range(40)]).to(torch.int32)
    return {
        "route": Case(envoi.route, arguments),
        "route-deepseek-v3": Case(
            envoi.route,
            lambda i: arguments(i, rule="deepseek-v3", expert_bias=normal(N, seed=i + 9, dtype=torch.float32)),
        ),
        "route-biased": Case(envoi.route, lambda i: arguments(i, alpha=0.5, logit_bias=normal(N, seed=i + 9))),
        "route-all": Case(
            envoi.route, lambda i: arguments(i, return_logits=True, return_dense=True, return_counts=True)
        ),
        "route-logits-fp16": Case(
            envoi.route, lambda i: arguments(i, rule=Rule("identity", renormalize=False), weights_dtype=torch.float16)
        ),
        "route-hashed": Case(
            envoi.route,
            lambda i: arguments(i, token_ids=((torch.arange(M) + i) % 40).to(torch.int32), hash_table=table),
        ),
    }


def moe_cases(
    tokens: int, experts: int, k: int, hidden: int, intermediate: int, device: str = "cpu"
) -> dict[str, Case]:
    """Return layers in every format, with and without biases, tokens of two and of three dimensions.

    device: where the experts are packed, which decides the order of 4-bit weights.
    """

    def arguments(i: int, format: str, bias: bool = False, batch: bool = False, **kind: Any) -> tuple[tuple, dict]:
        kind |= {"activation": "swiglu_oai", "bias": True} if bias else {}
        layer = Layer(**on(device, vars(make(tokens, experts, k, hidden, intermediate, seed=i, **kind))))
        x = layer.tokens.view(2, tokens // 2, hidden) if batch else layer.tokens
        return (x, layer.routing, layer.pack(format)), {}

    found = {f"moe-{f}": Case(envoi.moe, lambda i, f=f: arguments(i, f)) for f in FORMATS}
    found["moe-bias"] = Case(envoi.moe, lambda i: arguments(i, "bf16", bias=True))
    found["moe-mxfp4-bias"] = Case(envoi.moe, lambda i: arguments(i, "mxfp4", bias=True))
    found["moe-own"] = Case(envoi.moe, lambda i: arguments(i, "bf16", activation=written(reglu)))
    found["moe-mxfp4-own"] = Case(envoi.moe, lambda i: arguments(i, "mxfp4", activation=written(reglu)))
    found["moe-mapped"] = Case(envoi.moe, lambda i: mapped(*arguments(i, "bf16")))
    found["moe-shared"] = Case(envoi.moe, lambda i: with_shared(i, *arguments(i, "fp8_block128")))
    found["moe-batch"] = Case(envoi.moe, lambda i: arguments(i, "fp8_row", batch=True))
    return found


def mapped(given: tuple, named: dict) -> tuple[tuple, dict]:
    """Return the call of a layer whose experts are half of the routing's, every second one."""
    tokens, routing, experts = given
    E, device = experts.num_local_experts, tokens.device
    here = torch.arange(E, dtype=torch.int32, device=device)
    expert_map = torch.stack([here, torch.full_like(here, -1)], 1).flatten()
    every_other = replace(routing, topk_ids=2 * routing.topk_ids + routing.topk_ids % 2, num_experts=2 * E)
    return (tokens, every_other, experts), named | {"expert_map": expert_map}


def with_shared(i: int, given: tuple, named: dict) -> tuple[tuple, dict]:
    """Return the call of a layer whose last expert is shared, by a gate."""
    tokens, routing, experts = given
    last = experts.num_local_experts - 1
    gate = torch.linspace(-1, 1 + i, experts.hidden, device=tokens.device)
    routed = replace(routing, topk_ids=torch.where(routing.topk_ids == last, -1, routing.topk_ids), num_experts=last)
    return (tokens, routed, replace(experts, num_shared=1, shared_gate=gate)), named


def indexer_cases(length: int) -> dict[str, Case]:
    """Return the fast mode: slots, positions in ascending order, several rows a request."""

    def arguments(i: int, **named: Any) -> tuple[tuple, dict]:
        tensors = one((length, 70), num_heads=32, seed=i).tensors()
        tensors[3][0] -= 100 * i
        return tensors, {"k": 512, "mode": "fast", **named}

    def in_fp4(i: int) -> tuple[tuple, dict]:
        (q, cache, *rest), named = arguments(i)
        return (q, random_fp4_cache(len(cache)), *rest), named

    return {
        "indexer": Case(envoi.indexer_topk, arguments),
        "indexer-fp4": Case(envoi.indexer_topk, in_fp4),
        "indexer-positions": Case(
            envoi.indexer_topk, lambda i: arguments(i, output="positions", order="any", return_errors=True)
        ),
    }


def tensors_in(x: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors of arguments or results."""
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, dict):
        yield from tensors_in(tuple(x.values()))
    elif isinstance(x, tuple | list):
        for part in x:
            yield from tensors_in(part)
    elif is_dataclass(x):
        yield from tensors_in(tuple(getattr(x, field.name) for field in fields(x)))


def on(device: str, x: Any) -> Any:
    """Move arguments to a device."""
    if isinstance(x, torch.Tensor):
        return x.to(device)
    if isinstance(x, dict):
        return {name: on(device, value) for name, value in x.items()}
    if isinstance(x, tuple):
        return tuple(on(device, part) for part in x)
    if is_dataclass(x) and not isinstance(x, type):
        moved = {field.name: on(device, getattr(x, field.name)) for field in fields(x)}
        return type(x)(**moved)
    return x


def same_bits(got: Any, want: Any) -> bool:
    """Compare results bit for bit: type, shapes, dtypes and bytes, NaN's too."""
    mine, theirs = list(tensors_in(got)), list(tensors_in(want))
    if type(got) is not type(want) or len(mine) != len(theirs):
        return False
    if isinstance(got, QuantTensor) and (got.group, got.scales_at_most_2) != (want.group, want.scales_at_most_2):
        return False
    return all(
        (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())
        and torch.equal(*(z.contiguous().view(-1).view(torch.uint8) for z in (x, y)))
        for x, y in zip(mine, theirs, strict=True)
    )

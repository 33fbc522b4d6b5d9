"""Warm-up of a layer on one GPU: the public function `envoi.warm_up`."""

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from envoi.check import expect_int
from envoi.ops.moe import moe
from envoi.ops.moe.op import IDS, WEIGHTS
from envoi.ops.moe.router import route
from envoi.ops.moe.router.api import check_arguments
from envoi.ops.moe.router.warm_up import RouterCall
from envoi.ops.moe.warm_up import ROUTED, LayerCall, check_jobs, compiles, prepare, without_tensors
from envoi.runtime import shortcuts
from envoi.runtime.devices import Target
from envoi.runtime.planned_kernels import Call, compile_calls, load_at
from envoi.types import ExpertWeights, expect_experts


def check_router(router: Any, experts: ExpertWeights) -> None:
    """Raise ValueError unless these are named arguments of `envoi.route` that go with tokens of the experts."""
    known: dict[str, Any] = {
        name: None if parameter.default is parameter.empty else parameter.default
        for name, parameter in inspect.signature(route).parameters.items()
        if name not in ("tokens", "out", "workspace", "num_sms")
    }
    if not isinstance(router, Mapping):
        raise ValueError(f"router: expected a dict of named arguments of envoi.route, got {type(router).__name__}")
    for name in router:
        if name not in known:
            raise ValueError(f"router: expected names among {', '.join(known)}, got {name!r}")
    given = known | dict(router)
    if isinstance(given["token_ids"], torch.Tensor):
        given["token_ids"] = given["token_ids"].flatten()[:0]  # as many as the tokens below
    tokens = torch.empty(0, experts.hidden, dtype=torch.bfloat16, device=experts.device)
    try:
        check_arguments(tokens, **given)
    except ValueError as error:
        raise ValueError(f"router: {error}") from None


def warm_up(
    experts: ExpertWeights, max_tokens: int, num_topk: int, router: Mapping[str, Any] | None = None,
    jobs: int | None = None, progress: bool = True, dtypes: tuple[torch.dtype, torch.dtype] = ROUTED,
) -> int:  # fmt: skip
    """Compile and load all kernels that `envoi.moe` needs for 1 to max_tokens tokens; return how many there are.

    Afterwards no call with these experts compiles, whatever its number of tokens, if the tokens are contiguous and
    start on 16 bytes, and batch_invariant, which may take other kernels, isn't asked for. Layers of equal sizes and
    format share their kernels: one of them is enough. Kernels are kept in Triton's cache on disk, so that the next
    process only reads them.

    experts: from `envoi.experts.pack`, on the GPU that will run them; on a CPU there is nothing to compile.
    num_topk: slots of a token.
    router: also compile what `envoi.route` needs for so many bf16 tokens: its named arguments but for the tokens, such
        as {"gate": gate, "k": 8, "rule": "deepseek-v3"}.
    dtypes: of the routing's ids and weights; the default is what `envoi.route` returns, int32 and float32. For
        torch.topk's int64 ids, or 16-bit weights, other kernels sort and gather the tokens.
    jobs: processes that compile, by default as many as there are CPUs. They start for the call and end with it; what
        they can't compile this process does.
    progress: show the progress on stderr if it takes longer than two seconds.

    Calls with up to 64 tokens, and with 72, 80 .. 256, are prepared too, by making each of them, unless
    ENVOI_PREPARED=0 or ENVOI_SAFE_LAUNCH=1.
    Raises ValueError for wrong arguments, RuntimeError if a kernel can't be compiled.
    """
    expect_experts(experts)
    expect_int("max_tokens", max_tokens, 1)
    expect_int("num_topk", num_topk, 1)
    check_jobs(jobs, progress)
    if not isinstance(dtypes, tuple) or len(dtypes) != 2 or dtypes[0] not in IDS or dtypes[1] not in WEIGHTS:
        raise ValueError(f"dtypes: expected int32 or int64, and float32, bfloat16 or float16, got {dtypes!r}")
    if router is not None:
        check_router(router, experts)
    if not compiles(experts.device):
        return 0
    calls: list[Call] = [LayerCall(without_tensors(experts), num_topk, dtypes)]
    if router is not None:
        calls.append(RouterCall({name: without_tensors(value) for name, value in router.items()}))
    with torch.cuda.device(experts.device):
        target = Target.of(experts.device)
        sites = compile_calls(calls, target, range(1, max_tokens + 1), jobs, progress, for_launch=True)
        for site in sites:
            load_at(calls, target, site)
        if shortcuts.PREPARED:
            prepare(partial(moe, experts=experts), experts, experts.num_routed, max_tokens, num_topk, dtypes)
    return len(sites)

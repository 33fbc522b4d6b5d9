"""Check that `ExpertParallel` gives the bits of one rank for any number of ranks and any shares of tokens and experts.

One rank is `envoi.moe(.., batch_invariant=True)`: the kernels that ranks have too. Without presum only.
"""

import random
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

import envoi
from envoi.types import Routing
from tests.helpers.ranks import gpu_ranks, own_device, run_ranks, share_gpus
from tests.moe.layers import Layer, make
from tests.promises.same_bits import Result, same

EXPERTS, MOST_TOKENS = 12, 300


def drawn(format: str, seed: int, number: int) -> tuple[Layer, random.Random]:
    """Draw a layer, and what else follows from the seed; equal on all ranks."""
    draw = random.Random(f"ranks {format} {seed} {number}")
    size: dict[str, Any] = {"hidden": draw.choice((256, 512)), "intermediate": draw.choice((128, 256))}
    tokens = draw.choice((0, 1, draw.randint(2, 40), draw.randint(2, MOST_TOKENS), MOST_TOKENS))
    layer = make(tokens, EXPERTS, draw.randint(1, 6), masked=draw.choice((0.0, 0.2)), seed=number, **size)
    if draw.random() < 0.2 and tokens:  # one expert has a slot of every token
        layer.routing.topk_ids[:, 0] = draw.randrange(EXPERTS)
    return layer, draw


def shares(draw: random.Random, total: int, num_ranks: int, least: int) -> list[int]:
    """Draw where each rank's share begins, and the total; each share has at least `least`."""
    inner = sorted(draw.sample(range(1, total), num_ranks - 1)) if least else None
    return [0, *(inner or sorted(draw.randint(0, total) for _ in range(num_ranks - 1))), total]


def on_one_rank(layer: Layer, format: str, device: torch.device) -> torch.Tensor:
    """Return the layer's output on one rank, on the CPU."""
    r = layer.routing
    experts = envoi.experts.pack(layer.gate_up.to(device), layer.down.to(device), format)
    routing = Routing(r.topk_weights.to(device), r.topk_ids.to(device), r.num_experts)
    return envoi.moe(layer.tokens.to(device), routing, experts, batch_invariant=True).cpu()


def on_rank(rank: int, num_ranks: int, format: str, seed: int, draws: int, kind: str) -> list[torch.Tensor]:
    """Run every draw's layer over the ranks; return this rank's outputs."""
    device, outs = own_device(kind), []
    may_count = not share_gpus(num_ranks, kind)  # over NCCL on GPUs
    for number in range(draws):
        layer, draw = drawn(format, seed, number)
        (first, last), (e0, e1) = (
            list(pairwise(shares(draw, total, num_ranks, least)))[rank]
            for total, least in ((len(layer.tokens), 0), (EXPERTS, 1))
        )
        r = layer.routing
        experts = envoi.experts.pack(layer.gate_up[e0:e1].to(device), layer.down[e0:e1].to(device), format)
        most, k = max(1, len(layer.tokens)), r.topk_ids.shape[1]
        sizes: dict[str, Any] = {"max_tokens": most, "num_topk": k} if number % 4 or not may_count else {}
        parallel = envoi.ExpertParallel(experts, timeout_s=60, exchange="rows", **sizes)
        routing = Routing(r.topk_weights[first:last].to(device), r.topk_ids[first:last].to(device), EXPERTS)
        outs.append(parallel.moe(layer.tokens[first:last].to(device), routing).cpu())
        parallel.check()
        dist.barrier()
        parallel.close()
    return outs


def compare_ranks(format: str, seed: int, draws: int, device: torch.device) -> Result:
    """Compare draws over 2 and 4 ranks with one rank; over 2 on machines of 2 or 3 GPUs."""
    most = gpu_ranks() if device.type == "cuda" else 4
    wrong, text = 0, ""
    want = [on_one_rank(drawn(format, seed, number)[0], format, device) for number in range(draws)]
    for num_ranks in (n for n in (2, 4) if n <= most):
        backend = "nccl" if device.type == "cuda" else "gloo"
        found = run_ranks(num_ranks, on_rank, format, seed, draws, device.type, backend=backend, timeout_s=600)
        errors = [f"rank {rank}: {o.error}: {o.text}" for rank, o in enumerate(found) if o.error]
        if errors:
            return Result(draws, draws, errors[0])
        for number in range(draws):
            got = torch.cat([outcome.value[number] for outcome in found])
            if not same([got], [want[number]]):
                wrong += 1
                text = text or f"draw {number} over {num_ranks} ranks differs from one rank"
    return Result(draws, wrong, text)

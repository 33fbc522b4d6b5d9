"""Implementation of `envoi trace`: a timeline of one call of a layer that its sizes describe, on random tokens."""

import argparse

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from envoi import env
from envoi.check import expect_int, expect_picture, expect_writable
from envoi.ops.moe.packing import pack
from envoi.ops.moe.parallel import ExpertParallel
from envoi.ops.moe.parallel.timeline import ENDINGS
from envoi.quant.formats import format_named
from envoi.types import ExpertWeights, Routing

TRACE_TIMEOUT_S = 60.0


def run(args: argparse.Namespace) -> int:
    """Trace a call and write the files; return 0. Raises ValueError for a user's mistake."""
    for name in ("hidden", "inter", "experts", "topk", "tokens"):
        expect_int(f"--{name}", getattr(args, name), 1)
    if args.topk > args.experts:
        raise ValueError(f"--topk: expected at most the {args.experts} experts, got {args.topk}")
    format_named(args.format, "--format")
    out = expect_writable("--out", args.out, ENDINGS)
    picture = expect_picture("--png", args.png) if args.png is not None else None
    if picture:
        import matplotlib  # noqa: F401  # fails before the work is done if it is missing
    if not torch.cuda.is_available():
        raise ValueError("trace: expected a GPU, this machine has none that torch can use")
    num_ranks, rank = env.world_size(), env.rank()
    if args.experts % num_ranks:
        raise ValueError(f"--nproc-per-node: expected a divisor of {args.experts} experts, got {num_ranks}")
    device = torch.device("cuda", env.local_rank())
    torch.cuda.set_device(device)
    try:
        if num_ranks > 1:
            dist.init_process_group("nccl")
        else:
            dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
        source = torch.Generator(device).manual_seed(rank)
        sizes = {"max_tokens": args.tokens, "num_topk": args.topk}
        parallel = ExpertParallel(_experts(args, num_ranks, source), timeout_s=TRACE_TIMEOUT_S, **sizes)
        tokens = torch.randn(args.tokens, args.hidden, generator=source, device=device, dtype=torch.bfloat16)
        timeline = parallel.trace(tokens, _routing(args, source))
        if rank == 0:
            print(f"{_title(args, num_ranks)}; {parallel.why}")
            print(timeline, flush=True)  # first: the files of thousands of tokens take seconds
            timeline.save(out)
            if picture:
                timeline.draw(picture)
        dist.barrier()
        parallel.close()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def _experts(args: argparse.Namespace, num_ranks: int, source: torch.Generator) -> ExpertWeights:
    """Return a rank's share of random experts."""
    sizes = {"generator": source, "device": source.device, "dtype": torch.bfloat16}
    num_local, hidden, intermediate = args.experts // num_ranks, args.hidden, args.inter
    gate_up = torch.randn(num_local, 2 * intermediate, hidden, **sizes).mul_(hidden**-0.5)
    down = torch.randn(num_local, hidden, intermediate, **sizes).mul_(intermediate**-0.5)
    return pack(gate_up, down, args.format)


def _routing(args: argparse.Namespace, source: torch.Generator) -> Routing:
    """Draw the tokens' experts evenly, but expert 0 with --skew times its share; weights add up to 1."""
    drawn = torch.rand(args.tokens, args.experts, generator=source, device=source.device)
    if args.skew != 1.0:
        hit = torch.rand(args.tokens, generator=source, device=source.device)
        drawn[:, 0] = (hit < args.skew * args.topk / args.experts) * 4.0 - 2.0
    ids = drawn.topk(args.topk).indices.to(torch.int32)
    weights = torch.rand(ids.shape, generator=source, device=source.device)
    return Routing(weights / weights.sum(1, keepdim=True), ids, args.experts)


def _title(args: argparse.Namespace, num_ranks: int) -> str:
    sizes = f"hidden {args.hidden}, intermediate {args.inter}, {args.experts} experts"
    return f"{sizes}, top-{args.topk}, {args.format}, {args.tokens} tokens on each of {num_ranks} GPUs"

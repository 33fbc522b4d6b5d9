"""Implementation of `envoi trace`: a timeline of one call of a layer that its sizes describe, on random tokens."""

import argparse

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from envoi.bench.runner import join_ranks, leave_ranks, pick_device
from envoi.bench.shapes import MoeShape
from envoi.bench.suites.moe import make_layer
from envoi.check import expect_int, expect_picture, expect_writable
from envoi.ops.moe.parallel import ExpertParallel
from envoi.ops.moe.parallel.trace_files import ENDINGS
from envoi.quant.formats import format_named

TIMEOUT_S = 60.0


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
    shape = MoeShape(args.hidden, args.inter, args.experts, args.topk, args.tokens, args.format, args.skew)
    ranks = join_ranks(pick_device("cuda"))
    try:
        if ranks.num_ranks == 1:
            dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
        layer = make_layer(shape, ranks.device, ranks.rank, ranks.num_ranks)
        sizes = {"max_tokens": args.tokens, "num_topk": args.topk}
        parallel = ExpertParallel(layer.packed, timeout_s=TIMEOUT_S, **sizes)
        timeline = parallel.trace(layer.tokens, layer.routing)
        if ranks.rank == 0:
            print(f"{_title(shape, ranks.num_ranks)}; {parallel.why}")
            print(timeline, flush=True)  # first: the files of thousands of tokens take seconds
            timeline.save(out)
            if picture:
                timeline.draw(picture)
        dist.barrier()
        parallel.close()
    finally:
        leave_ranks()
    return 0


def _title(shape: MoeShape, num_ranks: int) -> str:
    sizes = f"hidden {shape.hidden}, intermediate {shape.intermediate}, {shape.num_experts} experts"
    return f"{sizes}, top-{shape.num_topk}, {shape.format}, {shape.num_tokens} tokens on each of {num_ranks} GPUs"

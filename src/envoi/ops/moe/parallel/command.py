"""Implementation of `envoi warm-up` and `envoi trace`."""

import argparse
import time
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from envoi import env
from envoi.check import expect_divisible, expect_int, expect_writable
from envoi.ops.moe.op import IDS
from envoi.ops.moe.packing import pack
from envoi.ops.moe.parallel import ExpertParallel
from envoi.ops.moe.parallel.nvlink import SharedLayout
from envoi.ops.moe.parallel.opening import DEFAULT_TIMEOUT_S, RESULTS, check_results, with_presum
from envoi.ops.moe.parallel.trace import ENDINGS
from envoi.ops.moe.parallel.warm_up import ParallelCall
from envoi.ops.moe.router.warm_up import call_of_model
from envoi.ops.moe.support import experts_without_memory
from envoi.ops.moe.warm_up import ROUTED, LayerCall
from envoi.quant.formats import format_named
from envoi.runtime.devices import EVERY_ARCH, Target, standing_for
from envoi.runtime.planned_kernels import Call, compile_calls
from envoi.runtime.workers import num_cpus
from envoi.types import ExpertWeights, Routing


def run(args: argparse.Namespace) -> int:
    """Compile the kernels of a layer and print how many there are; return 0. Raises ValueError for a user's mistake."""
    for name in ("hidden", "intermediate", "experts", "topk", "max_tokens", "ranks", "jobs"):
        if getattr(args, name) is not None:
            expect_int(f"--{name.replace('_', '-')}", getattr(args, name), 1)
    if args.topk > args.experts:
        raise ValueError(f"--topk: expected at most the {args.experts} experts, got {args.topk}")
    if args.presum is not None and args.ranks == 1:
        raise ValueError("--presum: expected it only with --ranks of 2 or more, got --ranks 1")
    check_results("--results", args.results, args.hidden, args.presum)
    if RESULTS[args.results] is not None and args.ranks == 1:
        raise ValueError(f"--results: expected 'bf16' with --ranks 1, got {args.results!r}")
    here = Target.of(torch.device("cuda", torch.cuda.current_device())) if torch.cuda.is_available() else None
    target = _target(args.arch, args.sms, here)
    expect_divisible("--experts", args.experts, args.ranks, "each rank has as many")
    format_named(args.format, "--format")
    with standing_for(target):
        experts = experts_without_memory(
            args.hidden, args.intermediate, args.experts // args.ranks, args.format, args.activation, args.bias
        )
        sizes = args.experts, args.topk, args.max_tokens, args.ranks
        calls = calls_of(experts, *sizes, args.presum, RESULTS[args.results])
        if args.router is not None:
            calls.append(call_of_model("--router", args.router, args.experts, args.topk, args.hidden))
    start, jobs = time.monotonic(), args.jobs or num_cpus()
    sites = compile_calls(calls, target, range(1, args.max_tokens + 1), jobs, True, for_launch=target == here)
    counts = Counter(site.name for site in sites)
    for name, count in sorted(counts.items()):
        print(f"{count:5} {name}")
    took = f"{time.monotonic() - start:.0f} s by {jobs} processes"
    print(f"{len(sites)} kernels for {target.arch} with {target.num_sms} SMs are in Triton's cache, after {took}")
    return 0


def _target(arch: str | None, num_sms: int | None, here: Target | None) -> Target:
    if arch is None:
        if num_sms is not None:
            raise ValueError("--sms: expected it only beside --arch; the GPU here has its own")
        if here is None:
            raise ValueError(f"--arch: expected one of {', '.join(EVERY_ARCH)} on a machine without a GPU, got none")
        return here
    if arch not in EVERY_ARCH:
        raise ValueError(f"--arch: expected one of {', '.join(EVERY_ARCH)}, got {arch!r}")
    return Target(arch) if num_sms is None else Target(arch, expect_int("--sms", num_sms, 1))


def calls_of(
    experts: ExpertWeights, num_experts: int, num_topk: int, max_tokens: int, num_ranks: int,
    presum: bool | None, results: str | None,
) -> list[Call]:  # fmt: skip
    """Return the calls of a layer on one GPU; of several ranks over NVLink, of each whose kernels may differ.

    presum, results: of `ExpertParallel`. Raises ValueError for sizes or experts that can't be.
    """
    if num_ranks == 1:
        return [LayerCall(experts, num_topk, (ids, ROUTED[1])) for ids in IDS]
    if experts.hidden % 16:
        raise ValueError(f"--hidden: expected a multiple of 16 with --ranks, got {experts.hidden}")
    layout = SharedLayout(num_ranks, num_experts, max_tokens, num_topk, experts.hidden, experts.format)
    layout = with_presum(layout, experts.intermediate, presum, 0, results)
    offsets = tuple(range(0, num_experts + 1, num_experts // num_ranks))
    # Triton compiles another kernel for a number that is 1, or a multiple of 16.
    kinds = {tuple((x == 1, x % 16 == 0) for x in (rank, offsets[rank])): rank for rank in range(num_ranks)}
    return [
        ParallelCall(layout, num_topk, rank, offsets, DEFAULT_TIMEOUT_S, experts) for rank in sorted(kinds.values())
    ]


def trace(args: argparse.Namespace) -> int:
    """Trace a call and write the file; return 0. Raises ValueError for a user's mistake."""
    for name in ("hidden", "inter", "experts", "topk", "tokens"):
        expect_int(f"--{name}", getattr(args, name), 1)
    if args.topk > args.experts:
        raise ValueError(f"--topk: expected at most the {args.experts} experts, got {args.topk}")
    format_named(args.format, "--format")
    out = expect_writable("--out", args.out, ENDINGS)
    if not torch.cuda.is_available():
        raise ValueError("trace: expected a GPU, this machine has none that torch can use")
    num_ranks, rank = env.world_size(), env.rank()
    if args.experts % num_ranks:
        raise ValueError(f"--nproc-per-node: expected a divisor of {args.experts} experts, got {num_ranks}")
    device = torch.device("cuda", env.local_rank())
    torch.cuda.set_device(device)
    try:
        alone: dict[str, Any] = {"store": HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group("nccl", **(alone if num_ranks == 1 else {}))
        source = torch.Generator(device).manual_seed(rank)
        experts, tokens, routing = _random_layer(args, num_ranks, source)
        parallel = ExpertParallel(experts, timeout_s=60.0, max_tokens=args.tokens, num_topk=args.topk)
        timeline = parallel.trace(tokens, routing)
        if rank == 0:
            sizes = f"hidden {args.hidden}, intermediate {args.inter}, {args.experts} experts, top-{args.topk}"
            print(f"{sizes}, {args.format}, {args.tokens} tokens on each of {num_ranks} GPUs; {parallel.why}")
            timeline.save(out)
            cut = "; some roles had more events than are kept" if timeline.is_cut else ""
            print(f"{len(timeline.slices)} slices are in {out}, for https://ui.perfetto.dev{cut}")
        dist.barrier()
        parallel.close()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def _random_layer(
    args: argparse.Namespace, num_ranks: int, source: torch.Generator
) -> tuple[ExpertWeights, torch.Tensor, Routing]:
    """Return a rank's share of random experts, tokens, and a routing of them to even experts; weights add up to 1."""
    sizes = {"generator": source, "device": source.device}
    num_local, hidden, intermediate, bf16 = args.experts // num_ranks, args.hidden, args.inter, torch.bfloat16
    gate_up = torch.randn(num_local, 2 * intermediate, hidden, **sizes, dtype=bf16).mul_(hidden**-0.5)
    down = torch.randn(num_local, hidden, intermediate, **sizes, dtype=bf16).mul_(intermediate**-0.5)
    tokens = torch.randn(args.tokens, hidden, **sizes, dtype=bf16)
    ids = torch.rand(args.tokens, args.experts, **sizes).topk(args.topk).indices.to(torch.int32)
    weights = torch.rand(ids.shape, **sizes)
    return pack(gate_up, down, args.format), tokens, Routing(weights / weights.sum(1, keepdim=True), ids, args.experts)

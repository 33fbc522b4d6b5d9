"""Envoi's experts on two data-parallel ranks in vLLM's own classes: with vLLM's exchange of tokens, then Envoi's.

    python -m tools.engines.vllm_ranks [CASE ..]      with a vLLM and its dependencies importable

Each rank has half of a layer's experts, and tokens of its own, not as many as the other. Layers are made and called as
in `vllm_layers`, and results held to float64 with all experts; once more after vLLM's load balancer has moved experts
between the ranks. Then one rank can't pack a layer, and no rank may wait for it. Without GPUs ranks speak by gloo.
"""
# pyright: reportMissingImports=false

import contextlib
import itertools
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch

from tools.engines import vllm_layers as layers
from tools.engines.checks import Checks, run_ranks
from tools.engines.vllm_layers import CASES, DEVICE, FORM, GPU, E, H, K
from tools.engines.vllm_memory import move

TOKENS = (5, 3)  # of each rank
COMMUNICATOR = "vllm.distributed.device_communicators.cpu_communicator.CpuCommunicator"
RUN = ("bf16", "bf16, biases, gpt-oss", "fp8 in blocks", "mxfp4 of DeepSeek-V4")


def start(stack: contextlib.ExitStack, rank: int, port: int) -> None:
    """Make this process a rank of vLLM's."""
    from vllm import distributed
    from vllm.config import DeviceConfig, ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed.device_communicators import all2all
    from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
    from vllm.platforms import current_platform

    parallel = ParallelConfig(
        data_parallel_size=len(TOKENS), data_parallel_rank=rank, data_parallel_master_ip="127.0.0.1",
        enable_expert_parallel=True, all2all_backend="allgather_reducescatter",
    )  # fmt: skip
    parallel.get_next_dp_init_port = lambda: port
    if GPU:
        torch.cuda.set_device(rank)
    given = VllmConfig(device_config=DeviceConfig(device=DEVICE.type), parallel_config=parallel)
    given.scheduler_config.max_num_batched_tokens = max(TOKENS)
    layers.prepare_envoi()
    if not GPU:
        kind: Any = type(current_platform)
        kind.get_device_communicator_cls = classmethod(lambda cls: COMMUNICATOR)
        DeviceCommunicatorBase.all_gatherv, DeviceCommunicatorBase.reduce_scatterv = gathered, scattered
    stack.enter_context(set_current_vllm_config(given))
    distributed.init_distributed_environment(1, 0, "env://", rank if GPU else 0, "nccl" if GPU else "gloo")
    distributed.initialize_model_parallel(1, 1)
    given.model_config = SimpleNamespace(quantization_config=None)
    sizes = SimpleNamespace(get_chunk_sizes_across_dp_rank=lambda: list(TOKENS))
    all2all.get_forward_context = lambda: SimpleNamespace(dp_metadata=sizes)


def gathered(self: Any, tensors: list[torch.Tensor], dim: int, sizes: list[int]) -> list[torch.Tensor]:
    """Stand for vLLM's collective of NCCL: concatenate each tensor over the ranks."""
    found: list[Any] = [None] * len(sizes)
    torch.distributed.all_gather_object(found, tensors, group=self.cpu_group)
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def scattered(self: Any, x: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
    """Stand for vLLM's collective of NCCL: return this rank's rows of the sum over the ranks."""
    total = x.float()
    torch.distributed.all_reduce(total, group=self.cpu_group)
    return total.to(x.dtype).split(sizes)[self.rank_in_group].contiguous()


def run(name: str, rank: int, moves: bool) -> tuple[Any, float]:
    """Return a layer's kernel on this rank, and the error of its result for this rank's tokens.

    moves: let vLLM's load balancer move experts between the ranks before.
    """
    _, make, changed = CASES[name]
    local = E // len(TOKENS)
    parallel = {"dp_size": len(TOKENS), "dp_rank": rank, "ep_size": len(TOKENS), "ep_rank": rank, "use_ep": True,
                "all2all_backend": "allgather_reducescatter", "enable_eplb": moves}  # fmt: skip
    config = layers.config(**changed, num_local_experts=local, parallel=parallel)
    expert_map = torch.full((E,), -1, dtype=torch.int32, device=DEVICE)
    expert_map[rank * local : (rank + 1) * local] = torch.arange(local, dtype=torch.int32, device=DEVICE)
    layer, mine = layers.made(make(config), config, expert_map, seed=rank)
    loaded: list[Any] = [None] * len(TOKENS)
    mine = {key: None if x is None else x.clone().cpu() for key, x in mine.items()}
    torch.distributed.all_gather_object(loaded, mine)
    whole = {key: None if mine[key] is None else torch.cat([part[key] for part in loaded]).to(DEVICE) for key in mine}
    if moves:
        order = [local, *range(local - 1, E - 1), *range(local - 1)]  # the second rank's first has two places
        move(layer, order)
        whole = {key: None if x is None else x[order] for key, x in whole.items()}
    source = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS[rank], H, generator=source).bfloat16().to(DEVICE)
    logits = torch.randn(TOKENS[rank], E, generator=source).to(DEVICE)
    top, ids = logits.topk(K, dim=1)
    weights, ids = top.softmax(1), ids.int()
    want = layers.expected(x, weights, ids, layer, whole)
    out = layers.called(layer.quant_method, layer, x, logits, weights, ids)
    return layer.quant_method.moe_kernel, float((out.double() - want).norm() / want.norm())


def check_failure(rank: int, judge: Any) -> None:
    """Check that all ranks hear of one that can't pack experts that the load balancer may move."""
    from envoi.integrations import engines

    pack = engines.pack
    if rank == 1:
        engines.pack = failing
    try:
        run("mxfp4 of DeepSeek-V4", rank, moves=True)
        said = "no error"
    except RuntimeError as error:
        said = str(error)
    engines.pack = pack
    judge(f"rank {rank}: the other can't pack" if rank == 0 else f"rank {rank}: can't pack", "injected" in said, said)


def failing(*given: Any, **named: Any) -> None:
    """Stand for `pack` on a rank that has no memory for it."""
    raise MemoryError("injected")


def main(rank: int, port: int) -> None:
    """Run the checks on a rank, print a line for each on the first; exit with 1 if one fails."""
    from envoi.integrations import lines

    stack = contextlib.ExitStack()
    start(stack, rank, port)
    checks = Checks()
    for name in sys.argv[1:] or RUN:
        for ours, moves in itertools.product((False, True), repeat=2):
            os.environ["ENVOI_VLLM_EP"] = str(int(ours))
            kernel, error = run(name, rank, moves)
            experts = kernel.fused_experts
            good = error < FORM[experts.format] and (experts.exchange is not None) == ours
            title = f"{name}, {'Envoi' if ours else 'vLLM'}'s exchange{', experts moved' * moves}"
            whose = type(kernel.prepare_finalize).__name__
            checks.judge(f"rank {rank}: {title}", good, f"{error:.1e}, {whose}")
    check_failure(rank, checks.judge)
    if rank == 0:
        print("\n".join(line for line in lines._said if "exchange" in line))
    torch.distributed.barrier()
    checks.end()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main(int(os.environ["RANK"]), int(os.environ["MASTER_PORT"]))
    if unknown := [name for name in sys.argv[1:] if name not in CASES]:
        sys.exit(f"CASE: expected one of {', '.join(map(repr, CASES))}, got {', '.join(map(repr, unknown))}")
    here = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(len(TOKENS))}
    sys.exit(run_ranks("tools.engines.vllm_ranks", len(TOKENS), "RANK", "MASTER_PORT", **here))

"""Spread the experts of a layer over the ranks of a process group.

torchrun --nproc-per-node 4 examples/moe_torchrun.py        NVLink or NCCL with a GPU a rank, gloo without
"""

import torch
import torch.distributed as dist

import envoi

HIDDEN, INTERMEDIATE, EXPERTS_PER_RANK, TOPK, MAX_TOKENS = 256, 128, 2, 2, 128


def main() -> None:
    """Run the layer on this rank's tokens; ranks may have different numbers of tokens, also none."""
    if not dist.is_torchelastic_launched():
        raise SystemExit("moe_torchrun.py: expected ranks, run torchrun --nproc-per-node 4 examples/moe_torchrun.py")
    use_gpus = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_gpus else "gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if use_gpus else torch.device("cpu")
    torch.manual_seed(0)
    gate = torch.randn(EXPERTS_PER_RANK * num_ranks, HIDDEN).bfloat16().to(device)
    torch.manual_seed(1 + rank)
    gate_up = torch.randn(EXPERTS_PER_RANK, 2 * INTERMEDIATE, HIDDEN).bfloat16().to(device)
    down = torch.randn(EXPERTS_PER_RANK, HIDDEN, INTERMEDIATE).bfloat16().to(device)
    tokens = torch.randn(16 * (rank + 1), HIDDEN).bfloat16().to(device)

    my_experts = envoi.experts.pack(gate_up, down, "fp8_block128")
    parallel = envoi.ExpertParallel(my_experts, timeout_s=30, max_tokens=MAX_TOKENS, num_topk=TOPK)
    out = parallel.moe(tokens, envoi.route(tokens, gate, k=TOPK))  # [16 * (rank + 1), 256]
    parallel.check()  # raise what a kernel found wrong, if anything
    print(f"rank {rank}: {tuple(out.shape)} over {parallel.transport} ({parallel.why})", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

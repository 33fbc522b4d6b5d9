"""The path across ranks of one NVLink domain: kernels that read and write peers' memory. A CUDA graph can hold a call.

    publish               tokens to where peers read them; slots counted by expert, piece by piece
    announce              slots, and their places among those of this rank, to the peers; wait for theirs
    pull                  peers' tokens -> rows by expert
    L1 -> L2              as on one rank; L2 sends each row to the slot that it came from
    (return)              with presum instead: the sum of a token's rows here goes to its rank
    meet -> sum           wait for the peers' rows; slots, or ranks' sums -> tokens

Memory is used again by the next call without a further meeting: a rank gets to its next `publish` only after all have
met, so after all have pulled; and to its next L2, or return, only after all have announced again, so after all have
summed. Within a rank the order of one stream is what keeps calls apart.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from envoi.ep.memory import TOKENS, Plan
from envoi.experts import launch
from envoi.experts.launch import Launch
from envoi.gemm.grouping import Grouping
from envoi.runtime.devices import num_sms
from envoi.runtime.math import next_power_of_2
from envoi.types import ExpertWeights, Matrix

REFUSED_ON_HOST = 3  # of `report`, as in kernel_triton
LATE = {1: "dispatch", 2: "combine"}  # of `report`, and the step
PIECE, RANKED = 1024, 16  # slots, as in kernel_triton
MAX_CHUNKS = 32  # programs that announce to one peer
PULLS_PER_SM = 8  # programs that pull or return, 4 warps each
RETURNED = 2048  # columns at a time
WARPS = {"num_warps": 4}


@dataclass
class Domain:
    """What the calls of a rank use again and again.

    memory: this rank's, uint8, that peers reach at `peers` [num_ranks] int64. shift, offsets, state: of the call under
    way. report [2, num_ranks] int32: who was late, and whose arguments were refused, in memory that the host reads
    without waiting.
    rows, row_weights, row_to: room for all rows that may come, their weights, and where they go back to. rank_ends
    [num_ranks]: behind each rank's last expert.
    """

    plan: Plan
    rank: int
    expert_offsets: list[int]
    timeout_s: float
    memory: torch.Tensor
    peers: torch.Tensor
    shift: torch.Tensor
    offsets: torch.Tensor
    state: torch.Tensor
    report: torch.Tensor
    rows: Matrix
    row_weights: torch.Tensor
    row_to: torch.Tensor
    rank_ends: torch.Tensor
    handle: Any = None  # keeps the peers' memory mapped
    watch: Any = None  # where the ranks leave word of what they refused, and of who was late

    @property
    def first_expert(self) -> int:
        """This rank's first."""
        return self.expert_offsets[self.rank]

    @property
    def on_gpu(self) -> bool:
        """False in the interpreter; "meta" stands for a GPU."""
        return self.memory.device.type != "cpu"

    @property
    def num_local(self) -> int:
        """Experts of this rank."""
        return self.expert_offsets[self.rank + 1] - self.first_expert


@dataclass(frozen=True)
class Ranked:
    """A rank's slots, in pieces of PIECE, on their way to places sorted by expert.

    slot_ranks [M, k] int32: how many slots in front of each, in its piece, have its expert; -1 = masked.
    counts [pieces, num_experts + 1] int32: slots of a piece by expert.
    """

    slot_ranks: torch.Tensor
    counts: torch.Tensor


def supports_nvlink(experts: ExpertWeights) -> str:
    """Why the kernels can't be used with these experts; "" if they can."""
    if not launch.supported(experts.device):
        return f"no kernels on {experts.device}"
    return "" if experts.hidden % 16 == 0 else f"hidden {experts.hidden} isn't a multiple of 16"


def allocate(
    plan: Plan, rank: int, expert_offsets: list[int], timeout_s: float, device: torch.device, shared: bool = True
) -> Domain:
    """All memory of a rank, the peers' still unknown. shared: peers may map it; False is for tests in one process.

    Room for as many rows as there may be: every slot of every rank, since a token may name an expert twice.
    """
    memory = _shareable(plan.at[-1], device) if shared else torch.empty(plan.at[-1], dtype=torch.uint8, device=device)
    memory[: plan.at[TOKENS]].zero_()
    num_local, capacity = expert_offsets[rank + 1] - expert_offsets[rank], plan.num_ranks * plan.room

    def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    report = torch.zeros(2, plan.num_ranks, dtype=torch.int32, pin_memory=device.type == "cuda")
    domain = Domain(
        plan, rank, expert_offsets, timeout_s, memory, ints(plan.num_ranks, dtype=torch.int64),
        ints(plan.num_ranks, num_local), ints(num_local + 1), ints(4), report,
        launch.empty_rows(capacity, plan.hidden, plan.scheme, device),
        torch.empty(capacity, dtype=torch.float32, device=device), ints(capacity, dtype=torch.int64),
        torch.tensor(expert_offsets[1:], dtype=torch.int32, device=device),
    )  # fmt: skip
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # peers raise flags here as soon as they may
    return domain


def _shareable(num_bytes: int, device: torch.device) -> torch.Tensor:
    import torch.distributed._symmetric_memory as symmetric

    return symmetric.empty(num_bytes, dtype=torch.uint8, device=device)


def connect(domain: Domain, group: dist.ProcessGroup) -> None:
    """Map the peers' memory. Collective; RuntimeError where the ranks can't reach each other's."""
    import torch.distributed._symmetric_memory as symmetric

    domain.handle = symmetric.rendezvous(domain.memory, group)
    know_peers(domain, list(domain.handle.buffer_ptrs))


def know_peers(domain: Domain, addresses: list[int]) -> None:
    """addresses: of all ranks' memory, as this rank sees them."""
    domain.peers.copy_(torch.tensor(addresses, dtype=torch.int64, device="cpu"))


def moe(
    domain: Domain, tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, experts: ExpertWeights
) -> torch.Tensor:
    """tokens [M, H] bf16 of this rank -> [M, H] bf16; NaN if a rank was late or refused its arguments."""
    dispatch(domain, tokens, topk_weights, topk_ids)
    rows = expert_mlp(domain, experts, topk_ids.numel())
    return combine(domain, rows, topk_ids)


def dispatch(domain: Domain, tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> None:
    """This rank's tokens to the experts' ranks, their tokens to domain.rows."""
    ranked = publish(domain, tokens, topk_ids)
    run("announce_kernel", announce_arguments(domain, topk_ids.contiguous(), topk_weights.contiguous(), ranked))
    run("pull_kernel", pull_arguments(domain))


def expert_mlp(domain: Domain, experts: ExpertWeights, num_slots: int) -> torch.Tensor:
    """domain.rows through this rank's experts to the slots that they came from; with presum, to what is returned.

    num_slots: of this rank, as a guess at what the others have.
    """
    plan = domain.plan
    expected = plan.num_ranks * (num_slots or plan.room) * domain.num_local // plan.num_experts
    grouping = Grouping(write_tail=False, expected=expected, to=None if plan.presum else domain.row_to)
    return launch.expert_mlp(domain.rows, domain.row_weights, domain.offsets, experts, grouping)


def combine(domain: Domain, rows: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
    """Once all peers have sent what they have: [M, H] bf16. rows: of `expert_mlp`; with presum they are still here."""
    if domain.plan.presum:
        send_back(domain, rows)
    return finish(domain, topk_ids)


def finish(domain: Domain, topk_ids: torch.Tensor) -> torch.Tensor:
    """Wait for the peers' rows, and sum them."""
    run("meet_kernel", meet_arguments(domain))
    out = torch.empty(len(topk_ids), domain.plan.hidden, dtype=torch.bfloat16, device=topk_ids.device)
    if not len(out):
        return out
    if domain.plan.presum:
        run("sum_ranks_kernel", sum_ranks_arguments(domain, topk_ids, out))
    else:
        run("sum_kernel", sum_arguments(domain, topk_ids, out))
    return out


def send_back(domain: Domain, rows: torch.Tensor) -> None:
    """With presum: each token's rows, summed, to its rank."""
    run("return_kernel", return_arguments(domain, rows))


def refuse(domain: Domain) -> None:
    """Tell all peers that this rank's arguments are wrong, instead of a call."""
    none = torch.empty(0, 1, dtype=torch.int32, device=domain.memory.device)
    ranked = publish(domain, none.to(torch.bfloat16).view(0, 1).expand(0, domain.plan.hidden), none)
    run("announce_kernel", announce_arguments(domain, none, none.float(), ranked, REFUSED_ON_HOST))
    run("meet_kernel", meet_arguments(domain))


def publish(domain: Domain, tokens: torch.Tensor, topk_ids: torch.Tensor) -> Ranked:
    """This rank's tokens to where peers read them; its slots ranked."""
    ranked = empty_ranked(topk_ids, domain.plan.num_experts)
    run("publish_kernel", publish_arguments(tokens, topk_ids, ranked, domain.plan.tokens_in(domain.memory)))
    return ranked


def empty_ranked(topk_ids: torch.Tensor, num_experts: int) -> Ranked:
    """Room for what becomes of the slots."""
    shape = (-(-topk_ids.numel() // PIECE), num_experts + 1)
    return Ranked(
        torch.empty(topk_ids.shape, dtype=torch.int32, device=topk_ids.device),
        torch.empty(shape, dtype=torch.int32, device=topk_ids.device),
    )


def publish_arguments(tokens: torch.Tensor, topk_ids: torch.Tensor, ranked: Ranked, mine: Matrix) -> Launch:
    """Grid, arguments and options of `publish_kernel`. mine: this rank's tokens, as peers read them."""
    tokens = tokens if tokens.stride(1) == 1 else tokens.contiguous()
    (num_pieces, width_of_counts), (M, width) = ranked.counts.shape, tokens.shape
    values, sf, block, *form = launch.quantised(mine, width)
    arguments = (
        tokens, tokens.stride(0), values, sf, width, topk_ids.contiguous(), ranked.counts, ranked.slot_ranks,
        topk_ids.numel(), width_of_counts - 1, block, *form, next_power_of_2(width_of_counts),
    )  # fmt: skip
    return (num_pieces * (PIECE // RANKED + 1) + M, -(-width // block)), arguments, launch.warps(block)


def num_chunks(plan: Plan) -> int:
    """Programs that announce to one peer: on all ranks as many, since a flag counts them."""
    return min(MAX_CHUNKS, max(1, -(-plan.room // PIECE)))


def announce_arguments(
    domain: Domain, topk_ids: torch.Tensor, topk_weights: torch.Tensor, ranked: Ranked, trouble: int = 0
) -> Launch:
    """Grid, arguments and options of `announce_kernel`."""
    plan = domain.plan
    shape = (next_power_of_2(domain.num_local), next_power_of_2(plan.num_ranks))
    chunks = num_chunks(plan)
    arguments = (
        topk_ids, ranked.slot_ranks, ranked.counts, topk_weights, domain.peers, plan.at, domain.shift, domain.offsets,
        domain.state, domain.report, domain.rank, plan.num_ranks, *topk_ids.shape, plan.room, plan.num_experts,
        domain.first_expert, domain.num_local, trouble, int(domain.timeout_s * 1e6),
        chunks, next_power_of_2(plan.num_experts + 1), shape, domain.on_gpu,
    )  # fmt: skip
    return (plan.num_ranks, chunks), arguments, WARPS


def pull_arguments(domain: Domain) -> Launch:
    """Grid, arguments and options of `pull_kernel`."""
    plan, rows = domain.plan, domain.rows
    values, sf = (rows, None) if isinstance(rows, torch.Tensor) else (rows.values, rows.sf)
    if sf is not None:
        sf = sf.view(torch.uint8) if sf.itemsize == 1 else sf.view(torch.int32)
    num_words = plan.row_bytes // 4
    arguments = (
        domain.peers, plan.at, domain.shift, domain.state, values.view(torch.int32), sf, domain.row_weights,
        domain.row_to, domain.rank, plan.num_ranks, plan.room, domain.first_expert, domain.num_local, num_words,
        plan.num_sf, plan.slot_bytes, next_power_of_2(plan.num_topk), next_power_of_2(num_words),
        next_power_of_2(plan.num_sf) if plan.num_sf else 0,
    )  # fmt: skip
    return (PULLS_PER_SM * num_sms(values.device),), arguments, WARPS


def return_arguments(domain: Domain, rows: torch.Tensor) -> Launch:
    """Grid, arguments and options of `return_kernel`. rows: L2's, by expert."""
    plan = domain.plan
    arguments = (
        domain.peers, plan.at, domain.shift, domain.state, rows, plan.hidden, domain.rank, plan.num_ranks, plan.room,
        domain.first_expert, domain.num_local, next_power_of_2(plan.num_topk),
        min(RETURNED, next_power_of_2(plan.hidden)),
    )  # fmt: skip
    return (PULLS_PER_SM * num_sms(rows.device),), arguments, WARPS


def meet_arguments(domain: Domain) -> Launch:
    """Grid, arguments and options of `meet_kernel`."""
    arguments = (
        domain.peers, domain.plan.at, domain.state, domain.report, domain.rank, int(domain.timeout_s * 1e6),
        domain.on_gpu,
    )  # fmt: skip
    return (domain.plan.num_ranks,), arguments, WARPS


def sum_arguments(domain: Domain, topk_ids: torch.Tensor, out: torch.Tensor) -> Launch:
    """Grid, arguments and options of `sum_kernel`."""
    (M, k), width = topk_ids.shape, out.shape[1]
    block = min(launch.SUMMED, next_power_of_2(width))
    slots = domain.plan.slots_in(domain.memory)
    arguments = slots, topk_ids.contiguous(), out, domain.state, width, k, block
    return (M, -(-width // block)), arguments, launch.warps(block)


def sum_ranks_arguments(domain: Domain, topk_ids: torch.Tensor, out: torch.Tensor) -> Launch:
    """Grid, arguments and options of `sum_ranks_kernel`."""
    (M, k), width = topk_ids.shape, out.shape[1]
    block = min(launch.SUMMED, next_power_of_2(width))
    arguments = (
        domain.plan.slots_in(domain.memory), topk_ids.contiguous(), domain.rank_ends, out, domain.state, width, k,
        domain.plan.num_ranks, next_power_of_2(k), block,
    )  # fmt: skip
    return (M, -(-width // block)), arguments, launch.warps(block)


def run(name: str, given: Launch) -> None:
    """Launch a kernel of this folder."""
    from envoi.ep import kernel_triton
    from envoi.runtime.launch import launch as launch_kernel

    launch_kernel(getattr(kernel_triton, name), *given)

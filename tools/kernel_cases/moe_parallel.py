"""Launches of the kernels between ranks: 4 ranks, 2048 tokens each, 6 of 256 experts each."""

from functools import cache

import torch

from envoi.ops.moe.launches import Launch
from envoi.ops.moe.parallel import (
    combine,
    dispatch,
    gathered_device,
    gathered_kernels,
    hosts_device,
    hosts_kernels,
    queued,
)
from envoi.ops.moe.parallel.combine_kernels import (
    combine_barrier_kernel,
    send_partial_sums_kernel,
    sum_kernel,
    sum_ranks_kernel,
)
from envoi.ops.moe.parallel.dispatch_kernels import pull_kernel, send_routing_kernel, stage_tokens_kernel
from envoi.ops.moe.parallel.hosts import Grid
from envoi.ops.moe.parallel.load import HISTORY
from envoi.ops.moe.parallel.progress import BEGUN
from envoi.ops.moe.parallel.symmetric_memory import Domain, SharedLayout
from envoi.ops.moe.permute import empty_rows
from envoi.runtime.kernel_case import EVERY_ARCH, case_of
from envoi.runtime.program import without_memory

M, NUM_TOPK, NUM_EXPERTS, HIDDEN, NUM_RANKS = 2048, 6, 256, 4096, 4
NUM_HOSTS = 2
NUM_LOCAL = NUM_EXPERTS // NUM_RANKS
BF16, FP32, INT32, INT64 = torch.bfloat16, torch.float32, torch.int32, torch.int64


def _domain(format: str = "bf16", presum: bool = False) -> Domain:
    layout = SharedLayout(NUM_RANKS, NUM_EXPERTS, M, NUM_TOPK, HIDDEN, format, presum)
    capacity, empty = NUM_RANKS * M * NUM_TOPK, without_memory
    return Domain(
        layout, 1, list(range(0, NUM_EXPERTS + 1, NUM_LOCAL)), 10.0, empty((layout.regions.end,), torch.uint8),
        empty((NUM_RANKS,), INT64), empty((NUM_RANKS, NUM_LOCAL), INT32), empty((NUM_LOCAL + 1,), INT32),
        empty((4,), INT32), empty((NUM_RANKS,), INT32),
        empty_rows(capacity, HIDDEN, layout.scheme, torch.device("meta")),
        empty((capacity,), FP32), empty((capacity,), INT64), empty((NUM_RANKS,), INT32),
        empty((HISTORY + 1, NUM_EXPERTS), INT32),
    )  # fmt: skip


def _slots() -> torch.Tensor:
    return without_memory((M, NUM_TOPK), INT32)


def _tokens() -> torch.Tensor:
    return without_memory((M, HIDDEN), BF16)


def _ranked() -> dispatch.RankedSlots:
    return dispatch.empty_ranked(_slots(), NUM_EXPERTS)


def _stage_tokens(format: str) -> Launch:
    domain = _domain(format)
    return dispatch.stage_tokens_arguments(_tokens(), _slots(), _ranked(), domain.layout.tokens_in(domain.memory))


def _send_routing() -> Launch:
    return dispatch.send_routing_arguments(_domain(), _slots(), without_memory((M, NUM_TOPK), FP32), _ranked())


def _pull(format: str) -> Launch:
    return dispatch.pull_arguments(_domain(format))


def _combine_barrier() -> Launch:
    return combine.combine_barrier_arguments(_domain())


def _sum() -> Launch:
    return combine.sum_arguments(_domain(), _slots(), _tokens())


def _send_partial_sums() -> Launch:
    results = without_memory((NUM_RANKS * M * NUM_TOPK, HIDDEN), BF16)
    return combine.send_partial_sums_arguments(_domain(presum=True), results)


def _sum_ranks() -> Launch:
    return combine.sum_ranks_arguments(_domain(presum=True), _slots(), _tokens())


def _buffers(presum: bool = False) -> gathered_device.Buffers:
    domain, empty = _domain(presum=presum), without_memory
    sizes = NUM_RANKS, NUM_EXPERTS, M, NUM_TOPK, HIDDEN, "bf16", presum, 1
    domain.layout = layout = gathered_device.GatheredLayout(*sizes)
    domain.results = empty((NUM_RANKS,), INT64)
    sent = empty((NUM_RANKS, layout.part_columns), BF16)
    return gathered_device.Buffers(
        domain=domain, solo=domain, segments=domain.memory, head=domain.state, sent=sent, received=sent,
        counts=empty((4,), INT32), host=empty((4,), INT32),
    )  # fmt: skip


def _mark() -> Launch:
    counts = without_memory((4,), INT32)
    return queued.mark_arguments(counts, counts, counts, counts, BEGUN)


def _settle() -> Launch:
    return gathered_device.settle_arguments(_buffers())


def _sum_received(presum: bool) -> Launch:
    return gathered_device.sum_arguments(_buffers(presum), _slots(), _tokens())


@cache
def _hosts(format: str = "bf16", presum: bool = False) -> hosts_device.Buffers:
    """Return the buffers of a rank on one of two hosts, with as many ranks each as the cases above have."""
    num_ranks = NUM_HOSTS * NUM_RANKS
    layout = SharedLayout(num_ranks, NUM_EXPERTS, M, NUM_TOPK, HIDDEN, format, presum)
    grid, offsets = Grid.of([str(rank // NUM_RANKS) for rank in range(num_ranks)]), range(0, NUM_EXPERTS + 1, 32)
    sizes = hosts_device.HostsLayout(layout, NUM_HOSTS), grid, 1, list(offsets), 10.0, torch.device("meta")
    return hosts_device.open_buffers(*sizes, shared=False)


def _pack() -> Launch:
    return hosts_device.pack_arguments(_hosts(), without_memory((M, NUM_TOPK), FP32), _slots(), 0)


def _unpack(format: str) -> Launch:
    return hosts_device.unpack_arguments(_hosts(format))


def _seal() -> Launch:
    return hosts_device.seal_arguments(_hosts())


def _sum_hosts(presum: bool) -> Launch:
    return hosts_device.sum_hosts_arguments(_hosts(presum=presum), _slots(), _tokens())


# Name, description, kernel, function of the arguments, and what it is called with.
LAUNCHES = (
    ("stage-tokens-bf16", "tokens to where peers read them", stage_tokens_kernel, _stage_tokens, "bf16"),
    ("stage-tokens-fp8-block128", "quantised to 1x128", stage_tokens_kernel, _stage_tokens, "fp8_block128"),
    ("send-routing", "each slot's expert to all peers; waits for theirs", send_routing_kernel, _send_routing),
    ("pull-bf16", "peers' tokens to rows by expert", pull_kernel, _pull, "bf16"),
    ("pull-fp8-row", "in fp8_row", pull_kernel, _pull, "fp8_row"),
    ("pull-fp8-block128", "in fp8_block128", pull_kernel, _pull, "fp8_block128"),
    ("pull-mxfp8", "in MXFP8", pull_kernel, _pull, "mxfp4_mxfp8"),
    ("combine-barrier", "barrier across ranks after L2", combine_barrier_kernel, _combine_barrier),
    ("sum", "sums over each token's slots", sum_kernel, _sum),
    ("send-partial-sums", "sums of a token's rows, sent to its rank", send_partial_sums_kernel, _send_partial_sums),
    ("sum-ranks", "sums of what the ranks sent for a token", sum_ranks_kernel, _sum_ranks),
)
AROUND_COLLECTIVES = (
    ("mark", "counts a point of a call around collectives", gathered_kernels.mark_kernel, _mark),
    ("settle", "rows of this rank from all ranks' sizes", gathered_kernels.settle_kernel, _settle),
    ("sum-received", "sums of rows from all ranks", gathered_kernels.sum_received_kernel, _sum_received, False),
    ("sum-received-sums", "of sums from all ranks", gathered_kernels.sum_received_kernel, _sum_received, True),
)
BETWEEN_HOSTS = (
    ("pack-slots", "slots of a rank into its parcel", hosts_kernels.pack_slots_kernel, _pack),
    ("unpack-bf16", "parcels of all hosts into this rank's memory", hosts_kernels.unpack_kernel, _unpack, "bf16"),
    ("unpack-fp8-row", "in fp8_row", hosts_kernels.unpack_kernel, _unpack, "fp8_row"),
    ("unpack-fp8-block128", "in fp8_block128", hosts_kernels.unpack_kernel, _unpack, "fp8_block128"),
    ("unpack-mxfp8", "in MXFP8", hosts_kernels.unpack_kernel, _unpack, "mxfp4_mxfp8"),
    ("seal", "the call's number to the end of each part", hosts_kernels.seal_kernel, _seal),
    ("sum-hosts", "sums of rows from all hosts", hosts_kernels.sum_hosts_kernel, _sum_hosts, False),
    ("sum-hosts-sums", "of sums from all hosts", hosts_kernels.sum_hosts_kernel, _sum_hosts, True),
)
NVLINK, GATHERED, HOSTS = (
    tuple(case_of(f"ep-{name}", about, EVERY_ARCH, *launch) for name, about, *launch in launches)
    for launches in (LAUNCHES, AROUND_COLLECTIVES, BETWEEN_HOSTS)
)
KERNELS = NVLINK + GATHERED + HOSTS

"""ExpertParallel by host as on GPUs, in several processes: how it is opened, called, refused and closed.

Kernels run in the interpreter on memory that processes share by files; gloo stands for NCCL. A kernel there waits for
no other process, so ranks meet at a barrier before each wait, which then finds its flags raised.
"""

from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torch_symmetric
import triton.language as tl
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import GroupName, PrefixStore, ProcessGroupGloo

from envoi.ops.moe import choose
from envoi.ops.moe.parallel import dispatch_kernels, nvlink, opening, rail
from envoi.ops.moe.parallel.nvlink import MAX_CHUNKS, num_chunks
from tests.helpers import interpreter_shortcuts
from tests.helpers.accuracy import assert_same_bits
from tests.helpers.ranks import run_ranks
from tests.moe.parallel import cases, domains
from tests.moe.parallel.cases import Case
from tests.moe.parallel.test_hosts import summed_by_host
from tests.moe.parallel.test_ranks import on_one_rank

SIZES = {"max_tokens": 12, "num_topk": 4, "exchange": "hosts"}
SMALL = {"tokens": 12, "hidden": 128, "intermediate": 128, "experts": 8, "k": 3}


class Rail:
    """Backend between hosts: gloo, whose collectives are waited for where they are queued."""

    def __init__(self, group):
        self.group = group

    def size(self) -> int:
        return self.group.size()

    def _allgather_base(self, everyone, mine, *_):
        return self.group._allgather_base(everyone.view(self.size(), -1), mine.clone().view(1, -1))

    def alltoall_base(self, received, sent, *_):
        return self.group.alltoall_base(received, sent.clone(), [], [])

    def abort(self) -> None:
        pass


def stand_in(rank: int, folder: str) -> None:
    """Let an object over gloo take the path of GPUs, in this process."""
    interpreter_shortcuts.install()
    everyone = dist.new_group(backend="gloo")

    def meet() -> None:
        everyone.barrier().wait()

    made = iter(range(100))
    file_of: dict[int, str] = {}  # by address

    def shareable(num_bytes: int, device: torch.device) -> torch.Tensor:
        name = f"{rank}.{next(made)}"
        memory = torch.from_file(f"{folder}/{name}", shared=True, size=num_bytes, dtype=torch.uint8)
        file_of[memory.data_ptr()] = name
        return memory

    def rendezvous(own: torch.Tensor, name: str) -> SimpleNamespace:
        """As torch's: ranks, and the store by which they meet, are those of the group registered by that name."""
        group: Any = distributed_c10d._resolve_process_group(GroupName(name))
        store, peers = group.get_group_store(), range(group.size())
        store.set(f"file {group.rank()}", file_of[own.data_ptr()])
        paths = [store.get(f"file {peer}").decode() for peer in peers]
        size = own.numel()
        files = [torch.from_file(f"{folder}/{path}", shared=True, size=size, dtype=torch.uint8) for path in paths]
        meet()
        return SimpleNamespace(buffer_ptrs=[file.data_ptr() for file in files], files=files)

    announce, barrier = rail.send_routing, nvlink.combine_barrier

    def announce_in_turns(buffers) -> None:
        errors = domains.error_codes(buffers.domain)
        meet()
        found = errors.clone()
        for turn in range(2):
            errors.copy_(found)  # again, since they are cleared where they are read
            meet()
            buffers.domain.report[1].zero_()
            domains.flags(buffers.domain)[0] = num_chunks(buffers.domain.layout) if turn else 100 * MAX_CHUNKS
            announce(buffers)
            meet()
        errors.zero_()

    def meet_first(domain) -> None:
        meet()
        domains.flags(domain)[1] = 1
        barrier(domain)

    def rail_of(channel, group, names, name, timeout_s):
        grid = rail.Grid.of(names)
        members = grid.grid[grid.local_rank[rank]].tolist()
        store = PrefixStore(f"{name}/stand-in {members}", distributed_c10d._get_default_store())
        return Rail(ProcessGroupGloo(store, members.index(rank), len(members), timedelta(seconds=timeout_s)))

    rail.queued_gather = lambda *given: lambda: given[0]._allgather_base(*given[1:]).wait()
    rail.queued_exchange = lambda *given: lambda: given[0].alltoall_base(*given[1:]).wait()
    rail.send_routing, nvlink.combine_barrier = announce_in_turns, meet_first
    nvlink._shareable, torch_symmetric.rendezvous = shareable, rendezvous
    nvlink.why_not_kernels = lambda experts: ""
    opening.dist.get_backend = lambda group: "nccl"
    opening.connect_rail = rail_of
    torch.cuda.device = lambda device: nullcontext()
    choose.decode_mx_pays = lambda *_: False
    nvlink.RANKED = nvlink.PIECE // 4  # as in conftest.py, in this process
    dispatch_kernels.RANKED = tl.constexpr(nvlink.RANKED)


def right_calls(rank: int, tried: list[Case], names: list[str], presum: bool) -> list[torch.Tensor]:
    outs = []
    for case in tried:
        layer, (token_ends, expert_ends) = case.build(), case.cuts(len(names))
        options = SIZES | {"hosts": names, "exchange": "hosts+sums" if presum else "hosts", "timeout_s": 60.0}
        parallel = cases.open_parallel(layer, case.format, rank, expert_ends, **options)
        assert (parallel.exchange, parallel.transport, parallel.presum) == ("hosts", "nccl", presum)
        for _ in range(2):
            out = parallel.moe(*cases.part_of(layer, rank, token_ends))
        parallel.check()
        outs.append(out)
        again = cases.open_parallel(layer, case.format, rank, expert_ends, **options)
        assert again._exchange is parallel._exchange, "layers of equal sizes share their memory"
        parallel.close()
        again.close()
    return outs


def mistakes(rank: int) -> list[str]:
    """Let rank 3 pass wrong tokens, then a wrong id; each time a right call follows."""
    layer = Case("bf16", SMALL).build()
    ends = [3, 6, 9, 12]
    parallel = cases.open_parallel(layer, "bf16", rank, [2, 4, 6, 8], **SIZES, hosts=list("aabb"), timeout_s=60.0)
    want, found = parallel.moe(*cases.part_of(layer, rank, ends)), []
    for mistake in ("dtype", "id"):
        tokens, routing = cases.part_of(layer, rank, ends)
        if rank == 3 and mistake == "dtype":
            tokens = tokens.float()
        if rank == 3 and mistake == "id":
            routing.topk_ids[2, 1] = 8
        try:
            found.append(str(bool(parallel.moe(tokens, routing).isnan().all())))
            parallel.check()
        except ValueError as error:
            found.append(str(error))
        assert torch.equal(parallel.moe(*cases.part_of(layer, rank, ends)), want)
    parallel.check()
    return found


def unshared(rank: int) -> tuple[str, str, bool]:
    """Open where rank 2 can't map its peers' memory: return how tokens are exchanged instead."""

    def fail(domain, name, store):
        if rank == 2:
            store.set("file 0", "0.0")  # so that its peer doesn't wait
            raise RuntimeError("no way there\nand more")
        domain.handle = None

    nvlink.connect_part, opening.gathering_pays = fail, lambda *_: False
    layer = Case("bf16", SMALL).build()
    parallel = cases.open_parallel(layer, "bf16", rank, [2, 4, 6, 8], **SIZES, hosts=list("aabb"), timeout_s=60.0)
    return parallel.exchange, parallel.why, parallel._calls is None


TRIED = {
    ("abba", False): [Case("bf16", SMALL), Case("fp8_row", SMALL, [0, 9, 9, 12])],
    ("aabb", True): [Case("bf16", SMALL)],
}


def run_all(rank: int, num_ranks: int, folder: str) -> tuple:
    """Run all in one process, which reads each kernel's source once."""
    stand_in(rank, folder)
    right = [right_calls(rank, tried, list(names), presum) for (names, presum), tried in TRIED.items()]
    return right, mistakes(rank), unshared(rank)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[tuple]:
    """Return what each of four ranks has found: its outputs, the errors of mistakes, how tokens are exchanged."""
    outcomes = run_ranks(4, run_all, str(tmp_path_factory.mktemp("memory")))
    assert [outcome.text for outcome in outcomes] == [""] * 4
    return [outcome.value for outcome in outcomes]


@pytest.mark.parametrize("number", range(len(TRIED)))
def test_bits(number, found):
    (names, presum), tried = list(TRIED.items())[number]
    for case, *outs in zip(tried, *(right[number] for right, *_ in found), strict=True):
        want = on_one_rank(case)
        if presum:
            want = summed_by_host(case.build(), case.format, case.cuts(4)[1], list(names))
        assert_same_bits(torch.cat(outs), want)


def test_one_ranks_mistake_is_an_error_on_all_that_names_it(found):
    ids = "routing.topk_ids: expected ids from 0 to 7, or -1 for a masked slot"
    for rank, (_, (dtype, wrong_id), _) in enumerate(found):
        told = "" if rank == 3 else "rank 3 of the group refused its arguments in an earlier call: "
        assert dtype.startswith(f"{told}tokens: expected bfloat16")
        assert wrong_id == f"rank 3 of the group refused its arguments in an earlier call: {ids}"


def test_ranks_that_share_no_memory_are_not_grouped(found):
    for *_, how in found:
        assert how == ("counted", "rank 2: no way there", True)

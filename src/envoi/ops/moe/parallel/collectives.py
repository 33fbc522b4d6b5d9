"""Collectives of a group with bounded waits: texts, tensors and refusals of all ranks, all-to-all of rows."""

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions

from envoi.ops.moe.parallel.failure import PeerTimeout, Watch, in_background, line_of

_ended: "weakref.WeakSet[Any]" = weakref.WeakSet()  # groups, or backends, that this process has ended


@dataclass(frozen=True)
class Channel:
    """Connection of this rank to its peers.

    control: a gloo group of our own, with our timeout, for what ranks tell each other. data: the group that sends rows.
    device: the device that its collectives work on. watch: bounds every wait.
    """

    control: dist.ProcessGroup
    data: dist.ProcessGroup
    device: torch.device
    watch: Watch

    @property
    def num_ranks(self) -> int:
        """Number of ranks in the group."""
        return self.control.size()

    @property
    def rank(self) -> int:
        """Rank within the group."""
        return self.control.rank()

    @property
    def queues(self) -> bool:
        """Tell whether rows are sent by NCCL, on a stream of the device, and not by `control`."""
        return self.data is not self.control


def backend_of(group: Any) -> Any:
    """Return NCCL's backend of a group, which may be one itself."""
    return group._get_backend(torch.device("cuda")) if isinstance(group, dist.ProcessGroup) else group


def end_collectives(group: Any) -> None:
    """End all collectives of a group of NCCL, or a backend of it, also those of other objects. It takes a second."""
    if group not in _ended:
        _ended.add(group)
        backend_of(group).abort()


def error_of(group: Any) -> str:
    """Return why collectives of a group of NCCL failed by themselves or were ended, "" if none was."""
    if group in _ended:
        return "the group's collectives were ended, because a rank is missing"
    try:
        found = backend_of(group).get_error()
    except (AttributeError, RuntimeError):  # of an earlier torch, or of another backend
        return ""
    return "" if found.name == "SUCCESS" else f"NCCL reports {found.name}"


def connect_ranks(channel: Channel, group: Any, step: str) -> None:
    """Connect the ranks by a group's first collectives. Collective; raises PeerTimeout, also if a rank can't.

    group: of NCCL, or a backend of it, of some of this channel's ranks. NCCL connects them within those collectives,
    each pair for an all-to-all too, by waits of its own and with memory that a GPU may not have.
    """

    def connect() -> None:
        try:
            with torch.cuda.device(channel.device) if channel.device.type == "cuda" else nullcontext():  # of the thread
                everyone = torch.zeros(group.size(), dtype=torch.int32, device=channel.device)
                group._allgather_base(everyone, everyone[:1].clone()).wait()
                group.alltoall_base(torch.empty_like(everyone), everyone, [], []).wait()
        except RuntimeError as error:
            if channel.device.type != "cuda":
                raise
            free = torch.cuda.mem_get_info(channel.device)[0] >> 20  # NCCL doesn't say that it lacks memory
            raise RuntimeError(f"{line_of(error)}; {free} MiB of its GPU's memory were free") from error

    try:
        channel.watch.wait_for_first(connect, step)
    except PeerTimeout:
        if channel.queues:  # what is left of the collectives would keep the device
            in_background(partial(end_collectives, group))
        raise


def gather_texts(channel: Channel, text: str, step: str) -> list[str]:
    """Gather every rank's text, in the order of the ranks."""

    def gather(mine: torch.Tensor) -> torch.Tensor:
        everyone = [torch.empty_like(mine) for _ in range(channel.num_ranks)]
        channel.watch.wait(lambda: channel.control.allgather([everyone], [mine]), step)
        return torch.stack(everyone)

    raw = text.encode()
    sizes = gather(torch.tensor([len(raw)], device="cpu")).flatten().tolist()
    if not any(sizes):
        return [""] * len(sizes)
    rows = gather(torch.tensor([*raw, *[0] * (max(sizes) - len(raw))], dtype=torch.uint8, device="cpu"))
    return [bytes(row[:size].tolist()).decode() for row, size in zip(rows, sizes, strict=True)]


def refuse_together(channel: Channel, refusal: str, step: str) -> None:
    """Raise ValueError on all ranks if one refuses its arguments: the others would hang in the next exchange.

    refusal: this rank's, "" if it has none. Collective.
    """
    for rank, text in enumerate(gather_texts(channel, refusal, step)):
        if text:
            raise ValueError(refusal or f"rank {rank} of the group refused its arguments: {text}")


def same_everywhere(what: str, values: list) -> None:
    """Raise ValueError unless all ranks' values are equal."""
    for rank, value in enumerate(values):
        if value != values[0]:
            raise ValueError(
                f"{what}: expected the same on every rank, got {values[0]} on rank 0, {value} on rank {rank}"
            )


def complaint(check: Callable, *arguments: object, kind: type[Exception] = ValueError) -> str:
    """Run a check; return the text of its ValueError, or of another kind of error, or ""."""
    try:
        check(*arguments)
    except kind as error:
        return str(error).strip() or type(error).__name__
    return ""


def gather_tensors(channel: Channel, mine: torch.Tensor, step: str) -> torch.Tensor:
    """Gather tensors of one shape from all ranks, by the group that sends rows: [num_ranks, *shape]."""
    sent = mine.to(channel.device).contiguous().unsqueeze(0)
    everyone = sent.new_empty(channel.num_ranks, *mine.shape)
    channel.watch.wait(lambda: channel.data._allgather_base(everyone, sent), step)
    return everyone.to(mine.device)


def exchange_rows(
    channel: Channel, rows: torch.Tensor, send_counts: list[int], recv_counts: list[int], step: str
) -> torch.Tensor:
    """Exchange byte rows all-to-all: [sum(send_counts), B] by destination -> [sum(recv_counts), B] by source.

    Over NCCL the host doesn't wait: `Watch.wait_for_device` does.
    """
    sent = rows.contiguous().to(channel.device)
    received = sent.new_empty(sum(recv_counts), rows.shape[1])
    start = channel.watch.queue if channel.queues else channel.watch.wait
    start(lambda: channel.data.alltoall_base(received, sent, recv_counts, send_counts), step)
    return received.to(rows.device)


def queued_gather(backend: Any, everyone: torch.Tensor, mine: torch.Tensor) -> Callable[[], object]:
    """Return a call that gathers `mine` of all ranks in `everyone` on the current stream; the host doesn't wait.

    backend: of NCCL, without the process group around it: an operator of torch would cost the host as much again.
    """
    options = AllgatherOptions()
    options.asyncOp = False  # on the current stream: another one would have to wait for it, and it for the other
    return lambda: backend._allgather_base(everyone, mine, options)


def queued_exchange(backend: Any, received: torch.Tensor, sent: torch.Tensor) -> Callable[[], object]:
    """Return a call that sends part r of `sent` to rank r on the current stream; the host doesn't wait."""
    options = AllToAllOptions()
    options.asyncOp = False
    return lambda: backend.alltoall_base(received, sent, [], [], options)

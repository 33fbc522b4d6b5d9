"""Collectives of a group with bounded waits: integers and texts from all ranks, all-to-all of rows as bytes."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from envoi.moe.parallel.timeout import Watch
from envoi.types import Matrix, QuantTensor


@dataclass(frozen=True)
class Channel:
    """Connection of this rank to its peers.

    control: a gloo group of our own, with our timeout, for sizes and counts.
    data: the group that sends rows. device: the device that its collectives work on.
    watch: bounds every wait.
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


def gather_ints(channel: Channel, values: list[int], step: str) -> torch.Tensor:
    """Gather every rank's integers, equally many on each: int64 [num_ranks, len(values)] on the CPU."""
    mine = torch.tensor(values, dtype=torch.int64, device="cpu")
    everyone = [torch.empty_like(mine) for _ in range(channel.num_ranks)]
    channel.watch.wait(lambda: channel.control.allgather([everyone], [mine]), step)
    return torch.stack(everyone)


def gather_texts(channel: Channel, text: str, step: str) -> list[str]:
    """Gather every rank's text, in the order of the ranks."""
    raw = text.encode()
    sizes = gather_ints(channel, [len(raw)], step)[:, 0]
    padded = list(raw) + [0] * (int(sizes.max()) - len(raw))
    rows = gather_ints(channel, padded, step) if padded else torch.empty(len(sizes), 0, device="cpu")
    return [bytes(row[:size].tolist()).decode() for row, size in zip(rows, sizes, strict=True)]


def exchange_rows(
    channel: Channel, rows: torch.Tensor, send_counts: list[int], recv_counts: list[int], step: str
) -> torch.Tensor:
    """Exchange byte rows all-to-all: [sum(send_counts), B] by destination -> [sum(recv_counts), B] by source."""
    sent = rows.contiguous().to(channel.device)
    received = sent.new_empty(sum(recv_counts), rows.shape[1])
    channel.watch.wait(lambda: channel.data.alltoall_base(received, sent, recv_counts, send_counts), step)
    return received.to(rows.device)


def to_bytes(rows: Matrix, topk_weights: torch.Tensor) -> torch.Tensor:
    """Concatenate rows, their scale factors and their routing weights as bytes: uint8 [P, B]."""
    parts = [rows] if isinstance(rows, torch.Tensor) else [rows.values, rows.sf]
    parts.append(topk_weights.unsqueeze(1))
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)


def from_bytes(packed: torch.Tensor, like: Matrix) -> tuple[Matrix, torch.Tensor]:
    """Inverse of `to_bytes`: rows and routing weights; `like` gives the dtypes and widths."""
    # Copies, always: one row's columns are contiguous where they are, at any byte, and so can't be seen as float32.
    parts = [like] if isinstance(like, torch.Tensor) else [like.values, like.sf]
    columns, start = [], 0
    for part in parts:
        width = part.shape[1] * part.element_size()
        columns.append(packed[:, start : start + width].clone(memory_format=torch.contiguous_format).view(part.dtype))
        start += width
    weights = packed[:, start:].clone(memory_format=torch.contiguous_format).view(torch.float32).squeeze(1)
    if isinstance(like, torch.Tensor):
        return columns[0], weights
    return QuantTensor(columns[0], columns[1], like.group), weights

"""Memory of calls that exchange tokens by two collectives of constant size, queued on the stream like their kernels.

    dispatch    all-gather: what a rank's peers need to know of its tokens          `gathered_device`, `hosts_device`
    combine     all-to-all of equal parts: what its tokens come back as

The device counts the points that calls pass, and a thread of the host watches them: see `progress`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from envoi.ops.moe.launches import Launch, launch_kernel
from envoi.ops.moe.parallel.collectives import backend_of, end_collectives, queued_exchange, queued_gather
from envoi.ops.moe.parallel.progress import BEGUN, oversee
from envoi.ops.moe.parallel.symmetric_memory import Domain
from envoi.ops.moe.parallel.timeout import Watch
from envoi.runtime.prepared import Calls
from envoi.runtime.program import take_step

HEAD_BYTES = 256  # in front of a segment: state [4] int32, report [2] int32
CALL_COLUMNS = 8  # bf16 columns after a part's rows, which begin with the call's number


def nothing() -> None:
    """Stand for a collective that isn't connected."""


@dataclass(kw_only=True)
class QueuedBuffers:
    """Buffers that all calls of a rank use, and the two collectives that they queue.

    domain: memory of the kernels around the collectives. head int32: of what this rank gathers to its peers, where the
    number of the call goes. sent, received [parts, part_columns] bf16: of combine.
    counts, host [4] int32: how often calls have passed each point, on the device and where the host reads it.
    gathering, exchanging: the two collectives, on the current stream, set by `connect`.
    """

    domain: Domain
    head: torch.Tensor
    sent: torch.Tensor
    received: torch.Tensor
    counts: torch.Tensor
    host: torch.Tensor
    gathering: Callable[[], object] = nothing
    exchanging: Callable[[], object] = nothing

    @property
    def calls_begun(self) -> int:
        """Count the calls that the device has begun."""
        return int(self.host[BEGUN])

    @cached_property
    def calls(self) -> Calls:
        """Prepared calls, which launch on this memory."""
        return Calls()

    def connect(self, everyone: torch.Tensor, mine: torch.Tensor, group: Any, watch: Watch) -> None:
        """Connect the ranks by both collectives, in time, and have calls overseen from now on. Collective.

        everyone, mine: what is gathered, and this rank's part of it. group: of NCCL, or a backend of it.
        """
        backend = backend_of(group)
        self.domain.watch = watch
        self.gathering = queued_gather(backend, everyone, mine)
        self.exchanging = queued_exchange(backend, self.received, self.sent)
        watch.wait(lambda: group._allgather_base(everyone, mine), "opening the group")
        watch.wait(lambda: group.alltoall_base(self.received, self.sent, [], []), "opening the group")
        # A collective that waits for a lost peer has no other end, and no other one can follow it.
        oversee(self, self.host, watch, partial(end_collectives, group))

    def gather(self) -> None:
        """Gather what peers need to know of all ranks' tokens. Collective; the host doesn't wait for it."""
        take_step(self.gathering)

    def exchange(self) -> None:
        """Send part i of `sent` to peer i. Collective; the host doesn't wait for it."""
        take_step(self.exchanging)

    def mark(self, point: int) -> None:
        """Count that a call has passed a point."""
        given = mark_arguments(self.counts, self.host, self.domain.state, self.head, point)
        launch_kernel("envoi.ops.moe.parallel.gathered_kernels", "mark_kernel", given)


def mark_arguments(
    counts: torch.Tensor, host: torch.Tensor, state: torch.Tensor, head: torch.Tensor, point: int
) -> Launch:
    """Build the launch of `mark_kernel`."""
    arguments = counts, host, state, head, point
    return Launch((1,), arguments, {"num_warps": 1})


def empty_counts(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `counts` and `host` of no calls yet."""
    host = torch.zeros(4, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
    return torch.zeros(4, dtype=torch.int32, device=device), host

"""Timeline of a call: which role of which multiprocessor did what, and when, by the GPU's clock.

    tracing         launches of a thread are recorded
    Recorder        gives each launch of a call memory for its moments      `runtime.launch` asks it
    kernel          notes moments there                                     `runtime.timeline_device`
    Recorder.slices reads them after the call                               here

Nothing of it is in a kernel that isn't traced: its parameter `trace` is then None.
"""

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch

from envoi.runtime.devices import scoped

WORDS = 8  # int64 of a record: its label, then up to 7 moments
UNTRACED = None  # argument `trace` of a launch; a Recorder puts a `Trace` in its place
PRODUCER = 2  # track of a GEMM's producer; consumers have 0 and 1
ROOM = 512  # events of a role that are kept; a GEMM's launch takes 26 MB


class _Local(threading.local):
    recorder: "Recorder | None" = None


_local = _Local()


def current() -> "Recorder | None":
    """Return the recorder of this thread's launches, or None."""
    return _local.recorder


def tracing(recorder: "Recorder") -> AbstractContextManager[None]:
    """Record this thread's launches inside the context."""
    return scoped(_local, recorder=recorder)


class Role(NamedTuple):
    """Role of a kernel, or a whole program, or one phase of a role.

    spans: what it does between two moments of an event, in order.
    """

    name: str
    spans: tuple[str, ...]


class Slice(NamedTuple):
    """Stretch of time in which a role did one thing. begin, end: nanoseconds of the GPU's clock.

    step: number of the launch in the call. program: of the launch. label: what it was about, such as a tile.
    """

    step: int
    role: int
    span: int
    program: int
    sm: int
    label: int
    begin: int
    end: int


class Trace(NamedTuple):
    """Memory for the moments of a launch.

    records: pointer to int64 [programs, num_roles, room, WORDS], 0 at launch. A record is an event: 1 + (multiprocessor
    << 32) + label, then its moments in nanoseconds. Events from `room` on are left out.
    """

    records: Any
    num_roles: Any
    room: Any


@dataclass
class Strip:
    """Records of one launch: int64 [programs, roles, room, WORDS]."""

    kernel: str
    records: torch.Tensor


@dataclass
class Recorder:
    """Memory for the moments of one call's launches, in their order; for a repeated call `rewind` it.

    roles: of each kernel that is traced, by the kernel's name. device: of the launches.
    left_out: names of kernels that were launched and can't be traced.
    """

    roles: Mapping[str, Sequence[Role]]
    device: torch.device
    strips: list[Strip] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    _next: int = 0

    def rewind(self) -> None:
        """Expect the same launches again, from the first, and record them in the same memory."""
        self._next = 0

    def clear(self) -> None:
        """Forget the moments, on the current stream."""
        for strip in self.strips:
            strip.records.zero_()

    def joined(self, kernel: Any, grid: tuple[int, ...], arguments: tuple) -> tuple:
        """Return a launch's arguments with memory for its moments, if its kernel can be traced."""
        name = kernel.fn.__name__
        if name not in self.roles or kernel.arg_names[-1] != "trace":
            if name not in self.left_out:
                self.left_out.append(name)
            return arguments
        programs, num_roles = prod(grid), len(self.roles[name])
        room = ROOM if num_roles > 1 else 1  # whole programs have one event
        if self._next == len(self.strips):
            records = torch.zeros(programs, num_roles, room, WORDS, dtype=torch.int64, device=self.device)
            self.strips.append(Strip(name, records))
        strip = self.strips[self._next]
        if strip.kernel != name or strip.records.shape[:2] != (programs, num_roles):
            raise RuntimeError(f"trace: launch {self._next} was of {strip.kernel}, and is now of {name}")
        self._next += 1
        return *arguments[:-1], Trace(strip.records, num_roles, room)

    def slices(self) -> torch.Tensor:
        """Return all slices, int64 [N, fields of Slice] on the CPU, by step, program, role and time."""
        parts = [self._slices_of(step) for step in range(len(self.strips))]
        return torch.cat(parts) if parts else torch.empty(0, len(Slice._fields), dtype=torch.int64, device="cpu")

    def is_cut(self) -> bool:
        """Tell whether a role may have had more events than there was room for."""
        return any(s.records.shape[2] > 1 and bool((s.records[:, :, -1, 0] != 0).any()) for s in self.strips)

    def _slices_of(self, step: int) -> torch.Tensor:
        records = self.strips[step].records.cpu()
        spans = [len(role.spans) for role in self.roles[self.strips[step].kernel]]
        program, role, event = (records[..., 0] != 0).nonzero(as_tuple=True)
        found = records[program, role, event]
        label = found[:, 0] - 1
        parts = []
        for span in range(max(spans)):
            begin, end = _between(found, span)
            had = (torch.tensor(spans, device="cpu")[role] > span) & (end > 0)
            columns = torch.full_like(role, step), role, torch.full_like(role, span), program
            columns = (*columns, label >> 32, label & 0xFFFFFFFF, begin, end)
            parts.append(torch.stack(columns, 1)[had])
        return torch.cat(parts)


def _between(records: torch.Tensor, span: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return when a span of each record begins and ends; both 0 if it has no end.

    A role may leave out a moment, and what it belongs to: the next span then begins at the last moment there was.
    """
    moments = records[:, 1:]
    end = moments[:, span + 1]
    begin = moments[:, : span + 1].amax(1)
    return torch.where(end > 0, begin, 0), end

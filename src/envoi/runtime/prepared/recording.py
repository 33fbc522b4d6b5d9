"""Observation of one call: the kernels that it launched, the memory that it allocated, and the source of each address.

A call can be replayed if all that it did on the device is launches that came through `runtime.launch`, and steps that
came through `observer.take_step`, which a replay repeats. The recorder is a dispatch mode, so it sees every operator of
torch in between: allocations and views are fine, anything else (a copy, a fill, a value read by the host) would be
missing in the replay, and the call is refused.

Roles of an address, by the tensor whose memory it is in:

    input      argument of the call       the same distance from the new argument's address
    output     returned tensor            a new tensor of the same shape, strides and dtype
    scratch    allocated, not returned    a place in one memory for all of them, which the
                                          stream keeps (`runtime.workspace`) or the call allocates
    kept       counters and sums of       the same, on this stream and outside of captures
               `runtime.workspace`
    owned      given to `Calls`           the same

Any other address is refused: it could be that of a tensor made from an input in an earlier call.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from envoi.runtime import observer, workspace
from envoi.runtime.prepared.parameters import Parameter, RefusedError

MAX_SCRATCH_BYTES = 1 << 30  # a call that needs more is bound by the device, and the recorder would hold it all
SCRATCH_ALIGNMENT = 512  # of each part, as torch's allocator gives it

INPUT, OUTPUT, SCRATCH, FIXED = range(4)

_aten = torch.ops.aten
ALLOCATIONS = frozenset(
    {_aten.empty.memory_format, _aten.empty_strided.default, _aten.new_empty.default, _aten.empty_like.default}
)


class Launched(NamedTuple):
    """Launch: the compiled kernel, its grid of 3, and the arguments."""

    compiled: Any
    grid: tuple[int, ...]
    arguments: tuple


class Place(NamedTuple):
    """Role of an address: INPUT or OUTPUT `number`, or SCRATCH; plus `offset` bytes. FIXED: the address is `offset`."""

    role: int
    number: int
    offset: int


class Recorder(TorchDispatchMode):
    """Dispatch mode that observes the call under it, in one thread. Used once.

    device: the arguments'. refusal: why the call can't be replayed, "" if it can. steps: how many launches came before
    each step that is no launch, and the step.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and True imports torch's compiler at the first use, for seconds

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.launches: list[Launched] = []
        self.steps: list[tuple[int, Callable[[], object]]] = []
        self._in_step = False
        self.allocated: list[torch.Tensor] = []
        self.num_bytes = 0
        self.refusal = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run an operator of torch, and note an allocation."""
        if self._in_step:
            return func(*args, **(kwargs or {}))
        if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
            with self:  # `contiguous` and the like: what counts is what they do
                return func.decompose(*args, **(kwargs or {}))
        found = func(*args, **(kwargs or {}))
        if func in ALLOCATIONS:
            self._allocated(found)
        elif not func.is_view:
            self._refuse(f"{func} between the launches")
        return found

    def launched(self, compiled: Any, grid: tuple[int, ...], arguments: tuple) -> None:
        """Note a launch. compiled: the kernel; None if it isn't known."""
        if compiled is None:
            self._refuse("a launch without a compiled kernel")
        if not self.refusal:
            x, y, z = (*grid, 1, 1)[:3]
            self.launches.append(Launched(compiled, (x, y, z), arguments))

    def stepped(self, step: Callable[[], object]) -> None:
        """Run a step that is no launch, and note it."""
        self.steps.append((len(self.launches), step))
        self._in_step = True
        try:
            step()
        finally:
            self._in_step = False

    def _allocated(self, x: torch.Tensor) -> None:
        if self.refusal or not x.numel() or x.is_meta:  # none of the device's memory
            return
        self.allocated.append(x)
        self.num_bytes += x.untyped_storage().nbytes()
        if x.device != self.device:
            self._refuse(f"memory on {x.device}")
        if self.num_bytes > MAX_SCRATCH_BYTES:
            self._refuse(f"more than {MAX_SCRATCH_BYTES} bytes of memory")

    def _refuse(self, reason: str) -> None:
        self.refusal = self.refusal or reason
        self.allocated.clear()  # memory that would otherwise be free by now
        self.launches.clear()
        self.steps.clear()


def extent(x: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and after its last."""
    start = x.data_ptr()
    if not x.numel():
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return start, start + (last + 1) * x.itemsize


@contextmanager
def recording(device: torch.device) -> Iterator[Recorder]:
    """Record what the context does on this device, in this thread."""
    recorder = Recorder(device)
    observer.observe(recorder)
    try:
        with recorder:
            yield recorder
    finally:
        observer.observe(None)


class Memory:
    """Memory that the addresses of a recorded call can be in.

    inputs: the call's arguments. returned: its results, which must be among the tensors that it allocated.
    scratch_bytes: of one memory with a part for each other tensor. is_bound: an address was that of memory that
    belongs to this stream. Raises RefusedError for results that aren't the call's own.
    """

    def __init__(
        self, recorder: Recorder, inputs: Sequence[torch.Tensor | None], returned: Sequence[torch.Tensor],
        owned: Sequence[torch.Tensor],
    ) -> None:  # fmt: skip
        self.inputs = [(i, *extent(x)) for i, x in enumerate(inputs) if x is not None]
        self.owned = [extent(x) for x in owned]
        self.allocated = [_storage(x) for x in recorder.allocated]
        self.places = [Place(SCRATCH, 0, 0)] * len(self.allocated)
        self.scratch_bytes, self.is_bound = 0, False
        for number, x in enumerate(returned):
            self._return(number, x)
        for i, (start, end) in enumerate(self.allocated):
            if self.places[i].role == SCRATCH:
                self.places[i] = Place(SCRATCH, 0, self.scratch_bytes)
                self.scratch_bytes += -(-(end - start) // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT

    def _return(self, number: int, x: torch.Tensor) -> None:
        start, end = extent(x)
        if start == end:
            return
        at = [i for i, (first, last) in enumerate(self.allocated) if (first, last) == (start, end)]
        if len(at) != 1 or self.places[at[0]].role == OUTPUT:
            raise RefusedError(f"result {number} isn't a whole tensor that the call allocated")
        self.places[at[0]] = Place(OUTPUT, number, 0)

    def place(self, parameter: Parameter) -> Place:
        """Return the role of a parameter's address. RefusedError if it has none, or more than one."""
        x = parameter.tensor
        if x is None or not x.numel():
            return Place(FIXED, 0, 0)
        address = x.data_ptr()
        given = [(i, start) for i, start, end in self.inputs if start <= address < end]
        if len(given) > 1:
            raise RefusedError("arguments that share memory")
        if given:
            return Place(INPUT, given[0][0], address - given[0][1])
        for place, (start, end) in zip(self.places, self.allocated, strict=True):
            if start <= address < end:
                return place._replace(offset=place.offset + address - start)
        if workspace.is_kept(address):
            self.is_bound = True
        elif not any(start <= address < end for start, end in self.owned):
            raise RefusedError("memory that is neither an argument nor the call's own")
        return Place(FIXED, 0, address)


def _storage(x: torch.Tensor) -> tuple[int, int]:
    start = x.untyped_storage().data_ptr()
    return start, start + x.untyped_storage().nbytes()

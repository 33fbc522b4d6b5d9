"""A call as data: the launches that a host path makes, planned on tensors that have no memory.

    plan      function, arguments, Target -> Program       no GPU needed, nothing is launched
    Program   launches (kernel, grid, arguments, options), steps between them, outputs, scratch

A host path is ordinary Python: it allocates with torch.empty, views, and calls `launch`. Planning runs it once on
tensors on "meta", where `launch` appends. A meta tensor in a launch's arguments is therefore a reference: its storage
tells the role, its offset, shape and strides the part.

    INPUT      tensor `number` of the call's
    OUTPUT     tensor `number` of the result
    SCRATCH    allocated and not returned: a part of one memory for all of them
    KEPT       kept by the process for a stream or a device, such as counters: request `number` of the call
    FIXED      memory that belongs to the call's object, such as that which ranks share; or no memory

Such a list runs on any tensors of the same shapes (`runtime.prepared`), tells a warm-up what to compile
(`runtime.planned_kernels`), and can be counted and compared. A call that does anything else on the device than launches
and steps has a refusal, and is made by its host path each time: its operators of torch would be missing.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from envoi.runtime.devices import Target, scoped, standing_for

MAX_SCRATCH_BYTES = 1 << 30  # a call that needs more is bound by the device, and its parts would never be freed early
SCRATCH_ALIGNMENT = 512  # of each part, as torch's allocator gives it
ALIGNMENT = 16  # bytes: what Triton compiles for, and TMA needs

INPUT, OUTPUT, SCRATCH, KEPT, FIXED = range(5)
Find = Callable[[torch.device], torch.Tensor]  # memory that is kept, on a device and its current stream

_aten = torch.ops.aten
ALLOCATIONS = frozenset(
    {_aten.empty.memory_format, _aten.empty_strided.default, _aten.new_empty.default, _aten.empty_like.default}
)


class Launch(NamedTuple):
    """Launch `kernel[grid](*arguments, **options)`. kernel: a function under triton.jit or gluon.jit."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple
    options: dict[str, Any]


class Place(NamedTuple):
    """Memory that an argument stands for: `offset` bytes after the start of tensor `number` in a role.

    FIXED: of object's tensor `number`, or (-1) no memory. SCRATCH: number is 0.
    """

    role: int
    number: int
    offset: int


NOWHERE = Place(FIXED, -1, 0)


class RefusedError(Exception):
    """Reason why a call can't be replayed."""


class _Local(threading.local):
    program: "Program | None" = None


_local = _Local()


def current() -> "Program | None":
    """Return the program that this thread plans, or None."""
    return _local.program


def take_step(step: Callable[[], object]) -> None:
    """Run a step of a call that is no launch of ours, such as a collective; a replay repeats it at its place.

    step: works on memory that belongs to the call's object, and returns nothing. Planned calls only note it.
    """
    if _local.program is None:
        step()
    else:
        _local.program.steps.append((len(_local.program.launches), step))


@dataclass
class Program:
    """Planned call, or one that is being planned. steps: how many launches come before each, and the step.

    kept: what finds the memory of each request for memory that the process keeps; stand_ins: for it, and then for all
    that the call allocates, kept alive since a storage is known by its address. device: on which the call will run,
    None if it needn't be here.
    inputs, owned: what stood for the call's tensors and for those of its object; owned_memory: these themselves.
    outputs: tensors of the result, on "meta"; build: makes a result from such a list. places: of each storage.
    scratch_bytes: of the memory that SCRATCH is a part of. refusal: why it can't be replayed, "" if it can.
    """

    device: torch.device | None = None
    launches: list[Launch] = field(default_factory=list)
    steps: list[tuple[int, Callable[[], object]]] = field(default_factory=list)
    kept: list[Find] = field(default_factory=list)
    stand_ins: list[torch.Tensor] = field(default_factory=list)
    inputs: list[torch.Tensor | None] = field(default_factory=list)
    owned: list[torch.Tensor] = field(default_factory=list)
    owned_memory: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    build: Callable[[Sequence[torch.Tensor]], Any] = list
    places: dict[int, Place] = field(default_factory=dict)
    scratch_bytes: int = 0
    refusal: str = ""

    def take_kept(self, find: Find, count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Return a tensor [count] on "meta" for memory that the process keeps. find: returns it when the call runs."""
        self.kept.append(find)
        self.stand_ins.append(without_memory((count,), dtype))
        return self.stand_ins[-1]

    def place(self, x: torch.Tensor) -> Place:
        """Return what a tensor in a launch's arguments stands for. RefusedError if it is none of the call's."""
        if not x.numel():
            return NOWHERE
        found = self.places.get(_storage(x))
        if found is None:
            raise RefusedError("memory that is neither an argument nor the call's own")
        return found._replace(offset=found.offset + x.storage_offset() * x.itemsize)


def without_memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Make a tensor on "meta"."""
    return torch.empty(shape, dtype=dtype, device="meta")


def unwatched() -> AbstractContextManager[Any]:
    """Allow tensors without memory inside the context that no call has: they are kept, or only their form matters."""
    return _disable_current_modes()


@contextmanager
def building(target: Target, device: torch.device | None = None) -> Iterator[Program]:
    """Plan this thread's launches for a GPU inside the context, instead of making them."""
    program = Program(device)
    with standing_for(target), scoped(_local, program=program):
        yield program


class _Watch(TorchDispatchMode):
    """Mode that notes what is allocated, and the first operator of torch that isn't an allocation or a view."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and True imports torch's compiler at the first use, for seconds

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[torch.Tensor] = []
        self.refusal = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run an operator of torch."""
        if func in ALLOCATIONS:
            found = func(*args, **(kwargs or {}))
            self.allocated.append(found)
            return found
        if _is_composite(func):
            with self:  # `contiguous` and the like: what counts is what they do
                return func.decompose(*args, **(kwargs or {}))
        if not func.is_view:
            self.refusal = self.refusal or f"{func} between the launches"
        return func(*args, **(kwargs or {}))


@cache
def _is_composite(func: Any) -> bool:
    return func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


def plan(
    function: Callable, arguments: tuple, named: dict[str, Any], tensors: Sequence[torch.Tensor | None],
    target: Target, owner: Any = None,
) -> Program:  # fmt: skip
    """Return the program of `function(*arguments, **named)` on a GPU.

    tensors: all tensors among the arguments, each once, None where one is left out. owner: object whose tensors have
    one address for its life, such as memory that ranks share; with one, its stand-in is the first argument.
    Raises what the function raises, and RefusedError for a tensor that isn't among `tensors` or is given twice.
    """
    given = [x for x in tensors if x is not None]
    if len({id(x) for x in given}) < len(given):
        raise RefusedError("an object that is given twice")
    twins = {id(x): stand_in(x) for x in given}
    owned = [x for x in tensors_in(owner) if id(x) not in twins]
    twins |= {id(x): stand_in(x) for x in owned}
    if owner is not None:
        arguments = owner, *arguments
    arguments, named = substituted((arguments, named), twins)
    watch = _Watch()
    device = next((x.device for x in given), None)
    with building(target, device) as found, watch:
        result = function(*arguments, **named)
    found.inputs = [None if x is None else twins[id(x)] for x in tensors]
    found.owned, found.owned_memory = [twins[id(x)] for x in owned], owned
    found.build = take_apart(result, found.outputs)
    found.refusal = watch.refusal or _find_places(found, watch.allocated)
    found.stand_ins += watch.allocated
    return found


def _find_places(program: Program, allocated: list[torch.Tensor]) -> str:
    """Fill in what each storage stands for; return why the program can't be replayed, or ""."""
    for role, stand_ins in ((INPUT, program.inputs), (KEPT, program.stand_ins), (FIXED, program.owned)):
        for number, x in enumerate(stand_ins):
            if x is not None:
                program.places[_storage(x)] = Place(role, number, -x.storage_offset() * x.itemsize)
    new = [x for x in allocated if x.numel() and _storage(x) not in program.places]
    sizes = {_storage(x): x.untyped_storage().nbytes() for x in new}
    if sum(sizes.values()) > MAX_SCRATCH_BYTES:
        return f"more than {MAX_SCRATCH_BYTES} bytes of memory"
    for number, x in enumerate(program.outputs):
        if x.numel():
            storage = _storage(x)
            if sizes.pop(storage, None) != extent_bytes(x) or x.storage_offset():
                return f"result {number} isn't a whole tensor that the call allocated"
            program.places[storage] = Place(OUTPUT, number, 0)
    for storage, size in sizes.items():
        program.places[storage] = Place(SCRATCH, 0, program.scratch_bytes)
        program.scratch_bytes += -(-size // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
    return ""


def _storage(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


def extent_bytes(x: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last."""
    return (sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1) * x.itemsize


def stand_in(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor without memory of the same shape, strides and dtype, and as far off a multiple of 16 bytes."""
    off = x.data_ptr() % ALIGNMENT if x.device.type != "meta" else 0
    if off % x.itemsize or not off:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    first = off // x.itemsize
    whole = without_memory((extent_bytes(x) // x.itemsize + first,), x.dtype)
    return whole.as_strided(x.shape, x.stride(), first)


def substituted(value: Any, twins: dict[int, torch.Tensor]) -> Any:
    """Return arguments with other tensors, by their id; what has no tensors stays what it is.

    Raises RefusedError for a tensor without a twin.
    """
    if isinstance(value, torch.Tensor):
        if id(value) not in twins:
            raise RefusedError("a tensor that isn't among the call's")
        return twins[id(value)]
    if isinstance(value, dict):
        return {name: substituted(x, twins) for name, x in value.items()}
    if isinstance(value, tuple | list):
        parts = [substituted(x, twins) for x in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    before = {part.name: getattr(value, part.name) for part in fields(value)}
    after = {name: substituted(x, twins) for name, x in before.items()}
    if not any(_differs(after[name], x) for name, x in before.items()):
        return value
    changed = object.__new__(type(value))  # without what the object has cached
    for name, x in after.items():
        object.__setattr__(changed, name, x)
    return changed


def _differs(after: Any, before: Any) -> bool:
    """Tell whether a field has changed; tuples and lists are made anew and compared by their parts."""
    if isinstance(before, tuple | list):
        return any(_differs(x, y) for x, y in zip(after, before, strict=True))
    if isinstance(before, dict):
        return any(_differs(after[name], x) for name, x in before.items())
    return after is not before


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors of an object's fields, once each."""
    seen: set[int] = set()
    for x in _all_tensors(value):
        if id(x) not in seen:
            seen.add(id(x))
            yield x


def _all_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for x in value:
            yield from _all_tensors(x)
    elif is_dataclass(value) and not isinstance(value, type):
        for part in fields(value):
            yield from _all_tensors(getattr(value, part.name))


Build = Callable[[Sequence[torch.Tensor]], Any]


def take_apart(result: Any, tensors: list[torch.Tensor]) -> Build:
    """Append a result's tensors to a list, and return the function that makes such a result from such a list.

    result: a tensor, a dataclass, tuple, list or dict of results, or any other value, which is kept.
    """
    if isinstance(result, torch.Tensor):
        index = len(tensors)
        tensors.append(result)
        return lambda found: found[index]
    if isinstance(result, dict):
        names, parts = list(result), [take_apart(x, tensors) for x in result.values()]
        return lambda found: {name: part(found) for name, part in zip(names, parts, strict=True)}
    if isinstance(result, tuple | list):
        kind, parts = type(result), [take_apart(x, tensors) for x in result]
        return lambda found: kind([part(found) for part in parts])
    if is_dataclass(result):
        kind, parts = type(result), [take_apart(getattr(result, field.name), tensors) for field in fields(result)]
        return lambda found: kind(*[part(found) for part in parts])
    return lambda found: result

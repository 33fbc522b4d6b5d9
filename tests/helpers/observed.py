"""Calls made on real memory, their launches noted and not made; and the same calls planned, in one form to compare.

`standing_for_gpu` lets a CPU stand for a GPU. `observe` then runs a call's host path on CPU tensors and finds the role
of each pointer by its address, which `program.plan` knows by the identity of a storage without memory.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from envoi.ops.gemm import backend, reference
from envoi.ops.moe import api as moe_api
from envoi.ops.moe import permute
from envoi.ops.moe.parallel import nvlink, rail
from envoi.runtime import custom_op, devices, launch, program, workspace
from envoi.runtime.devices import Target
from envoi.runtime.program import FIXED, INPUT, KEPT, OUTPUT, SCRATCH, SCRATCH_ALIGNMENT, Place, extent_bytes

ROLES = {INPUT: "input", OUTPUT: "output", SCRATCH: "scratch", KEPT: "kept", FIXED: "fixed"}
BETWEEN = "between the launches"


class Pointer(NamedTuple):
    """Pointer of a launch. number: of the tensor in its role; of fixed memory its address, and offset is 0."""

    dtype: torch.dtype
    role: str
    number: int
    offset: int


class Map(NamedTuple):
    """TMA descriptor of a launch."""

    base: Pointer
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    layout: str


class Made(NamedTuple):
    """Launch as it is compared. key: what decides which compiled kernel runs, as `launch.key_of` has it."""

    kernel: str
    grid: tuple[int, ...]
    options: tuple
    arguments: tuple
    key: tuple


class Account(NamedTuple):
    """All that a call does on the device. steps: launches before each step; outputs: shape, strides, dtype, place.

    refused: what else it does, so that it can't be replayed; then nothing else is said.
    """

    launches: tuple[Made, ...] = ()
    steps: tuple[int, ...] = ()
    outputs: tuple = ()
    refused: str = ""


@dataclass
class Observer(TorchDispatchMode):
    """Mode that notes what is allocated, launched and done besides, in a call on real memory.

    kept: ends of the memory of each request for memory that the process keeps. operators: of torch, but for
    allocations and views.
    """

    allocated: list[torch.Tensor] = field(default_factory=list)
    kept: list[torch.Tensor] = field(default_factory=list)
    launches: list[program.Launch] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    operators: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
            with self:
                return func.decompose(*args, **(kwargs or {}))
        found = func(*args, **(kwargs or {}))
        if func in program.ALLOCATIONS:
            self.allocated.append(found)
        elif not func.is_view:
            self.operators.append(str(func))
        return found

    def keep(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Make memory that stands for what the process keeps."""
        with _disable_current_modes():
            self.kept.append(make())
        return self.kept[-1]


_observers: list[Observer] = []


def by_torchs_operators(*_: Any) -> None:
    """Stand in for a product by torch: raise ValueError, as for a call that has other operators than launches."""
    raise ValueError("operators of torch")


@contextmanager
def standing_for_gpu(target: Target) -> Iterator[None]:
    """Let CPU tensors stand for those of a GPU inside the context, and their launches be noted."""

    def kept(pool: workspace.Kept, count: int, device: torch.device) -> torch.Tensor:
        if program.current() is not None:
            return original_kept(pool, count, device)
        return _observers[-1].keep(lambda: torch.empty(count, dtype=torch.int32))

    def constant(find: program.Find, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if program.current() is not None:
            return original_constant(find, count, dtype, device)
        return _observers[-1].keep(lambda: torch.empty(count, dtype=dtype))

    def take_step(step: Callable[[], object]) -> None:
        if program.current() is not None:
            program.take_step(step)
        else:
            _observers[-1].steps.append(len(_observers[-1].launches))

    def run(*given: Any) -> None:
        _observers[-1].launches.append(program.Launch(*given))

    def casts(device: torch.device) -> bool:
        return int(target.arch.removeprefix("sm_")) >= 89

    original_kept, original_constant = workspace._kept, workspace.constant
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "_implementation", lambda device: target.implementation)
        patch.setattr(devices, "_num_sms", lambda device: target.num_sms)
        for module in (backend, devices, nvlink):
            patch.setattr(module, "on_gpu", lambda device: True)
        for module in (devices, permute):
            patch.setattr(module, "casts_e4m3", casts)
        patch.setattr(workspace, "_kept", kept)
        patch.setattr(workspace, "constant", constant)
        patch.setattr(rail, "take_step", take_step)
        patch.setattr(launch, "run", run)
        patch.setattr(custom_op, "watched", lambda: False)
        # A GPU's host reads no values.
        patch.setattr(reference, "check_offsets", lambda *_: None)
        for name in ("compute", "compute_groups"):  # takes long, and no list of launches has it
            patch.setattr(reference, name, by_torchs_operators)
        patch.setattr(moe_api, "check_ids", lambda *_: None)
        yield


def observe(call: Callable[[], Any], tensors: Sequence[torch.Tensor | None], owner: Any) -> Account:
    """Make a call on real memory, inside `standing_for_gpu`. tensors: the call's; owner: as `program.plan` takes it."""
    observer = Observer()
    _observers.append(observer)
    try:
        with observer:
            result = call()
    except ValueError as error:
        return Account(refused=str(error))
    finally:
        _observers.pop()
    if observer.operators:
        return Account(refused=f"{observer.operators[0]} {BETWEEN}")
    outputs: list[torch.Tensor] = []
    program.take_apart(result, outputs)
    given = {id(x) for x in tensors}
    owned = [x for x in program.tensors_in(owner) if id(x) not in given]
    find = Addresses(tensors, outputs, observer, owned)
    if find.refused:
        return Account(refused=find.refused)
    return account(observer.launches, observer.steps, outputs, find.pointer)


class Addresses:
    """Memory of a call on real tensors. refused: why it can't be replayed, "" if it can."""

    def __init__(self, tensors, outputs: list[torch.Tensor], observer: Observer, owned: list[torch.Tensor]) -> None:
        self.parts: list[tuple[int, int, str, int, int]] = []  # start, end, role, number, offset of the start
        for number, x in enumerate(tensors):
            if x is not None and x.numel():
                self._add(x.data_ptr(), extent_bytes(x), "input", number)
        self.num_inputs = len(self.parts)
        for number, x in enumerate(observer.kept):
            self._add(x.data_ptr(), x.untyped_storage().nbytes(), "kept", number)
        for x in owned:
            self.parts.append((x.data_ptr(), x.data_ptr() + max(1, extent_bytes(x)), "fixed", 0, x.data_ptr()))
        returned = {x.data_ptr(): (extent_bytes(x), number) for number, x in enumerate(outputs) if x.numel()}
        scratch = 0
        for x in observer.allocated:
            if not x.numel() or x.is_meta:
                continue
            start, size = x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()
            if start in returned:
                expected, number = returned.pop(start)
                if expected == size:
                    self._add(start, size, "output", number)
                    continue
            self._add(start, size, "scratch", 0, scratch)
            scratch += -(-size // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
        self.refused = "a result that isn't a whole tensor of the call's" if returned else ""
        if scratch > program.MAX_SCRATCH_BYTES:
            self.refused = "too much memory"

    def _add(self, start: int, size: int, role: str, number: int, offset: int = 0) -> None:
        self.parts.append((start, start + size, role, number, offset))

    def pointer(self, x: torch.Tensor) -> Pointer:
        """Return a pointer's role by its address."""
        if not x.numel():
            return Pointer(x.dtype, "fixed", -1, 0)
        address = x.data_ptr()
        found = {
            (role, number, first + address - start)
            for start, end, role, number, first in self.parts
            if start <= address < end
        }
        if len(found) != 1:
            return Pointer(x.dtype, f"{len(found)} roles: {found}", 0, 0)
        ((role, number, offset),) = found
        return Pointer(x.dtype, role, *((offset, 0) if role == "fixed" else (number, offset)))


def plan_of(
    function: Callable, arguments: tuple, named: dict, tensors: Sequence[torch.Tensor | None], target: Target,
    owner: Any = None,
) -> Account:  # fmt: skip
    """Estimate a call."""
    try:
        planned = program.plan(function, arguments, named, tensors, target, owner)
    except Exception as error:  # a value that the host reads, among others
        return Account(refused=f"{type(error).__name__}: {error}")
    if planned.refusal:
        return Account(refused=planned.refusal)

    def pointer(x: torch.Tensor) -> Pointer:
        try:
            place: Place = planned.place(x)
        except program.RefusedError as error:
            return Pointer(x.dtype, str(error), 0, 0)
        if place.role == FIXED and place.number >= 0:
            return Pointer(x.dtype, "fixed", planned.owned_memory[place.number].data_ptr() + place.offset, 0)
        return Pointer(x.dtype, ROLES[place.role], place.number, place.offset)

    steps = [done for done, _ in planned.steps]
    return account(planned.launches, steps, planned.outputs, pointer)


def account(launches, steps, outputs: list[torch.Tensor], pointer: Callable[[torch.Tensor], Pointer]) -> Account:
    """Write down a call in the form to compare."""

    def argument(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return pointer(x)
        if isinstance(x, tuple):
            return type(x).__name__, *map(argument, x)
        if hasattr(x, "base") and hasattr(x, "block_shape"):
            shapes = tuple(x.shape), tuple(x.strides), tuple(x.block_shape)
            return Map(pointer(x.base), *shapes, repr(x.layout))
        return type(x), repr(x) if isinstance(x, float) else x

    made = tuple(
        Made(
            f"{each.kernel.fn.__module__}.{each.kernel.fn.__name__}", tuple(each.grid), tuple(each.options.items()),
            tuple(map(argument, each.arguments)),
            launch.key_of(each.kernel, each.arguments, each.options),
        )
        for each in launches
    )  # fmt: skip
    forms = tuple((tuple(x.shape), x.stride(), x.dtype, pointer(x)) for x in outputs)
    return Account(made, tuple(steps), forms)


def difference(observed: Account, planned: Account) -> str:
    """Say in which first way a plan isn't what was observed, "" if it is."""
    reasons = observed.refused, planned.refused
    if bool(reasons[0]) != bool(reasons[1]) or (reasons[0] != reasons[1] and all(BETWEEN in said for said in reasons)):
        return f"refused: observed {observed.refused!r}, planned {planned.refused!r}"
    names = [[each.kernel for each in found.launches] for found in (observed, planned)]
    if names[0] != names[1]:
        return f"observed: {names[0]}, planned: {names[1]}"
    for one, other in zip(observed.launches, planned.launches, strict=True):
        for name in Made._fields:
            if getattr(one, name) != getattr(other, name):
                return f"{one.kernel}, {name}: observed {_apart(getattr(one, name), getattr(other, name))}"
    for name in ("steps", "outputs"):
        if getattr(observed, name) != getattr(planned, name):
            return f"{name}: observed {_apart(getattr(observed, name), getattr(planned, name))}"
    return ""


def _apart(one: tuple, other: tuple) -> str:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        apart = [(i, x, y) for i, (x, y) in enumerate(zip(one, other, strict=True)) if x != y]
        return "; ".join(f"{x}, planned {y} (number {i})" for i, x, y in apart)
    return f"{one}, planned {other}"

"""Runs of a planned call: its launches as blocks of parameters, into which each run writes its addresses.

    run_first   the first run, by Triton's launcher, which compiles; makes a Prepared of it
    Prepared    what is the same for all runs: outputs, scratch, which word takes which address
    Frame       the memory of one call under way: for each launch a LaunchConfig, its attributes, the parameters, and a
                pointer to each of them

The driver copies the parameters while a launch is made, in a CUDA graph when it is captured, so a frame may be written
again as soon as the call has returned. A call takes a frame from a list and puts it back: threads never share one.
"""

import ctypes
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from envoi.check import expect_tensor
from envoi.runtime import launch as launcher
from envoi.runtime import workspace
from envoi.runtime.prepared.driver import INVALID_CONTEXT, Attribute, LaunchConfig, attributes_of
from envoi.runtime.prepared.parameters import Parameter, check_launch, check_map, check_sizes, parameters_of
from envoi.runtime.program import (
    ALIGNMENT,
    FIXED,
    INPUT,
    KEPT,
    NOWHERE,
    OUTPUT,
    SCRATCH,
    Place,
    Program,
    RefusedError,
    extent_bytes,
)
from envoi.runtime.shortcuts import rebase

WORD = 8
CONFIG_WORDS = -(-ctypes.sizeof(LaunchConfig) // WORD)
ATTRIBUTE_WORDS = ctypes.sizeof(Attribute) // WORD
STREAM_WORD = LaunchConfig.stream.offset // WORD
MAP_WORDS = 16  # a map is on 128 bytes
FRAME_ALIGNMENT = 128
NO_STREAM = -1


class Launch(NamedTuple):
    """Launch of a prepared call, in few objects: Python's garbage collection takes time for each.

    attributes: numbers of the launch attributes. words: the word of each parameter, counted from the launch's first.
    memory: all of the launch's in a frame, with its parameters at their words and zeros elsewhere.
    """

    compiled: Any
    grid: tuple[int, ...]
    attributes: tuple[int, ...]
    words: tuple[int, ...]
    memory: bytes


class Frame:
    """Memory of one call under way. words: as uint64; starts: the word at which each launch's memory begins.

    calls: arguments of cuLaunchKernelEx for each launch. stream, scratch, kept: whose addresses are written now.
    """

    __slots__ = ("_memory", "calls", "kept", "scratch", "starts", "stream", "words")

    def __init__(self, launches: Sequence[Launch]) -> None:
        num_words = sum(len(launch.memory) for launch in launches) // WORD
        self._memory = bytearray(num_words * WORD + FRAME_ALIGNMENT)
        first = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        skipped = -first % FRAME_ALIGNMENT
        self.words = memoryview(self._memory)[skipped : skipped + num_words * WORD].cast("Q")
        self.calls: list[tuple[int, int, int, None]] = []
        self.starts: list[int] = []
        self.stream, self.scratch = NO_STREAM, 0
        self.kept: list[torch.Tensor] = []
        start = 0
        for launch in launches:
            self.calls.append(self._fill(launch, start, first + skipped))
            self.starts.append(start)
            start += len(launch.memory) // WORD

    def _fill(self, launch: Launch, start: int, address: int) -> tuple[int, int, int, None]:
        """Write all of a launch at this word; address: of the frame."""
        num_warps, _, shared_bytes = launch.compiled.packed_metadata  # the warps of all roles
        at_attributes = start + CONFIG_WORDS
        at_pointers = at_attributes + len(launch.attributes) * ATTRIBUTE_WORDS
        config = LaunchConfig(
            launch.grid, (32 * num_warps, 1, 1), shared_bytes, None, address + WORD * at_attributes,
            len(launch.attributes),
        )  # fmt: skip
        raw = self.words.cast("B")
        raw[start * WORD : start * WORD + len(launch.memory)] = launch.memory
        raw[start * WORD : start * WORD + ctypes.sizeof(config)] = bytes(config)
        for i, name in enumerate(launch.attributes):
            at = (at_attributes + i * ATTRIBUTE_WORDS) * WORD
            raw[at : at + ctypes.sizeof(Attribute)] = bytes(Attribute(name, b"", (1,)))
        for i, word in enumerate(launch.words):
            self.words[at_pointers + i] = address + (start + word) * WORD
        return address + start * WORD, launch.compiled.function, address + at_pointers * WORD, None


class Given(NamedTuple):
    """Memory that a call's caller owns, None for what the call is to find: tensors of the outputs, a workspace."""

    out: Sequence[torch.Tensor] | None = None
    workspace: torch.Tensor | None = None


NOTHING_GIVEN = Given()


def check_out(out: Sequence[torch.Tensor], forms: Sequence[tuple], device: torch.device) -> None:
    """Raise ValueError unless these are tensors of these (shape, strides, dtype), on 16 bytes, that share no memory."""
    if len(out) != len(forms):
        raise ValueError(f"out: expected {len(forms)} tensors, got {len(out)}")
    for i, (x, (shape, strides, dtype)) in enumerate(zip(out, forms, strict=True)):
        name = "out" if len(out) == 1 else f"out, tensor {i}"
        expect_tensor(name, x, dtype, shape, device)
        if x.numel() and (x.stride() != strides or x.data_ptr() % ALIGNMENT):
            raise ValueError(f"{name}: expected strides {strides} and an address that is a multiple of 16, got others")
    ranges = sorted((x.data_ptr(), x.data_ptr() + extent_bytes(x)) for x in out if x.numel())
    if any(end > start for (_, end), (start, _) in pairwise(ranges)):
        raise ValueError("out: expected tensors that share no memory")


def forms_of(tensors: Sequence[torch.Tensor]) -> list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]:
    """Return shape, strides and dtype of each tensor, as `Driver.empty` and `check_out` take them."""
    return [(tuple(x.shape), tuple(x.stride()), x.dtype) for x in tensors]


def check_workspace(memory: torch.Tensor, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return memory for a call's scratch; ValueError if it is elsewhere, too small or off 16 bytes."""
    expect_tensor("workspace", memory, device=device)
    if not memory.is_contiguous() or memory.nbytes < num_bytes or memory.data_ptr() % ALIGNMENT:
        raise ValueError(
            f"workspace: expected {num_bytes} contiguous bytes at a multiple of 16, got {memory.nbytes}"
            f"{'' if memory.is_contiguous() else ', not contiguous'}"
        )
    return memory


class Launched(NamedTuple):
    """Launch that was made: the compiled kernel, None if it isn't known, the grid of 3, and the arguments."""

    compiled: Any
    grid: tuple[int, int, int]
    arguments: tuple


class Memory:
    """Memory of a program's first run: tensors for those that it was planned with.

    outputs: of the result. places: what each tensor that was made for an argument stands for, by its id.
    """

    def __init__(
        self, program: Program, tensors: Sequence[torch.Tensor | None], driver: Any, given: Given
    ) -> None:  # fmt: skip
        """tensors: the call's, as `plan` took them."""
        self._program, self._driver = program, driver
        first: Any = tensors[0]
        forms = forms_of(program.outputs)
        if given.out is not None:
            check_out(given.out, forms, first.device)
        self.outputs = [driver.empty(*form) for form in forms] if given.out is None else list(given.out)
        scratch: list[torch.Tensor] = []
        if program.scratch_bytes and given.workspace is not None:
            scratch.append(check_workspace(given.workspace, program.scratch_bytes, first.device))
        elif program.scratch_bytes:
            scratch.append(driver.empty((program.scratch_bytes // 4,), (1,), torch.float32))
        self._by_role: dict[int, Sequence[Any]] = {
            INPUT: tensors, OUTPUT: self.outputs, SCRATCH: scratch, FIXED: program.owned_memory,
            KEPT: [find(first.device) for find in program.kept],
        }  # fmt: skip
        self._made: dict[int, torch.Tensor] = {}
        self.places: dict[int, Place] = {}
        for stand_ins, real in (
            (program.inputs, tensors), (program.owned, program.owned_memory), (program.outputs, self.outputs),
        ):  # fmt: skip
            self._made |= {id(x): y for x, y in zip(stand_ins, real, strict=True) if x is not None and y is not None}

    def argument(self, value: Any) -> Any:
        """Return a launch's argument with tensors that have memory."""
        kind = type(value)
        if kind is int or kind is bool or value is None:
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, tuple):
            parts = [self.argument(x) for x in value]
            return kind(*parts) if hasattr(value, "_fields") else tuple(parts)
        if hasattr(value, "base") and hasattr(value, "block_shape"):  # a TMA descriptor
            return rebase(value, self._tensor(value.base))
        return value

    def _tensor(self, x: torch.Tensor) -> torch.Tensor:
        place = self._program.place(x)
        made = self._made.get(id(x))
        if made is None:
            made = self._made[id(x)] = self._part(x, place)
        self.places[id(made)] = place
        return made

    def _part(self, x: torch.Tensor, place: Place) -> torch.Tensor:
        if place == NOWHERE:
            return self._driver.empty(tuple(x.shape), x.stride(), x.dtype)
        whole = self._by_role[place.role][place.number]
        first = (whole.storage_offset() * whole.itemsize + place.offset) // x.itemsize
        with torch.no_grad():
            return torch.empty(0, dtype=x.dtype, device=whole.device).set_(
                whole.untyped_storage(), first, x.shape, x.stride()
            )


def run_first(
    program: Program, tensors: Sequence[torch.Tensor | None], driver: Any, given: Given = NOTHING_GIVEN
) -> tuple[Any, "Prepared | str"]:  # fmt: skip
    """Make a program's launches by Triton's launcher; return the result, and the call prepared for later runs.

    tensors: the call's. Instead of a prepared call a text says why there is none. Raises RefusedError, before anything
    is launched, for memory that isn't the call's own.
    """
    memory = Memory(program, tensors, driver, given)
    made = [memory.argument(launch.arguments) for launch in program.launches]  # all, before anything is launched
    launched, done = [], 0
    for end, step in [*program.steps, (len(program.launches), None)]:
        for (kernel, grid, _, options), arguments in zip(program.launches[done:end], made[done:end], strict=True):
            x, y, z = (*grid, 1, 1)[:3]
            launched.append(Launched(launcher.run(kernel, grid, arguments, options), (x, y, z), arguments))
        done = end
        if step is not None:
            step()
    result = program.build(memory.outputs)
    try:
        return result, Prepared(program, launched, memory.places, driver)
    except RefusedError as error:
        return result, str(error)
    except Exception as error:  # the call itself is done; what is private to Triton may have changed
        return result, f"{type(error).__name__}: {error}"


class Prepared:
    """Planned call, ready to run on tensors of the same shapes, strides, dtypes and device."""

    __slots__ = (
        "_build", "_context", "_device", "_driver", "_free", "_kept", "_of_inputs", "_of_kept", "_of_outputs",
        "_of_scratch", "_outputs", "_parts", "_scratch", "_scratch_floats", "_streams", "launches", "used",
    )  # fmt: skip

    def __init__(
        self, program: Program, launched: Sequence[Launched], places: dict[int, Place], driver: Any
    ) -> None:  # fmt: skip
        """launched: what ran first; places: of the tensors in it. Raises RefusedError if it can't run otherwise."""
        made = [_launch(each, places, program, driver) for each in launched if 0 not in each.grid]
        self.launches = [launch for launch, _ in made]
        self._build = program.build
        self._parts = _parts(program, launched)
        self._outputs = forms_of(program.outputs)
        self._scratch_floats = program.scratch_bytes // 4
        self._device = driver.device()
        keeps = 0 < self._scratch_floats <= workspace.MOST_SCRATCH
        self._scratch = workspace.scratch(self._device) if keeps else None
        self._kept = program.kept
        self.used = False
        self._driver, self._context = driver, driver.context()
        frame = Frame(self.launches)
        self._streams = [start + STREAM_WORD for start in frame.starts]
        self._of_inputs, self._of_outputs, self._of_scratch, self._of_kept = (
            _written(made, frame.starts, role) for role in (INPUT, OUTPUT, SCRATCH, KEPT)
        )
        self._free = [frame]

    def run(self, addresses: Sequence[int], stream: int, given: Given = NOTHING_GIVEN) -> Any:
        """Make the launches for inputs at these addresses; return the result. The device must be the current one."""
        driver = self._driver
        if given.out is not None:
            check_out(given.out, self._outputs, self._device)
        if given.workspace is not None:
            check_workspace(given.workspace, 4 * self._scratch_floats, self._device)
        outputs = [driver.empty(*form) for form in self._outputs] if given.out is None else given.out
        try:
            frame = self._free.pop()
        except IndexError:  # all are in use by other threads
            frame = Frame(self.launches)
        words = frame.words
        for word, number, offset in self._of_inputs:
            words[word] = addresses[number] + offset
        for word, number, offset in self._of_outputs:
            words[word] = outputs[number].data_ptr() + offset
        kept = self._scratch
        scratch: Any = None
        captured = (kept is not None or bool(self._of_kept)) and driver.is_capturing()
        if captured or given.workspace is not None:
            kept = None
        if self._scratch_floats:
            if given.workspace is not None:
                scratch = given.workspace
            elif kept is None:
                scratch = driver.empty((self._scratch_floats,), (1,), torch.float32)
            else:
                scratch = kept.take(stream, self._scratch_floats)
            first = scratch.data_ptr()
            if first != frame.scratch:
                frame.scratch = first
                for word, _, offset in self._of_scratch:
                    words[word] = first + offset
        if stream != frame.stream or captured:  # each capture has counters of its own
            frame.stream = NO_STREAM if captured else stream
            for word in self._streams:
                words[word] = stream
            if self._of_kept:
                frame.kept = [find(self._device) for find in self._kept]
                for word, number, offset in self._of_kept:
                    words[word] = frame.kept[number].data_ptr() + offset
        launch = driver.launch
        for part, step in self._parts:
            for call in frame.calls[part]:
                error = launch(*call)
                if error:
                    self._again(call, error)
            if step is not None:
                step()
        self._free.append(frame)
        if kept is not None:
            kept.give_back(stream, scratch)
        return self._build(outputs)

    def _again(self, call: tuple[int, int, int, None], error: int) -> None:
        """Repeat a launch that a thread made which is new to CUDA and has no context. RuntimeError for other errors.

        The launches before it are under way, so the call can't start again from its beginning.
        """
        if error == INVALID_CONTEXT:
            self._driver.set_context(self._context)
            error = self._driver.launch(*call)
        if error:
            raise RuntimeError(f"cuLaunchKernelEx: expected 0 from the CUDA driver, got {error}")


def _launch(
    launched: Launched, places: dict[int, Place], program: Program, driver: Any
) -> tuple[Launch, list[Place]]:  # fmt: skip
    """Return a launch, and the place of each parameter's address, NOWHERE for numbers too."""
    if launched.compiled is None:
        raise RefusedError("a launch without a compiled kernel")
    check_launch(launched.compiled)
    parameters = parameters_of(launched.compiled, launched.arguments, driver)
    check_sizes(launched.compiled, parameters, driver)
    for parameter in parameters:
        if parameter.is_map:
            check_map(parameter, driver)
    places_of = [NOWHERE if x.tensor is None else places[id(x.tensor)] for x in parameters]
    meta = launched.compiled.metadata
    attributes = attributes_of(bool(meta.launch_cooperative_grid), bool(meta.launch_pdl))
    words, num_words = _words(parameters, CONFIG_WORDS + len(attributes) * ATTRIBUTE_WORDS + len(parameters))
    values = bytearray(num_words * WORD)
    for parameter, word in zip(parameters, words, strict=True):
        values[word * WORD : word * WORD + len(parameter.value)] = parameter.value
    return Launch(launched.compiled, launched.grid, tuple(attributes), tuple(words), bytes(values)), places_of


def _words(parameters: Sequence[Parameter], before: int) -> tuple[list[int], int]:
    """Return the word of each parameter, and the end of the last. before: words of config, attributes and pointers."""
    found, next_word = [], _up(before)
    for parameter in parameters:
        if parameter.is_map:
            next_word = _up(next_word)
        found.append(next_word)
        next_word += MAP_WORDS if parameter.is_map else 1
    return found, _up(next_word)


def _up(word: int) -> int:
    """Return the next word, or this one, at which a map may begin."""
    return -(-word // MAP_WORDS) * MAP_WORDS


def _parts(
    program: Program, launched: Sequence[Launched]
) -> list[tuple[slice, Callable[[], object] | None]]:  # fmt: skip
    """Return the launches up to each step, and the step; None after the last ones."""
    found, first = [], 0
    for raw, step in [*program.steps, (len(launched), None)]:
        last = sum(0 not in each.grid for each in launched[:raw])
        found.append((slice(first, last), step))
        first = last
    return found


def _written(
    made: Sequence[tuple[Launch, list[Place]]], starts: Sequence[int], role: int
) -> list[tuple[int, int, int]]:  # fmt: skip
    """Return (word, number, offset) of each address with this role."""
    return [
        (start + word, place.number, place.offset)
        for (launch, places), start in zip(made, starts, strict=True)
        for word, place in zip(launch.words, places, strict=True)
        if place.role == role and place != NOWHERE
    ]

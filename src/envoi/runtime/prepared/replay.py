"""Replay of a recorded call: its launches as blocks of parameters, into which each call writes its addresses.

    Prepared    what is the same for all calls: outputs, scratch, which word takes which address
    Frame       the memory of one call under way: for each launch a LaunchConfig, its attributes, the parameters, and a
                pointer to each of them

The driver copies the parameters while a launch is made, in a CUDA graph when it is captured, so a frame may be written
again as soon as the call has returned. A call takes a frame from a list and puts it back: threads never share one.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from envoi.runtime import workspace
from envoi.runtime.prepared.driver import INVALID_CONTEXT, Attribute, LaunchConfig, attributes_of
from envoi.runtime.prepared.parameters import (
    Parameter,
    RefusedError,
    check_launch,
    check_map,
    check_sizes,
    parameters_of,
)
from envoi.runtime.prepared.recording import FIXED, INPUT, OUTPUT, Memory, Place, Recorder
from envoi.runtime.prepared.results import take_apart

WORD = 8
CONFIG_WORDS = -(-ctypes.sizeof(LaunchConfig) // WORD)
ATTRIBUTE_WORDS = ctypes.sizeof(Attribute) // WORD
STREAM_WORD = LaunchConfig.stream.offset // WORD
MAP_WORDS = 16  # a map is on 128 bytes
FRAME_ALIGNMENT = 128


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

    calls: arguments of cuLaunchKernelEx for each launch. stream, scratch: as written now.
    """

    __slots__ = ("_memory", "calls", "scratch", "starts", "stream", "words")

    def __init__(self, launches: Sequence[Launch]) -> None:
        num_words = sum(len(launch.memory) for launch in launches) // WORD
        self._memory = bytearray(num_words * WORD + FRAME_ALIGNMENT)
        first = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        skipped = -first % FRAME_ALIGNMENT
        self.words = memoryview(self._memory)[skipped : skipped + num_words * WORD].cast("Q")
        self.calls: list[tuple[int, int, int, None]] = []
        self.starts: list[int] = []
        self.stream, self.scratch = 0, 0
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


class Prepared:
    """Call that has been recorded, ready to run on other tensors of the same shapes, strides, dtypes and device.

    stream: the stream that it is bound to, or None for all of them; a bound one can't be captured either.
    """

    __slots__ = (
        "_build", "_context", "_driver", "_free", "_of_inputs", "_of_outputs", "_of_scratch", "_outputs", "_parts",
        "_scratch", "_scratch_floats", "_streams", "launches", "stream", "used",
    )  # fmt: skip

    def __init__(
        self, recorder: Recorder, inputs: Sequence[torch.Tensor | None], result: Any, stream: int,
        owned: Sequence[torch.Tensor], driver: Any,
    ) -> None:  # fmt: skip
        """recorder: of a call that has ended. Raises RefusedError where the call can't be replayed."""
        if recorder.refusal:
            raise RefusedError(recorder.refusal)
        returned: list[torch.Tensor] = []
        self._build = take_apart(result, returned)
        memory = Memory(recorder, inputs, returned, owned)
        made = [_launch(launched, memory, driver) for launched in recorder.launches if 0 not in launched.grid]
        self.launches = [launch for launch, _ in made]
        self._parts = _parts(recorder)
        self._outputs = [(tuple(x.shape), tuple(x.stride()), x.dtype) for x in returned]
        self._scratch_floats = memory.scratch_bytes // 4
        keeps = 0 < self._scratch_floats <= workspace.MOST_SCRATCH
        self._scratch = workspace.scratch(recorder.device) if keeps else None
        self.stream = stream if memory.is_bound else None
        self.used = True
        self._driver, self._context = driver, driver.context()
        frame = Frame(self.launches)
        self._streams = [start + STREAM_WORD for start in frame.starts]
        self._of_inputs, self._of_outputs, self._of_scratch = (
            _written(made, frame.starts, role) for role in (INPUT, OUTPUT, None)
        )
        self._free = [frame]

    def run(self, addresses: Sequence[int], stream: int) -> Any:
        """Make the launches for inputs at these addresses; return the result. The device must be the current one."""
        driver = self._driver
        outputs = [driver.empty(*form) for form in self._outputs]
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
        if kept is not None and self.stream is None and driver.is_capturing():  # a bound one never is
            kept = None
        if self._scratch_floats:
            if kept is None:
                scratch = driver.empty((self._scratch_floats,), (1,), torch.float32)
            else:
                scratch = kept.take(stream, self._scratch_floats)
            first = scratch.data_ptr()
            if first != frame.scratch:
                frame.scratch = first
                for word, _, offset in self._of_scratch:
                    words[word] = first + offset
        if stream != frame.stream:
            frame.stream = stream
            for word in self._streams:
                words[word] = stream
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


def _launch(launched: Any, memory: Memory, driver: Any) -> tuple[Launch, list[Place]]:
    """Return a launch, and the place of each parameter's address, FIXED for numbers too."""
    check_launch(launched.compiled)
    parameters = parameters_of(launched.compiled, launched.arguments, driver)
    check_sizes(launched.compiled, parameters, driver)
    for parameter in parameters:
        if parameter.is_map:
            check_map(parameter, driver)
    places = [memory.place(parameter) for parameter in parameters]
    meta = launched.compiled.metadata
    attributes = attributes_of(bool(meta.launch_cooperative_grid), bool(meta.launch_pdl))
    words, num_words = _words(parameters, CONFIG_WORDS + len(attributes) * ATTRIBUTE_WORDS + len(parameters))
    values = bytearray(num_words * WORD)
    for parameter, word in zip(parameters, words, strict=True):
        values[word * WORD : word * WORD + len(parameter.value)] = parameter.value
    return Launch(launched.compiled, launched.grid, tuple(attributes), tuple(words), bytes(values)), places


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


def _parts(recorder: Recorder) -> list[tuple[slice, Callable[[], object] | None]]:
    """Return the launches up to each step, and the step; None after the last ones."""
    found, first = [], 0
    for raw, step in [*recorder.steps, (len(recorder.launches), None)]:
        last = sum(0 not in launched.grid for launched in recorder.launches[:raw])
        found.append((slice(first, last), step))
        first = last
    return found


def _written(
    made: Sequence[tuple[Launch, list[Place]]], starts: Sequence[int], role: int | None
) -> list[tuple[int, int, int]]:  # fmt: skip
    """Return (word, number, offset) of each address with this role; None: the scratch memory."""
    found = []
    for (launch, places), start in zip(made, starts, strict=True):
        for word, place in zip(launch.words, places, strict=True):
            is_scratch = place.role not in (INPUT, OUTPUT, FIXED)
            if place.role == role or (role is None and is_scratch):
                found.append((start + word, place.number, place.offset))
    return found

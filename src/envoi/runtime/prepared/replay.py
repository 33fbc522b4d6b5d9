"""Planned calls ready to run: their launches as blocks of parameters, into which each run writes its addresses.

    Prepared    what is the same for all runs: kernels, outputs, scratch, which word takes which address
    Frame       the memory of one call under way: for each launch a LaunchConfig, its attributes, the parameters, and a
                pointer to each of them

The driver copies the parameters while a launch is made, in a CUDA graph when it is captured, so a frame may be written
again as soon as the call has returned. A call takes a frame from a list and puts it back: threads never share one.

Parameters of a kernel, in Triton 3.6 to 3.9: the arguments that aren't constexpr (None and an integer 1 are constexpr
too), tuples taken apart; a TMA descriptor is its map of 128 bytes, then its shape in int32, then its strides in int64;
at the end the addresses of two scratch memories. What the driver knows of the kernel's parameters is compared with that
order, so that a Triton with another one is noticed.
"""

import ctypes
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch

from envoi.check import describe, expect_no_gradients, expect_tensor
from envoi.runtime import launch as launcher
from envoi.runtime import program, workspace
from envoi.runtime.prepared.driver import INVALID_CONTEXT, MAP_BYTES, Attribute, LaunchConfig, attributes_of
from envoi.runtime.program import ALIGNMENT, FIXED, INPUT, KEPT, NOWHERE, OUTPUT, SCRATCH, Place, Program, RefusedError
from envoi.runtime.tma import rebase

WORD = 8
CONFIG_WORDS = -(-ctypes.sizeof(LaunchConfig) // WORD)
ATTRIBUTE_WORDS = ctypes.sizeof(Attribute) // WORD
STREAM_WORD = LaunchConfig.stream.offset // WORD
MAP_WORDS = 16  # a map is on 128 bytes
FRAME_ALIGNMENT = 128
NO_STREAM = -1
ADDRESS_BYTES = 8
FORMATS = {
    "i1": "b", "u1": "B", "i8": "b", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I", "i64": "q", "u64": "Q",
    "fp32": "f", "fp64": "d",
}  # fmt: skip


class Loaded(NamedTuple):
    """Launch whose kernel is loaded, in few objects: Python's garbage collection takes time for each.

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

    def __init__(self, launches: Sequence[Loaded]) -> None:
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

    def _fill(self, launch: Loaded, start: int, address: int) -> tuple[int, int, int, None]:
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


class WorkspaceError(ValueError):
    """Error of a workspace that isn't what a call needs; nothing has been launched."""


class Given(NamedTuple):
    """Memory that a call's caller owns, None for what the call is to find: tensors of the outputs, a workspace.

    form: what the caller gave for the outputs, of which `out` are the tensors.
    """

    out: Sequence[torch.Tensor] | None = None
    workspace: torch.Tensor | None = None
    form: Any = None

    def in_order(self, build: program.Build, count: int) -> Sequence[torch.Tensor]:
        """Return the tensors of `out`, which is there, in the order of the call's: those of a dict by their names.

        build: makes the call's result of its `count` tensors; another number of them is for `check_out` to refuse.
        Raises ValueError for a dict of other names, or where the call returns none, and for a dataclass that says
        something else than the call's.
        """
        out, form = cast(Sequence[torch.Tensor], self.out), self.form
        if len(out) != count or form is None or isinstance(form, torch.Tensor):
            return out
        result = build(out)
        if not (isinstance(result, dict) or isinstance(form, dict)):
            if type(form) is type(result) and not isinstance(form, tuple | list):
                _check_fields(form, result)
            return out
        if not (isinstance(result, dict) and isinstance(form, dict) and form.keys() == result.keys()):
            raise ValueError(f"out: expected {_said(result)}, as the call returns, got {_said(form)}")
        tensors: list[torch.Tensor] = []
        program.take_apart({name: form[name] for name in result}, tensors)
        return tensors


def _check_fields(form: Any, result: Any) -> None:
    """Raise ValueError unless a dataclass equals the call's, which is made of its tensors."""
    for name, want in vars(result).items():
        came = getattr(form, name)
        if came is want or not (_is_tensor(came) or _is_tensor(want) or came != want):
            continue
        want, came = (describe(x) if _is_tensor(x) else repr(x) for x in (want, came))
        raise ValueError(f"out.{name}: expected {want}, as the call returns, got {came}")


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _said(form: Any) -> str:
    return f"a dict of {', '.join(map(repr, form))}" if isinstance(form, dict) else describe(form)


NOTHING_GIVEN = Given()


def check_out(out: Sequence[torch.Tensor], forms: Sequence[tuple], device: torch.device) -> None:
    """Raise ValueError unless these are tensors of these (shape, strides, dtype), on 16 bytes, that share no memory.

    Nor may autograd go through them.
    """
    if len(out) != len(forms):
        raise ValueError(f"out: expected {len(forms)} tensors, got {len(out)}")
    names = ["out"] if len(out) == 1 else [f"out, tensor {i}" for i in range(len(out))]
    expect_no_gradients(names, out)
    for name, x, (shape, strides, dtype) in zip(names, out, forms, strict=True):
        expect_tensor(name, x, dtype, shape, device)
        apart = any(n > 1 and a != b for n, a, b in zip(shape, x.stride(), strides, strict=True))
        if x.numel() and (apart or x.data_ptr() % ALIGNMENT):
            raise ValueError(f"{name}: expected strides {strides} and an address that is a multiple of 16, got others")
    ranges = sorted((x.data_ptr(), x.data_ptr() + program.extent_bytes(x)) for x in out if x.numel())
    if any(end > start for (_, end), (start, _) in pairwise(ranges)):
        raise ValueError("out: expected tensors that share no memory")


def forms_of(tensors: Sequence[torch.Tensor]) -> list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]:
    """Return shape, strides and dtype of each tensor, as `Driver.empty` and `check_out` take them."""
    return [(tuple(x.shape), tuple(x.stride()), x.dtype) for x in tensors]


def check_workspace(memory: torch.Tensor, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return memory for a call's scratch. WorkspaceError if it is too small, or off 16 bytes."""
    expect_tensor("workspace", memory, device=device)
    if not memory.is_contiguous() or memory.nbytes < num_bytes or memory.data_ptr() % ALIGNMENT:
        raise WorkspaceError(
            f"workspace: expected {num_bytes} contiguous bytes at a multiple of 16, got {memory.nbytes}"
            f"{'' if memory.is_contiguous() else ', not contiguous'}"
        )
    return memory


class Prepared:
    """Planned call, ready to run on tensors of the same shapes, strides, dtypes and device."""

    __slots__ = (
        "_build", "_device", "_driver", "_free", "_kept", "_of_inputs", "_of_kept", "_of_outputs",
        "_of_scratch", "_outputs", "_parts", "_scratch", "_scratch_floats", "_streams", "launches", "used",
    )  # fmt: skip

    def __init__(self, planned: Program, driver: Any, address: int) -> None:
        """Load the program's kernels. Raises RefusedError if it can't run by the driver alone.

        address: in the GPU's memory, for maps of matrices that aren't there yet.
        """
        launches = [launch for launch in planned.launches if 0 not in launch.grid]
        made = [_loaded(launch, planned, driver, address) for launch in launches]
        self.launches = [launch for launch, _ in made]
        self._build = planned.build
        self._parts = _parts(planned)
        self._outputs = forms_of(planned.outputs)
        self._scratch_floats = planned.scratch_bytes // 4
        self._device = driver.device()
        keeps = 0 < self._scratch_floats <= workspace.MOST_SCRATCH
        self._scratch = workspace.scratch(self._device) if keeps else None
        self._kept = planned.kept
        self.used = False
        self._driver = driver
        frame = Frame(self.launches)
        self._streams = [start + STREAM_WORD for start in frame.starts]
        self._of_inputs, self._of_outputs, self._of_scratch, self._of_kept = (
            _written(made, frame.starts, role) for role in (INPUT, OUTPUT, SCRATCH, KEPT)
        )
        self._free = [frame]

    def run(self, addresses: Sequence[int], stream: int, given: Given = NOTHING_GIVEN) -> Any:
        """Make the launches for inputs at these addresses; return the result. The device must be the current one."""
        driver = self._driver
        out, memory = given.out, given.workspace
        if out is not None:
            out = given.in_order(self._build, len(self._outputs))
            check_out(out, self._outputs, self._device)
        if memory is not None:
            check_workspace(memory, 4 * self._scratch_floats, self._device)
        outputs = [driver.empty(*form) for form in self._outputs] if out is None else out
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
        if captured or memory is not None:
            kept = None
        if self._scratch_floats:
            if memory is not None:
                scratch = memory
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
            self._driver.set_context(self._driver.context())
            error = self._driver.launch(*call)
        if error:
            raise RuntimeError(f"cuLaunchKernelEx: expected 0 from the CUDA driver, got {error}")


def _loaded(launch: program.Launch, planned: Program, driver: Any, address: int) -> tuple[Loaded, list[Place]]:
    """Return a launch with its kernel, and the place of each parameter's address, NOWHERE for numbers too."""
    compiled = launcher.load(*launch)
    check_launch(compiled)
    parameters = parameters_of(compiled, launch.arguments, driver, address)
    known, given = driver.parameter_sizes(compiled), [len(parameter.value) for parameter in parameters]
    if known != given:
        raise RefusedError(f"parameters of {given} bytes, where the driver knows of {known}")
    places = [NOWHERE if x.tensor is None else planned.place(x.tensor) for x in parameters]
    meta = compiled.metadata
    attributes = attributes_of(bool(meta.launch_cooperative_grid), bool(meta.launch_pdl))
    words, num_words = _words(parameters, CONFIG_WORDS + len(attributes) * ATTRIBUTE_WORDS + len(parameters))
    values = bytearray(num_words * WORD)
    for parameter, place, word in zip(parameters, places, words, strict=True):
        if parameter.is_map:
            check_map(parameter, driver)
        values[word * WORD : word * WORD + len(parameter.value)] = parameter.value
        if place.role == FIXED and place != NOWHERE:
            owned = planned.owned_memory[place.number].data_ptr() + place.offset
            struct.pack_into("Q", values, word * WORD, owned)
    x, y, z = (*launch.grid, 1, 1)[:3]
    return Loaded(compiled, (x, y, z), tuple(attributes), tuple(words), bytes(values)), places


def check_launch(compiled: Any) -> None:
    """Raise RefusedError for a kernel whose launch needs more than its parameters."""
    if compiled is None:
        raise RefusedError("a launch without a compiled kernel")
    meta = compiled.metadata
    if meta.global_scratch_size or meta.profile_scratch_size:
        raise RefusedError("scratch memory that Triton allocates")
    if meta.num_ctas != 1:
        raise RefusedError("clusters of CTAs")
    if compiled.function is None:
        raise RefusedError("a kernel that isn't loaded")


class Parameter(NamedTuple):
    """Bytes of a parameter; if they begin with the address of a tensor, that tensor.

    A map is followed by the shape and the strides of its matrix, which are parameters of their own.
    """

    value: bytes
    tensor: torch.Tensor | None = None

    @property
    def is_map(self) -> bool:
        """Return True for a TMA descriptor's map."""
        return len(self.value) == MAP_BYTES


class Somewhere(NamedTuple):
    """Stand-in for a matrix of which only the address matters."""

    address: int

    def data_ptr(self) -> int:
        """Return the address."""
        return self.address


def parameters_of(compiled: Any, arguments: tuple, driver: Any, address: int) -> list[Parameter]:
    """Return the parameters of a compiled kernel for these arguments. RefusedError for what isn't known here.

    address: in all maps.
    """
    forms = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
    somewhere: Any = Somewhere(address & -MAP_BYTES)  # maps of FP4 have to be on 32 bytes

    def encode(descriptor: Any) -> bytes:
        form = next(forms, None)
        if form is None:
            raise RefusedError("a descriptor that the kernel takes apart")
        return driver.tensor_map(rebase(descriptor, somewhere), form)

    kinds = tuple(compiled.src.signature.values())
    return [*_flatten(kinds, arguments, encode), *[Parameter(bytes(ADDRESS_BYTES))] * 2]


def _flatten(kinds: tuple, values: tuple, encode: Callable[[Any], bytes]) -> Iterator[Parameter]:
    for kind, value in zip(kinds, values, strict=True):
        if isinstance(kind, tuple):
            yield from _flatten(kind, value, encode)
        elif kind.startswith("tensordesc"):
            yield Parameter(encode(value), value.base)
            yield from (Parameter(struct.pack("i", side)) for side in value.shape)
            yield from (Parameter(struct.pack("q", stride)) for stride in value.strides)
        elif kind[0] == "*":
            yield _pointer(value)
        elif kind != "constexpr":
            yield Parameter(_number(kind, value))


def _pointer(value: Any) -> Parameter:
    if not (value is None or isinstance(value, torch.Tensor)):
        raise RefusedError(f"an address without a tensor, given as {type(value).__name__}")
    return Parameter(bytes(ADDRESS_BYTES), value)


def _number(kind: str, value: Any) -> bytes:
    if kind not in FORMATS:
        raise RefusedError(f"a number of type {kind}")
    if kind == "fp32" and math.isfinite(value) and abs(value) > torch.finfo(torch.float32).max:
        raise RefusedError(f"{value} as float32")
    return struct.pack(FORMATS[kind], value)


def check_map(parameter: Parameter, driver: Any) -> None:
    """Raise RefusedError unless the first 8 bytes of a map are its address and nothing else depends on it."""
    other = 0x7F00_1234_5680
    if driver.moved_map(parameter.value, other) != struct.pack("Q", other) + parameter.value[ADDRESS_BYTES:]:
        raise RefusedError("a tensor map whose address stands elsewhere")


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


def _parts(planned: Program) -> list[tuple[slice, Callable[[], object] | None]]:
    """Return the launches up to each step, and the step; None after the last ones."""
    found, first = [], 0
    for raw, step in [*planned.steps, (len(planned.launches), None)]:
        last = sum(0 not in each.grid for each in planned.launches[:raw])
        found.append((slice(first, last), step))
        first = last
    return found


def _written(
    made: Sequence[tuple[Loaded, list[Place]]], starts: Sequence[int], role: int
) -> list[tuple[int, int, int]]:  # fmt: skip
    """Return (word, number, offset) of each address with this role."""
    return [
        (start + word, place.number, place.offset)
        for (launch, places), start in zip(made, starts, strict=True)
        for word, place in zip(launch.words, places, strict=True)
        if place.role == role and place != NOWHERE
    ]

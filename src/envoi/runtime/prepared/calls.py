"""Prepared calls by key: planned at the first one, replayed from then on; and what decides whether a call is plain.

A key is what decides a call's launches: its numbers and flags as the operator lists them, and each tensor's shape,
strides and dtype, on the current device. What isn't in the key is checked at each call; if one of these holds, the call
runs as always, with all its checks, errors, records and modes:

    the log or NVTX ranges are on; a mode, a transform, a tracer, a compiler or a profiler observes the thread
    autocast is on; a tensor requires a gradient, or forward-mode differentiation is under way
    a tensor is of another class, on another device than the current one, off 16 bytes, or holds its negative
    Triton's launches have hooks

Wrong arguments have no key: planning refuses them, and the call as always says why.

To make a key takes ten times as long as the guards of torch's compiler, so a call is looked for among `Forms` first.
"""

import functools
import operator
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch.autograd import forward_ad

from envoi import log
from envoi.check import expect_tensor
from envoi.runtime import program, shortcuts, triton_compat, workspace
from envoi.runtime.custom_op import watched
from envoi.runtime.devices import limited
from envoi.runtime.prepared import driver as driver_module
from envoi.runtime.prepared.replay import NOTHING_GIVEN, Given, Prepared, check_out, forms_of
from envoi.spans import NVTX

# Keys that are kept. A prepared call takes some 20 KB of the host's memory and none of the device's: all calls of a
# stream share the scratch memory that `runtime.workspace` keeps for it.
MOST_CALLS = 1024
MOST_VARIANTS = 4  # of strides, dtypes and modes that a form is looked up for
ALIGNMENT_MASK = 15
MISSED = object()

Function = TypeVar("Function", bound=Callable)
Listed = (
    tuple[tuple, Sequence[torch.Tensor | None]] | None
)  # constants and tensors, or None for a call to run as always

_guards: Any = getattr(shortcuts.GUARDS, "TensorGuards", None)
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_all: "weakref.WeakSet[Calls]" = weakref.WeakSet()


class Plannable(NamedTuple):
    """Call as `program.plan` takes it: a function that launches, and its arguments."""

    function: Callable
    arguments: tuple
    named: dict[str, Any] = {}  # noqa: RUF012
    owner: Any = None


class Variant(NamedTuple):
    """Prepared call, and what its tensors have to be.

    check: torch's guards for the tensors that aren't None; pick: takes these out of all, None where that is all of
    them; absent: the places of the others.
    """

    check: Callable[..., bool]
    num_tensors: int
    device: int
    pick: Callable[[Sequence], tuple] | None
    absent: tuple[int, ...]
    call: Prepared


class Forms:
    """Variants of calls by constants and the shape of their first tensor; at most `most` of these.

    Torch compares the tensors with those of a call that went through all checks:

        class, dtype, device, sizes, strides                     of each tensor
        dispatch keys, with those that a mode, a transform,      as they were: a tensor that holds its negative,
            a tracer, inference mode or autocast adds            inference mode or not, for instance
        requires a gradient, where grad mode is on               never
        one object twice                                         never: such a call is found by its key
    """

    def __init__(self, most: int) -> None:
        self.known: dict[Any, tuple[Variant, ...]] = {}
        self.most = most

    def find(self, constants: tuple, tensors: Sequence[torch.Tensor | None], device: int) -> Prepared | None:
        """Return the prepared call that these tensors fit, None if there is none. device: the current one."""
        first: Any = tensors[0]
        for variant in self.known.get((constants, first.shape), ()):
            if variant.device != device or len(tensors) != variant.num_tensors:
                continue
            for place in variant.absent:
                if tensors[place] is not None:
                    break
            else:
                # A None among the picked fails the check like any other object that is no tensor.
                if variant.check(*(tensors if variant.pick is None else variant.pick(tensors))):
                    return variant.call
        return None

    def add(self, constants: tuple, tensors: Sequence[torch.Tensor | None], call: Prepared) -> None:
        """Add a call that went through all checks, so that its tensors are on one device.

        Nothing happens where torch has no such guards.
        """
        present = tuple(i for i, x in enumerate(tensors) if x is not None)
        absent = tuple(i for i, x in enumerate(tensors) if x is None)
        given: list[Any] = [tensors[i] for i in present]
        check = _check_of(given)
        if check is None or not check(*given):
            return
        if len(self.known) >= self.most:
            self.known.clear()
        key = constants, given[0].shape
        variants = self.known.get(key, ())
        pick = _picker(present) if absent else None
        variant = Variant(check, len(tensors), given[0].get_device(), pick, absent, call)
        self.known[key] = (*variants[-MOST_VARIANTS + 1 :], variant)

    def forget(self, call: Prepared) -> None:
        """Forget all variants of a call."""
        kept = {key: tuple(v for v in variants if v.call is not call) for key, variants in self.known.items()}
        self.known = {key: variants for key, variants in kept.items() if variants}


def _picker(places: tuple[int, ...]) -> Callable[[Sequence], tuple]:
    """Return a function that takes these places out of a sequence, as a tuple."""
    take = itemgetter(*places)
    return take if len(places) > 1 else lambda found: (take(found),)


def _check_of(tensors: list[torch.Tensor]) -> Callable[..., bool] | None:
    if _guards is None:
        return None
    sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
    try:
        return _guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    except (TypeError, RuntimeError):  # another release of torch
        return None


class Calls:
    """Calls of one or several operators by key, the least recently used ones forgotten.

    known: for a key its prepared call, or a text: why it has none.
    """

    def __init__(self, most: int = MOST_CALLS) -> None:
        self.known: dict[Any, Prepared | str] = {}
        self.most = most
        self.forms = Forms(most)
        self._lock = threading.Lock()
        _all.add(self)

    def replay(
        self, constants: tuple, tensors: Sequence[torch.Tensor | None], given: Given = NOTHING_GIVEN
    ) -> Any:  # fmt: skip
        """Return the result of a call whose tensors have the forms of a prepared one's, MISSED if there is none.

        Arguments as for `run`; for calls that nothing watches but what the guards of `Forms` notice.
        """
        driver = driver_module.active()
        if driver is None or not self.forms.known:
            return MISSED
        device = driver.current_device()
        stream = driver.stream(device)
        try:
            found = self.forms.find(constants, tensors, device)
        except (TypeError, AttributeError):  # a constant or a tensor that isn't one
            return MISSED
        if found is None:
            return MISSED
        addresses = [0 if x is None else x.data_ptr() for x in tensors]
        if functools.reduce(operator.or_, addresses) & ALIGNMENT_MASK:
            return MISSED
        found.used = True
        return found.run(addresses, stream, given)

    def run(
        self, constants: tuple, tensors: Sequence[torch.Tensor | None], as_always: Callable[[], Any], call: Plannable,
        given: Given = NOTHING_GIVEN,
    ) -> Any:  # fmt: skip
        """Return what `as_always()` returns, by the call's planned launches where they are all that it does.

        constants: all that decides the launches apart from tensors, the operator's name first; hashable.
        tensors: all arguments whose addresses the launches take. Only for calls under `plain`.
        given: memory of the caller's; what `as_always` returns is copied there.
        """
        driver = driver_module.active()
        first: Any = tensors[0]
        if driver is None or type(first) not in _TENSORS or first.device.type != driver.device_type:
            return copied(as_always(), given)
        device, grad = driver.current_device(), torch.is_grad_enabled()
        parts, addresses, bits = [constants, device], [], 0
        for x in tensors:
            if x is None:
                parts.append(None)
                addresses.append(0)
                continue
            if type(x) not in _TENSORS or x.get_device() != device or x.is_neg() or (grad and x.requires_grad):
                return copied(as_always(), given)
            address = x.data_ptr()
            bits |= address
            addresses.append(address)
            parts += x.shape, x.stride(), x.dtype
        if bits & ALIGNMENT_MASK:
            return copied(as_always(), given)
        key, stream = tuple(parts), driver.stream(device)
        try:
            found = self.known.get(key)
        except TypeError:  # a constant that isn't one
            return copied(as_always(), given)
        if isinstance(found, Prepared):
            found.used = True
            self.forms.add(constants, tensors, found)
            return found.run(addresses, stream, given)
        if found is not None:
            return copied(as_always(), given)
        planned = self._prepared(tensors, max(addresses), call)
        if isinstance(planned, Prepared):
            self._keep(key, planned)
            self.forms.add(constants, tensors, planned)
            return planned.run(addresses, stream, given)
        result = copied(as_always(), given)
        if not _is_given_twice(tensors):
            self._keep(key, planned)
        return result

    @staticmethod
    def _prepared(tensors: Sequence[torch.Tensor | None], address: int, call: Plannable) -> Prepared | str:
        """Plan a call and load its kernels; return why that can't be. address: as `Prepared` takes it."""
        driver: Any = driver_module.active()
        function, arguments, named, owner = call
        try:
            planned = program.plan(function, arguments, named, tensors, driver.target(), owner)
            return planned.refusal or Prepared(planned, driver, address)
        except program.RefusedError as error:
            return str(error)
        except Exception as error:  # wrong arguments, a value that the host reads, or another Triton
            return f"{type(error).__name__}: {error}"

    def _keep(self, key: Any, found: Prepared | str) -> None:
        """Keep what is known of a key. If there are too many, forget the oldest that weren't used since they were last
        passed over."""
        with self._lock:
            while len(self.known) >= self.most and key not in self.known:
                oldest = next(iter(self.known))
                passed = self.known.pop(oldest)
                if isinstance(passed, Prepared) and passed.used:
                    passed.used = False
                    self.known[oldest] = passed
                elif isinstance(passed, Prepared):
                    self.forms.forget(passed)
            self.known[key] = found

    def clear(self) -> None:
        """Forget all calls."""
        with self._lock:
            self.known.clear()
            self.forms.known.clear()

    def refusals(self) -> list[str]:
        """Return why calls can't be replayed."""
        return [found for found in self.known.values() if isinstance(found, str)]


def scratch_bytes(tensors: Sequence[torch.Tensor | None], call: Plannable) -> int:
    """Return the bytes of a prepared call's scratch, 0 where calls aren't prepared. Arguments as for `Calls.run`.

    Raises ValueError for tensors that no call can be planned for, and what the call's function raises.
    """
    driver, (function, arguments, named, owner) = driver_module.active(), call
    if driver is None:
        return 0
    try:
        return program.plan(function, arguments, named, tensors, driver.target(), owner).scratch_bytes
    except program.RefusedError as error:
        raise ValueError(f"tensors: expected some that a call can be planned for, got {error}") from None


def _is_given_twice(tensors: Sequence[torch.Tensor | None]) -> bool:
    given = [id(x) for x in tensors if x is not None]
    return len(set(given)) < len(given)


_calls = Calls()


def clear() -> None:
    """Forget all prepared calls, for example when other configs are to be used from now on; free their memory."""
    for calls in list(_all):
        calls.clear()
    workspace.forget_scratch()


def unwatched() -> bool:
    """Tell whether calls of this thread may be prepared now, as far as the guards of `Forms` don't notice it."""
    return (
        shortcuts.PREPARED
        and shortcuts.ENABLED
        and program.current() is None
        and not torch.compiler.is_compiling()
        and not (log.LEVEL or NVTX)
        and torch._C._len_torch_function_stack() == 0
        and not torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]
        and forward_ad._current_level < 0
        and not triton_compat.has_launch_hooks()
    )


def plain() -> bool:
    """Tell whether calls of this thread may be prepared now, as far as that doesn't depend on their arguments."""
    return unwatched() and not watched() and not torch._C._is_any_autocast_enabled()


def prepared(listed: Callable[..., Listed]) -> Callable[[Function], Function]:
    """Decorate a public function so that its calls are prepared.

    listed: takes the function's arguments and returns all that decides its launches, (constants, tensors) as
    `Calls.run` takes them; or None for arguments that only the function itself can judge. Errors in it count as None.

    The decorated function also takes, for what it returns, `out`; `workspace` and `num_sms`: see `envoi.gemm`. These
    don't reach the function, whose signature has them for its readers.
    """

    def decorate(function: Function) -> Function:
        name = function.__name__
        # Python's error of wrong arguments, which only a plan shows, names the call that the user wrote.
        listed.__qualname__ = f"plan of {name}"

        def run(arguments: tuple, named: dict[str, Any], num_sms: int | None, given: Given) -> Any:
            if not unwatched():
                return copied(function(*arguments, **named), given)
            try:
                found = listed(*arguments, **named)
            except (TypeError, AttributeError, ValueError):
                found = None
            if found is None:
                return copied(function(*arguments, **named), given)
            constants, tensors = (name, num_sms, *found[0]), found[1]
            result = _calls.replay(constants, tensors, given)
            if result is not MISSED:
                return result
            if not plain():
                return copied(function(*arguments, **named), given)
            as_always = functools.partial(function, *arguments, **named)
            return _calls.run(constants, tensors, as_always, Plannable(function, arguments, named), given)

        @functools.wraps(function)
        def call(
            *arguments: Any, out: Any = None, workspace: torch.Tensor | None = None, num_sms: int | None = None,
            **named: Any,
        ) -> Any:  # fmt: skip
            if out is None and workspace is None and num_sms is None:
                return run(arguments, named, None, NOTHING_GIVEN)
            given = given_of(out, workspace)
            if num_sms is None:
                return run(arguments, named, None, given)
            with limited(num_sms):
                return run(arguments, named, num_sms, given)

        call.listed = listed  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]
        return cast(Function, call)

    return decorate


def exactly(x: Any) -> Any:
    """Return a value that equals that of another x only if both have the same type and, if numbers, the same bits.

    For keys: Python calls 1, 1.0 and True equal, and 0.0 and -0.0, but a call may refuse or distinguish them.
    """
    kind = type(x)
    return (kind, struct.pack("d", x)) if kind is float else (kind, x)


def given_of(out: Any, memory: Any) -> Given:
    """Return what a caller gives for a call's outputs, of the form that the call returns, and for its scratch."""
    tensors: list[torch.Tensor] | None = None
    if out is not None:
        program.take_apart(out, tensors := [])
        if not tensors:
            raise ValueError(f"out: expected tensors of the form that the call returns, got {type(out).__name__}")
    if memory is not None:
        expect_tensor("workspace", memory)
    return Given(tensors, memory, out)


def copied(result: Any, given: Given) -> Any:
    """Copy a result's tensors to those that the caller gave, if any, and return the result with these."""
    if given.out is None:
        return result
    found: list[torch.Tensor] = []
    build = program.take_apart(result, found)
    out = given.in_order(build, len(found))
    check_out(out, forms_of(found), found[0].device)
    for x, y in zip(out, found, strict=True):
        x.copy_(y)
    return build(out)

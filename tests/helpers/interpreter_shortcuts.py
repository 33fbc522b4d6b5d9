"""Shortcuts in Triton's interpreter, which spends more time on types and shapes than on the values of tensors.

Each replaces a function by one with the same results; without them the tests take twice as long.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

REDUCE_NUMBERS = interpreter.ReduceOps.generic_reduce


def install() -> None:
    """Install all, once in a process, before a kernel runs."""
    _find_builtins_once()
    _patch_once_a_launch()
    _describe_blocks_once()
    _describe_tensors_once()
    _look_up_dtypes()
    _compare_dtypes_by_identity()
    _broadcast_what_differs()
    _convert_numbers_once()
    _replace(interpreter.ReduceOps, "generic_reduce", reduce_slices)
    if not interpreter.interpreter_builder.options.debug:
        _skip_unread_overflow_checks()


def _replace(owner: Any, name: str, new: Callable) -> None:
    assert callable(getattr(owner, name)), f"Triton's interpreter has changed: see what it does instead of {name}"
    setattr(owner, name, new)


def _find_builtins_once() -> None:
    """Cache the list of the language's functions, which the interpreter makes whenever it replaces them."""

    @functools.cache
    def names(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name in names(package):
            member = getattr(package, name)
            if core.is_builtin(member):  # not if a running kernel has replaced it already
                interpreter._patch_attr(package, name, member, builder, scope)

    for package in (tl, core, tl.tensor, tl.math, core.tensor_descriptor_base):
        names(package)  # before anything is replaced
    _replace(interpreter, "_patch_builtin", patch_builtin)


def _patch_once_a_launch() -> None:
    """Replace no function of the language at the call of a device function: the launch has replaced all."""
    original = interpreter._patch_lang

    @functools.cache
    def languages(function: Any) -> list[Any]:
        return [value for value in function.__globals__.values() if value is tl or value is core]

    def patch_lang(function: Any) -> Any:
        if all(not core.is_builtin(language.load) for language in languages(function)):
            return interpreter._LangPatchScope()
        return original(function)

    _replace(interpreter, "_patch_lang", patch_lang)


def _describe_blocks_once() -> None:
    """Check and describe each shape once, not for each type of a block."""
    original = core.block_type.__init__
    known: dict[tuple[int, ...], dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(size.value if type(size) is core.constexpr else size for size in shape)
        found = known.get(sizes) if all(type(size) is int for size in sizes) else None
        if found is not None:
            self.__dict__.update(found)
            self.element_ty, self.name = element_ty, f"<{found['text']}, {element_ty}>"
            return
        original(self, element_ty, shape)
        known[sizes] = {**self.__dict__, "text": str(self.shape)}

    _replace(core.block_type, "__init__", init)


def _describe_tensors_once() -> None:
    """Wrap the sizes of each shape once, not for each tensor."""
    original = core.tensor.__init__
    known: dict[tuple[int, ...], dict[str, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()
        found = known.get(sizes)
        if found is not None:
            self.__dict__.update(found)
            self.handle, self.type, self.dtype = handle, type, type.scalar
            return
        original(self, handle, type)
        known[sizes] = {name: self.__dict__[name] for name in ("shape", "numel")}

    _replace(core.tensor, "__init__", init)


def _look_up_dtypes() -> None:
    """Look numpy's dtype up in a table that isn't made anew for each question."""
    original = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def np_dtype(of: Any) -> Any:
        if type(of) is core.block_type:
            return np_dtype(of.element_ty)
        if type(of) is not core.dtype:
            return original(of)
        found = known.get(of.name)
        if found is None:
            found = known[of.name] = original(of)
        return found

    _replace(interpreter, "_get_np_dtype", np_dtype)


def _compare_dtypes_by_identity() -> None:
    """Look at the name of a dtype only if it isn't the very same object."""
    equal, cast = core.dtype.__eq__, TritonSemantic.cast

    def cast_another(self: Any, input: Any, dst_ty: Any, *rest: Any, **named: Any) -> Any:
        return input if input.dtype is dst_ty else cast(self, input, dst_ty, *rest, **named)

    _replace(core.dtype, "__eq__", lambda self, other: self is other or equal(self, other))
    _replace(TritonSemantic, "cast", cast_another)


def _broadcast_what_differs() -> None:
    """Compare two shapes size by size only if they aren't the very same object, as those of `_describe_blocks_once`."""
    original = TritonSemantic.broadcast_impl_value

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        one, other = lhs.type, rhs.type
        same = one.shape is other.shape if one.is_block() and other.is_block() else one.is_block() == other.is_block()
        return (lhs, rhs) if same else original(self, lhs, rhs)

    _replace(TritonSemantic, "broadcast_impl_value", broadcast)


def _convert_numbers_once() -> None:
    """Make a tensor of a number once for each type of the other operand; note types of operands that stay as they are.

    A type's name has its shape. The operators write to no operand.
    """
    original = TritonSemantic.binary_op_type_checking_impl
    numbers: dict[tuple, core.tensor] = {}
    kept: set[tuple] = set()
    tensor: Any = core.tensor

    def check(self: Any, lhs: Any, rhs: Any, *rest: Any, **named: Any) -> Any:
        right = type(rhs)
        if type(lhs) is tensor and right is tensor:
            key = lhs.type.name, rhs.type.name, *rest, *named.items()
            if key in kept:
                return lhs, rhs
            checked = original(self, lhs, rhs, *rest, **named)
            if checked[0] is lhs and checked[1] is rhs:
                kept.add(key)
            return checked
        if type(lhs) is tensor and (right is int or right is float):
            key = lhs.type.name, right, rhs, *rest, *named.items()
            number = numbers.get(key)
            if number is not None:
                return lhs, number
            checked = original(self, lhs, rhs, *rest, **named)
            if checked[0] is lhs:
                numbers[key] = checked[1]
            return checked
        return original(self, lhs, rhs, *rest, **named)

    _replace(TritonSemantic, "binary_op_type_checking_impl", check)


def reduce_slices(self: Any, input: Any) -> list[Any]:
    """Reduce whole slices, one after the other along the axis: the order of the original, which reduces numbers.

    The function that combines two may not branch on a tensor; none in Envoi does.
    """
    tensors, axis = self.unravel(input, self.axis)
    arrays = [np.moveaxis(tensor.handle.data, axis, 0) for tensor in tensors]
    dtypes = [tensor.dtype for tensor in tensors]

    def wrapped(values: Any) -> list[Any]:
        return [self.to_tensor(value, dtype) for value, dtype in zip(values, dtypes, strict=True)]

    reduced = [array[0] for array in arrays]
    for values in zip(*(array[1:] for array in arrays), strict=True):
        combined = self.combine_fn.fn(*wrapped(reduced), *wrapped(values))
        combined = combined if isinstance(combined, tuple) else (combined,)
        pairs = zip(combined, arrays, strict=True)
        reduced = [one.handle.data.astype(array.dtype).reshape(array.shape[1:]) for one, array in pairs]
    if self.keep_dims:
        kept = axis if self.axis is not None else tuple(range(len(input[0].handle.data.shape)))
        reduced = [np.expand_dims(value, kept) for value in reduced]
    return wrapped(reduced)


def _skip_unread_overflow_checks() -> None:
    """Compute no sums in 64 bits for an assertion that does nothing: without the option `debug` it isn't made."""
    _replace(TritonSemantic, "binary_op_sanitize_overflow_impl", lambda *_: None)

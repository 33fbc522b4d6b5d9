"""Shortcuts in Triton's interpreter, which spends more time on types and shapes than on the values of tensors.

Each replaces a function by one with the same results; without them the tests take twice as long.
"""

import functools
import inspect
import linecache
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
    _find_definitions_at_once()
    _find_builtins_once()
    _call_builtins_directly()
    _patch_once_a_launch()
    _unwrap_by_type()
    _describe_blocks_once()
    _describe_tensors_once()
    _look_up_dtypes()
    _compare_dtypes_by_identity()
    _broadcast_what_differs()
    _convert_numbers_once()
    _check_sizes_once()
    _replace(interpreter.ReduceOps, "generic_reduce", reduce_slices)
    _replace(interpreter.InterpreterBuilder, "create_histogram", count_values)
    if not interpreter.interpreter_builder.options.debug:
        _skip_unread_overflow_checks()


def _replace(owner: Any, name: str, new: Callable) -> None:
    assert callable(getattr(owner, name)), f"Triton's interpreter has changed: see what it does instead of {name}"
    setattr(owner, name, new)


def _find_definitions_at_once() -> None:
    """Find a function's line without the object of a compiled one, which reads and describes its source anew."""

    def place(self: Any) -> tuple[str, int]:
        code = self.fn.__code__
        lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
        before = next(index for index, line in enumerate(lines) if line.strip().startswith("def "))
        return code.co_filename, code.co_firstlineno + before

    _replace(interpreter.FunctionRewriter, "_get_jit_fn_file_line", place)


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


def _call_builtins_directly() -> None:
    """Make what stands for a function of the language once, not at each launch; it calls what the check is around."""
    checked = core.builtin(lambda: None).__code__  # of all functions that ask for `_semantic`

    @functools.cache
    def standing_for(member: Any, builder: Any) -> Callable:
        semantic = getattr(interpreter, "interpreter_semantic", None) or TritonSemantic(builder)
        function = member.__wrapped__ if getattr(member, "__code__", None) is checked else member

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        return call

    def patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        scope.set_attr(owner, name, standing_for(member, builder))

    _replace(interpreter, "_patch_attr", patch_attr)


def _unwrap_by_type() -> None:
    """Ask once for the type of what may be a constexpr, or hold some."""
    original = core._unwrap_if_constexpr
    plain = frozenset((core.tensor, core.dtype, core.block_type, int, float, bool, str, type(None)))

    def unwrap(value: Any) -> Any:
        kind = type(value)
        return value if kind in plain else value.value if kind is core.constexpr else original(value)

    _replace(core, "_unwrap_if_constexpr", unwrap)


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
    """Check and describe each shape once, not for each type of a block; derive a type from another once."""
    original, to_ir, with_element_ty = core.block_type.__init__, core.block_type.to_ir, core.block_type.with_element_ty
    known: dict[tuple[int, ...], dict[str, Any]] = {}
    irs: dict[tuple[str, Any], Any] = {}
    derived: dict[tuple[str, str], Any] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(size.value if type(size) is core.constexpr else size for size in shape)
        found = known.get(sizes) if all(type(size) is int for size in sizes) else None
        if found is not None:
            self.__dict__.update(found)
            self.element_ty, self.name = element_ty, f"<{found['text']}, {element_ty.name}>"
            return
        original(self, element_ty, shape)
        known[sizes] = {**self.__dict__, "text": str(self.shape)}

    def ir_of(self: Any, builder: Any) -> Any:
        found = irs.get((self.name, builder))
        if found is None:
            found = irs[self.name, builder] = to_ir(self, builder)
        return found

    def another(self: Any, scalar_ty: Any) -> Any:
        found = derived.get((self.name, scalar_ty.name))
        if found is None:
            found = derived[self.name, scalar_ty.name] = with_element_ty(self, scalar_ty)
        return found

    _replace(core.block_type, "__init__", init)
    _replace(core.block_type, "to_ir", ir_of)
    _replace(core.block_type, "with_element_ty", another)


def _describe_tensors_once() -> None:
    """Wrap the sizes of each type once, not for each tensor. A type's name has its shape."""
    original = core.tensor.__init__
    known: dict[str, dict[str, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        found = known.get(type.name)
        if found is not None:
            self.__dict__.update(found)
            self.handle, self.type, self.dtype = handle, type, type.scalar
            return
        original(self, handle, type)
        known[type.name] = {name: self.__dict__[name] for name in ("shape", "numel")}

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
    """Compare the shapes of two types once; afterwards broadcast at once what differs. A type's name has its shape."""
    original = TritonSemantic.broadcast_impl_value
    known: dict[tuple[str, str], list[Any]] = {}  # the types that both operands get, None for one that stays as it is

    def widened(self: Any, value: Any, to: Any) -> Any:
        if value.type.is_block():
            return self.tensor(self.builder.create_broadcast(value.handle, to.shape), to)
        return self.tensor(self.builder.create_splat(to.to_ir(self.builder), value.handle), to)

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        key = lhs.type.name, rhs.type.name
        types = known.get(key)
        if types is None:
            pairs = [*zip((lhs, rhs), original(self, lhs, rhs), strict=True)]
            if not any(_gains_axes(before, after) for before, after in pairs):
                known[key] = [None if before is after else after.type for before, after in pairs]
            return pairs[0][1], pairs[1][1]
        left, right = types
        return lhs if left is None else widened(self, lhs, left), rhs if right is None else widened(self, rhs, right)

    _replace(TritonSemantic, "broadcast_impl_value", broadcast)


def _gains_axes(before: Any, after: Any) -> bool:
    return before.type.is_block() and len(before.type.shape) < len(after.type.shape)


def _convert_numbers_once() -> None:
    """Make a tensor of a number once for each type of the other operand; note what two types are cast to.

    The operators write to no operand.
    """
    original = TritonSemantic.binary_op_type_checking_impl
    numbers: dict[tuple, core.tensor] = {}
    casts: dict[tuple, tuple[Any, Any]] = {}
    tensor: Any = core.tensor

    def check(self: Any, lhs: Any, rhs: Any, *rest: Any, **named: Any) -> Any:
        left, right = type(lhs), type(rhs)
        if left is tensor and right is tensor:
            key = lhs.type.name, rhs.type.name, *rest, *named.items()
            dtypes = casts.get(key)
            if dtypes is not None:
                return self.broadcast_impl_value(self.cast(lhs, dtypes[0]), self.cast(rhs, dtypes[1]))
            checked = original(self, lhs, rhs, *rest, **named)
            casts[key] = checked[0].dtype, checked[1].dtype
            return checked
        first = right is tensor  # the number, if one is
        number, kind, other = (lhs, left, rhs) if first else (rhs, right, lhs)
        if not (first or left is tensor) or not (kind is int or kind is float):
            return original(self, lhs, rhs, *rest, **named)
        key = first, kind, number, other.type.name, *rest, *named.items()
        made = numbers.get(key)
        if made is not None:
            return (made, other) if first else (other, made)
        checked = original(self, lhs, rhs, *rest, **named)
        if checked[first] is other:
            numbers[key] = checked[not first]
        return checked

    _replace(TritonSemantic, "binary_op_type_checking_impl", check)


def _check_sizes_once() -> None:
    """Check once for each dtype that an element of a tensor's values has no more bytes."""
    original, make = interpreter._validate_np_data_size, interpreter.TensorHandle.__init__
    known: dict[tuple[int, str], bool] = {}

    def fits(values: Any, dtype: Any) -> bool:
        key = values.itemsize, dtype.name
        found = known.get(key)
        if found is None:
            found = known[key] = original(values, dtype)
        return found

    def init(self: Any, data: Any, dtype: Any, *attr: Any, **named: Any) -> None:
        if attr or named or not known.get((data.itemsize, dtype.name)):
            make(self, data, dtype, *attr, **named)
        else:
            self.data, self.dtype, self.attr = data, dtype, {}

    _replace(interpreter, "_validate_np_data_size", fits)
    _replace(interpreter.TensorHandle, "__init__", init)


def count_values(self: Any, data: Any, bins: int, mask: Any) -> Any:
    """Count whole numbers without looking for the bins' edges. Values outside of the bins are an error."""
    values = data.data if mask is None else data.data[mask.data]
    counts = np.bincount(values, minlength=bins)
    assert len(counts) == bins, f"histogram: expected values below {bins}, got {values.max()}"
    return interpreter.TensorHandle(counts.astype(np.int32), tl.int32)


def reduce_slices(self: Any, input: Any) -> list[Any]:
    """Reduce whole slices, one after the other along the axis: the order of the original, which reduces numbers.

    All at once where the order doesn't matter, under xor.
    The function that combines two may not branch on a tensor; none in Envoi does.
    """
    if self.combine_fn == tl.standard._xor_combine:
        bits = np.bitwise_xor.reduce(input[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
        return [self.to_tensor(bits, input[0].dtype)]
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

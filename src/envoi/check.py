"""Checks of arguments. All raise ValueError that names the argument, what was expected and what came."""

import math
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.autograd import forward_ad

Dim = int | str | None  # an exact size, a name for any size, or None for any size


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without its module: `float8_e4m3fn`."""
    return str(dtype).removeprefix("torch.")


def describe(value: Any) -> str:
    """Describe a value as error messages do: `int64 [128, 6]`, or the type of a non-tensor."""
    if isinstance(value, torch.Tensor):
        return f"{dtype_name(value.dtype)} {list(value.shape)}"
    return f"{type(value).__name__} {value!r}" if isinstance(value, (int, float, str, bool)) else type(value).__name__


def expect_tensor(
    name: str,
    value: Any,
    dtype: torch.dtype | Collection[torch.dtype] | None = None,
    shape: Sequence[Dim] | None = None,
    device: torch.device | None = None,
    contiguous: bool = False,
) -> torch.Tensor:
    """Return `value` if it is a dense tensor of that dtype, shape, device and layout; else raise ValueError.

    >>> expect_tensor("topk_ids", torch.zeros(128, 6, dtype=torch.int64), torch.int32, (128, 8))
    Traceback (most recent call last):
    ValueError: topk_ids: expected int32 [128, 8], got int64 [128, 6]
    """
    dtypes = (dtype,) if isinstance(dtype, torch.dtype) else tuple(dtype or ())
    if (
        not isinstance(value, torch.Tensor)
        or (dtypes and value.dtype not in dtypes)
        or (shape is not None and not _fits(value.shape, shape))
    ):
        raise ValueError(f"{name}: expected {_wanted(dtypes, shape)}, got {describe(value)}")
    if value.layout != torch.strided:
        raise ValueError(f"{name}: expected a dense tensor, got one in {str(value.layout).removeprefix('torch.')}")
    if device is not None and value.device != device:
        raise ValueError(f"{name}: expected a tensor on {device} like the other arguments, got one on {value.device}")
    if contiguous and not value.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {value.stride()}; call .contiguous()")
    return value


def _wanted(dtypes: Sequence[torch.dtype], shape: Sequence[Dim] | None) -> str:
    kinds = " or ".join(map(dtype_name, dtypes)) or "tensor"
    return kinds if shape is None else f"{kinds} [{', '.join('*' if d is None else f'{d}' for d in shape)}]"


def _fits(sizes: Sequence[int], shape: Sequence[Dim]) -> bool:
    return len(sizes) == len(shape) and all(
        want is None or isinstance(want, str) or size == want for size, want in zip(sizes, shape, strict=True)
    )


def expect_choice(name: str, value: Any, choices: Collection[str]) -> str:
    """Return `value` if it is one of `choices`; else raise ValueError that lists them."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}")
    return value


def expect_int(name: str, value: Any, low: int, high: int | None = None, why: str = "") -> int:
    """Return `value` if it is an int in [low, high]; else raise ValueError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        span = f"an int of at least {low}" if high is None else f"an int from {low} to {high}"
        raise ValueError(f"{name}: expected {span}{why and f' ({why})'}, got {value!r}")
    return value


def expect_bool(name: str, value: Any) -> bool:
    """Return `value` if it is True or False; else raise ValueError."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}: expected True or False, got {describe(value)}")
    return value


def expect_number(name: str, value: Any) -> float:
    """Return `value` as a float if it is a number; else raise ValueError."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ValueError(f"{name}: expected a number, got {describe(value)}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name}: expected a number that float64 can hold, got an int of more digits") from None


def expect_float32(name: str, value: Any) -> float:
    """Return `value` as a float if it is a finite number that float32 can hold; else raise ValueError."""
    number = expect_number(name, value)
    if not (math.isfinite(number) and fits_float32(number)):
        raise ValueError(f"{name}: expected a finite number that float32 can hold, got {number}")
    return number


def fits_float32(value: int | float) -> bool:
    """Return False for a finite number that is infinite in float32."""
    value = value if isinstance(value, int) else float(value)  # NumPy compares its numbers in their own precision
    return not math.inf > abs(value) > torch.finfo(torch.float32).max


def expect_device(name: str, value: Any) -> torch.device:
    """Return the device that a user named; else raise ValueError."""
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError):
        raise ValueError(f"{name}: expected a device of torch such as 'cuda', got {describe(value)}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{name}: expected a device that is here, got {value!r}: torch sees no GPU")
    return device


def expect_arch(name: str, value: Any) -> str:
    """Return `value` if it names an architecture of NVIDIA's; else raise ValueError."""
    if not (isinstance(value, str) and re.fullmatch(r"sm_\d+a?", value)):
        raise ValueError(f"{name}: expected one of NVIDIA's, such as 'sm_90', got {value!r}")
    return value


def expect_divisible(name: str, value: int, by: int, why: str) -> int:
    """Return `value` if `by` divides it; else raise ValueError that says why it must."""
    if value % by:
        raise ValueError(f"{name}: expected a multiple of {by} ({why}), got {value}")
    return value


def expect_writable(name: str, value: str, endings: Sequence[str]) -> Path:
    """Return `value` as the path of a file that can be written, with one of these endings; else raise ValueError."""
    path = Path(value)
    if path.is_dir():
        raise ValueError(f"{name}: expected a file, got the folder {value}")
    if not any(path.name.lower().endswith(ending) and path.name.lower() != ending for ending in endings):
        raise ValueError(f"{name}: expected a name that ends in {', '.join(endings)}, got {value}")
    if not path.parent.is_dir():
        raise ValueError(f"{name}: expected a file in a folder that exists, got {value}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{name}: expected a file that can be written, got {value}")
    return path


def expect_no_gradients(names: Sequence[str], values: Sequence[Any]) -> None:
    """Raise ValueError if autograd would go through a call with these values, naming the first such value.

    values: tensors, lists of them (an epilogue's operands), and anything else, which is ignored.
    Nothing is refused where gradients are off: in torch.no_grad() and torch.inference_mode().
    """
    forward = forward_ad._current_level >= 0
    if not (forward or torch.is_grad_enabled()):
        return
    # Under a compiler a tensor doesn't show which transforms it is under.
    transformed = torch.compiler.is_compiling() and _differentiates()
    for position, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            if value.requires_grad or transformed or (forward and _has_tangent(value)):
                _refuse_gradient(names[position], value)
        elif isinstance(value, list):
            expect_no_gradients([names[position]] * len(value), value)


def _refuse_gradient(name: str, x: torch.Tensor) -> None:
    raise ValueError(
        f"{name}: expected a tensor without gradients, got {describe(x)} that "
        f"{'requires grad' if x.requires_grad else 'is differentiated'}: Envoi computes none. For inference call it in "
        "torch.no_grad() or torch.inference_mode(), or detach the tensor; to train use torch.nn.functional, or "
        'experts_implementation="grouped_mm" of transformers'
    )


def _has_tangent(x: torch.Tensor) -> bool:
    return forward_ad.unpack_dual(x).tangent is not None


def _differentiates() -> bool:
    """Tell whether one of the transforms of torch.func that are being traced is a derivative."""
    stack = torch._C._functorch.get_interpreter_stack()  # pyright: ignore[reportAttributeAccessIssue]
    derivatives = torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp  # pyright: ignore[reportAttributeAccessIssue]
    return any(interpreter.key() in derivatives for interpreter in stack or ())


# Equivalent to torch.compiler.assume_constant_result, which would load the compiler at import.
_differentiates._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]

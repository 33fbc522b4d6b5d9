"""TMA descriptors of torch matrices, and copies of matrices that TMA can't read as they are."""

from functools import cache, lru_cache
from math import prod
from typing import Any

import torch

from envoi.runtime import shortcuts
from envoi.runtime.math import cdiv

TMA_BYTES = 16  # TMA needs addresses and row strides that are multiples of this


def is_tma_ready(x: torch.Tensor) -> bool:
    """Return True if TMA can read x [.., R, C].

    Ready means: the last side contiguous, address and row stride multiples of 16 bytes, the matrices of the leading
    sides stacked without gaps.
    """
    *lead, _, columns = x.shape
    stacked = all(x.stride(i) == x.stride(i + 1) * x.shape[i + 1] for i in range(len(lead)))
    on_16 = x.data_ptr() % TMA_BYTES == 0 and x.stride(-2) * x.itemsize % TMA_BYTES == 0
    return x.stride(-1) == 1 and stacked and on_16 and x.stride(-2) >= columns


def tma_ready(x: torch.Tensor) -> torch.Tensor:
    """Return x [.., R, C] as TMA can read it: x itself, or a copy with padded rows."""
    if is_tma_ready(x):
        return x
    *lead, rows, columns = x.shape
    step = TMA_BYTES // x.itemsize
    padded = torch.empty(*lead, rows, cdiv(columns, step) * step, dtype=x.dtype, device=x.device)[..., :columns]
    return padded.copy_(x)


def fits_tma(shape: tuple[int, ...], itemsize: int) -> bool:
    """Return True if TMA can read and write a contiguous matrix of this shape."""
    return len(shape) == 2 and shape[1] * itemsize % TMA_BYTES == 0


def as_one_matrix(x: torch.Tensor) -> torch.Tensor:
    """View [E, N, K] as [E * N, K]; return a matrix as it is. x: from `tma_ready`."""
    return x if x.dim() == 2 else x.as_strided((x.shape[0] * x.shape[1], x.shape[2]), x.stride()[1:])


def descriptor(x: torch.Tensor, rows: int, columns: int) -> Any:
    """Return a TMA descriptor of a matrix, in boxes of [rows, columns] with Gluon's default swizzle.

    Raises ValueError for an address that isn't a multiple of 16 bytes.
    """
    return _checked(x, _described(x.shape, x.stride(), x.dtype, (rows, columns)))


def halves_descriptor(x: torch.Tensor, rows: int, columns: int) -> Any:
    """Return a TMA descriptor of matrices [.., N, K] as [all halves, N / 2, K], in boxes of [2, rows / 2, columns].

    A box has as many rows of a matrix's upper half as of its lower one; in shared memory it is one matrix [rows,
    columns], swizzled as that of `descriptor`. x: from `tma_ready`, N even.
    Raises ValueError for an address that isn't a multiple of 16 bytes.
    """
    *lead, N, K = x.shape
    shape, strides = torch.Size((2 * prod(lead), N // 2, K)), (N // 2 * x.stride(-2), *x.stride()[-2:])
    return _checked(x, _described(shape, strides, x.dtype, (2, rows // 2, columns)))


def unswizzled_descriptor(x: torch.Tensor, rows: int, columns: int) -> Any:
    """Return a TMA descriptor of a matrix of 16 or 32 bits whose boxes are row-major in shared memory."""
    return _checked(x, _described(x.shape, x.stride(), x.dtype, (rows, columns), False))


@lru_cache(maxsize=4096)
def _described(
    shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, box: tuple[int, ...], swizzled: bool = True
) -> Any:
    """Return a descriptor without a matrix: checking a shape takes longer than all else that a descriptor needs."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = _layout(box, dtype) if swizzled else _unswizzled_layout(8 * dtype.itemsize)
    return TensorDescriptor(_nothing(dtype), list(shape), list(strides), list(box), layout)


@cache
def _nothing(dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device="cpu")


def _checked(x: torch.Tensor, described: Any) -> Any:
    if x.data_ptr() % TMA_BYTES:
        raise ValueError(f"x: expected a matrix on {TMA_BYTES} bytes, as TMA needs it, got address {x.data_ptr():#x}")
    return rebase(described, x)


def rebase(described: Any, x: torch.Tensor) -> Any:
    """Return a copy of a `TensorDescriptor` for x, whose shape, strides and dtype must be the ones described.

    Its constructor would check them again, which takes longer than the rest of a launch.
    """
    if not shortcuts.ENABLED:
        kind, layout = type(described), described.layout
        return kind(x, list(described.shape), list(described.strides), list(described.block_shape), layout)
    found = object.__new__(type(described))
    found.__dict__.update(described.__dict__, base=x)
    return found


@cache
def _unswizzled_layout(bits: int) -> Any:
    import triton.experimental.gluon.language as gl

    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=bits, rank=2)


@cache
def _layout(box: tuple[int, ...], dtype: torch.dtype) -> Any:
    import triton.experimental.gluon.language as gl

    types = {
        torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32,
        torch.float8_e4m3fn: gl.float8e4nv, torch.uint8: gl.uint8, torch.int32: gl.int32,
    }  # fmt: skip
    return gl.NVMMASharedLayout.get_default_for(list(box), types[dtype])

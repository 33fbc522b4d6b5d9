"""Launching the Hopper kernel: descriptors, workspace, outputs."""

import torch

from envoi.epilogue.lower import Lowered
from envoi.gemm.config import Config

MAX_GRID = 132


def descriptor(x: torch.Tensor, rows: int, columns: int):
    """A TMA descriptor of a row-major matrix, in boxes of [rows, columns]."""
    import triton.experimental.gluon.language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], GLUON_TYPES[x.dtype](gl))
    return TensorDescriptor.from_tensor(x, [rows, columns], layout)


GLUON_TYPES = {
    torch.bfloat16: lambda gl: gl.bfloat16,
    torch.float16: lambda gl: gl.float16,
    torch.float32: lambda gl: gl.float32,
    torch.float8_e4m3fn: lambda gl: gl.float8e4nv,
    torch.uint8: lambda gl: gl.uint8,
}


def arguments(
    a, b, config: Config, code: Lowered, operands: tuple, names: list, outputs: list, offsets, workspace, num_sms: int
):
    """The kernel's arguments and its grid."""
    M, K = a.shape
    N = b.shape[-2]
    x, y = (b.flatten(0, -2), a) if config.swap_ab else (a, b.flatten(0, -2))
    x_desc = descriptor(x, config.role_m, config.block_k)
    y_desc = descriptor(y, config.block_y, config.block_k)
    descs = []
    for index in code.leaving:
        slot = code.slots[index]
        piece = min(config.piece, config.block_y) // (slot.columns * (2 if slot.packed else 1))
        descs.append(descriptor(outputs[index], config.role_m, piece))
    descs += [None] * (2 - len(descs))
    for name in code.side:
        operand = names.index(name)
        columns = operands[operand].shape[1] * min(config.piece, config.block_y) // N
        descs.append(descriptor(operands[operand], config.role_m, columns))
    block_m, block_n = (config.block_y, config.block_x) if config.swap_ab else (config.block_x, config.block_y)
    num_ctas = num_sms * config.per_sm
    tiles = -(-M // block_m) * -(-N // block_n)
    whole = tiles // num_ctas * num_ctas if config.split_k > 1 else tiles
    units = whole + (tiles - whole) * config.split_k
    groups = 0 if offsets is None else b.shape[0]
    max_groups = max(32, 1 << (groups - 1).bit_length()) if groups else 1
    raw = [o.view(torch.uint8) if o.dtype == torch.float8_e8m0fnu else o for o in outputs]
    grid = (min(units, num_ctas) if offsets is None else num_ctas,)
    return grid, (
        x_desc, y_desc, *descs, *[None] * (4 - len(descs)), operands or (0,), tuple(raw), offsets, *workspace,
        M, N, K, groups, whole, config, code, offsets is not None, max_groups,
    )  # fmt: skip

"""GEMM on Hopper of narrow numbers that its kernels don't read: both matrices become bf16 first.

No number changes, except those of MXFP8 below 2^-133, which bf16 rounds.

    widen_kernel  a matrix of NVFP4, MXFP4 or MXFP8 -> bf16; one launch for each that is narrow
    gemm_kernel   the product in bf16 and the epilogue, as of any two matrices in bf16

A grouped GEMM isn't widened, nor are weights of more than MAX_WEIGHTS: their copies may be larger than what is free.
"""

from dataclasses import replace
from math import prod

import torch

from envoi.epilogues.ir import IR
from envoi.ops.gemm.grouping import ALL_ROWS, Grouping
from envoi.ops.gemm.hopper import host as hopper
from envoi.ops.gemm.triton import host as triton_host
from envoi.runtime.launch import launch
from envoi.runtime.math import cdiv
from envoi.runtime.program import unwatched
from envoi.types import Matrix, QuantTensor

ROWS, COLUMNS = 8, 512  # that a program widens
MAX_WEIGHTS = 1 << 28  # elements, 512 MiB in bf16; a bound on tokens would give their rows other bits in larger calls
MAX_SIDE = 65535 * COLUMNS  # of weights: a grid's second side has at most 65535 programs
GROUPS = (8, 16, 32, 64, 128, 256, 512)  # of K: whole ones in COLUMNS, and copies that lie as TMA reads them
with unwatched():  # a call's plan may be what imports this, and would count it as the call's memory
    BF16 = torch.empty((), dtype=torch.bfloat16, device="meta")


def why_not_widened(a: Matrix, b: Matrix, ir: IR) -> str:
    """Return why `run_gemm` can't run this; "" if it can."""
    if len(b.shape) > 2:
        return "weights of several experts"
    if not all(becomes_bf16(x) for x in (a, b)):
        return "the operands' formats"
    if prod(b.shape) > MAX_WEIGHTS or max(b.shape) > MAX_SIDE:
        return "weights whose copy is too large"
    return hopper.why_not_hopper(BF16.expand(a.shape), BF16.expand(b.shape), ir)


def becomes_bf16(x: Matrix) -> bool:
    """Return True for bf16, and for numbers of 4 or 8 bits under factors of a byte.

    A number times its factor has at most the 8 significant bits of bf16.
    """
    if isinstance(x, torch.Tensor):
        return x.dtype == torch.bfloat16
    return x.sf.dtype != torch.float32 and x.group[1] in GROUPS


def run_gemm(
    a: Matrix, b: Matrix, offsets: torch.Tensor | None, ir: IR, out_dtype: torch.dtype, operands: dict,
    grouping: Grouping = ALL_ROWS,
) -> list[torch.Tensor]:  # fmt: skip
    """Return the flat outputs of `envoi.gemm`; offsets: None.

    With MX weights a row has the same bits whatever other rows there are, without `batch_invariant` too.
    """
    of_mx = isinstance(b, QuantTensor) and b.sf.dtype == torch.float8_e8m0fnu
    grouping = replace(grouping, batch_invariant=of_mx or grouping.batch_invariant)
    return hopper.run_gemm(widened(a), widened(b), offsets, ir, out_dtype, operands, grouping=grouping)


def widened(x: Matrix) -> torch.Tensor:
    """Return a matrix [rows, K] in bf16, times its scale factors: a copy, or a matrix in bf16 itself."""
    if isinstance(x, torch.Tensor):
        return x
    rows, K = x.shape
    out = torch.empty(rows, K, dtype=torch.bfloat16, device=x.device)
    arguments = triton_host.matrix_argument(x), out, rows, K, triton_host.side_of(x), ROWS, COLUMNS
    launch(triton_host.kernels.widen_kernel, (cdiv(rows, ROWS), cdiv(K, COLUMNS)), arguments, {})
    return out

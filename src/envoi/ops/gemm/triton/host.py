"""Host side of the Triton GEMM: supported calls, tiles, launches, and the kernels that finish epilogues."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton.language as tl

from envoi.constant import Constant
from envoi.epilogues.ir import IR, Node
from envoi.epilogues.library import store
from envoi.epilogues.lower import Lowered, lower
from envoi.epilogues.outputs import chunk_columns, deferred, empty_outputs, operand_tensors, rows_must_fit
from envoi.ops.gemm.grouping import ALL_ROWS, Grouping
from envoi.ops.gemm.triton import kernel as device_code
from envoi.quant.bits import as_bytes
from envoi.runtime.devices import has_tcgen05
from envoi.runtime.launch import launch
from envoi.runtime.math import cdiv, next_power_of_2
from envoi.types import Matrix

kernels: Any = device_code  # Any, because type checkers expect constexprs for its constants

MAX_TILE_N = 256  # columns of a tile of the product
MAX_ROW = 16384  # columns of a row that one program can hold
FINISH_M = 64
MANY_ROWS = 1 << 20  # for which tiles have the most rows
REDUCE_M, REDUCE_C = 64, 64
BLOCK_SCALED_K = 128  # elements of K in a step of a block-scaled product: rows of 128 bytes in shared memory


@dataclass(frozen=True)
class Side(Constant):
    """Format of one matrix, known when the kernel is compiled.

    values: "plain" (a float), "e4m3" or "e2m1" (two a byte). scale: the type of its scale factors, "none", "f32",
    "e8m0" or "e4m3". group_k: columns that share a factor; 0 = all columns, or there are no factors. block_scaled: both
    matrices go to the tensor cores as they are stored, with their UE8M0 factors, or with 1 for float32 ones.
    """

    values: str
    scale: str
    group_k: int
    block_scaled: bool = False

    @property
    def kind(self) -> tl.constexpr:
        """Name of the values for `tl.dot_scaled`, which takes no other text."""
        return tl.constexpr(self.values)

    @property
    def per_byte(self) -> int:
        """Elements in a byte or, for plain floats, at an address."""
        return 2 if self.values == "e2m1" else 1

    @property
    def scales(self) -> bool:
        """Return True if the product is multiplied by the scale factors."""
        return self.scale == "f32"

    @property
    def folds(self) -> bool:
        """Return True if elements are scaled before the product, which is exact for narrow formats, or in it."""
        return self.scale in ("e8m0", "e4m3")


MX_GROUP = 32  # elements of K that share a factor in a block-scaled product
SCALES = {torch.float32: "f32", torch.float8_e8m0fnu: "e8m0", torch.float8_e4m3fn: "e4m3"}


def why_not_triton(ir: IR, N: int) -> str:
    """Return why the Triton kernels can't compute this epilogue for N columns; "" if they can."""
    if _in_tiles(ir, N) or N <= MAX_ROW:
        return ""
    return f"epilogue {ir.name} needs whole rows, which may have {MAX_ROW} columns at most, got {N}"


def run_gemm(
    a: Matrix, b: Matrix, offsets: torch.Tensor | None, ir: IR, out_dtype: torch.dtype, operands: dict,
    grouping: Grouping = ALL_ROWS,
) -> list[torch.Tensor]:  # fmt: skip
    """Return the flat outputs of `envoi.gemm` or, with offsets, of `envoi.grouped_gemm`.

    Values and scale factors of a QuantTensor are adjacent outputs. offsets: int32 [E + 1], not copied to the host.
    Raises ValueError for an epilogue that needs longer rows than one program holds.
    """
    M, N = a.shape[0], b.shape[-2]
    refusal = why_not_triton(ir, N)
    if refusal:
        raise ValueError(f"N: {refusal}")
    offsets = None if offsets is None else offsets.contiguous()
    tensors, pointers = operand_tensors(ir, operands, 0 if offsets is None else b.shape[0])
    written = empty_outputs(ir, out_dtype, M, N, a.device, grouping.to)
    if _in_tiles(ir, N):
        block_n = tile_columns(ir, N)
        code = lower(ir, out_dtype, "triton", block_n >= N, False, pointers, scattered=grouping.to is not None)
        _launch(a, b, offsets, code, tensors, written, block_n, grouping)
    else:
        acc = torch.empty(M, N, dtype=torch.float32, device=a.device)
        plain = lower(store.ir, torch.float32, "triton", False, False, frozenset())
        _launch(a, b, offsets, plain, (), [acc], 128, grouping)
        finish_rows(acc, ir, out_dtype, tensors, pointers, written, offsets, grouping.write_tail)
    return written if grouping.to is not None else finish_outputs(ir, written, offsets)


def _in_tiles(ir: IR, N: int) -> bool:
    """Return True if the epilogue can run on tiles of the product."""
    return chunk_columns(ir) <= MAX_TILE_N and (N <= MAX_TILE_N or not rows_must_fit(ir))


def tile_columns(ir: IR, N: int) -> int:
    """Return the columns of a tile: the whole row if it is short."""
    if N <= MAX_TILE_N:
        return max(16, next_power_of_2(N), chunk_columns(ir))
    return max(128, chunk_columns(ir))


def side_of(x: Matrix) -> Side:
    """Return the format of a matrix, which a kernel is compiled for."""
    if isinstance(x, torch.Tensor):
        return Side("plain", "none", 0)
    whole = x.sf.dtype == torch.float32 and x.sf.shape[-1] <= 1
    return Side("e2m1" if x.packed else "e4m3", SCALES[x.sf.dtype], 0 if whole else x.group[1])


def sides_of(a: Matrix, b: Matrix) -> tuple[Side, Side]:
    """Return the formats of both matrices, block-scaled if one is MX and the GPU's tensor cores can multiply them.

    Without MX both would have factors of 1 in all steps, which Triton 3.6 doesn't compile.
    """
    A, B = side_of(a), side_of(b)
    can = has_tcgen05(a.device) and "e8m0" in (A.scale, B.scale) and all(map(_is_block_scaled, (A, B)))
    return replace(A, block_scaled=can), replace(B, block_scaled=can)


def _is_block_scaled(side: Side) -> bool:
    """Return True for E4M3 and E2M1 under UE8M0 factors for 32 of K, or float32 ones for all of K.

    With float32 factors for a part of K a tile is in registers twice, which spills.
    """
    return side.values != "plain" and (side.scale, side.group_k) in (("e8m0", MX_GROUP), ("f32", 0))


def matrix_argument(x: Matrix) -> tuple:
    """Return a matrix [.., rows, K] as the kernels take it: a `MatrixArgs` of `kernel.py`."""
    if isinstance(x, torch.Tensor):
        return kernels.MatrixArgs(x, *_strides(x), x, 0, 0, 0, 1)
    values, sf = as_bytes(x.values), as_bytes(x.sf)
    return kernels.MatrixArgs(values, *_strides(values), sf, *_strides(sf), x.group[0])


def _strides(x: torch.Tensor) -> tuple[int, ...]:
    return (*(0,) * (3 - x.dim()), *x.stride())


def _launch(
    a: Matrix, b: Matrix, offsets: torch.Tensor | None, code: Lowered, operands: tuple, outputs: list, block_n: int,
    grouping: Grouping,
) -> None:  # fmt: skip
    """Launch the product with its epilogue, and the kernel that completes reductions over rows that span tiles."""
    M = a.shape[0]
    grid, arguments, options = product_arguments(a, b, offsets, code, operands, outputs, block_n, grouping)
    launch(kernels.gemm_kernel, grid, arguments, options)
    if code.partials and M:
        _, _, _, operands, raw, workspace, *_ = arguments
        finished = workspace, operands, raw, grid[1], M, code, FINISH_M
        launch(kernels.finish_kernel, (cdiv(M, FINISH_M),), finished, {})


def product_arguments(
    a: Matrix, b: Matrix, offsets: torch.Tensor | None, code: Lowered, operands: tuple, outputs: list, block_n: int,
    grouping: Grouping,
) -> tuple[tuple[int, int], tuple, dict[str, int]]:  # fmt: skip
    """Return the grid of `gemm_kernel`, its arguments and its options."""
    M, N, K = a.shape[0], b.shape[-2], a.shape[-1]
    A, B = sides_of(a, b)
    # Low tiles are products of another instruction, which may round otherwise.
    block_m, block_k, options = tile_rows(MANY_ROWS if grouping.batch_invariant else M, block_n, a)
    block_k = BLOCK_SCALED_K if A.block_scaled else block_k
    num_experts = 0 if offsets is None else b.shape[0]
    # Each expert may end with a partial tile. Without rows the first tile still writes the outputs that have no rows.
    grid = (max(1, cdiv(M, block_m) + num_experts), max(1, cdiv(N, block_n)))
    workspace = torch.empty(code.partials * grid[1] * M, dtype=torch.float32, device=a.device)
    group_k = max(side.group_k for side in (A, B) if side.scales) if A.scales or B.scales else 0
    return grid, (
        matrix_argument(a), matrix_argument(b), offsets, operands or (0,), tuple(map(as_bytes, outputs)), workspace,
        M, N, K, num_experts, code, A, B, group_k, block_m, block_n, block_k, max_experts(offsets),
        grouping.write_tail,
    ), options  # fmt: skip


def tile_rows(M: int, block_n: int, a: Matrix) -> tuple[int, int, dict[str, int]]:
    """Return the rows of a tile, the elements of K in a step, and the launch's options."""
    block_m = 16 if M <= 16 else 32 if M <= 32 else 64 if M <= 64 or block_n > 128 else 128
    wide = isinstance(a, torch.Tensor) and a.dtype == torch.float32
    num_warps = 8 if block_m * block_n >= 128 * 128 else 4
    return block_m, 32 if wide else 64, {"num_warps": num_warps, "num_stages": 3}


def max_experts(offsets: torch.Tensor | None) -> int:
    """Return a power of two above the number of experts; 0 in a dense GEMM."""
    return 0 if offsets is None else max(2, next_power_of_2(offsets.shape[0]))


def why_not_rows(ir: IR, N: int) -> str:
    """Return why `run_with_rows` can't give an epilogue whole rows of N columns; "" if it can.

    Of short ones, which a tile here holds, the Triton kernels finish the epilogue themselves.
    """
    return "whole rows" if N <= MAX_TILE_N else why_not_triton(ir, N)


def run_with_rows(
    launch_gemm: Callable[[Lowered, tuple, list[torch.Tensor]], None], a: Matrix, b: Matrix,
    offsets: torch.Tensor | None, ir: IR, out_dtype: torch.dtype, operands: dict, grouping: Grouping,
) -> list[torch.Tensor]:  # fmt: skip
    """Return the flat outputs of a GEMM by one of Hopper's kernels; where the epilogue needs whole rows, it follows.

    launch_gemm: of the kernel, with code, its operands and its outputs.
    """
    M, N = a.shape[0], b.shape[-2]
    tensors, pointers = operand_tensors(ir, operands, 0 if offsets is None else b.shape[0])
    written = empty_outputs(ir, out_dtype, M, N, a.device, grouping.to)
    if 0 in (M, b.shape[0]):
        return finish_outputs(ir, written, offsets)
    if rows_must_fit(ir):
        acc = torch.empty(M, N, dtype=torch.float32, device=a.device)
        launch_gemm(lower(store.ir, torch.float32, "gluon", False, False, frozenset()), (), [acc])
        finish_rows(acc, ir, out_dtype, tensors, pointers, written, offsets, grouping.write_tail)
    else:
        code = lower(ir, out_dtype, "gluon", False, False, pointers, scattered=grouping.to is not None)
        launch_gemm(code, tensors, written)
    return finish_outputs(ir, written, offsets)


def finish_rows(
    acc: torch.Tensor, ir: IR, out_dtype: torch.dtype, operands: tuple, pointers: frozenset[str],
    outputs: list[torch.Tensor], offsets: torch.Tensor | None = None, write_tail: bool = True, overlap: bool = False,
) -> None:  # fmt: skip
    """Run an epilogue that needs whole rows on accumulators in memory.

    acc: float32 or bf16 [M, N], contiguous, N up to MAX_ROW if the epilogue has values of rows; with offsets, rows
    after the last expert's are not read.
    operands, pointers: from `operand_tensors`. outputs: from `empty_outputs`, written here; with write_tail also after
    the last expert's rows. overlap: start while the kernel launched right before, which writes acc, ends (Hopper).

    The wider the rows, the fewer in a program. An epilogue without row reductions gets chunks of rows: more programs
    for few tokens.
    """
    code, (M, N) = lower(ir, out_dtype, "triton", True, False, pointers), acc.shape
    block_n = max(16, next_power_of_2(N) if deferred(ir) else 0, chunk_columns(ir))
    block_m = max(1, (4096 if deferred(ir) else 1024) // block_n)
    num_experts = 0 if offsets is None else offsets.shape[0] - 1
    grid = (max(1, cdiv(M, block_m) + num_experts), cdiv(N, block_n))
    arguments = (
        acc, offsets, operands or (0,), tuple(as_bytes(x) for x in outputs), M, N, num_experts, code, block_m, block_n,
        max_experts(offsets), write_tail, overlap,
    )  # fmt: skip
    options = {"num_warps": 4 if block_n <= 4096 else 8, "launch_pdl": overlap}
    launch(kernels.rows_kernel, grid, arguments, options)


def finish_outputs(ir: IR, written: list[torch.Tensor], offsets: torch.Tensor | None) -> list[torch.Tensor]:
    """Return the outputs: the tensors as written, or reduced over rows for reductions."""
    flat: list[torch.Tensor] = []
    left = iter(written)
    for _, position in ir.outputs:
        node = ir.nodes[position]
        if node.op == "quantize":
            flat += [next(left), next(left)]
        elif node.step in ("column", "all"):
            flat.append(_reduced(node, next(left), offsets))
        else:
            flat.append(next(left))
    return flat


def _reduced(node: Node, x: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor:
    op = node.op.partition("_")[2]
    x = x.unsqueeze(1) if x.dim() == 1 else x
    if node.step == "column":
        out = reduce_rows(x, op, offsets)
        return out[0] if offsets is None else out
    # All rows that belong to an expert are one group.
    bounds = None if offsets is None else offsets[:: max(1, offsets.shape[0] - 1)]
    if bounds is not None and bounds.shape[0] == 1:
        bounds = torch.cat((bounds, bounds))
    columns = reduce_rows(x, op, bounds)
    return reduce_rows(columns.view(-1, 1), op, None).view(())


def reduce_rows(x: torch.Tensor, op: str, offsets: torch.Tensor | None) -> torch.Tensor:
    """Reduce float32 x [M, C] over its rows to [1, C], with offsets over each expert's to [E, C].

    op: "sum", "max" or "absmax".
    """
    M, C = x.shape
    groups = 1 if offsets is None else offsets.shape[0] - 1
    out = torch.empty(groups, C, dtype=torch.float32, device=x.device)
    block_c = min(REDUCE_C, next_power_of_2(C))
    if out.numel():
        bounds = None if offsets is None else offsets.contiguous()
        grid = (groups, cdiv(C, block_c))
        arguments = x, out, bounds, M, C, op, REDUCE_M * REDUCE_C // block_c, block_c, offsets is not None
        launch(kernels.reduce_kernel, grid, arguments, {})
    return out

"""Public functions `envoi.gemm` and `envoi.grouped_gemm`, and the torch custom operators that they call.

gemm         -> check -> product          (flat tensors and plain values) -> kernels, or torch -> wrap the outputs
grouped_gemm -> check -> grouped_product                                  -> kernels, or torch -> wrap the outputs
"""

from typing import Any

import torch

from envoi.check import Dim, dtype_name, expect_bool, expect_divisible, expect_no_gradients, expect_tensor
from envoi.epilogues.api import Epilogue, for_graph, with_key
from envoi.epilogues.ir import IR, Node
from envoi.epilogues.library import store
from envoi.epilogues.operands import check_columns, check_operands
from envoi.ops.gemm import reference
from envoi.ops.gemm.backend import run_kernels
from envoi.ops.gemm.grouping import ALL_ROWS, INVARIANT_ROWS
from envoi.quant.formats import SCHEMES
from envoi.runtime.custom_op import autocast_dtype, operator
from envoi.runtime.prepared import exactly, prepared
from envoi.types import Matrix, QuantTensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
QUANTISED = (torch.float8_e4m3fn, torch.uint8)
SCALES = (torch.float32, torch.float8_e8m0fnu, torch.float8_e4m3fn)


def constants_of(x: Any, tensors: list[torch.Tensor]) -> tuple | None:
    """Append a matrix's tensors to a list, and return all else that a call with it depends on.

    Raises ValueError for a scale of the whole tensor and for zero points, which are for the call itself to judge. None
    in their place would take a tenth of a prepared call's time.
    """
    if type(x) is not QuantTensor:
        tensors.append(x)
        return None
    if x.scale is not None or x.zeros is not None:
        raise ValueError("a scale for the whole tensor, or zero points")
    tensors += x.values, x.sf
    return x.group, x.scales_at_most_2, x.order


def _given(a, b, epilogue=None, *, out_dtype=None, batch_invariant=False, **operands):
    tensors: list[torch.Tensor] = []
    sides = constants_of(a, tensors), constants_of(b, tensors)
    settings = sides, epilogue, out_dtype, exactly(batch_invariant)
    if not operands:
        return settings, tensors
    numbers = []
    for value in operands.values():
        is_tensor = isinstance(value, torch.Tensor)
        numbers.append(None if is_tensor else exactly(value))
        if is_tensor:
            tensors.append(value)
    return (*settings, *operands, *numbers), tensors


@prepared(_given)
def gemm(
    a: Matrix,
    b: Matrix,
    epilogue: Epilogue | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
    out: Any = None,
    workspace: torch.Tensor | None = None,
    num_sms: int | None = None,
    **operands: torch.Tensor | float,
) -> Any:
    """Compute epilogue(a @ b.T): the product is summed in fp32 and passed to the epilogue unrounded.

    a [M, K], b [N, K] (as nn.Linear stores a weight): both bf16, fp16 or fp32, or QuantTensors from
    `envoi.quant.quantize`;
        a may be bf16 with an mxfp4, mxfp8 or nvfp4 b. M may be 0.
    epilogue: from `@envoi.epilogue`; None returns the product.
    operands: of the epilogue, by name: Row [M], Col [N], Tile [M, N], HalfCol [N / 2], HalfTile [M, N / 2], each
        bf16, fp16 or fp32, Scalar a number or a tensor of one element.
    out_dtype: dtype of outputs that the epilogue doesn't cast or quantise; the default is a's dtype, bf16 for a
        QuantTensor. Reductions, and the values of a top-k, are always float32.
    batch_invariant: give a row the same bits whatever other rows there are and however many, for outputs that have
        rows. Without it every run gives the same bits, but the sum over K may be split where tiles are few, which
        depends on M. Costs time where it would be.
    out: what the call returns otherwise, as tensors to write: of the same shapes, strides and dtypes, on 16 bytes,
        sharing no memory with one another or the arguments; a dict's by their names. In calls that can't be prepared
        (`ENVOI_PREPARED=0`, a CPU, an observer, a compiler) the result is copied there.
    workspace: memory for the call's own use in place of Envoi's: contiguous, on 16 bytes, as large as
        `envoi.plan(..).workspace_bytes`. Later calls of the same stream may have it again. Ignored in calls that can't
        be prepared.
    num_sms: multiprocessors that the GEMM's CTAs take at most, to leave the others to another stream's kernels; None =
        all. Not in calls that torch.compile traces.

    In torch.autocast a and b, unless quantised, are cast to its dtype first, as for torch.mm; operands aren't.
    torch.func.vmap may batch a, and the operands that have rows, if no output is reduced over rows.
    Returns what the epilogue returns: a tensor, a QuantTensor, or a tuple or dict of them.
    Raises ValueError for dtypes, shapes, devices or names that don't go together.
    """
    _check_matrix("a", a, ("M", "K"))
    _check_matrix("b", b, ("N", a.shape[1]), a.device)
    a, b = _autocast(a, b)
    epilogue, out_dtype = _settle(a, b, epilogue, out_dtype)
    expect_bool("batch_invariant", batch_invariant)
    sizes = {"M": a.shape[0], "N": b.shape[0]}
    tensors, scalars = check_operands(epilogue.ir, operands, sizes, a.device, FLOATS)
    expect_no_gradients(tuple(tensors), tuple(tensors.values()))
    outputs = product(
        *split(a), *split(b), epilogue.ir.key, out_dtype, list(tensors.values()),
        list(scalars.values()), ",".join([*tensors, *scalars]), batch_invariant,
    )  # fmt: skip
    return _wrap(epilogue, outputs, sizes)


def _given_grouped(rows, weights, offsets, epilogue=None, *, out_dtype=None, batch_invariant=False, **operands):
    given = {"out_dtype": out_dtype, "batch_invariant": batch_invariant, **operands}
    constants, tensors = _given(rows, weights, epilogue, **given)
    return constants, [*tensors, offsets]


@prepared(_given_grouped)
def grouped_gemm(
    rows: Matrix,
    weights: Matrix,
    offsets: torch.Tensor,
    epilogue: Epilogue | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
    out: Any = None,
    workspace: torch.Tensor | None = None,
    num_sms: int | None = None,
    **operands: torch.Tensor | float,
) -> Any:
    """Compute epilogue(rows[offsets[e] : offsets[e + 1]] @ weights[e].T) for each expert e.

    rows [P, K] sorted by expert; a QuantTensor needs a scale factor for each row. weights [E, N, K]. Dtypes as in
    `gemm`. offsets [E + 1] int32, exclusive, from 0; rows after offsets[E] belong to no expert: their output is the
    epilogue of 0, and total_sum, total_max and total_absmax exclude them. E may be 0.
    operands: as in `gemm`, but a Col is [E, N], one for each expert; column reductions return [E, N].
        Of other values that rows share, only scalars can be returned.
    batch_invariant: as in `gemm`. The sum over K is never split here; it matters for epilogues that add up rows.
    out, workspace, num_sms: as in `gemm`.

    Example: offsets [0, 2, 2, 5] gives rows 0 and 1 to expert 0, none to expert 1, rows 2 to 4 to expert 2.
    Raises ValueError for dtypes, shapes, devices or names that don't go together, and for offsets that aren't
    ascending; RuntimeError for float32 on a GPU, which runs on torch, while a CUDA graph is captured.
    """
    _check_matrix("rows", rows, ("P", "K"))
    _check_matrix("weights", weights, ("E", "N", rows.shape[1]), rows.device)
    rows, weights = _autocast(rows, weights)
    if isinstance(rows, QuantTensor) and rows.group[0] != 1:
        raise ValueError(f"rows: expected a scale factor for each row, got one for {rows.group[0]} rows")
    num_experts = weights.shape[0]
    expect_tensor("offsets", offsets, torch.int32, (num_experts + 1,), rows.device)
    epilogue, out_dtype = _settle(rows, weights, epilogue, out_dtype, ("rows", "weights"))
    _check_grouped_outputs(epilogue)
    expect_bool("batch_invariant", batch_invariant)
    sizes = {"M": rows.shape[0], "N": weights.shape[1]}
    tensors, scalars = check_operands(epilogue.ir, operands, sizes, rows.device, FLOATS, num_experts)
    expect_no_gradients(tuple(tensors), tuple(tensors.values()))
    outputs = grouped_product(
        *split(rows), *split(weights), offsets, epilogue.ir.key, out_dtype, list(tensors.values()),
        list(scalars.values()), ",".join([*tensors, *scalars]), batch_invariant,
    )  # fmt: skip
    return _wrap(epilogue, outputs, sizes)


def _autocast(a: Matrix, b: Matrix) -> tuple[Matrix, Matrix]:
    dtype = autocast_dtype(a.device)
    if dtype is None:
        return a, b
    return a.to(dtype) if isinstance(a, torch.Tensor) else a, b.to(dtype) if isinstance(b, torch.Tensor) else b


def _check_matrix(name: str, x: Any, shape: tuple[Dim, ...], device: torch.device | None = None) -> None:
    if not isinstance(x, QuantTensor):
        expect_tensor(name, x, FLOATS, shape, device)
        return
    if x.scale is not None:
        raise ValueError(f"{name}: expected a QuantTensor without a scale for the whole tensor, got one with")
    if x.order != "rows":
        raise ValueError(f"{name}.order: expected 'rows', got {x.order!r}, which only the experts' kernels read")
    *lead, columns = shape
    packed = columns // 2 if x.packed and isinstance(columns, int) else columns
    expect_tensor(f"{name}.values", x.values, QUANTISED, (*lead, packed), device)
    if min(x.group) < 1:
        raise ValueError(f"{name}.group: expected at least 1 row and 1 column, got {x.group}")
    if x.shape[-1] % x.group[1]:  # a traced size can't be printed, so the reason is only formatted for an error
        expect_divisible(f"{name}.shape[-1]", x.shape[-1], x.group[1], f"{x.group[1]} columns share a scale factor")
    scales = tuple(-(-size // side) for size, side in zip(x.shape[-2:], x.group, strict=True))
    expect_tensor(f"{name}.sf", x.sf, SCALES, (*x.shape[:-2], *scales), x.device)


def _check_grouped_outputs(epilogue: Epilogue) -> None:
    for node in epilogue.output_nodes:
        if node.shape.rows == "1" and node.shape.spans_columns and node.step != "column":
            raise ValueError(
                f"epilogue: {epilogue.ir.name} returns a value that is the same for all rows of an expert ({node}); "
                "in a grouped GEMM only col_sum, col_max and col_absmax can be returned for each expert"
            )


def _settle(
    a: Matrix, b: Matrix, epilogue: Any, out_dtype: Any, names: tuple[str, str] = ("a", "b")
) -> tuple[Epilogue, torch.dtype]:
    """Fill in the defaults, and check that a and b have matching kinds and scale groups."""
    if epilogue is None:
        epilogue = store
    if not isinstance(epilogue, Epilogue):
        raise ValueError(f"epilogue: expected a function decorated with @envoi.epilogue, got {type(epilogue).__name__}")
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dtype != b.dtype:
        raise ValueError(f"{names[1]}: expected {dtype_name(a.dtype)} like {names[0]}, got {dtype_name(b.dtype)}")
    if isinstance(a, QuantTensor) and isinstance(b, torch.Tensor):
        raise ValueError(f"{names[1]}: expected a QuantTensor like {names[0]}, got {dtype_name(b.dtype)}")
    if isinstance(a, torch.Tensor) and isinstance(b, QuantTensor):
        if a.dtype != torch.bfloat16 or not (b.sf.dtype == torch.float8_e8m0fnu or _is_nvfp4(b)):
            raise ValueError(
                f"{', '.join(names)}: expected bf16 beside mxfp8, mxfp4 or nvfp4, or the same kind on both sides, "
                f"got {dtype_name(a.dtype)} beside {dtype_name(b.values.dtype)} with {dtype_name(b.sf.dtype)} scales"
            )
    elif isinstance(a, QuantTensor) and isinstance(b, QuantTensor):
        reference.block_k(a, b)  # raises if scale factors change at different positions along K
    if out_dtype is None:
        out_dtype = a.dtype if isinstance(a, torch.Tensor) else torch.bfloat16
    if out_dtype not in FLOATS:
        raise ValueError(f"out_dtype: expected torch.bfloat16, float16 or float32, got {out_dtype!r}")
    check_columns(epilogue.ir, b.shape[-2])
    return epilogue, out_dtype


def _is_nvfp4(x: QuantTensor) -> bool:
    """Return True for E2M1 under E4M3 factors, whose products are exact in bf16."""
    return x.packed and x.sf.dtype == torch.float8_e4m3fn


def _wrap(epilogue: Epilogue, outputs: list[torch.Tensor], sizes: dict[str, int]) -> Any:
    flat = iter(outputs)
    return epilogue.wrap([_output(node, flat, sizes) for node in epilogue.output_nodes])


def _output(node: Node, flat: Any, sizes: dict[str, int]) -> Matrix:
    if node.op != "quantize":
        return next(flat)
    group = SCHEMES[node.attribute("scheme")].group_for((sizes["M"], node.shape.num_columns(sizes["N"])))
    return QuantTensor(next(flat), next(flat), group)


# Custom operators


def split(x: Matrix) -> tuple[torch.Tensor, torch.Tensor | None, list[int]]:
    """Split a matrix into an operator's arguments: values, factors, [rows and columns of a group, the promise]."""
    return (x, None, []) if isinstance(x, torch.Tensor) else (x.values, x.sf, [*x.group, int(x.scales_at_most_2)])


def join(values: torch.Tensor, sf: torch.Tensor | None, group: list[int]) -> Matrix:
    """Join an operator's arguments to a matrix; inverse of `split`."""
    return values if sf is None else QuantTensor(values, sf, (group[0], group[1]), scales_at_most_2=bool(group[2]))


def num_columns(values: torch.Tensor) -> int:
    """Return the number of elements in a row; a byte of uint8 holds two."""
    return values.shape[-1] * (2 if values.dtype == torch.uint8 else 1)


def name_operands(tensors: list[torch.Tensor], scalars: list[float], names: str) -> dict[str, torch.Tensor | float]:
    """Return operands by name. names: of the tensors, then of the numbers, separated by commas."""
    values = [*tensors, *scalars]
    return dict(zip(names.split(",") if values else [], values, strict=True))


def _gemm_fake(
    a, a_sf, a_group, b, b_sf, b_group, epilogue, out_dtype, tensors, scalars, names, batch_invariant=False
):  # fmt: skip
    return reference.empty(for_graph(epilogue), a, b.shape[0], None, out_dtype)


def _gemm_flops(a, a_sf, a_group, b, *arguments):
    return 2 * a.shape[0] * num_columns(a) * b.shape[0]


def batch_rows(
    info, in_dims, a, a_sf, a_group, b, b_sf, b_group, epilogue, out_dtype, tensors, scalars, names,
    batch_invariant=False,
):  # fmt: skip
    """Return the outputs of `torch.ops.envoi.gemm`, each [B, ..], and the position of B; see `register_vmap` of torch.

        vmap(gemm, in_dims=(0, None))(a [B, M, K], b)  =  gemm(a [B * M, K], b) as [B, M, N]

    Valid if the batch shares b, and no output of the epilogue sums over rows. Row, Tile and HalfTile operands may be
    batched; those that aren't are repeated. Raises ValueError if the batch isn't one of rows.
    """
    ir, size = with_key(epilogue), info.batch_size
    a_dim, a_sf_dim, _, *of_b, _, _, _, operand_dims, _, _ = in_dims[:11]
    _check_batch(ir, a_dim, a_sf, a_sf_dim, of_b, list(zip(names.split(","), operand_dims, strict=False)))
    by_row = {operand.name for operand in ir.operands if operand.shape.rows == "M"}
    operands = [
        _as_rows(x, dim, size) if name in by_row else x
        for x, dim, name in zip(tensors, operand_dims, names.split(","), strict=False)
    ]
    outputs = torch.ops.envoi.gemm(
        _as_rows(a, a_dim, size), None if a_sf is None else _as_rows(a_sf, a_sf_dim, size), a_group, b, b_sf, b_group,
        epilogue, out_dtype, operands, scalars, names, batch_invariant,
    )  # fmt: skip
    return [x.unflatten(0, (size, -1)) for x in outputs], [0] * len(outputs)


def _as_rows(x: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    """Reshape [.., B, ..], or repeat [M, ..], to [B * M, ..]."""
    batched = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return batched.reshape(-1, *batched.shape[2:])


def _check_batch(ir: IR, a_dim, a_sf, a_sf_dim, of_b, operands: list[tuple[str, int | None]]) -> None:
    by_row = {operand.name for operand in ir.operands if operand.shape.rows == "M"}
    batched = [name for name, dim in operands if dim is not None and name not in by_row]
    if any(dim is not None for dim in of_b):
        _refuse_batch("b batched: call it once for each b, or use grouped_gemm")
    if a_dim is None or (a_sf is not None and a_sf_dim is None):
        _refuse_batch("an a that isn't batched")
    if batched:
        _refuse_batch(f"{batched[0]} batched, which all rows share")
    for _, position in ir.outputs:
        if ir.nodes[position].shape.rows != "M":
            _refuse_batch(f"epilogue {ir.name}, which returns a value of all rows ({ir.nodes[position]})")


def _refuse_batch(came: str) -> None:
    raise ValueError(
        "torch.func.vmap: expected envoi.gemm with a batched, and of its operands only those that have rows "
        f"(Row, Tile, HalfTile), got {came}"
    )


@operator("gemm", _gemm_fake, _gemm_flops, batch_rows)
def product(
    a: torch.Tensor, a_sf: torch.Tensor | None, a_group: list[int],
    b: torch.Tensor, b_sf: torch.Tensor | None, b_group: list[int],
    epilogue: str, out_dtype: torch.dtype,
    tensors: list[torch.Tensor], scalars: list[float], names: str, batch_invariant: bool = False,
) -> list[torch.Tensor]:  # fmt: skip
    """Return the flat outputs of a GEMM."""
    ir, operands = with_key(epilogue), name_operands(tensors, scalars, names)
    sides = join(a, a_sf, a_group), join(b, b_sf, b_group)
    outputs = run_kernels(*sides, None, ir, out_dtype, operands, INVARIANT_ROWS if batch_invariant else ALL_ROWS)
    return reference.compute(*sides, ir, out_dtype, operands, tensors) if outputs is None else outputs


def _grouped_fake(
    rows, rows_sf, rows_group, weights, weights_sf, weights_group, offsets, epilogue, out_dtype,
    tensors, scalars, names, batch_invariant=False,
):  # fmt: skip
    return reference.empty(for_graph(epilogue), rows, weights.shape[1], weights.shape[0], out_dtype)


def _grouped_flops(rows, rows_sf, rows_group, weights, *arguments):
    return 2 * rows.shape[0] * num_columns(rows) * weights.shape[1]


@operator("grouped_gemm", _grouped_fake, _grouped_flops)
def grouped_product(
    rows: torch.Tensor, rows_sf: torch.Tensor | None, rows_group: list[int],
    weights: torch.Tensor, weights_sf: torch.Tensor | None, weights_group: list[int],
    offsets: torch.Tensor, epilogue: str, out_dtype: torch.dtype,
    tensors: list[torch.Tensor], scalars: list[float], names: str, batch_invariant: bool = False,
) -> list[torch.Tensor]:  # fmt: skip
    """Return the flat outputs of a grouped GEMM."""
    ir, operands = with_key(epilogue), name_operands(tensors, scalars, names)
    sides = join(rows, rows_sf, rows_group), join(weights, weights_sf, weights_group)
    if rows.device.type == "cpu":
        reference.check_offsets(offsets, rows.shape[0])
    outputs = run_kernels(*sides, offsets, ir, out_dtype, operands, INVARIANT_ROWS if batch_invariant else ALL_ROWS)
    return reference.compute_groups(*sides, offsets, ir, out_dtype, operands, tensors) if outputs is None else outputs

"""Batching rule of `envoi.gemm` for `torch.func.vmap`: a batch of rows becomes more rows.

    vmap(gemm, in_dims=(0, None))(a [B, M, K], b)  =  gemm(a [B * M, K], b) as [B, M, N]

Valid if the batch shares b, and no output of the epilogue sums over rows. Row, Tile and HalfTile operands may be
batched; those that aren't are repeated.
"""

import torch

from envoi.epilogues.api import with_key
from envoi.epilogues.ir import IR


def batch_rows(
    info, in_dims, a, a_sf, a_group, b, b_sf, b_group, epilogue, out_dtype, tensors, scalars, names,
    batch_invariant=False,
):  # fmt: skip
    """Return the outputs of `torch.ops.envoi.gemm`, each [B, ..], and the position of B; see `register_vmap` of torch.

    Raises ValueError if the batch isn't one of rows.
    """
    ir, size = with_key(epilogue), info.batch_size
    a_dim, a_sf_dim, _, *of_b, _, _, _, operand_dims, _, _ = in_dims[:11]
    _check(ir, a_dim, a_sf, a_sf_dim, of_b, list(zip(names.split(","), operand_dims, strict=False)))
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


def _check(ir: IR, a_dim, a_sf, a_sf_dim, of_b, operands: list[tuple[str, int | None]]) -> None:
    by_row = {operand.name for operand in ir.operands if operand.shape.rows == "M"}
    batched = [name for name, dim in operands if dim is not None and name not in by_row]
    if any(dim is not None for dim in of_b):
        _refuse("b batched: call it once for each b, or use grouped_gemm")
    if a_dim is None or (a_sf is not None and a_sf_dim is None):
        _refuse("an a that isn't batched")
    if batched:
        _refuse(f"{batched[0]} batched, which all rows share")
    for _, position in ir.outputs:
        if ir.nodes[position].shape.rows != "M":
            _refuse(f"epilogue {ir.name}, which returns a value of all rows ({ir.nodes[position]})")


def _refuse(came: str) -> None:
    raise ValueError(
        "torch.func.vmap: expected envoi.gemm with a batched, and of its operands only those that have rows "
        f"(Row, Tile, HalfTile), got {came}"
    )

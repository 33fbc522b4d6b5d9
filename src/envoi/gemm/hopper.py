"""GEMMs on Hopper: what the kernel can take, how scale factors reach it, which config runs."""

from dataclasses import dataclass, replace
from functools import cache
from typing import cast

import torch

from envoi.epilogue.ir import COL, IR, ROW, SCALAR, Node, Operand
from envoi.epilogue.library import store
from envoi.epilogue.lower import Lowered, lower
from envoi.epilogue.slots import MAX_DESCS, piece_columns, rows_must_fit, slots
from envoi.gemm import portable, sm90, tune
from envoi.gemm.config import Config
from envoi.gemm.grouping import ALL_ROWS, Grouping
from envoi.runtime import devices
from envoi.runtime.tma import fits_tma, tma_ready
from envoi.types import Matrix, QuantTensor

HALVES = (torch.bfloat16, torch.float16)
MAX_WHOLE = 256  # columns of a row that a tile holds
MAX_FEW = 64  # columns of a piece where tokens are few
MAX_SCALED = 128  # columns of a piece with factors along K
MANY_TILES = 100  # of a GPU's multiprocessors: fewer tiles leave too many idle
FEW = 64  # tokens (of an expert) up to which the weights go on the instruction's long side
A_SF, B_SF = "a_sf of the GEMM", "b_sf of the GEMM"  # no parameter can have such a name


def supports_hopper(a: Matrix, b: Matrix, ir: IR) -> str:
    """Why the Hopper kernel can't run this; "" if it can."""
    if 0 in (*a.shape, *b.shape):
        return "a matrix is empty"
    if not scaling(a, b):
        return "the operands' formats"
    N = b.shape[-2]
    return f"rows of {N} columns" if needs_rows_after(ir, N, scaling(a, b)) and N > portable.MAX_ROW else ""


def needs_rows_after(ir: IR, N: int, scaled: str, num_tokens: int | None = None) -> bool:
    """True if the epilogue runs on rows in memory, by a kernel of its own, since no tile can hold what it needs.

    num_tokens: also if so few tiles as wide as it needs would leave most of the GPU idle.
    """
    widest = MAX_SCALED if scaled == "blocks" else MAX_WHOLE
    if piece_columns(ir) > widest or (rows_must_fit(ir) and widest < N):
        return True
    tiles = 0 if num_tokens is None else -(-num_tokens // 64) * -(-N // piece_columns(ir))
    return 0 < tiles < MANY_TILES and piece_columns(ir) > MAX_FEW and portable.MAX_ROW >= N


def scaling(a: Matrix, b: Matrix) -> str:
    """How the product of the values becomes that of the matrices.

    "none"; "rows": by a factor for each row of a (or all) times one for each row of b (or all), after the sum over K;
    "blocks": by factors that change every 128 elements of K; "": not here.
    """
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return "none" if a.dtype in HALVES and a.dtype == b.dtype else ""
    if not (isinstance(a, QuantTensor) and isinstance(b, QuantTensor)) or a.packed or b.packed:
        return ""
    if a.sf.dtype != torch.float32 or b.sf.dtype != torch.float32:
        return ""
    if a.sf.shape[-1] == 1 and b.sf.shape[-1] == 1 and a.group[1] == b.group[1] == a.shape[-1]:
        return "rows" if _side(a) and _side(b) else ""
    return "blocks" if a.group == (1, 128) and b.group == (128, 128) else ""


def _side(x: QuantTensor) -> str:
    """Whether a factor belongs to a row or to all of a matrix."""
    return "row" if x.group[0] == 1 else "all" if x.group[0] >= x.shape[-2] else ""


@cache
def with_scales(ir: IR, of_a: str, of_b: str) -> IR:
    """The IR behind a multiplication of the accumulator by the factors of a and b, which become its first operands."""
    operands = (_factor(A_SF, of_a, ROW, "Row"), _factor(B_SF, of_b, COL, "Col"))
    acc = next(position for position, node in enumerate(ir.nodes) if node.op == "acc")
    head = [ir.nodes[acc]]
    for operand in operands:
        head.append(Node("load", (), (("name", operand.name),), operand.shape, "f32", "load"))
        head.append(Node("mul", (len(head) - 2, len(head) - 1), (), head[0].shape, "f32", "element"))
    moved = {acc: len(head) - 1}
    nodes = list(head)
    for position, node in enumerate(ir.nodes):
        if position != acc:
            moved[position] = len(nodes)
            nodes.append(replace(node, args=tuple(moved[arg] for arg in node.args)))
    outputs = tuple((name, moved[position]) for name, position in ir.outputs)
    return IR(ir.name, operands + ir.operands, tuple(nodes), outputs)


def _factor(name: str, of: str, shape, kind: str) -> Operand:
    return Operand(name, kind, shape) if of == "row" else Operand(name, "Scalar", SCALAR)


@dataclass(frozen=True)
class Work:
    """A call as the kernel sees it: plain values, factors along K or none, an IR that scales the rest by itself."""

    a: torch.Tensor
    b: torch.Tensor
    ir: IR
    operands: dict
    scales: tuple[torch.Tensor, torch.Tensor] | None
    offsets: torch.Tensor | None

    @property
    def num_groups(self) -> int:
        """Experts, or 0."""
        return 0 if self.offsets is None else self.b.shape[0]

    @property
    def rows_after(self) -> bool:
        """True if the epilogue is left to `portable.finish_rows`."""
        tokens = None if self.num_groups else self.a.shape[0]
        return needs_rows_after(self.ir, self.b.shape[-2], "blocks" if self.scales else "", tokens)


def work_of(a: Matrix, b: Matrix, ir: IR, operands: dict, offsets: torch.Tensor | None) -> Work:
    """Take scale factors off the matrices."""
    kind = scaling(a, b)
    if not isinstance(a, QuantTensor) or not isinstance(b, QuantTensor):
        a, b = cast(torch.Tensor, a), cast(torch.Tensor, b)
        return Work(tma_ready(a), tma_ready(b), ir, operands, None, offsets)
    values = tma_ready(a.values), tma_ready(b.values)
    if kind == "blocks":
        return Work(*values, ir, operands, (a.sf.contiguous(), b.sf.contiguous()), offsets)
    of_a, of_b = _side(a), _side(b)
    b_sf = b.sf.flatten(-2)
    if b_sf.dim() == 2 and of_b == "all":  # a factor for each expert
        b_sf, of_b = b_sf.expand(-1, b.shape[-2]), "row"
    scales = {A_SF: a.sf.reshape(-1), B_SF: b_sf.contiguous()}
    return Work(*values, with_scales(ir, of_a, of_b), {**scales, **operands}, None, offsets)


def run(
    a: Matrix, b: Matrix, offsets: torch.Tensor | None, ir: IR, out_dtype: torch.dtype, operands: dict,
    grouping: Grouping = ALL_ROWS,
) -> list[torch.Tensor]:  # fmt: skip
    """The outputs of `envoi.gemm` or, with offsets, `envoi.grouped_gemm`, as a flat list."""
    work = work_of(a, b, ir, operands, offsets)
    M, N = work.a.shape[0], work.b.shape[-2]
    tensors, pointers = portable.operand_tensors(work.ir, work.operands, work.num_groups)
    written = portable.empty_slots(work.ir, slots(work.ir, out_dtype), M, N, work.a.device, grouping.to)
    if work.rows_after:
        acc = torch.empty(M, N, dtype=torch.float32, device=work.a.device)
        _launch(replace(work, ir=store.ir), torch.float32, (), frozenset(), [acc], grouping)
        portable.finish_rows(acc, work.ir, out_dtype, tensors, pointers, written, work.offsets, grouping.behind)
    else:
        _launch(work, out_dtype, tensors, pointers, written, grouping)
    return portable.finish_outputs(work.ir, written, work.offsets)


def _launch(
    work: Work, out_dtype: torch.dtype, operands: tuple, pointers: frozenset[str], outputs: list[torch.Tensor],
    grouping: Grouping,
) -> None:  # fmt: skip
    num_sms = devices.num_sms(work.a.device)
    code = _code(work, out_dtype, operands, pointers, outputs, grouping)
    call, config = _planned(work, code, operands, outputs, grouping, num_sms)
    sm90.launch(call, config, num_sms)


def _planned(
    work: Work, code: Lowered, operands: tuple, outputs: list[torch.Tensor], grouping: Grouping, num_sms: int,
    shipped_only: bool = False,
) -> tuple[sm90.Call, Config]:  # fmt: skip
    names = tuple(operand.name for operand in work.ir.operands)
    call = sm90.Call(work.a, work.b, code, operands, names, outputs, work.offsets, work.scales, grouping)
    problem = sm90.problem_of(call)
    config = tune.choose(problem, code, num_sms, shipped_only)
    if config is None:
        raise ValueError(f"epilogue {work.ir.name}: no config of the Hopper kernel fits {problem}")
    return call, config


def _code(
    work: Work, out_dtype: torch.dtype, operands: tuple, pointers: frozenset[str], outputs: list[torch.Tensor],
    grouping: Grouping,
) -> Lowered:  # fmt: skip
    """The epilogue lowered for this call: by TMA, unless tokens are few or something isn't on 16 bytes."""
    N, sent = work.b.shape[-2], grouping.to is not None
    whole = N <= MAX_WHOLE and rows_must_fit(work.ir)
    tokens = grouping.likely_rows(work.a.shape[0]) // max(1, work.num_groups)
    few = tokens <= FEW and not whole and piece_columns(work.ir) <= MAX_FEW
    tiles = [t for t, slot in zip(outputs, slots(work.ir, out_dtype), strict=True) if slot.kind == "tile"]
    tma = not few and not sent and all(fits_tma(t.shape, t.itemsize) for t in tiles)
    side = tuple(
        operand.name
        for operand, value in zip(work.ir.operands, operands, strict=True)
        if operand.shape.rows == "M" and operand.shape.spans_columns and fits_tma(value.shape, value.itemsize)
    )
    side = side if tma and len(side) <= MAX_DESCS else ()
    return lower(work.ir, out_dtype, "gluon", whole, tma, pointers, side, sent)


def planned(
    a: Matrix, b: Matrix, offsets: torch.Tensor | None, ir: IR, out_dtype: torch.dtype, operands: dict, num_sms: int,
    grouping: Grouping = ALL_ROWS,
) -> tuple[sm90.Call, Config]:  # fmt: skip
    """What `run` launches for these tensors, which may be without memory, with no config but those shipped.

    An epilogue on rows too long for a tile has a second kernel; this is the first.
    """
    work = work_of(a, b, ir, operands, offsets)
    M, N = work.a.shape[0], work.b.shape[-2]
    if work.rows_after:
        work, out_dtype = replace(work, ir=store.ir, operands={}), torch.float32
    tensors, pointers = portable.operand_tensors(work.ir, work.operands, work.num_groups)
    written = portable.empty_slots(work.ir, slots(work.ir, out_dtype), M, N, work.a.device, grouping.to)
    code = _code(work, out_dtype, tensors, pointers, written, grouping)
    return _planned(work, code, tensors, written, grouping, num_sms, shipped_only=True)

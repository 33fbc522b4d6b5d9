"""Host side of the Hopper GEMM: supported calls, scale factors, choice of a config, launch.

run_gemm -> work_of (scale factors apart) -> _lowered (the epilogue) -> tune.choose -> arguments -> launch

An epilogue that no tile holds, or that would take longer on tiles as wide as it needs, is cut in two; see
`two_kernels`.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import torch

from envoi.epilogues.cut import Cut, cut
from envoi.epilogues.ir import COL, IR, ROW, SCALAR, Node, Operand, kept_with_ir
from envoi.epilogues.lower import Lowered, lower
from envoi.epilogues.outputs import (
    MAX_DESCS,
    chunk_columns,
    deferred,
    empty_outputs,
    operand_tensors,
    output_specs,
    pairs_up,
    reduces_rows,
    rows_must_fit,
)
from envoi.ops.gemm.grouping import ALL_ROWS, Grouping, RowMode
from envoi.ops.gemm.hopper import tune, two_kernels
from envoi.ops.gemm.hopper.config import MAX_FEW_COLUMNS, SHORT_BYTES, SHORT_ROWS, Config, Problem, are_few
from envoi.ops.gemm.hopper.tile_config import TileConfig
from envoi.ops.gemm.hopper.time_model import have_one_tile
from envoi.ops.gemm.triton import host as triton_host
from envoi.runtime import workspace
from envoi.runtime.devices import num_sms
from envoi.runtime.math import cdiv, next_power_of_2
from envoi.runtime.program import Launch
from envoi.runtime.timeline import UNTRACED
from envoi.runtime.tma import as_one_matrix, descriptor, fits_tma, halves_descriptor, tma_ready
from envoi.types import Matrix, QuantTensor

HALVES = (torch.bfloat16, torch.float16)
BLOCK_FACTORS = (torch.float32, torch.float8_e8m0fnu)  # of weights with a factor for 128 x 128
MAX_WHOLE = 256  # columns of a row that a tile can hold
MAX_SCALED = 128  # columns of a row that a tile can hold with scale factors along K
A_SF, B_SF = "a_sf of the GEMM", "b_sf of the GEMM"  # operands' names that no parameter can have


# Supported calls


def why_not_hopper(a: Matrix, b: Matrix, ir: IR) -> str:
    """Return why the Hopper kernel can't run this; "" if it can."""
    if 0 in (*a.shape, *b.shape):
        return "a matrix is empty"
    kind = scaling(a, b)
    if not kind:
        return "the operands' formats"
    N = b.shape[-2]
    if ir.takes_halves and kind == "blocks" and N % 256:
        return "halves that end within a block of 128 rows"
    return f"rows of {N} columns" if has_long_rows(ir, N) and no_tile_holds(ir, N, kind == "blocks") else ""


def has_long_rows(ir: IR, N: int) -> bool:
    """Return True if the epilogue has values of rows that are too long for a second kernel, which holds whole ones."""
    return bool(deferred(ir)) and N > triton_host.MAX_ROW


def no_tile_holds(ir: IR, N: int, scaled: bool) -> bool:
    """Return True if no tile has all columns that the epilogue needs at once. scaled: factors change along K."""
    widest = MAX_SCALED if scaled else MAX_WHOLE
    return chunk_columns(ir) > widest or (rows_must_fit(ir) and widest < N)


def takes_pairs(ir: IR, N: int, num_groups: int) -> bool:
    """Return True if pairs of tiles of a grouped GEMM with scales along K hold what the epilogue quantises together."""
    return num_groups > 0 and pairs_up(ir) and chunk_columns(ir) == 2 * MAX_SCALED and N % chunk_columns(ir) == 0


def scaling(a: Matrix, b: Matrix) -> str:
    """Return how the product of the values becomes the product of the matrices.

    "none": it is; "rows": times a factor for each row of a (or all) and one for each row of b (or all), after the sum
    over K; "blocks": by factors that change every 128 elements of K; "": not on this kernel.
    """
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return "none" if a.dtype in HALVES and a.dtype == b.dtype else ""
    if not (isinstance(a, QuantTensor) and isinstance(b, QuantTensor)) or a.packed or b.packed:
        return ""
    if a.sf.dtype != torch.float32 or b.sf.dtype not in BLOCK_FACTORS:
        return ""
    if a.group == (1, 128) and b.group == (128, 128):  # also where K is 128: the same bits as with more
        return "blocks"
    if a.sf.shape[-1] == 1 and b.sf.shape[-1] == 1 and a.group[1] == b.group[1] == a.shape[-1]:
        return "rows" if b.sf.dtype == torch.float32 and _rows_per_factor(a) and _rows_per_factor(b) else ""
    return ""


def _rows_per_factor(x: QuantTensor) -> str:
    """Return whether a scale factor belongs to one "row", to "all" rows of a matrix, or to neither ("")."""
    return "row" if x.group[0] == 1 else "all" if x.group[0] >= x.shape[-2] else ""


# From a call to the kernel's operands


@kept_with_ir
def with_scales(ir: IR, of_a: str, of_b: str) -> IR:
    """Return the IR with the accumulator first multiplied by the factors of a and b, which are its first operands.

    of_a, of_b: from `_rows_per_factor`; without of_b, b has none.
    """
    operands = (_factor(A_SF, of_a, ROW, "Row"), *((_factor(B_SF, of_b, COL, "Col"),) if of_b else ()))
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
    """Call with plain values: scale factors along K in `scales`, all others as operands of the IR.

    scales: factors of a [M, K / 128], float32, and of b [.., N / 128, K / 128], float32 or UE8M0 as uint8, or None.
    """

    a: torch.Tensor
    b: torch.Tensor
    ir: IR
    operands: dict
    scales: tuple[torch.Tensor, ...] | None
    offsets: torch.Tensor | None

    @property
    def num_groups(self) -> int:
        """Number of experts of a grouped GEMM, else 0."""
        return 0 if self.offsets is None else self.b.shape[0]

    @property
    def in_pairs(self) -> bool:
        """Return True if pairs of tiles are quantised together; see `takes_pairs`."""
        return self.scales is not None and takes_pairs(self.ir, self.b.shape[-2], self.num_groups)

    def parts(self, grouping: Grouping, num_sms: int, shipped_only: bool = False) -> Cut | None:
        """Return the epilogue in two parts if a second kernel runs the second on rows in memory, else None."""
        (M, K), N, scaled = self.a.shape, self.b.shape[-2], self.scales is not None
        if self.in_pairs:
            return None
        if no_tile_holds(self.ir, N, scaled):
            return cut(self.ir)
        if self.num_groups or grouping.batch_invariant or chunk_columns(self.ir) <= MAX_FEW_COLUMNS:
            return None
        problem = Problem(M, N, K, self.a.itemsize, scaled=scaled)
        return cut(self.ir) if two_kernels.pay(tune.rounded(problem), self.ir, num_sms, shipped_only) else None


def work_of(a: Matrix, b: Matrix, ir: IR, operands: dict, offsets: torch.Tensor | None) -> Work:
    """Separate scale factors from values; values that TMA can't read are copied."""
    kind = scaling(a, b)
    if not isinstance(a, QuantTensor) or not isinstance(b, QuantTensor):
        a, b = cast(torch.Tensor, a), cast(torch.Tensor, b)
        return Work(tma_ready(a), tma_ready(b), ir, operands, None, offsets)
    values = tma_ready(a.values), tma_ready(b.values)
    if kind == "blocks":
        return Work(*values, ir, operands, as_stored([a.sf.contiguous(), b.sf.contiguous()]), offsets)
    of_a, of_b = _rows_per_factor(a), _rows_per_factor(b)
    b_sf = b.sf.flatten(-2)
    if b_sf.dim() == 2 and of_b == "all":  # one factor per expert
        b_sf, of_b = b_sf.expand(-1, b.shape[-2]), "row"
    scales = {A_SF: a.sf.reshape(-1), B_SF: b_sf.contiguous()}
    return Work(*values, with_scales(ir, of_a, of_b), {**scales, **operands}, None, offsets)


@dataclass(frozen=True)
class Call:
    """Operands of one launch. a [M, K], b [N, K] or [E, N, K], both from `tma_ready`.

    operands: in the IR's order, their names in `names`. outputs: one for each of code.output_specs. offsets: int32
    [E + 1] of a grouped GEMM, or None; grouping: the rows that are written, and their addresses. scales: as in `Work`.
    """

    a: torch.Tensor
    b: torch.Tensor
    code: Lowered
    operands: tuple
    names: tuple[str, ...]
    outputs: list[torch.Tensor]
    offsets: torch.Tensor | None = None
    scales: tuple[torch.Tensor, ...] | None = None
    grouping: Grouping = ALL_ROWS

    @property
    def num_groups(self) -> int:
        """Number of experts of a grouped GEMM, else 0."""
        return 0 if self.offsets is None else self.b.shape[0]

    @property
    def num_tokens(self) -> int:
        """Rows of a, or the expected number of them."""
        return self.grouping.likely_rows(self.a.shape[0])

    @property
    def row_mode(self) -> RowMode:
        """Rows that the kernel computes."""
        return RowMode.of(self.offsets is not None, self.grouping.write_tail)

    @property
    def tma_operand_bytes(self) -> float:
        """Bytes of the operands that TMA loads, for each column of the accumulator."""
        tiles = (self.operands[self.names.index(name)] for name in self.code.tma_operands)
        return sum(tile.shape[1] * tile.itemsize / self.b.shape[-2] for tile in tiles)


def problem_of(call: Call) -> Problem:
    """Return the sizes that the choice of a config depends on."""
    K, N = call.a.shape[1], call.b.shape[-2]
    kind = call.num_groups, call.scales is not None, call.tma_operand_bytes, call.grouping.batch_invariant
    return Problem(call.num_tokens, N, K, call.a.itemsize, *kind, call.code.takes_halves and call.num_groups > 0)


# From a call to a launch


def run_gemm(
    a: Matrix, b: Matrix, offsets: torch.Tensor | None, ir: IR, out_dtype: torch.dtype, operands: dict,
    grouping: Grouping = ALL_ROWS,
) -> list[torch.Tensor]:  # fmt: skip
    """Return the flat outputs of `envoi.gemm` or, with offsets, of `envoi.grouped_gemm`."""
    work = work_of(a, b, ir, operands, offsets)
    written = empty_outputs(work.ir, out_dtype, work.a.shape[0], work.b.shape[-2], work.a.device, grouping.to)
    count = num_sms(work.a.device)
    call, config, second = _first_launch(work, out_dtype, written, grouping, count)
    launch_gemm(call, config, count)
    if second is not None:
        tensors, pointers = operand_tensors(second, work.operands, work.num_groups)
        by_expert = offsets if tensors or not grouping.write_tail else None  # else rows of no expert are like others
        # It overlaps the GEMM, the launch right before, and waits for its end: nothing is launched between the two.
        triton_host.finish_rows(
            call.outputs[0], second, out_dtype, tensors, pointers, written, by_expert, grouping.write_tail, overlap=True
        )
    return triton_host.finish_outputs(work.ir, written, offsets) if reduces_rows(work.ir) else written


def planned(
    a: Matrix, b: Matrix, offsets: torch.Tensor | None, ir: IR, out_dtype: torch.dtype, operands: dict, num_sms: int,
    grouping: Grouping = ALL_ROWS,
) -> tuple[Call, Config]:  # fmt: skip
    """Return the call and config that `run_gemm` launches for these tensors (may be "meta"), from shipped configs only.

    Where a second kernel runs a part of the epilogue, this is the first.
    """
    work = work_of(a, b, ir, operands, offsets)
    written = empty_outputs(work.ir, out_dtype, work.a.shape[0], work.b.shape[-2], work.a.device, grouping.to)
    return _first_launch(work, out_dtype, written, grouping, num_sms, shipped_only=True)[:2]


def call_of(
    a: Matrix, b: Matrix, offsets: torch.Tensor | None, ir: IR, out_dtype: torch.dtype, operands: dict,
    grouping: Grouping = ALL_ROWS,
) -> Call:  # fmt: skip
    """Return the call of a kernel that runs the whole epilogue, for these tensors (may be "meta")."""
    work = work_of(a, b, ir, operands, offsets)
    written = empty_outputs(work.ir, out_dtype, work.a.shape[0], work.b.shape[-2], work.a.device, grouping.to)
    return _call(work, out_dtype, written, grouping)


def _call(
    work: Work, out_dtype: torch.dtype, outputs: list[torch.Tensor], grouping: Grouping, by_tma: bool = True
) -> Call:
    grouping = grouping.settled(bool(deferred(work.ir)), work.num_groups)
    operands, pointers = operand_tensors(work.ir, work.operands, work.num_groups)
    code = _lowered(work, out_dtype, operands, pointers, outputs, grouping, by_tma)
    names = tuple(operand.name for operand in work.ir.operands)
    return Call(work.a, work.b, code, operands, names, outputs, work.offsets, work.scales, grouping)


def _first_launch(
    work: Work, out_dtype: torch.dtype, outputs: list[torch.Tensor], grouping: Grouping, num_sms: int,
    shipped_only: bool = False,
) -> tuple[Call, Config, IR | None]:  # fmt: skip
    """Return the GEMM's call and config, and what a second kernel computes from its output if there is one.

    Tiles that TMA moves take shared memory: where wide ones leave the product too little, the epilogue is cut too, or,
    if rows are too long for a second kernel, nothing but the product's operands goes by TMA.
    """
    M, N = work.a.shape[0], work.b.shape[-2]
    parts, is_long = work.parts(grouping, num_sms, shipped_only), has_long_rows(work.ir, N)
    for by_tma in (True, False) if is_long else (True,):
        found = None if parts else _call_and_config(work, out_dtype, outputs, grouping, num_sms, shipped_only, by_tma)
        if found is not None:
            return *found, None
    parts = cut(work.ir) if parts is None and not is_long else parts
    if parts is not None:
        rows = [torch.empty(M, N // parts.divisor, dtype=parts.dtype, device=work.a.device)]
        found = _call_and_config(replace(work, ir=parts.first), parts.dtype, rows, grouping, num_sms, shipped_only)
        if found is not None:
            return *found, parts.second
    raise ValueError(f"epilogue {work.ir.name}: no config of the Hopper kernel fits M {M}, N {N}")


def _call_and_config(
    work: Work, out_dtype: torch.dtype, outputs: list[torch.Tensor], grouping: Grouping, num_sms: int,
    shipped_only: bool, by_tma: bool = True,
) -> tuple[Call, Config] | None:  # fmt: skip
    call = _call(work, out_dtype, outputs, grouping, by_tma)
    config = tune.choose(problem_of(call), call.code, num_sms, shipped_only)
    return None if config is None else (call, config)


def _lowered(
    work: Work, out_dtype: torch.dtype, operands: tuple, pointers: frozenset[str], outputs: list[torch.Tensor],
    grouping: Grouping, by_tma: bool,
) -> Lowered:  # fmt: skip
    """Lower the epilogue for this call. by_tma: by TMA, unless tokens are few or a row isn't a multiple of 16 bytes."""
    N, scattered = work.b.shape[-2], grouping.to is not None
    if work.in_pairs:
        return lower(work.ir, out_dtype, "gluon", False, False, pointers, (), scattered, True)
    whole_rows = N <= MAX_WHOLE and rows_must_fit(work.ir)
    tokens = grouping.likely_rows(work.a.shape[0]) // max(1, work.num_groups)
    few = not whole_rows and are_few(tokens, chunk_columns(work.ir))
    tma = by_tma and not few and not scattered
    if tma:
        specs = output_specs(work.ir, out_dtype)
        tma = all(fits_tma(t.shape, t.itemsize) for t, s in zip(outputs, specs, strict=True) if s.kind == "tile")
    loaded = tuple(
        operand.name
        for operand, value in zip(work.ir.operands, operands, strict=True)
        if operand.shape.rows == "M" and operand.shape.spans_columns and fits_tma(value.shape, value.itemsize)
    )
    loaded = loaded if tma and len(loaded) <= MAX_DESCS else ()
    return lower(work.ir, out_dtype, "gluon", whole_rows, tma, pointers, loaded, scattered)


def overlaps(call: Call, config: Config) -> bool:
    """Return True if the GEMM starts before the launch in front of it ends.

    CTAs then start one by one and don't keep step. Where many experts have two tiles of tokens, their weights would be
    read from memory twice: up to 12 % of the time, where an early start saves 1 to 3 %.
    """
    return call.grouping.are_offsets_early and have_one_tile(problem_of(call), config)


def launch_gemm(call: Call, config: Config, num_sms: int) -> None:
    """Launch the kernel on the current stream."""
    from envoi.runtime.launch import launch

    launch(*launch_of(call, config, num_sms))


def launch_of(call: Call, config: Config, num_sms: int) -> Launch:
    """Return the launch of a call with a config."""
    from envoi.ops.gemm.hopper.kernel import gemm_kernel

    options = {"num_warps": config.num_warps, "launch_pdl": overlaps(call, config)}
    return Launch(gemm_kernel, *arguments(call, config, num_sms), options)


def arguments(call: Call, config: Config, num_sms: int) -> tuple[tuple[int], tuple]:
    """Return the grid, and the kernel's arguments in the order of its parameters."""
    (M, K), N = call.a.shape, call.b.shape[-2]
    boxes = [config.main_y, config.rows_per_consumer]
    tokens = descriptor(call.a, boxes[not config.swap_ab], config.block_k)
    weights = weights_descriptor(call, boxes[config.swap_ab], config)
    rest = weights_descriptor(call, config.rest_y, config) if config.rest_y else None
    if config.narrowed:
        small = config.small_box
        rest = descriptor(call.a, small, config.block_k) if config.swap_ab else weights_descriptor(call, small, config)
    if config.short_boxes:
        rest = descriptor(call.a, SHORT_ROWS, SHORT_BYTES // call.a.itemsize)
    num_units, num_split = units(M, N, config, num_sms)
    num_whole = cdiv(M, config.block_m) * cdiv(N, config.block_n) - num_split
    num_experts = call.num_groups
    return (num_sms if num_experts else min(num_units, num_sms),), (
        *((weights, tokens) if config.swap_ab else (tokens, weights)),
        *epilogue_descriptors(call, config), call.operands or (0,), as_stored(call.outputs),
        call.offsets,
        *scratch(call, config, num_split), *(call.scales or (None, None)),
        M, N, K, num_experts, num_whole, rest, config, call.code, call.scales is not None, overlaps(call, config),
        call.row_mode, max_experts(num_experts, call.grouping.write_tail), UNTRACED,
    )  # fmt: skip


def weights_descriptor(call: Call, rows: int, config: Config) -> Any:
    """Return the TMA descriptor of all experts' weights in boxes of so many rows, or of half as many of both halves."""
    if call.code.takes_halves:
        return halves_descriptor(call.b, rows, config.block_k)
    return descriptor(as_one_matrix(call.b), rows, config.block_k)


# Shared by the launches of all Gluon GEMMs


def units(M: int, N: int, config: TileConfig, num_sms: int) -> tuple[int, int]:
    """Return the units of work of a dense GEMM, and how many tiles are split: those that don't fill a round."""
    tiles = cdiv(M, config.block_m) * cdiv(N, config.block_n)
    num_split = tiles % num_sms if config.split_k > 1 else 0
    return tiles + num_split * (config.split_k - 1), num_split


def epilogue_descriptors(call: Call, config: TileConfig) -> list[Any]:
    """Return TMA descriptors in boxes of a chunk: MAX_DESCS of outputs, MAX_DESCS of operands, or None for each."""
    columns = min(config.epilogue_columns, config.block_y)
    rows, N = config.rows_per_consumer, call.b.shape[-2]
    if config.stored_in_boxes:
        rows, columns = config.small_box, config.rows_per_consumer
    descs: list[Any] = [None] * (2 * MAX_DESCS)
    for i, index in enumerate(call.code.tma_outputs):
        spec = call.code.output_specs[index]
        descs[i] = descriptor(call.outputs[index], *spec.shape(rows, columns))
    for i, name in enumerate(call.code.tma_operands):
        operand = call.operands[call.names.index(name)]
        descs[MAX_DESCS + i] = descriptor(operand, rows, operand.shape[1] * columns // N)
    return descs


def scratch(call: Call, config: TileConfig, num_split: int) -> tuple[torch.Tensor, ...]:
    """Return the fields of `SplitK` (for num_split split tiles), then those of `RowReductions`."""
    M, N, device = call.a.shape[0], call.b.shape[-2], call.a.device
    shares = num_split * config.consumers_per_tile
    num_sums = shares * config.split_k * config.rows_per_consumer * config.tensor_y if config.split_k > 1 else 0
    slots_of_rows = cdiv(N, config.rows_per_consumer if config.swap_ab else config.block_y)
    if not num_sums and not call.code.partials:
        return _no_scratch(device)
    num_sums_of_rows = call.code.partials * slots_of_rows * M
    sums = torch.empty(num_sums + num_sums_of_rows, dtype=torch.float32, device=device)
    counters = workspace.counters(shares + M + config.block_m, device)
    return sums, counters, sums[num_sums:], counters[shares:]


@cache
def _no_scratch(device: torch.device) -> tuple[torch.Tensor, ...]:
    sums, counters = (torch.empty(0, dtype=dtype, device=device) for dtype in (torch.float32, torch.int32))
    return sums, counters, sums, counters


def as_stored(outputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the outputs in dtypes that Triton knows: UE8M0 as uint8."""
    return tuple(x.view(torch.uint8) if x.dtype == torch.float8_e8m0fnu else x for x in outputs)


def max_experts(num_experts: int, write_tail: bool = True) -> int:
    """Return the length of a role's vectors over the experts and, with write_tail, the tail; 1 in a dense GEMM."""
    return max(32, next_power_of_2(num_experts + write_tail)) if num_experts else 1

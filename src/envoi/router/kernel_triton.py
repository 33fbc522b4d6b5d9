# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
"""The router in plain Triton: any GPU, any float dtype, and the interpreter.

    for each block of BLOCK_M tokens:                          one program
        for each block of BLOCK_SUM along hidden:
            for k in the block, BLOCK_K at a time:
                sum += tokens[rows, k] @ gate[:, k].T
            logits += sum
        route_rows(logits)

The tensor cores cut off what they add, so what they add up is short. float32 operands become three bf16 each, and six
products of these, whose sums other units add: the error is that of float32, and one block is enough.
"""

import triton
import triton.language as tl

from envoi.epilogue.codes_triton import widen
from envoi.epilogue.device import INTERPRETED
from envoi.router.device import load_biases, route_rows, store_counts

BLOCK_SUM: tl.constexpr = tl.constexpr(512)


@triton.jit
def load_operand(x, stride, rows, num_rows, ks, hidden, WIDE: tl.constexpr):
    """[rows, ks] of a matrix, 0 outside; float32 if WIDE."""
    mask = (rows < num_rows)[:, None] & (ks < hidden)[None, :]
    v = tl.load(x + rows.to(tl.int64)[:, None] * stride + ks[None, :], mask=mask, other=0.0)
    if INTERPRETED:
        return widen(v)
    elif WIDE:
        return v.to(tl.float32)
    else:
        return v


@triton.jit
def product(
    tokens, token_stride, gate, gate_stride, rows, columns, num_tokens, hidden, first, last,
    spec: tl.constexpr, WIDE: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """tokens[rows, first:last] @ gate[columns, first:last].T"""
    num_experts: tl.constexpr = spec.num_experts
    sum = tl.zeros((rows.shape[0], columns.shape[0]), tl.float32)
    for k in range(first, last, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K)
        x = load_operand(tokens, token_stride, rows, num_tokens, ks, hidden, WIDE)
        y = load_operand(gate, gate_stride, columns, num_experts, ks, hidden, WIDE)
        sum = tl.dot(x, y.T, sum, input_precision="bf16x6" if WIDE and not INTERPRETED else None)
    return sum


@triton.jit
def router_kernel(
    tokens, token_stride, gate, gate_stride, num_tokens, hidden, numbers, tables, outputs, counts, counter,
    spec: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One block of tokens. numbers, tables, outputs: as `route_rows` takes them; counts: (counts, offsets)."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, spec.columns)
    if WIDE:
        logits = product(
            tokens, token_stride, gate, gate_stride, rows, columns, num_tokens, hidden, 0, hidden, spec, WIDE, BLOCK_K
        )
    else:
        logits = tl.zeros((BLOCK_M, columns.shape[0]), tl.float32)
        for first in range(0, hidden, BLOCK_SUM):
            last = tl.minimum(first + BLOCK_SUM, hidden)
            logits += product(
                tokens, token_stride, gate, gate_stride, rows, columns, num_tokens, hidden, first, last, spec, WIDE,
                BLOCK_K,
            )  # fmt: skip
    slots = tl.arange(0, spec.slots)[None, :]
    biases = load_biases(tables, columns[None, :], spec)
    group_slots = tl.arange(0, spec.group_slots)[None, :]
    route_rows(logits, rows, num_tokens, columns[None, :], slots, group_slots, numbers, biases, tables, outputs, spec)
    if spec.want_counts:
        tl.debug_barrier()
        if tl.atomic_add(counter, 1, sem="acq_rel") == tl.num_programs(0) - 1:
            store_counts(outputs[4], counts[0], counts[1], columns, spec)
            tl.store(counter, 0)

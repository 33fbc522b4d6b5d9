# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
"""Router kernel in Triton: any GPU, any float dtype, and the interpreter.

    for each block of BLOCK_M tokens:                          one program
        for k in hidden, BLOCK_K at a time:
            logits += tokens[rows, k] @ gate[:, k].T
        route_tile(logits)

Tensor cores truncate as they add, so they add only BLOCK_K products, and other units add these sums. float32 operands
become three bf16 each, multiplied in six products: the error is that of float32.
"""

import triton
import triton.language as tl

from envoi.epilogues.codes_triton import widen
from envoi.epilogues.device import INTERPRETED
from envoi.ops.moe.router.choose_experts import route_tile, store_counts
from envoi.ops.moe.router.device_types import Args, Positions
from envoi.ops.moe.router.selection import load_biases


@triton.jit
def load_operand(x, stride, rows, num_rows, ks, hidden, WIDE: tl.constexpr):
    """Load [rows, ks] of a matrix, 0 outside; as float32 if WIDE."""
    mask = (rows < num_rows)[:, None] & (ks < hidden)[None, :]
    v = tl.load(x + rows.to(tl.int64)[:, None] * stride + ks[None, :], mask=mask, other=0.0)
    if INTERPRETED:
        return widen(v)
    elif WIDE:
        return v.to(tl.float32)
    else:
        return v


@triton.jit
def add_apart(x, product):
    """Add a product to x outside the tensor cores; the compiler would otherwise start their accumulator with x."""
    if not INTERPRETED:
        product = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [product], tl.float32, is_pure=True, pack=1)
    return x + product


@triton.jit
def router_kernel(
    tokens, token_stride, gate, gate_stride, num_tokens, hidden, scalars, tables, outputs, counts, counter,
    spec: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Route one block of tokens. scalars, tables, outputs: see device_types; counts: (counts [N], offsets [N + 1])."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, spec.columns)
    num_experts: tl.constexpr = spec.num_experts
    num_columns: tl.constexpr = spec.columns
    logits = tl.zeros((BLOCK_M, num_columns), tl.float32)
    for k in range(0, hidden, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K)
        x = load_operand(tokens, token_stride, rows, num_tokens, ks, hidden, WIDE)
        y = load_operand(gate, gate_stride, columns, num_experts, ks, hidden, WIDE)
        if WIDE:
            logits = tl.dot(x, y.T, logits, input_precision=None if INTERPRETED else "bf16x6")
        else:
            logits = add_apart(logits, tl.dot(x, y.T))
    biases = load_biases(tables, columns[None, :], spec)
    slots, contenders = tl.arange(0, spec.slots)[None, :], tl.arange(0, spec.contenders)[None, :]
    positions = Positions(columns[None, :], slots, contenders, tl.arange(0, spec.group_slots)[None, :])
    route_tile(logits, rows, rows < num_tokens, positions, biases, Args(scalars, tables, outputs), spec)
    if spec.want_counts:
        tl.debug_barrier()
        if tl.atomic_add(counter, 1, sem="acq_rel") == tl.num_programs(0) - 1:
            total, offsets = counts
            store_counts(outputs.histogram, total, offsets, columns, spec)
            tl.store(counter, 0)

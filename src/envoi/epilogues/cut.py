"""Cut an epilogue in two: a first part that tiles of the product can run, and a second, a kernel on its output.

What quantises in groups of 128 after a gate needs tiles of 256 columns. Cut, it leaves the GEMM as the tile that is to
be quantised:

    swiglu_fp8 of [M, N]     first: silu(gate) * up -> float32 [M, N / 2]     second: quantize of that, [M, N / 2]

An epilogue of which a quantisation isn't the only output is cut before its first operation: its second part is all of
it, on the product.
"""

from dataclasses import dataclass, replace

import torch

from envoi.epilogues.ir import IR, TILE, kept_with_ir
from envoi.epilogues.library import store
from envoi.epilogues.outputs import deferred


@dataclass(frozen=True)
class Cut:
    """Epilogue in two parts; together they compute the same bits.

    first: its only output is a tile [M, N / divisor] of `dtype`, which loses no bit. second: takes that tile as its
    accumulator and has all outputs of the whole.
    """

    first: IR
    second: IR
    dtype: torch.dtype
    divisor: int


@kept_with_ir
def cut(ir: IR) -> Cut:
    """Return an epilogue cut before the quantisation that is its only output, or else before its first operation."""
    outputs = [ir.nodes[position] for _, position in ir.outputs]
    if [node.op for node in outputs] != ["quantize"] or deferred(ir):
        return Cut(store.ir, ir, torch.float32, 1)
    quantize = outputs[0]
    source = quantize.args[0]
    made = ir.nodes[source]
    acc = next(node for node in ir.nodes if node.op == "acc")
    first = IR(f"{ir.name}_first", ir.operands, ir.nodes[: source + 1], (("", source),))
    second = IR(f"{ir.name}_second", (), (acc, replace(quantize, args=(0,), shape=TILE)), ((ir.outputs[0][0], 1),))
    return Cut(first, second, torch.bfloat16 if made.op == "round_bf16" else torch.float32, made.shape.divisor)
